//! Turns a seed into a cluster, its requests and its faults.
use std::time::Duration;

use coordinator::engine::FinishReason;
use coordinator::replica::driver::DriverLimits;
use coordinator::scheduler::{Method, NgramConfig, SchedulerConfig, Speculation};
use shared::protocol::{EngineConfig, KvCacheDtype};
use shared::sampling::Pooling;

use crate::model::{COMING, Ends, OF_THE_HUB, POISON, VOCABULARY, adapter_of, undisturbed};
use crate::random::{Random, mix};

/// Virtual time in microseconds.
pub(crate) type Time = u64;

pub(crate) const MS: Time = 1_000;
/// The model's folder.
pub(crate) const MODEL: &str = "m";
pub(crate) const S: Time = 1_000_000;

/// How long a rank that is being formed may be silent: longer than collectives wait, so that its
/// peers give up first.
pub(crate) const FORM_TIMEOUT: Time = 40 * S;

/// Faults begin within this time.
const FAULTS_END: Time = 15 * S;

/// What can go wrong. `slot` is a place for a worker process.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// The process is killed, and started again after a while or never.
    Crash { slot: usize, back_after: Option<Time> },
    /// The process is told to end: it says goodbye, is released, and is started again after a while
    /// or never.
    Leave { slot: usize, back_after: Option<Time> },
    /// The process is stopped, and continues after a while.
    Freeze { slot: usize, lasts: Time },
    /// The connection breaks; both ends notice.
    Cut { slot: usize },
    /// Nothing passes, in one direction or both, and neither end is told.
    Partition { slot: usize, up: bool, down: bool, lasts: Time },
    /// Everything takes longer.
    Delay { slot: usize, extra: Time, lasts: Time },
    /// The rank computes slower.
    Slow { slot: usize, factor: u64, lasts: Time },
    /// The rank's next step takes this long.
    Stall { slot: usize, takes: Time },
    /// The rank's next step fails.
    FailStep { slot: usize },
    /// The rank's token in its next step differs from the other ranks'.
    Diverge { slot: usize },
    /// The maximum number of replicas changes.
    Scale { max: Option<u32> },
    /// The node is drained: its process ends, and is started again after a while or never.
    Drain { slot: usize, back_after: Option<Time> },
    /// Another process takes the name of this slot's process, for a while.
    Twin { twin: usize, lasts: Time },
    /// A coordinator process is killed, and started again after a while. Here and below, without a
    /// seat it is the leader's.
    CrashCoordinator { seat: Option<usize>, back_after: Time },
    /// A coordinator process is told to end, and has already waited long enough for its requests;
    /// it is started again after a while. Another takes over at once.
    StopCoordinator { seat: Option<usize>, back_after: Time },
    /// A coordinator process is stopped, and continues after a while.
    FreezeCoordinator { seat: Option<usize>, lasts: Time },
    /// Nobody can reach etcd; `counts`: whether leases end meanwhile; `resets`: whether its absence
    /// is noticed at once.
    EtcdAway { lasts: Time, counts: bool, resets: bool },
    /// One process cannot reach etcd.
    CutEtcd { who: usize, lasts: Time },
    /// A process's lease is taken away.
    Revoke { who: usize },
    /// A process loses its connection to etcd, and its next request to keep its lease fails once it
    /// is back; if `gone`, etcd wrongly says that the lease does not exist.
    FailKeep { who: usize, gone: bool },
    /// etcd ends a process's watch.
    CancelWatch { who: usize },
    /// A process's watch does not report the next change.
    LoseChange { who: usize },
    /// etcd forgets its history.
    Compact,
    /// The rank's next formation fails.
    FailForm { slot: usize, permanent: bool },
    /// The executor hangs in its current or next command, while its process and link live. The
    /// process ends once that is noticed: by itself if `notices`, otherwise because the coordinator
    /// says so.
    Hang { slot: usize, notices: bool },
    /// Every step of the rank hangs until it is told to leave, as long as its process lives, or
    /// for a while.
    HangSteps { slot: usize, lasts: Option<Time> },
    /// These two processes do not reach each other, for ever or for a while, though everybody else
    /// reaches both.
    Apart { slots: [usize; 2], lasts: Option<Time> },
    /// An operator has an adapter of this name loaded.
    LoadAdapter { name: &'static str, contents: u64, replace: bool },
    /// An operator has the adapter of this name unloaded.
    UnloadAdapter { name: &'static str },
    /// The rank cannot read the next adapter that it is told to load.
    FailAdapter { slot: usize },
    /// The rank's next download of an adapter takes this long; `speaks`: whether it says meanwhile
    /// that it gets on.
    SlowFetch { slot: usize, takes: Time, speaks: bool },
}

/// How a client leaves early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// It cancels.
    Cancels,
    /// It disconnects.
    Drops,
}

impl Leaving {
    const ALL: [Self; 2] = [Self::Cancels, Self::Drops];
}

/// A request, and its expected outcome.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) at: Time,
    pub(crate) prompt: Vec<u32>,
    pub(crate) n: u32,
    pub(crate) seed: u64,
    /// The name of its adapter; empty for none.
    pub(crate) adapter: &'static str,
    pub(crate) ends: Ends,
    /// Whether it sets no bound: the KV cache is one, too.
    pub(crate) open_ended: bool,
    /// Set if it asks for an embedding, not tokens.
    pub(crate) pooling: Option<Pooling>,
    pub(crate) leaves: Option<(Time, Leaving)>,
    pub(crate) expected: Vec<(Vec<u32>, FinishReason)>,
}

/// Everything about one run that is decided before it begins.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) tensor_parallel: u32,
    /// Degrees a replica may have, largest first.
    pub(crate) degrees: Vec<u32>,
    /// How long ranks may be absent before the replica is formed with fewer.
    pub(crate) reshard_after: Time,
    /// Number of replicas that the first processes can form.
    replicas: u64,
    /// Initial maximum number of replicas.
    pub(crate) max_replicas: Option<u32>,
    /// Hosts of the first worker processes, by slot; more may join.
    pub(crate) hosts: Vec<u8>,
    /// By slot: the number in its process's name; a twin has another slot's.
    pub(crate) nodes: Vec<usize>,
    /// When each slot's process is first started.
    pub(crate) starts: Vec<Time>,
    pub(crate) engine: EngineConfig,
    /// Maximum number of tokens in a step of replicas with a rank on a CPU.
    pub(crate) cpu_step_tokens: u32,
    /// By slot: whether its process computes on a GPU.
    pub(crate) gpus: Vec<bool>,
    /// For how many adapters there is room; 0 if their list never changes.
    pub(crate) places: u32,
    pub(crate) scheduler: SchedulerConfig,
    pub(crate) limits: DriverLimits,
    pub(crate) collective_timeout: Time,
    /// Interval between checkpoints of the totals.
    pub(crate) checkpoint: Time,
    /// Number of seats for coordinator processes, one of which leads.
    pub(crate) seats: usize,
    /// Longest time to load weights.
    pub(crate) load: Time,
    /// Longest time to compute a usual step.
    pub(crate) step: Time,
    /// Longest usual latency of a frame.
    pub(crate) latency: Time,
    /// Range of a worker's number of KV blocks.
    pub(crate) blocks: (u64, u64),
    /// Range of a worker's number of blocks in host memory.
    pub(crate) host_blocks: (u64, u64),
    pub(crate) clients: Vec<Client>,
    pub(crate) faults: Vec<(Time, Fault)>,
}

/// Whether and how sequences draft. Depends only on the seed, so that everything else stays as it
/// was.
fn speculation(seed: u64, max_num_seqs: u32) -> Option<Speculation> {
    let random = &mut Random::new(seed ^ 0xd4af7);
    let min = random.range(1, 3) as u32;
    random.chance(50).then(|| {
        let num_speculative_tokens = random.range(1, u64::from(max_num_seqs - 1)) as u32;
        let prompt_lookup_max = min + random.range(0, 2) as u32;
        let disable_by_batch_size = random.chance(20).then_some(3);
        let method = match random.chance(50) {
            true => Method::DraftModel,
            false => Method::Ngram(NgramConfig { prompt_lookup_max, prompt_lookup_min: min }),
        };
        Speculation { num_speculative_tokens, method, disable_by_batch_size }
    })
}

impl Scenario {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let random = &mut random;
        let degrees = random.pick(&[&[1][..], &[2], &[2, 1], &[3], &[4, 2], &[4, 2, 1]]).to_vec();
        let tensor_parallel = degrees[0];
        let replicas = random.range(1, 3) as usize;
        let spares = usize::from(random.chance(30));
        let count = tensor_parallel as usize * replicas + spares;
        let late = random.chance(20).then(|| random.range(1, 10) * S);
        let num_hosts = random.range(1, 2);
        let max_num_seqs = random.range(2, 6) as u32;
        let max_num_batched_tokens = max_num_seqs + random.range(0, 60) as u32;
        let engine = EngineConfig {
            block_size: 16,
            max_model_len: 256,
            max_num_seqs,
            max_num_batched_tokens,
            kv_cache_bytes: 1 << 20,
            swap_bytes: 0,
            kv_cache_dtype: KvCacheDtype::Auto,
            prefix_states: 0,
        };
        let scheduler = SchedulerConfig {
            block_size: engine.block_size,
            max_model_len: engine.max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            // Apart from the rest.
            max_mixed_prefill_tokens: [None, None, None, Some(8)][(mix(seed, 7) % 4) as usize],
            max_queued_requests: random.pick(&[4, 16, 64]),
            max_steps_in_flight: random.pick(&[1, 2, 2, 2]),
            prefix_caching: random.chance(80),
            prefix_states: None,
            hidden_size: 2,
            vocab_size: u32::MAX,
            speculation: speculation(seed, max_num_seqs),
        };
        let limits = DriverLimits {
            step_timeout: Duration::from_secs(random.pick(&[2, 5, 10, 60])),
            // Apart from the rest.
            step_floor: Duration::from_secs([1, 2, 5, 60][(mix(seed, 6) % 4) as usize]),
            unavailable_timeout: Duration::from_secs(30),
            max_queue_wait: None,
        };
        let fewest = random.range(17, 24);
        let mut scenario = Self {
            tensor_parallel,
            replicas: replicas as u64,
            degrees,
            reshard_after: random.pick(&[1, 5, 5]) * S,
            max_replicas: random.chance(10).then_some(1),
            nodes: (0..count).collect(),
            hosts: (0..count).map(|_| random.range(1, num_hosts) as u8).collect(),
            starts: (0..count)
                .map(|slot| match late {
                    Some(late) if slot % 3 == 2 => late,
                    _ => random.range(0, 300 * MS),
                })
                .collect(),
            engine,
            cpu_step_tokens: max_num_batched_tokens,
            gpus: vec![false; count],
            places: 0,
            scheduler,
            limits,
            collective_timeout: 30 * S,
            checkpoint: random.pick(&[S, 5 * S]),
            seats: random.pick(&[1, 2, 2, 3]),
            load: random.pick(&[50 * MS, S, 4 * S]),
            step: random.pick(&[2 * MS, 8 * MS, 30 * MS]),
            latency: random.pick(&[MS, MS, 20 * MS]),
            // Drawn separately, so that seeds keep their scenarios; a fifth have no host blocks.
            host_blocks: [(0, 0), (2, 5), (6, 20), (20, 20), (200, 300)]
                [(mix(seed, 5) % 5) as usize],
            blocks: (fewest, fewest + random.pick(&[0, 4, 30])),
            clients: Vec::new(),
            faults: Vec::new(),
        };
        scenario.add_clients(random);
        scenario.add_faults(random);
        scenario.add_states(seed);
        scenario.add_open_ended(seed);
        scenario.add_hang(seed);
        scenario.add_bad_ranks(seed);
        scenario.add_adapters(seed);
        scenario.add_gpus(seed);
        scenario
    }

    /// The same cluster from the start on, and nothing goes wrong. No request is poisoned.
    pub(crate) fn without_faults(mut self) -> Self {
        self.faults.clear();
        self.hosts.truncate(self.starts.iter().filter(|start| **start < Time::MAX).count());
        self.nodes.truncate(self.hosts.len());
        self.starts.truncate(self.hosts.len());
        self.starts.iter_mut().for_each(|start| *start = (*start).min(300 * MS));
        self.clients.retain(|client| !client.prompt.contains(&POISON));
        // Nobody loads these.
        let coming = self.clients.iter_mut().filter(|client| COMING.contains(&client.adapter));
        coming.for_each(|client| client.adapter = "");
        self
    }

    /// Every fourth model has linear attention, if its prefixes are cached: some states are kept,
    /// and what such a model cannot do is off.
    fn add_states(&mut self, seed: u64) {
        let states = [0, 1, 3, 12][(mix(seed, 9) % 4) as usize];
        if mix(seed, 10).is_multiple_of(4) && self.scheduler.prefix_caching {
            self.engine.prefix_states = states;
            self.scheduler.prefix_states = Some(states);
            self.scheduler.speculation = None;
            self.host_blocks = (0, 0);
        }
    }

    fn add_clients(&mut self, random: &mut Random) {
        let mut at = random.range(0, 2 * S);
        for _ in 0..random.range(20, 90) {
            // Bursts: many requests arrive together with the previous one.
            at += if random.chance(50) { random.range(0, MS) } else { random.skewed(0, 900 * MS) };
            let client = self.client(random, at);
            self.clients.push(client);
        }
        if random.chance(10) {
            // A request that ends every process that computes it.
            let index = random.range(0, self.clients.len() as u64 - 1) as usize;
            let client = &mut self.clients[index];
            let at = random.range(0, client.prompt.len() as u64 - 1) as usize;
            client.prompt[at] = POISON;
        }
    }

    fn client(&self, random: &mut Random, at: Time) -> Client {
        let len = if random.chance(50) { random.skewed(1, 200) } else { random.range(1, 150) };
        // Many prompts begin alike.
        let alike = if random.chance(50) { random.range(0, len) } else { 0 };
        let tail = (alike..len).map(|_| random.range(0, u64::from(VOCABULARY) - 1));
        let prompt: Vec<u32> =
            (0..alike).map(|at| at % 7).chain(tail).map(|token| token as u32).collect();
        let max_tokens = if random.chance(3) { 0 } else { random.skewed(1, 100) as u32 };
        let seed = random.next();
        let mut ends = Ends {
            end_tokens: Vec::new(),
            stop_token: None,
            min_tokens: if random.chance(20) { random.range(0, 10) as u32 } else { 0 },
            max_tokens,
            max_model_len: self.engine.max_model_len,
            guide: seed.is_multiple_of(4).then_some(seed >> 8),
        };
        ends.min_tokens = if ends.guide.is_some() { 0 } else { ends.min_tokens.min(max_tokens) };
        // A token of the text itself ends it early.
        let (text, _) = undisturbed(&prompt, seed, 0, &ends);
        if !text.is_empty() && random.chance(35) {
            ends.end_tokens = vec![random.pick(&text)];
        }
        if !text.is_empty() && random.chance(20) {
            ends.stop_token = Some(random.pick(&text));
        }
        let n = random.pick(&[1, 1, 1, 2, 3]);
        // For a request for no tokens, no token shows whether it finished before its client left.
        let ways = if max_tokens == 0 { [Leaving::Cancels; 2] } else { Leaving::ALL };
        let leaves = random.chance(15).then(|| (random.skewed(MS, 6 * S), random.pick(&ways)));
        let pooling = match seed % 4 {
            _ if max_tokens > 0 || n > 1 => None,
            0 => None,
            1 => Some(Pooling::Last),
            2 => Some(Pooling::First),
            _ => Some(Pooling::Mean),
        };
        let expected = match pooling {
            Some(_) => vec![(Vec::new(), FinishReason::Complete)],
            None => (0..n).map(|choice| undisturbed(&prompt, seed, choice, &ends)).collect(),
        };
        let adapter = ["", "1", "2"][adapter_of(seed) as usize];
        let open_ended = false;
        Client { at, prompt, n, seed, adapter, ends, open_ended, pooling, leaves, expected }
    }

    /// When a process is started again, if ever.
    fn back_after(&self, random: &mut Random) -> Option<Time> {
        (!random.chance(8)).then(|| random.skewed(50 * MS, 6 * S))
    }

    fn add_faults(&mut self, random: &mut Random) {
        let slots = self.hosts.len() as u64;
        if random.chance(25) {
            // For example, a silent process is replaced, and thaws.
            let slot = random.range(0, slots - 1) as usize;
            let at = random.range(0, FAULTS_END);
            let twin = self.hosts.len();
            self.nodes.push(slot);
            self.hosts.push(self.hosts[slot]);
            self.starts.push(Time::MAX);
            self.faults.push((at, Fault::Freeze { slot, lasts: random.skewed(S, 14 * S) }));
            let lasts = random.range(S, 20 * S);
            self.faults.push((at + random.range(0, 6 * S), Fault::Twin { twin, lasts }));
        }
        let has_spare = slots > u64::from(self.tensor_parallel) * self.replicas;
        if self.tensor_parallel > 1 && has_spare && random.chance(30) {
            // Slow for long, so that the spare takes its place.
            let (slot, factor) = (random.range(0, slots - 1) as usize, random.range(8, 40));
            self.faults
                .push((random.range(0, 5 * S), Fault::Slow { slot, factor, lasts: 130 * S }));
        }
        if random.chance(60) {
            self.add_control_faults(random);
        }
        for _ in 0..random.range(5, 15) {
            let at = random.range(0, FAULTS_END);
            let slot = random.range(0, slots - 1) as usize;
            let fault = match random.range(0, 99) {
                0..=16 => Fault::Crash { slot, back_after: self.back_after(random) },
                17..=19 => Fault::Leave { slot, back_after: self.back_after(random) },
                20..=34 => Fault::Freeze { slot, lasts: random.skewed(10 * MS, 14 * S) },
                35..=46 => Fault::Cut { slot },
                47..=62 => {
                    let (up, down) = random.pick(&[(true, true), (true, false), (false, true)]);
                    Fault::Partition { slot, up, down, lasts: random.skewed(100 * MS, 12 * S) }
                }
                63..=70 => Fault::Delay {
                    slot,
                    extra: random.skewed(MS, 2 * S),
                    lasts: random.range(100 * MS, 6 * S),
                },
                71..=75 => Fault::Slow {
                    slot,
                    factor: random.range(2, 300),
                    lasts: random.range(S, 8 * S),
                },
                76..=80 => Fault::Stall { slot, takes: random.skewed(100 * MS, 40 * S) },
                81..=85 => Fault::FailStep { slot },
                86..=89 => Fault::Scale { max: random.pick(&[None, Some(1), Some(2), Some(3)]) },
                90..=94 => Fault::Drain { slot, back_after: self.back_after(random) },
                95..=96 => Fault::Diverge { slot },
                _ => Fault::FailForm { slot, permanent: random.chance(30) },
            };
            self.faults.push((at, fault));
        }
    }

    /// Lets clients set no bound, where KV caches may hold less than the longest sequence, and more
    /// or less from epoch to epoch. Depends only on the seed, like the following.
    fn add_open_ended(&mut self, seed: u64) {
        let random = &mut Random::new(seed ^ 20_734);
        if !random.chance(25) {
            return;
        }
        // Enough for the longest prompt and a token.
        let fewest = random.range(13, 15);
        self.blocks = (fewest, fewest + random.pick(&[1, 3, 8]));
        let (smallest, longest) =
            (fewest as u32 * self.engine.block_size, self.engine.max_model_len);
        for client in self.clients.iter_mut().filter(|it| it.ends.max_tokens > 0) {
            let len = client.prompt.len() as u32;
            if len + client.ends.max_tokens <= smallest && !random.chance(20) {
                continue;
            }
            client.open_ended = true;
            client.ends.max_tokens = longest - len;
            // What ends some texts early is theirs by chance; others are to reach the bound.
            if random.chance(50) {
                client.ends.end_tokens.clear();
                client.ends.stop_token = None;
            }
            // Where its client hears nothing, nobody knows whether the cache has ended it.
            if let Some((_, leaving)) = &mut client.leaves {
                *leaving = Leaving::Cancels;
            }
            let (prompt, seed, ends) = (&client.prompt, client.seed, &client.ends);
            let text = |choice| undisturbed(prompt, seed, choice, ends);
            client.expected = (0..client.n).map(text).collect();
        }
    }

    /// Adds an executor that hangs. Depends only on the seed, so that everything else stays as it
    /// was.
    fn add_hang(&mut self, seed: u64) {
        let random = &mut Random::new(seed ^ 0x4a46);
        if random.chance(12) {
            let slot = random.range(0, self.starts.len() as u64 - 1) as usize;
            let at = random.range(0, FAULTS_END);
            self.faults.push((at, Fault::Hang { slot, notices: random.chance(50) }));
        }
    }

    /// Adds a rank whose steps hang for a while, and two that do not reach each other. This and the
    /// following depend only on the seed, like [`Self::add_hang`].
    fn add_bad_ranks(&mut self, seed: u64) {
        let random = &mut Random::new(seed ^ 0xbad);
        let last = self.hosts.len() as u64 - 1;
        if random.chance(5) {
            let (slot, lasts) = (random.range(0, last) as usize, random.range(S, 40 * S));
            let at = random.range(2 * S, FAULTS_END);
            self.faults.push((at, Fault::HangSteps { slot, lasts: Some(lasts) }));
        }
        if self.tensor_parallel > 1 && random.chance(6) {
            let (first, lasts) = (random.range(0, last), random.range(S, 60 * S));
            let other = (first + random.range(1, last)) % (last + 1);
            let slots = [first as usize, other as usize];
            let at = random.range(0, FAULTS_END);
            self.faults.push((at, Fault::Apart { slots, lasts: Some(lasts) }));
        }
    }

    /// Adds adapters that come and go.
    fn add_adapters(&mut self, seed: u64) {
        let random = &mut Random::new(seed ^ 0xada9);
        if !random.chance(30) {
            return;
        }
        self.places = random.range(4, 6) as u32;
        for client in self.clients.iter_mut().filter(|it| it.adapter.is_empty()) {
            client.adapter = if random.chance(60) { random.pick(&COMING) } else { "" };
        }
        let mut contents = OF_THE_HUB;
        let mut load = |name, replace| {
            contents += 1;
            Fault::LoadAdapter { name, contents, replace }
        };
        // When a replica serves, mostly.
        self.faults.extend(COMING.map(|name| (random.range(2 * S, 5 * S), load(name, false))));
        for _ in 0..random.range(2, 7) {
            let (at, name) = (random.range(S, FAULTS_END), random.pick(&COMING));
            let change = match random.range(0, 9) {
                0..=5 => load(name, random.chance(70)),
                6..=8 => Fault::UnloadAdapter { name },
                _ => Fault::UnloadAdapter { name: random.pick(&["1", "2"]) },
            };
            self.faults.push((at, change));
        }
        for _ in 0..random.range(0, 3) {
            let slot = random.range(0, self.hosts.len() as u64 - 1) as usize;
            let fault = match random.chance(30) {
                true => Fault::FailAdapter { slot },
                false => {
                    let (takes, speaks) = (random.skewed(S, 60 * S), random.chance(70));
                    Fault::SlowFetch { slot, takes, speaks }
                }
            };
            self.faults.push((random.range(0, FAULTS_END), fault));
        }
    }

    /// Gives some processes a GPU, so that the largest step depends on the ranks.
    fn add_gpus(&mut self, seed: u64) {
        let random = &mut Random::new(seed ^ 0x69b5);
        if random.chance(30) {
            let engine = &self.engine;
            let (least, most) = (engine.max_num_seqs, engine.max_num_batched_tokens);
            self.cpu_step_tokens = random.range(least.into(), most.into()) as u32;
            self.gpus = self.hosts.iter().map(|_| random.chance(60)).collect();
        }
    }

    /// Faults of coordinators and of etcd.
    fn add_control_faults(&mut self, random: &mut Random) {
        for _ in 0..random.range(1, 4) {
            let at = random.range(0, FAULTS_END);
            let seat = random.range(0, self.seats as u64 - 1) as usize;
            // Coordinators are hit as often as all workers together.
            let worker = random.range(0, self.hosts.len() as u64 - 1) as usize;
            let who = if random.chance(50) { self.hosts.len() + seat } else { worker };
            let seat = random.chance(30).then_some(seat);
            if random.chance(20) {
                // One after the other, so that another formation follows one in progress.
                for at in [at, at + random.range(100 * MS, 4 * S)] {
                    let back_after = random.skewed(10 * MS, 8 * S);
                    self.faults.push((at, Fault::StopCoordinator { seat: None, back_after }));
                }
                continue;
            }
            let fault = match random.range(0, 99) {
                0..=24 => {
                    Fault::StopCoordinator { seat, back_after: random.skewed(10 * MS, 8 * S) }
                }
                25..=34 => {
                    Fault::FreezeCoordinator { seat, lasts: random.skewed(100 * MS, 20 * S) }
                }
                35..=49 => {
                    Fault::CrashCoordinator { seat, back_after: random.skewed(10 * MS, 8 * S) }
                }
                50..=61 => Fault::EtcdAway {
                    lasts: random.skewed(100 * MS, 90 * S),
                    counts: random.chance(50),
                    resets: random.chance(50),
                },
                62..=75 => Fault::CutEtcd { who, lasts: random.skewed(100 * MS, 30 * S) },
                76..=83 => Fault::Revoke { who },
                84..=86 => Fault::CancelWatch { who },
                87..=89 => Fault::FailKeep { who, gone: random.chance(50) },
                90..=92 => Fault::LoseChange { who },
                _ => Fault::Compact,
            };
            self.faults.push((at, fault));
        }
    }
}

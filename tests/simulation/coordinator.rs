//! Coordinators that lead: their real cores and, between those, what `cluster::actor` and
//! `replica::actor` do with mailboxes and links. Each coordinator is a life. One life affects
//! another only through the checkpoint of its totals.
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::time::Duration;

use coordinator::adapters::{Leaving, ServedAdapters};
use coordinator::cluster::dispatch::Dispatch;
use coordinator::cluster::roster::{LinkNumber, Roster};
use coordinator::cluster::{Cluster, ClusterConfig, PlacementRules};
use coordinator::metrics::Hub;
use shared::ids::{Incarnation, ReplicaId, WorkerId};
use shared::membership::View;
use shared::metrics::Limits;
use shared::metrics::merger::checkpoint::Checkpoint;
use shared::model_config::ConfigOverrides;
use shared::model_identity::ModelIdentity;
use shared::protocol::{Dtype, Quantization, StepResult, WorkerStats};
use shared::wire::auth::Secret;

use crate::checks::LifeChecks;
use crate::events::Event;
use crate::idling::Idling;
use crate::model::lora;
use crate::network::{LinkId, Side};
use crate::pace::Paces;
use crate::random::mix;
use crate::replicas::{ClusterMail, RunningReplica};
use crate::scenario::{FORM_TIMEOUT, MODEL, S, Scenario, Time};
use crate::switches::Switches;
use crate::tally::Tally;
use crate::world::World;

/// Number of a coordinator that leads or led.
pub(crate) type Life = usize;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Connected {
    pub(crate) incarnation: u64,
    pub(crate) link: LinkId,
    pub(crate) number: LinkNumber,
}

pub(crate) struct Coordinator {
    pub(crate) life: Life,
    /// Seat of its process.
    pub(crate) seat: usize,
    /// Whether it has taken over what the last leader left.
    restored: bool,
    pub(crate) core: Cluster,
    pub(crate) hub: Hub,
    pub(crate) roster: Roster,
    pub(crate) connected: BTreeMap<WorkerId, Connected>,
    pub(crate) replicas: BTreeMap<ReplicaId, RunningReplica>,
    /// Given up, but with mail still to read.
    pub(crate) retiring: BTreeMap<ReplicaId, RunningReplica>,
    pub(crate) dispatch: Dispatch,
    /// The adapters that requests may name, and those that some may still use.
    pub(crate) served: ServedAdapters,
    pub(crate) leaving: Vec<Leaving>,
    /// When queues are compared next.
    pub(crate) shares_at: Duration,
    pub(crate) mail: VecDeque<ClusterMail>,
    pub(crate) mail_due: Time,
    /// Results of later epochs, or of epochs gone by then, to be delivered again.
    pub(crate) late_results: Vec<(ReplicaId, WorkerId, StepResult)>,
    /// Reports to be delivered again, or late.
    pub(crate) echoes: Vec<(WorkerId, u64, WorkerStats)>,
    /// What its totals should be.
    pub(crate) tally: Tally,
    /// Tokens accepted in earlier lives, as far as it knows.
    pub(crate) tokens_before: u64,
    pub(crate) checks: LifeChecks,
    pub(crate) paces: Paces,
    pub(crate) idling: Idling,
}

impl Coordinator {
    fn new(scenario: &Scenario, seed: u64, life: Life, seat: usize, switches: &Switches) -> Self {
        let run = mix(seed, life as u64);
        let mut degrees = scenario.degrees.clone();
        degrees.truncate(if switches.degrees_are_fixed { 1 } else { degrees.len() });
        let patient = switches.hung_ranks_are_waited_for;
        let config = ClusterConfig {
            tensor_parallel: scenario.tensor_parallel,
            degrees,
            reshard_after: Duration::from_micros(scenario.reshard_after),
            max_replicas: scenario.max_replicas,
            model: MODEL.to_owned(),
            identity: Some(ModelIdentity(1)),
            config_overrides: ConfigOverrides::default(),
            dtype: Dtype::Auto,
            quantization: Quantization::None,
            engine: scenario.engine.clone(),
            cpu_step_tokens: scenario.cpu_step_tokens,
            collective_timeout: Duration::from_micros(scenario.collective_timeout),
            step_timeout: scenario.limits.step_timeout,
            form_timeout: if patient { Duration::MAX } else { Duration::from_micros(FORM_TIMEOUT) },
            lora: lora(scenario.places),
            model_names: vec![MODEL.to_owned()],
            draft_model: None,
            worker_stats: true,
            collective_key: Secret::of_random([1; 32]),
            placement: PlacementRules::default(),
            run,
        };
        Self {
            life,
            seat,
            restored: false,
            core: Cluster::new(config),
            hub: Hub::new(Incarnation(run), Limits::default()),
            roster: Roster::default(),
            connected: BTreeMap::new(),
            replicas: BTreeMap::new(),
            retiring: BTreeMap::new(),
            dispatch: Dispatch::new(scenario.engine.max_num_seqs, scenario.engine.block_size),
            served: ServedAdapters::default(),
            leaving: Vec::new(),
            shares_at: Duration::ZERO,
            mail: VecDeque::new(),
            mail_due: 0,
            late_results: Vec::new(),
            echoes: Vec::new(),
            tally: Tally::default(),
            tokens_before: 0,
            checks: LifeChecks::default(),
            paces: Paces::default(),
            idling: Idling::default(),
        }
    }

    pub(crate) fn num_connected(&self) -> usize {
        self.connected.len()
    }

    /// Whether one of a replica's ranks is silent.
    pub(crate) fn is_doubtful(&self, id: ReplicaId) -> bool {
        let load = self.dispatch.load(id);
        load.is_some_and(|load| load.doubtful.load(Ordering::Relaxed))
    }
}

/// All coordinators so far. Whatever happens at a coordinator happens at the acting one.
#[derive(Default)]
pub(crate) struct Coordinators {
    lives: Vec<Option<Box<Coordinator>>>,
    acting: Life,
}

impl Coordinators {
    /// The coordinators that run.
    pub(crate) fn lives(&self) -> Vec<Life> {
        self.lives.iter().flatten().map(|it| it.life).collect()
    }

    /// Makes a coordinator the acting one, if it runs.
    pub(crate) fn act(&mut self, life: Life) -> bool {
        let runs = self.lives.get(life).is_some_and(Option::is_some);
        if runs {
            self.acting = life;
        }
        runs
    }
}

impl Deref for Coordinators {
    type Target = Coordinator;

    fn deref(&self) -> &Coordinator {
        self.lives[self.acting].as_ref().expect("only those that run act")
    }
}

impl DerefMut for Coordinators {
    fn deref_mut(&mut self) -> &mut Coordinator {
        self.lives[self.acting].as_mut().expect("only those that run act")
    }
}

/// What a leader leaves for the next one, and what must follow from it.
#[derive(Clone)]
pub(crate) struct Saved {
    pub(crate) bytes: Vec<u8>,
    tally: Tally,
    tokens: u64,
    checks: LifeChecks,
}

impl World {
    /// A coordinator that knows of these workers begins to lead, and acts.
    pub(crate) fn begin_life(&mut self, seat: usize, workers: BTreeSet<String>) -> Life {
        let life = self.coordinator.lives.len();
        let mut coordinator =
            Coordinator::new(&self.scenario, self.seed, life, seat, &self.switches);
        coordinator.core.expect(workers);
        self.coordinator.lives.push(Some(Box::new(coordinator)));
        self.coordinator.acting = life;
        self.adapters_changed();
        self.say(|| format!("life {life} begins"));
        self.schedule(self.scenario.checkpoint, Event::Checkpoint(life));
        life
    }

    /// The acting coordinator continues from what the last leader left.
    pub(crate) fn restore(&mut self) {
        self.coordinator.restored = true;
        let Some(saved) = self.etcd.ledger.clone() else { return };
        if !self.switches.totals_are_forgotten {
            match Checkpoint::decode(&saved.bytes) {
                Ok(checkpoint) => {
                    let unknown = self.coordinator.hub.restore(checkpoint);
                    assert_eq!(unknown, 0, "series that the same program wrote");
                }
                Err(error) => self.fail(format!("the last leader's totals: {error}")),
            }
        }
        self.coordinator.tally.add(&saved.tally);
        self.coordinator.tokens_before += saved.tokens;
        self.coordinator.checks.go_on_from(saved.checks);
    }

    /// A coordinator is gone, with all that it held.
    pub(crate) fn end_life(&mut self, life: Life) {
        if self.coordinator.lives.get_mut(life).and_then(Option::take).is_none() {
            return;
        }
        self.say(|| format!("life {life} ends"));
        for link in 0..self.links.len() {
            if self.links[link].life == life {
                self.close(link, Side::Coordinator);
            }
        }
        self.clients_lost(life);
        self.operators.asked.retain(|_, it| it.life != life);
    }

    /// The acting coordinator leaves its totals, if it believes that it leads.
    pub(crate) fn checkpoint(&mut self) {
        let (life, who) = (self.coordinator.life, self.member_of(self.coordinator.seat));
        let again = if self.coordinator.restored { self.scenario.checkpoint } else { S / 2 };
        self.schedule(again, Event::Checkpoint(life));
        if !self.reaches_etcd(who) {
            return;
        }
        if !self.coordinator.restored {
            return self.restore();
        }
        let Some(epoch) = self.view(who).and_then(View::own).map(|it| it.epoch) else { return };
        let (page, checkpoint) = self.coordinator.hub.snapshot_and_checkpoint();
        let bytes = match checkpoint.encode() {
            Ok(bytes) => bytes,
            Err(error) => return self.fail(format!("the totals: {error}")),
        };
        let mut tally = self.coordinator.tally.clone();
        // For later readers, these requests ended with this coordinator.
        self.clients.end_in_flight(life, &mut tally);
        let tokens = self.coordinator.tokens_before + self.clients.accepted_tokens(life);
        let checks = self.coordinator.checks.for_the_next(page.merged);
        let saved = Saved { bytes, tally, tokens, checks };
        let now = saved.checks.clone();
        let before = self.etcd.save(epoch, saved, !self.switches.saves_unfenced);
        if let Some(fallen) = before.and_then(|before| now.fallen_since(&before.checks)) {
            self.fail(format!("the totals that are left to the next leader: {fallen}"));
        }
    }
}

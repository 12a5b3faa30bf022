//! PURE: how the ranks of a replica exchange data on their devices. Every rank knows the
//! capabilities of all and decides for itself; since they decide by the same facts, they agree.
use std::fmt;

use super::launch::PEER_BLOCKS;

/// How an operator wants ranks on GPUs to exchange data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExchangePolicy {
    /// The fastest that is available on every rank.
    #[default]
    Auto,
    /// Host memory: no GPU accesses another's.
    Host,
    /// NCCL alone, or an error.
    Nccl,
    /// This project's own kernels on GPUs that access each other's memory, or an error.
    Peers,
}

impl ExchangePolicy {
    /// All variants, by name.
    pub const NAMES: [(&'static str, Self); 4] =
        [("auto", Self::Auto), ("host", Self::Host), ("nccl", Self::Nccl), ("peers", Self::Peers)];

    /// Name of a variant.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, exchange)| *exchange == self).map_or("", |(name, _)| name)
    }
}

/// Minimum version of NCCL: 2.22.3. Its predecessors from 2.19 on take 2 MiB of GPU memory for each
/// collective in a graph, gigabytes for the graphs of a large model; older ones cannot be aborted
/// safely while collectives are in graphs.
pub const NCCL_MIN: u32 = 22_203;
/// Minimum version of NCCL for several ranks on one GPU.
pub const NCCL_SHARING_MIN: u32 = 23_000;

/// Capabilities of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capability {
    /// What its operator asks for.
    pub wish: ExchangePolicy,
    /// Its host, by the kernel's boot id; zeros if unknown.
    pub host: [u8; 16],
    /// UUID of its GPU.
    pub gpu: [u8; 16],
    /// NCCL's version (22809 is 2.28.9); 0 if there is no usable one.
    pub nccl: u32,
    /// Whether NCCL is told that ranks share GPUs (`NCCL_MULTI_RANK_GPU_ENABLE=1`).
    pub nccl_shares: bool,
    /// Whether it can capture graphs.
    pub graphs: bool,
    /// Whether a row's bits must not depend on its batch.
    pub batch_invariant: bool,
    /// Number that identifies its process.
    pub process: u64,
    /// Number of multiprocessors of its GPU.
    pub multiprocessors: u32,
    /// Compute capability of its GPU, such as 9, 0.
    pub compute: [u8; 2],
}

/// Size of an encoded capability in bytes.
pub const CAPABILITY_BYTES: usize = 54;

impl Capability {
    /// Encodes a capability; only ranks of the same build exchange this form.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; CAPABILITY_BYTES] {
        let mut bytes = [0; CAPABILITY_BYTES];
        bytes[..16].copy_from_slice(&self.host);
        bytes[16..32].copy_from_slice(&self.gpu);
        bytes[32..36].copy_from_slice(&self.nccl.to_le_bytes());
        let wish = ExchangePolicy::NAMES.iter().position(|(_, exchange)| *exchange == self.wish);
        bytes[36] = u8::try_from(wish.unwrap_or(0)).unwrap_or(0);
        bytes[37] = u8::from(self.nccl_shares);
        bytes[38] = u8::from(self.graphs);
        bytes[39] = u8::from(self.batch_invariant);
        bytes[40..48].copy_from_slice(&self.process.to_le_bytes());
        bytes[48..52].copy_from_slice(&self.multiprocessors.to_le_bytes());
        bytes[52..].copy_from_slice(&self.compute);
        bytes
    }

    /// Decodes the result of [`Capability::to_bytes`]; `None` if the bytes are invalid.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let part = |at: usize| bytes.get(at..at + 16)?.try_into().ok();
        Some(Self {
            host: part(0)?,
            gpu: part(16)?,
            nccl: u32::from_le_bytes(bytes.get(32..36)?.try_into().ok()?),
            wish: ExchangePolicy::NAMES.get(usize::from(*bytes.get(36)?))?.1,
            nccl_shares: *bytes.get(37)? == 1,
            graphs: *bytes.get(38)? == 1,
            batch_invariant: *bytes.get(39)? == 1,
            process: u64::from_le_bytes(bytes.get(40..48)?.try_into().ok()?),
            multiprocessors: u32::from_le_bytes(bytes.get(48..52)?.try_into().ok()?),
            compute: bytes.get(52..54)?.try_into().ok()?,
        })
    }
}

/// How ranks exchange data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangeMethod {
    /// Host memory.
    Host,
    /// NCCL.
    Nccl,
}

/// The decision, and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExchangeDecision {
    /// How ranks exchange data, apart from `peers`.
    pub choice: ExchangeMethod,
    /// Small messages, or all of them, go through memory of GPUs that access each other's; all
    /// ranks attempt it.
    pub peers: bool,
    /// Whether anything else is an error.
    pub insists: bool,
    /// Whether steps become graphs, if ranks exchange data on their devices.
    pub graphs: bool,
    /// The reason, in one line for people.
    pub reason: String,
}

/// Chooses for ranks with these capabilities, rank 0 first.
///
/// # Errors
/// One line, if the wish of some rank's operator cannot be met.
pub fn choose(ranks: &[Capability]) -> Result<ExchangeDecision, String> {
    let mut wishes =
        ranks.iter().map(|rank| rank.wish).filter(|wish| *wish != ExchangePolicy::Auto);
    let wish = wishes.next().unwrap_or_default();
    if let Some(other) = wishes.find(|other| *other != wish) {
        return Err(format!(
            "ranks have different settings: --cuda-exchange {} and {}",
            wish.name(),
            other.name()
        ));
    }
    // It determines which kernels compute sums.
    if ranks.iter().any(|rank| rank.batch_invariant != ranks[0].batch_invariant) {
        return Err("some ranks have --batch-invariant, others do not".to_owned());
    }
    let graphs = ranks.iter().all(|rank| rank.graphs);
    let peers = match (wish, peers_obstacle(ranks)) {
        (ExchangePolicy::Host | ExchangePolicy::Nccl, _) => false,
        (ExchangePolicy::Peers, Some(obstacle)) => {
            return Err(format!("--cuda-exchange peers: {obstacle}"));
        }
        (_, obstacle) => obstacle.is_none(),
    };
    let insists = matches!(wish, ExchangePolicy::Nccl | ExchangePolicy::Peers);
    let host = |reason: String| ExchangeDecision {
        choice: ExchangeMethod::Host,
        peers,
        insists,
        graphs,
        reason,
    };
    let reason = match (wish, nccl_obstacle(ranks)) {
        (ExchangePolicy::Peers, _) => "--cuda-exchange peers".to_owned(),
        (ExchangePolicy::Host, _) => "--cuda-exchange host".to_owned(),
        (_, None) => {
            let reason = format!("NCCL {} on every rank", Version(least(ranks)));
            return Ok(ExchangeDecision {
                choice: ExchangeMethod::Nccl,
                peers,
                insists,
                graphs,
                reason,
            });
        }
        (ExchangePolicy::Nccl, Some(obstacle)) => {
            return Err(format!("--cuda-exchange nccl: {obstacle}"));
        }
        (ExchangePolicy::Auto, Some(obstacle)) => obstacle,
    };
    Ok(host(reason))
}

/// A warning, in one line, if ranks' GPUs are of different kinds: their tensor cores may round
/// differently. That is only a rounding error in a sum, but a different expert in a routing choice,
/// and nobody would notice.
#[must_use]
pub fn unlike(ranks: &[Capability]) -> Option<String> {
    let (first, rest) = ranks.split_first()?;
    let (rank, other) =
        (1..).zip(rest).find(|(_, other): &(usize, _)| other.compute != first.compute)?;
    let text = |rank: &Capability| format!("{}.{}", rank.compute[0], rank.compute[1]);
    Some(format!(
        "rank {rank}'s GPU has compute capability {}, rank 0's {}: with a mixture of experts, ranks \
         may choose different ones for the same token",
        text(other),
        text(first)
    ))
}

/// Why these ranks cannot access each other's memory, as far as known before they try.
fn peers_obstacle(ranks: &[Capability]) -> Option<String> {
    if ![2, 4, 8].contains(&ranks.len()) {
        return Some(format!("there are {} ranks, not 2, 4 or 8", ranks.len()));
    }
    for (rank, own) in ranks.iter().enumerate() {
        if own.host != ranks[0].host {
            return Some(format!("rank {rank} is on another host than rank 0"));
        }
        let sibling =
            ranks[..rank].iter().position(|o| o.process == own.process && o.gpu != own.gpu);
        if let Some(sibling) = sibling {
            return Some(format!("ranks {sibling} and {rank} are one process on different GPUs"));
        }
        if let Some(obstacle) = crowded(ranks, rank) {
            return Some(obstacle);
        }
    }
    None
}

/// Why this rank's GPU is too small for all ranks on it. Blocks of one rank wait for blocks of
/// another, so all must be resident at once: as compiled, one per multiprocessor. Time-sliced
/// processes would need less, but whether they are time-sliced is unknown (MPS).
fn crowded(ranks: &[Capability], rank: usize) -> Option<String> {
    let Capability { gpu, multiprocessors: has, .. } = ranks[rank];
    let sharing = ranks.iter().filter(|other| other.gpu == gpu).count();
    let needs = sharing * PEER_BLOCKS;
    (sharing > 1 && needs > has as usize).then(|| {
        format!(
            "{sharing} ranks share rank {rank}'s GPU, which has {has} multiprocessors, but {needs} \
             are needed"
        )
    })
}

/// Whether blocks of other ranks may run on this rank's GPU beside its own: those of ranks on the
/// same GPU, and with `mps` (NVIDIA's multi-process service runs on it) those of any process, such
/// as other replicas' ranks. Processes in time slices have all of the GPU in theirs.
pub(super) fn shares_gpu(ranks: &[Capability], rank: usize, mps: bool) -> bool {
    mps || ranks.iter().filter(|other| other.gpu == ranks[rank].gpu).count() > 1
}

fn least(ranks: &[Capability]) -> u32 {
    ranks.iter().map(|rank| rank.nccl).min().unwrap_or(0)
}

/// Why these ranks cannot use NCCL.
fn nccl_obstacle(ranks: &[Capability]) -> Option<String> {
    for (rank, own) in ranks.iter().enumerate() {
        if own.nccl == 0 {
            return Some(format!("rank {rank} has no NCCL that can be used"));
        }
        if own.nccl < NCCL_MIN {
            let (found, wanted) = (Version(own.nccl), Version(NCCL_MIN));
            return Some(format!("rank {rank} has NCCL {found}, older than {wanted}"));
        }
        // NCCL connects ranks of one and the same version only.
        if own.nccl != ranks[0].nccl {
            let (found, first) = (Version(own.nccl), Version(ranks[0].nccl));
            return Some(format!("rank {rank} has NCCL {found}, rank 0 has {first}"));
        }
        let twin = ranks[..rank].iter().position(|other| other.gpu == own.gpu);
        if let Some(twin) = twin
            && (least(ranks) < NCCL_SHARING_MIN || !ranks.iter().all(|rank| rank.nccl_shares))
        {
            return Some(format!(
                "ranks {twin} and {rank} share a GPU: NCCL allows that from {} on, with \
                 NCCL_MULTI_RANK_GPU_ENABLE=1",
                Version(NCCL_SHARING_MIN)
            ));
        }
    }
    None
}

/// `2.28.9` for 22809.
#[derive(Clone, Copy, Debug)]
pub struct Version(pub u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0 / 10_000, self.0 / 100 % 100, self.0 % 100)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(gpu: u8) -> Capability {
        let process = u64::from(gpu);
        Capability {
            gpu: [gpu; 16],
            process,
            nccl: 22_809,
            graphs: true,
            multiprocessors: 132,
            ..Capability::default()
        }
    }

    #[test]
    fn bytes_and_back() {
        let full = Capability {
            wish: ExchangePolicy::Nccl,
            host: std::array::from_fn(|i| i as u8),
            gpu: std::array::from_fn(|i| i as u8 + 100),
            nccl: 23_203,
            nccl_shares: true,
            graphs: false,
            batch_invariant: true,
            process: 0x1234_5678_9abc_def0,
            multiprocessors: 0x0102_0304,
            compute: [9, 1],
        };
        for one in [full.clone(), rank(3)] {
            assert_eq!(Capability::from_bytes(&one.to_bytes()), Some(one));
        }
        assert_eq!(Capability::from_bytes(&full.to_bytes()[..38]), None);
        let mut strange = full.to_bytes();
        strange[36] = 77;
        assert_eq!(Capability::from_bytes(&strange), None);
    }

    #[test]
    fn unlike_gpus_are_told() {
        let of = |compute| Capability { compute, ..rank(0) };
        assert_eq!(unlike(&[of([9, 0]), of([9, 0]), of([9, 0])]), None);
        assert_eq!(unlike(&[of([9, 0])]), None);
        let told = unlike(&[of([9, 0]), of([9, 0]), of([8, 0])]).unwrap();
        assert!(told.contains("rank 2's") && told.contains("8.0, rank 0's 9.0"), "{told}");
        assert!(!told.contains('\n'));
    }

    #[test]
    fn nccl_is_used_where_every_rank_can() {
        let chosen = choose(&[rank(0), rank(1)]).unwrap();
        assert_eq!((chosen.choice, chosen.graphs), (ExchangeMethod::Nccl, true));
        let wants = Capability { wish: ExchangePolicy::Nccl, ..rank(1) };
        let insists = choose(&[rank(0), wants]).unwrap().insists;
        assert!(insists && !chosen.insists, "one rank's operator speaks for all");
        assert!(chosen.reason.contains("2.28.9"), "{}", chosen.reason);
        let plain = Capability { graphs: false, ..rank(1) };
        assert!(!choose(&[rank(0), plain]).unwrap().graphs);
    }

    #[test]
    fn a_gpu_is_shared_by_ranks_on_it_and_by_what_mps_lets_in() {
        let ranks = [rank(0), rank(1), rank(0), rank(2)];
        let shared = |mps| [0, 1, 2, 3].map(|rank| shares_gpu(&ranks, rank, mps));
        assert_eq!(shared(false), [true, false, true, false]);
        assert_eq!(shared(true), [true; 4]);
    }

    #[test]
    fn what_is_in_the_way_is_said_and_decides() {
        let shares = |nccl: u32| Capability { nccl, nccl_shares: true, ..rank(0) };
        let cases = [
            (vec![rank(0), Capability { nccl: 0, ..rank(1) }], "rank 1 has no NCCL"),
            (vec![Capability { nccl: 22_105, ..rank(0) }, rank(1)], "older than 2.22.3"),
            (vec![rank(0), Capability { nccl: 22_701, ..rank(1) }], "rank 0 has 2.28.9"),
            (vec![rank(0), Capability { nccl: 22_807, ..rank(1) }], "has NCCL 2.28.7, rank 0"),
            (vec![rank(0), rank(1), rank(0)], "ranks 0 and 2 share a GPU"),
            (vec![shares(22_900), shares(22_900)], "share a GPU"),
            (vec![shares(23_000), Capability { nccl_shares: false, ..shares(23_000) }], "share"),
        ];
        for (ranks, words) in cases {
            let chosen = choose(&ranks).unwrap();
            assert_eq!(chosen.choice, ExchangeMethod::Host);
            assert!(chosen.reason.contains(words), "{}", chosen.reason);
            // An operator who insists gets an error.
            let mut insists = ranks;
            insists[1].wish = ExchangePolicy::Nccl;
            let error = choose(&insists).unwrap_err();
            assert!(error.contains(words) && !error.contains('\n'), "{error}");
        }
        assert_eq!(choose(&[shares(23_000), shares(23_000)]).unwrap().choice, ExchangeMethod::Nccl);
        let oldest = |gpu| Capability { nccl: NCCL_MIN, ..rank(gpu) };
        assert_eq!(choose(&[oldest(0), oldest(1)]).unwrap().choice, ExchangeMethod::Nccl);
    }

    #[test]
    fn ranks_of_one_host_try_to_see_each_others_memory() {
        let wants = |wish, gpu| Capability { wish, ..rank(gpu) };
        let chosen = choose(&[rank(0), rank(1)]).unwrap();
        assert_eq!((chosen.choice, chosen.peers), (ExchangeMethod::Nccl, true));
        // Two processes on one GPU, and two threads of one process.
        let twin = Capability { process: 9, ..rank(0) };
        assert!(choose(&[rank(0), twin]).unwrap().peers);
        assert!(choose(&[rank(0), rank(0)]).unwrap().peers);
        assert!(choose(&vec![rank(0); 4]).unwrap().peers);
        // A small GPU is no obstacle for a rank that has it to itself: blocks then run one after
        // another.
        let small = |gpu| Capability { multiprocessors: 16, ..rank(gpu) };
        assert!(choose(&[small(0), small(1)]).unwrap().peers);
        let chosen = choose(&[rank(0), wants(ExchangePolicy::Peers, 1)]).unwrap();
        assert_eq!(
            (chosen.choice, chosen.peers, chosen.graphs),
            (ExchangeMethod::Host, true, true)
        );
        for wish in [ExchangePolicy::Host, ExchangePolicy::Nccl] {
            assert!(!choose(&[wants(wish, 0), rank(1)]).unwrap().peers);
        }
        let cases = [
            (vec![rank(0), rank(1), rank(2)], "3 ranks"),
            (vec![rank(0), Capability { host: [1; 16], ..rank(1) }], "another host"),
            (vec![rank(0), Capability { process: 0, ..rank(1) }], "one process"),
            (
                vec![Capability { multiprocessors: 16, ..rank(0) }; 2],
                "16 multiprocessors, but 64 are needed",
            ),
            (vec![rank(0); 8], "8 ranks share rank 0's GPU"),
        ];
        for (ranks, words) in cases {
            assert!(!choose(&ranks).unwrap().peers);
            let mut insists = ranks;
            insists[0].wish = ExchangePolicy::Peers;
            let error = choose(&insists).unwrap_err();
            assert!(error.contains(words) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn wishes_are_kept_or_refused() {
        let wants = |wish| Capability { wish, ..rank(1) };
        assert_eq!(
            choose(&[rank(0), wants(ExchangePolicy::Host)]).unwrap().choice,
            ExchangeMethod::Host
        );
        let error =
            choose(&[wants(ExchangePolicy::Host), wants(ExchangePolicy::Nccl)]).unwrap_err();
        assert!(error.contains("host") && error.contains("nccl"), "{error}");
        let invariant = Capability { batch_invariant: true, ..rank(1) };
        assert!(choose(&[invariant.clone(), invariant.clone()]).is_ok());
        let error = choose(&[rank(0), invariant]).unwrap_err();
        assert!(error.contains("--batch-invariant"), "{error}");
    }
}

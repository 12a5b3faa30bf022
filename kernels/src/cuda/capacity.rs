//! PURE: division of a GPU's memory, and the message for models that do not fit.
use super::bucket::decode_buckets;

/// The driver takes memory from the GPU in pages of this size; allocations of more than
/// [`SHARED_MOST`] have theirs for themselves. NVIDIA documents such a granularity for memory that
/// programs map themselves. For `cuMemAlloc` it is known from how much the free memory shrinks; it
/// was not measured here.
const PAGE: u64 = 2 << 20;
/// Smaller allocations share pages.
const SHARED_MOST: u64 = 1 << 20;
/// The driver aligns what shares a page to this.
const ALIGNMENT: u64 = 256;
/// Kept free for code that is loaded when it first runs, after memory was divided (of cuBLASLt what
/// was not planned before, of NCCL each kind of sum), and for which the driver takes memory in
/// pieces of megabytes. An estimate.
const RESERVE: u64 = 256 << 20;
/// Memory that a kernel in a graph takes: what NVIDIA's own libraries reckon with. An estimate.
const NODE_BYTES: u64 = 10 << 10;
/// Kernels of a decode step for each layer, and besides; `tests/cuda` counts them.
const LAYER_NODES: u64 = 14;
const OTHER_NODES: u64 = 16;
/// What a layer of several ranks has besides: two sums, narrowed before and widened behind them.
const EXCHANGE_NODES: u64 = 6;
/// Graphs for each number of rows: with and without sampling, which ranks do from whole logits or
/// from a few of them. Those with adapters, and some rarer ones, are not counted.
const KINDS: [u64; 2] = [2, 4];

/// Memory that separate allocations of these sizes take from the GPU, in bytes. Those that share
/// pages are taken to share them with their like, of which a page has no room for a part.
#[must_use]
pub fn allocated_bytes(sizes: impl IntoIterator<Item = u64>) -> u64 {
    let pages = |bytes: u64| bytes.div_ceil(PAGE).saturating_mul(PAGE);
    let (mut whole, mut shared) = (0u64, 0u64);
    for bytes in sizes {
        if bytes > SHARED_MOST {
            whole = whole.saturating_add(pages(bytes));
        } else if bytes > 0 {
            let in_a_page = PAGE / bytes.next_multiple_of(ALIGNMENT);
            shared = shared.saturating_add(PAGE / in_a_page);
        }
    }
    whole.saturating_add(pages(shared))
}

/// Number of kernels in the graph of a decode step, on each of `ranks` ranks.
#[must_use]
pub fn graph_nodes(layers: usize, ranks: u32) -> u64 {
    let layer = LAYER_NODES + if ranks > 1 { EXCHANGE_NODES } else { 0 };
    layers as u64 * layer + OTHER_NODES
}

/// Memory of the graphs of a model's decode steps of up to `rows` rows, on each of `ranks` ranks.
#[must_use]
pub fn graph_bytes(layers: usize, rows: u32, ranks: u32) -> u64 {
    let graphs = decode_buckets(rows).len() as u64 * KINDS[usize::from(ranks > 1)];
    graphs * graph_nodes(layers, ranks) * NODE_BYTES
}

/// A GPU's memory after loading weights and activations and running the largest step once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredMemory {
    /// Total memory in bytes.
    pub total: u64,
    /// Free memory in bytes.
    pub free: u64,
    /// Fraction of `total` that may be in use, by this process and others together.
    pub utilization: f64,
    /// What graphs will take of it: see [`graph_bytes`].
    pub graphs: u64,
}

impl MeasuredMemory {
    /// Bytes that may be in use, by this process and others together.
    #[must_use]
    pub fn allowed(&self) -> u64 {
        (self.total as f64 * self.utilization.clamp(0.0, 1.0)) as u64
    }

    /// Bytes available for the KV cache, in whole pages, as it will take them.
    #[must_use]
    pub fn kv_bytes(&self) -> u64 {
        let used = self.total.saturating_sub(self.free);
        let reserve = RESERVE.saturating_add(self.graphs).min(self.total / 32);
        self.allowed().saturating_sub(used).saturating_sub(reserve) / PAGE * PAGE
    }
}

/// Memory that a model needs on each rank at a tensor-parallel degree. Activations are few
/// allocations, so their pages are within what is kept free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNeed {
    /// Tensor-parallel degree.
    pub degree: u32,
    /// What the weights take, in bytes: see [`allocated_bytes`].
    pub weights: u64,
    /// Size of the activations of the largest step in bytes.
    pub activations: u64,
    /// What the KV cache of one sequence of maximum length takes, in bytes.
    pub one_sequence: u64,
}

impl MemoryNeed {
    /// Total size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.weights.saturating_add(self.activations).saturating_add(self.one_sequence)
    }
}

/// Checks that `need` fits into the free `memory` before anything is loaded. If not, one line says
/// how much is missing and which of the degrees in `others` would fit.
///
/// # Errors
/// That line.
pub fn check_fit(
    memory: &MeasuredMemory,
    need: &MemoryNeed,
    others: &[MemoryNeed],
) -> Result<(), String> {
    let room = memory.kv_bytes();
    let missing = need.bytes().saturating_sub(room);
    if missing == 0 {
        return Ok(());
    }
    let fits = others.iter().filter(|other| other.bytes() <= room).map(|other| other.degree);
    let advice = match fits.min() {
        Some(degree) => format!("--tensor-parallel {degree} would fit"),
        None => "no tensor-parallel degree of this model fits GPUs of this size: lower \
                 --max-model-len or --max-num-batched-tokens, or raise --gpu-memory-utilization"
            .to_owned(),
    };
    Err(format!(
        "the model does not fit on the GPU: {} are missing (weights {}, activations {}, KV cache \
         of one sequence {}; {} of {} may be used and {} are free); {advice}",
        bytes_text(missing),
        bytes_text(need.weights),
        bytes_text(need.activations),
        bytes_text(need.one_sequence),
        bytes_text(memory.allowed()),
        bytes_text(memory.total),
        bytes_text(memory.free),
    ))
}

/// Checks, before anything is given up, that larger steps fit beside the weights that are loaded.
/// `memory` was measured with room for the steps so far, `before` bytes, which will be free; they
/// are to take `activations` bytes, and `one_sequence` as in [`MemoryNeed`].
///
/// # Errors
/// One line that says how much is missing.
pub fn check_steps(
    memory: &MeasuredMemory,
    before: u64,
    activations: u64,
    one_sequence: u64,
) -> Result<(), String> {
    let free = memory.free.saturating_add(before).min(memory.total);
    let room = MeasuredMemory { free, ..*memory }.kv_bytes();
    let missing = activations.saturating_add(one_sequence).saturating_sub(room);
    if missing == 0 {
        return Ok(());
    }
    Err(format!(
        "steps of this size do not fit on the GPU beside the weights: {} are missing (activations \
         {}, KV cache of one sequence {}; {} of {} may be used and {} are free without the \
         activations so far): lower --max-num-batched-tokens, or raise --gpu-memory-utilization",
        bytes_text(missing),
        bytes_text(activations),
        bytes_text(one_sequence),
        bytes_text(memory.allowed()),
        bytes_text(memory.total),
        bytes_text(free),
    ))
}

/// Formats a size: `1.5 GiB`.
#[must_use]
pub fn bytes_text(bytes: u64) -> String {
    const MIB: f64 = (1u64 << 20) as f64;
    let mib = bytes as f64 / MIB;
    if mib >= 1024.0 {
        format!("{:.1} GiB", mib / 1024.0)
    } else {
        format!("{:.0} MiB", mib.ceil())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn measured(free: u64, utilization: f64) -> MeasuredMemory {
        MeasuredMemory { total: 80 * GIB, free, utilization, graphs: 0 }
    }

    fn need(degree: u32, weights: u64) -> MemoryNeed {
        MemoryNeed { degree, weights, activations: GIB, one_sequence: GIB }
    }

    #[test]
    fn large_allocations_take_whole_pages_and_small_ones_share_them() {
        const MIB: u64 = 1 << 20;
        assert_eq!(allocated_bytes([]), 0);
        assert_eq!(allocated_bytes([0, 0]), 0);
        // Not a byte more than they have, or nearly a page more.
        assert_eq!(allocated_bytes([4 * MIB, 48 * MIB]), 52 * MIB);
        assert_eq!(allocated_bytes([4 * MIB + 1]), 6 * MIB);
        assert_eq!(allocated_bytes([MIB + 1]), 2 * MIB);
        // Twenty matrices of 1.25 MiB: 25 MiB of weights.
        assert_eq!(allocated_bytes([5 * MIB / 4; 20]), 40 * MIB);
        // Two of exactly 1 MiB share a page.
        assert_eq!(allocated_bytes([MIB; 5]), 6 * MIB);
        // Of 0.75 MiB as well: a third has no room. Of 0.625 MiB three do.
        assert_eq!(allocated_bytes([3 * MIB / 4; 4]), 4 * MIB);
        assert_eq!(allocated_bytes([5 * MIB / 8; 6]), 4 * MIB);
        // 8192 vectors of 256 bytes fill a page; a byte more each, and they fill two.
        assert_eq!(allocated_bytes([1; 8192]), 2 * MIB);
        assert_eq!(allocated_bytes([256; 8192]), 2 * MIB);
        assert_eq!(allocated_bytes([257; 8192]), 4 * MIB);
        // Both kinds, whatever their order.
        assert_eq!(allocated_bytes([1, 3 * MIB, MIB, 2 * MIB]), 8 * MIB);
        assert_eq!(allocated_bytes([u64::MAX, u64::MAX]), u64::MAX);
    }

    #[test]
    fn the_cache_takes_what_is_left_of_the_allowed_share() {
        let memory = measured(60 * GIB, 0.9);
        // 72 allowed, 20 in use, some kept.
        assert_eq!(memory.kv_bytes(), 52 * GIB - RESERVE);
        let all = MeasuredMemory { utilization: 1.0, ..memory };
        assert_eq!(all.kv_bytes(), 60 * GIB - RESERVE);
        let with_graphs = MeasuredMemory { graphs: GIB, ..memory };
        assert_eq!(with_graphs.kv_bytes(), 51 * GIB - RESERVE);
        // However many there are: without them steps are slower, without a cache there are none.
        let endless = MeasuredMemory { graphs: u64::MAX, ..memory };
        assert_eq!(endless.kv_bytes(), 52 * GIB - 80 * GIB / 32);
        // Others use more than is allowed; a share out of range; a tiny GPU.
        assert_eq!(MeasuredMemory { free: GIB, ..memory }.kv_bytes(), 0);
        assert_eq!(MeasuredMemory { utilization: 7.0, ..memory }.kv_bytes(), all.kv_bytes());
        assert_eq!(MeasuredMemory { utilization: f64::NAN, ..memory }.kv_bytes(), 0);
        let tiny = MeasuredMemory { total: 1 << 26, free: 1 << 26, utilization: 1.0, graphs: 0 };
        assert_eq!(tiny.kv_bytes(), (1 << 26) - (1 << 21));
        // A page that is not whole is none.
        let odd = MeasuredMemory { free: 60 * GIB - 1, ..memory };
        assert_eq!(odd.kv_bytes(), 52 * GIB - RESERVE - PAGE);
    }

    #[test]
    fn a_model_that_fits_is_no_error() {
        let memory = measured(80 * GIB, 0.9);
        assert_eq!(check_fit(&memory, &need(1, 60 * GIB), &[]), Ok(()));
    }

    #[test]
    fn one_that_does_not_says_how_much_is_missing_and_what_would_do() {
        let memory = measured(80 * GIB, 0.9);
        let others: Vec<MemoryNeed> = [2, 4, 8].map(|n| need(n, 140 * GIB / u64::from(n))).into();
        let line = check_fit(&memory, &need(1, 140 * GIB), &others).unwrap_err();
        // 142 needed, 71.75 there; halves need 72, just too much.
        assert!(line.contains("70.2 GiB are missing"), "{line}");
        assert!(line.contains("--tensor-parallel 4 would fit"), "{line}");
        assert!(!line.contains('\n'));
        let line = check_fit(&memory, &need(1, 140 * GIB), &[]).unwrap_err();
        assert!(line.contains("no tensor-parallel degree"), "{line}");
    }

    #[test]
    fn larger_steps_may_take_what_the_smaller_ones_had() {
        let memory = measured(9 * GIB, 1.0);
        // With what the steps so far have, 12 GiB are there, some of which are kept.
        assert_eq!(check_steps(&memory, 3 * GIB, 9 * GIB, 2 * GIB), Ok(()));
        let line = check_steps(&memory, 3 * GIB, 10 * GIB, 3 * GIB).unwrap_err();
        assert!(line.contains("1.2 GiB are missing (activations 10.0 GiB, KV cache"), "{line}");
        assert!(line.contains("12.0 GiB are free") && line.contains("--max-num-batched-tokens"));
        assert!(!line.contains('\n'));
        assert!(check_steps(&memory, u64::MAX, u64::MAX, u64::MAX).is_err());
    }

    #[test]
    fn graphs_take_memory_for_each_kernel() {
        // 80 layers: some ten megabytes a graph, several hundred for all of up to 256 rows.
        let (alone, of_ranks) = (graph_bytes(80, 256, 1), graph_bytes(80, 256, 8));
        assert!((300 << 20..600 << 20).contains(&alone), "{alone}");
        // Twice as many kinds, of graphs with exchanges.
        assert!((5 * alone / 2..3 * alone).contains(&of_ranks), "{of_ranks}");
        assert!(graph_bytes(32, 8, 1) < 40 << 20);
        assert_eq!(graph_bytes(80, 0, 2), 0);
    }

    #[test]
    fn sizes_that_overflow_do_not_wrap() {
        let memory = measured(80 * GIB, 0.9);
        assert!(check_fit(&memory, &need(1, u64::MAX), &[need(2, u64::MAX)]).is_err());
    }

    #[test]
    fn texts() {
        assert_eq!(bytes_text(1), "1 MiB");
        assert_eq!(bytes_text(512 << 20), "512 MiB");
        assert_eq!(bytes_text(3 * GIB / 2), "1.5 GiB");
    }
}

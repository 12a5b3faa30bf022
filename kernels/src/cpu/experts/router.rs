//! The router's product, which gives the same bits with every instruction set.
//!
//! Every rank of a replica chooses experts itself, on its own host. Rounding differences, harmless
//! elsewhere, could choose another expert on one rank only, and no rank would notice. So this
//! product has a fixed order of sums and no fused multiply-add; it is small beside those of the
//! experts.
use super::super::isa::{Isa, multiversion};
use super::super::memory::Disjoint;
use super::super::pack::{PANEL, PairRow, Panels};
use crate::check::ensure;
use crate::error::KernelError;
use crate::pool::Pool;

/// Pairs of inputs times panels per task: about 15 microseconds.
const TASK_COST: usize = 8 * 1024;

/// `logits = x router^T`, `[rows, router.rows()]`; row `i` of `x` is `row(i)`.
pub(super) fn multiply<'s>(
    isa: Isa,
    pool: &mut Pool,
    rows: usize,
    row: &(dyn Fn(usize) -> &'s [f32] + Sync),
    router: Panels<'_>,
    logits: &mut [f32],
) -> Result<(), KernelError> {
    let (width, pairs) = (router.rows(), router.num_pairs());
    ensure!("route", router.is_bf16(), "the router is quantised: it must be bf16");
    let logits = Disjoint::new(logits);
    // Panel by panel: a panel then stays in the cache from row to row.
    pool.run_ranges(rows * router.num_panels(), (TASK_COST / pairs).max(1), &|range, _| {
        for index in range {
            let (panel, at) = (index / rows, index % rows);
            let first = panel * PANEL;
            let len = PANEL.min(width - first);
            // SAFETY: every row's part of a panel belongs to one task.
            let out = unsafe { logits.slice(at * width + first, len) };
            let mut sums = [0.0f32; PANEL];
            let weights = router.panel(panel, 0..pairs).bf16().unwrap_or_default();
            dots(isa, row(at), weights, &mut sums);
            out.copy_from_slice(&sums[..len]);
        }
    })
}

multiversion! {
    /// `sums[i] = x . output i of the panel`, input by input: each product is rounded, then added.
    fn dots(x: &[f32], panel: &[PairRow], sums: &mut [f32; PANEL]) = dots_body
}

#[inline(always)]
fn dots_body<const FMA: bool>(x: &[f32], panel: &[PairRow], sums: &mut [f32; PANEL]) {
    // Not fused even where there is FMA: see the module.
    *sums = [0.0; PANEL];
    let (pairs, rest) = x.as_chunks::<2>();
    for (&[even, odd], words) in pairs.iter().zip(panel) {
        add_pair(sums, even, odd, words);
    }
    if let (Some(&even), Some(words)) = (rest.first(), panel.get(pairs.len())) {
        add_pair(sums, even, 0.0, words);
    }
}

/// One loop over all outputs of the panel: shorter loops would be unrolled instead of vectorised.
#[inline(always)]
fn add_pair(sums: &mut [f32; PANEL], even: f32, odd: f32, words: &PairRow) {
    for (sum, &word) in sums.iter_mut().zip(words.as_flattened()) {
        *sum += even * f32::from_bits(word << 16);
        *sum += odd * f32::from_bits(word & 0xFFFF_0000);
    }
}

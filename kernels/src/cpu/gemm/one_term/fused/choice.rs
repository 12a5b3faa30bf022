//! Whether this processor gains from fused multiply-adds.
use std::arch::x86_64::{_mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_set1_ps, _mm512_setzero_ps};
use std::array::from_fn;
use std::hint::black_box;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::super::super::super::pack::{PANEL, PairRow};
use super::super::super::TILE_ROWS;
use super::super::super::vector::{broadcast, load_bf16, store};
use super::super::Prefetch;
use super::add;

/// Whether they have the same bits as dot products here and are faster: measured once, and not
/// worth much if they are only a little faster.
pub(crate) fn is_used() -> bool {
    static USED: OnceLock<bool> = OnceLock::new();
    *USED.get_or_init(|| has_same_bits() && is_faster())
}

/// Compares products of a few pairs.
pub(crate) fn has_same_bits() -> bool {
    KINDS.iter().zip(1..).all(|(kind, seed)| {
        let mut random = words(seed);
        let mut word = || kind(random()) | kind(random()) << 16;
        let weights: [PairRow; 40] = from_fn(|_| from_fn(|_| from_fn(|_| word())));
        let rows: [[u32; 40]; TILE_ROWS] = from_fn(|_| from_fn(|_| word()));
        let rows = rows.each_ref().map(|row| &row[..]);
        // SAFETY: only called for an instruction set that this machine has.
        let sums = [false, true].map(|is_fused| unsafe { products(is_fused, &rows, &weights) });
        sums[0] == sums[1]
    })
}

/// The bits of a tile's sums.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn products(
    is_fused: bool,
    rows: &[&[u32]; TILE_ROWS],
    weights: &[PairRow],
) -> [[u32; PANEL]; TILE_ROWS] {
    let mut sums = [[_mm512_setzero_ps(); 4]; TILE_ROWS];
    if is_fused {
        add(rows, weights, &mut sums, Prefetch { line: 0, lines: 0, distance: 0 });
    } else {
        for (pair, weights) in weights.iter().enumerate() {
            for (sums, row) in sums.iter_mut().zip(rows) {
                for (sum, weights) in sums.iter_mut().zip(weights) {
                    *sum = _mm512_dpbf16_ps(*sum, broadcast(row[pair]), load_bf16(weights));
                }
            }
        }
    }
    sums.map(|sums| {
        let mut bits = [0; PANEL];
        for (bits, sum) in bits.as_chunks_mut().0.iter_mut().zip(sums) {
            let mut values = [0.0; 16];
            store(&mut values, sum);
            *bits = values.map(f32::to_bits);
        }
        bits
    })
}

/// Pseudorandom words with a long period.
pub(super) fn words(mut state: u64) -> impl FnMut() -> u32 {
    move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    }
}

/// Kinds of random bf16: of about the same size; of all sizes below 2; and so small that products
/// and sums are subnormal, or the numbers themselves.
pub(super) const KINDS: [fn(u32) -> u32; 4] = [
    |x| (x & 0x8000) | (0x3c00 + (x & 0x3ff)),
    |x| x & 0xbfff,
    |x| (x & 0x8000) | (0x1f00 + (x & 0x1ff)),
    |x| (x & 0x807f) | ((x >> 20 & 1) << 7),
];

fn is_faster() -> bool {
    let mut best = [Duration::MAX; 2];
    // In turns, since other load may share the machine.
    for _ in 0..8 {
        for (best, run) in best.iter_mut().zip([dot_products, multiply_adds]) {
            let start = Instant::now();
            // SAFETY: only called for an instruction set that this machine has.
            unsafe { run() };
            *best = start.elapsed().min(*best);
        }
    }
    best[1] * 5 < best[0] * 4
}

/// As many independent sums as a tile has.
const SUMS: usize = 4 * TILE_ROWS;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn dot_products() {
    let x = black_box(broadcast(0x3a83_3a83));
    let mut sums = [_mm512_setzero_ps(); SUMS];
    for _ in 0..200 {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, x, x);
        }
    }
    black_box(sums);
}

/// What does the same as [`dot_products`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn multiply_adds() {
    let x = black_box(_mm512_set1_ps(1e-3));
    let mut sums = [_mm512_setzero_ps(); SUMS];
    for _ in 0..400 {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(x, x, *sum);
        }
    }
    black_box(sums);
}

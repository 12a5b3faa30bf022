//! Products with 4-bit weights. A group's integers minus their zero points, or its floats, are
//! exact in bf16. Their products are summed in f32 from zero, as for bf16 weights; then the sum
//! times the group's scale is added to the output, group by group in ascending order. That product
//! and that addition are rounded separately on all instruction sets. So a row gets the same bits
//! alone and in a batch.
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512bh, __m512i, _mm_loadu_si128, _mm512_add_ps, _mm512_and_si512, _mm512_cvtepi8_epi32,
    _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_mul_ps, _mm512_or_si512, _mm512_permutexvar_epi16,
    _mm512_set1_epi8, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_slli_epi32,
    _mm512_srli_epi16, _mm512_storeu_si512, _mm512_sub_epi8,
};
use std::ops::Range;

use super::super::isa::{Isa, multiversion};
use super::super::pack::{Int4Group, MIDDLE, PANEL, PairRow};
#[cfg(target_arch = "x86_64")]
use super::super::pack::{Int4Panel, PairRows};
#[cfg(target_arch = "x86_64")]
use super::WIDE;
use super::layout::Layout;
#[cfg(target_arch = "x86_64")]
use super::one_term::{self, Ahead};
#[cfg(target_arch = "x86_64")]
use super::vector::{broadcast, load, store};
use super::{Acc, Product, TILE_ROWS, num_tiles, tile, tile_rows};
#[cfg(target_arch = "x86_64")]
use crate::weights::E2M1;

/// Pairs converted to bf16 at a time: 16 KiB, which stay in the L1 cache for all tiles of a block.
const ROOM: usize = 64;
/// Tiles whose group sums are kept side by side (12 KiB).
const BLOCK_TILES: usize = 8;

/// The group sums of each row of a tile.
type Sums = [Acc; TILE_ROWS];

impl Product<'_> {
    /// As [`Product::panels`], for 4-bit weights.
    pub(super) fn int4_panels(&self, range: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        if let (Layout::Rows { .. }, 1) = (self.acts.layout, self.acts.rows) {
            // Zero points take registers, too.
            let panel = range.clone().next().and_then(|first| self.weight.int4_panel(first));
            return match panel.is_some_and(|panel| panel.is_symmetric()) {
                true => self.int4_rows::<WIDE>(range),
                false => self.int4_rows::<2>(range),
            };
        }
        let mut room = [[[0; 16]; 4]; ROOM];
        let mut sums = [[[[0.0; 16]; 4]; TILE_ROWS]; BLOCK_TILES];
        for panel in range {
            self.int4_tiles(panel, &mut room, &mut sums);
        }
    }

    /// One row times these panels, `P` at once as long as that many are left.
    #[cfg(target_arch = "x86_64")]
    fn int4_rows<const P: usize>(&self, range: Range<usize>) {
        let rest = range.end - range.len() % P;
        for first in (range.start..rest).step_by(P) {
            self.int4_row::<P>(first);
        }
        for panel in rest..range.end {
            self.int4_row::<1>(panel);
        }
    }

    /// One row times `P` panels.
    #[cfg(target_arch = "x86_64")]
    fn int4_row<const P: usize>(&self, first: usize) {
        let panels: [Option<Int4Panel<'_>>; P] =
            std::array::from_fn(|i| self.weight.int4_panel(first + i));
        let mut out = [[[0.0; 16]; 4]; P];
        if panels.iter().flatten().all(Int4Panel::is_symmetric) {
            // SAFETY: only an instruction set that this machine has lays out rows.
            unsafe { row::<P, true>(self.acts.words, &panels, &mut out) };
        } else {
            // SAFETY: as above.
            unsafe { row::<P, false>(self.acts.words, &panels, &mut out) };
        }
        for (i, out) in out.iter().enumerate() {
            self.store(0, first + i, out, true);
        }
    }

    /// All rows times one panel, a block of tiles at a time.
    fn int4_tiles(&self, panel: usize, room: &mut [PairRow; ROOM], sums: &mut [Sums; BLOCK_TILES]) {
        let Some(weight) = self.weight.int4_panel(panel) else { return };
        let tiles = num_tiles(self.acts.rows);
        for first in (0..tiles).step_by(BLOCK_TILES) {
            let block = first..(first + BLOCK_TILES).min(tiles);
            for index in 0..weight.num_groups() {
                let group = weight.group(index);
                for start in (0..group.pairs).step_by(ROOM) {
                    let pairs = start..(start + ROOM).min(group.pairs);
                    widen(self.isa, &group, pairs.clone(), room);
                    let weights = &room[..pairs.len()];
                    let pairs = group.first_pair + pairs.start..group.first_pair + pairs.end;
                    for (index, sums) in block.clone().zip(&mut *sums) {
                        let rows = tile_rows(self.acts.rows, index);
                        self.int4_tile(rows, pairs.clone(), weights, sums, start == 0);
                    }
                }
                for (tile, sums) in block.clone().zip(&*sums) {
                    for (row, sums) in tile_rows(self.acts.rows, tile).zip(sums) {
                        add_scaled(
                            self.isa,
                            sums,
                            group.scales,
                            self.columns(row, panel),
                            index == 0,
                        );
                    }
                }
            }
            for row in block.flat_map(|tile| tile_rows(self.acts.rows, tile)) {
                self.finish(panel, self.columns(row, panel));
            }
        }
    }

    fn int4_tile(
        &self,
        rows: Range<usize>,
        pairs: Range<usize>,
        weights: &[PairRow],
        sums: &mut Sums,
        first: bool,
    ) {
        match rows.len() {
            1 => self.int4_sums::<1>(rows, pairs, weights, sums, first),
            2 => self.int4_sums::<2>(rows, pairs, weights, sums, first),
            3 => self.int4_sums::<3>(rows, pairs, weights, sums, first),
            4 => self.int4_sums::<4>(rows, pairs, weights, sums, first),
            5 => self.int4_sums::<5>(rows, pairs, weights, sums, first),
            _ => self.int4_sums::<6>(rows, pairs, weights, sums, first),
        }
    }

    /// `sums (+)= rows weights^T` over some pairs; overwrites `sums` if `first`.
    fn int4_sums<const M: usize>(
        &self,
        rows: Range<usize>,
        pairs: Range<usize>,
        weights: &[PairRow],
        sums: &mut Sums,
        first: bool,
    ) {
        let Some(sums) = sums.first_chunk_mut::<M>() else { return };
        match self.acts.layout {
            Layout::Tiles => {
                let all_pairs = self.weight.num_pairs();
                let words = &self.acts.words[rows.start * all_pairs * 2..rows.end * all_pairs * 2];
                let acts = &words.as_chunks::<M>().0.as_chunks::<2>().0[pairs];
                if first {
                    *sums = [[[0.0; 16]; 4]; M];
                }
                tile(self.isa, acts, weights, sums);
            }
            #[cfg(target_arch = "x86_64")]
            Layout::Rows { stride } => {
                let acts: [&[u32]; M] = std::array::from_fn(|i| {
                    &self.acts.words[(rows.start + i) * stride..][pairs.clone()]
                });
                let ahead = Ahead { line: 0, lines: 0, distance: 0 };
                let (weights, mut sums) = (PairRows::Bf16(weights), sums.each_mut());
                // SAFETY: only an instruction set that this machine has lays out rows.
                unsafe { one_term::tile(&acts, weights, &mut [], &mut sums, first, ahead) };
            }
        }
    }
}

multiversion! {
    /// `out (+)= sums * scales`, for the first `out.len()` outputs of the panel; overwrites `out`
    /// if `first`.
    fn add_scaled(sums: &Acc, scales: &[f32; PANEL], out: &mut [f32], first: bool) = add_scaled_body
}

#[inline(always)]
fn add_scaled_body<const FMA: bool>(
    sums: &Acc,
    scales: &[f32; PANEL],
    out: &mut [f32],
    first: bool,
) {
    if first {
        out.fill(0.0);
    }
    if let Ok(out) = <&mut [f32; PANEL]>::try_from(&mut *out) {
        for ((to, sum), scale) in out.iter_mut().zip(sums.as_flattened()).zip(scales) {
            *to += sum * scale;
        }
        return;
    }
    for ((to, sum), scale) in out.iter_mut().zip(sums.as_flattened()).zip(scales) {
        *to += sum * scale;
    }
}

/// Converts the pairs `range` of a group to bf16; `range` begins at a multiple of 4.
fn widen(isa: Isa, group: &Int4Group<'_>, range: Range<usize>, room: &mut [PairRow; ROOM]) {
    let rows = &group.rows[range.start / 4..range.end.div_ceil(4)];
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the backend refuses an instruction set that this machine lacks.
        Isa::Avx512Bf16 | Isa::Avx512 => unsafe { widen_512(rows, group, room) },
        _ if group.is_float => widen_floats(isa, rows, room),
        _ => widen_rows(isa, rows, group.zeros, room),
    }
}

multiversion! {
    /// Converts `rows` (four pairs each) minus their zero points; `room` is large enough.
    fn widen_rows(rows: &[[[u32; 16]; 4]], zeros: Option<&[i8; PANEL]>, room: &mut [PairRow; ROOM]) = widen_body
}

#[inline(always)]
fn widen_body<const FMA: bool>(
    rows: &[[[u32; 16]; 4]],
    zeros: Option<&[i8; PANEL]>,
    room: &mut [PairRow; ROOM],
) {
    let zeros = zeros.copied().unwrap_or([MIDDLE; PANEL]).map(i32::from);
    for (row, out) in rows.iter().zip(room.as_chunks_mut::<4>().0) {
        for (pair, out) in out.iter_mut().enumerate() {
            let all = out.as_flattened_mut().iter_mut().zip(row.as_flattened()).zip(&zeros);
            for ((to, word), zero) in all {
                let word = word >> (4 * pair);
                let even = (word & 15).cast_signed() - zero;
                let odd = (word >> 16 & 15).cast_signed() - zero;
                // The upper half of an f32 holds such an integer exactly.
                *to = (even as f32).to_bits() >> 16 | (odd as f32).to_bits();
            }
        }
    }
}

multiversion! {
    /// Converts `rows` of floats (four pairs each); `room` is large enough.
    fn widen_floats(rows: &[[[u32; 16]; 4]], room: &mut [PairRow; ROOM]) = widen_floats_body
}

#[inline(always)]
fn widen_floats_body<const FMA: bool>(rows: &[[[u32; 16]; 4]], room: &mut [PairRow; ROOM]) {
    // Twice the value, which is an integer: not all instruction sets can look up sixteen values.
    let worth = |bits: u32| {
        let (exponent, mantissa) = (bits >> 1 & 3, bits & 1);
        let normal = (2 | mantissa) << exponent >> 1;
        let twice = if exponent == 0 { mantissa } else { normal } as f32;
        (twice * 0.5).to_bits() | (bits & 8) << 28
    };
    for (row, out) in rows.iter().zip(room.as_chunks_mut::<4>().0) {
        for (pair, out) in out.iter_mut().enumerate() {
            for (to, word) in out.as_flattened_mut().iter_mut().zip(row.as_flattened()) {
                let word = word >> (4 * pair);
                *to = worth(word & 15) >> 16 | worth(word >> 16 & 15);
            }
        }
    }
}

/// The values of 5 bits in bf16, all 32 looked up at once: with `SYMMETRIC`, the lower four bits
/// minus 8; otherwise all five as a signed integer.
#[cfg(target_arch = "x86_64")]
const fn table<const SYMMETRIC: bool>() -> [u16; 32] {
    let mut table = [0; 32];
    let mut index = 0;
    while index < 32 {
        let value = match SYMMETRIC {
            true => (index & 15) as i32 - 8,
            false if index < 16 => index as i32,
            false => index as i32 - 32,
        };
        table[index] = ((value as f32).to_bits() >> 16) as u16;
        index += 1;
    }
    table
}

/// The same for floats: the values of the lower four bits.
#[cfg(target_arch = "x86_64")]
const FLOATS: [u16; 32] = {
    let mut table = [0; 32];
    let mut index = 0;
    while index < 32 {
        table[index] = (E2M1[index & 15].to_bits() >> 16) as u16;
        index += 1;
    }
    table
};

/// Loads a lookup table.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn load_table(table: &[u16; 32]) -> __m512i {
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_loadu_si512(table.as_ptr().cast()) }
}

/// The zero points of 16 outputs, copied to all bytes of their words.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn load_zeros(zeros: &[i8; 16]) -> __m512i {
    // SAFETY: the array has 16 bytes.
    let zeros = _mm512_cvtepi8_epi32(unsafe { _mm_loadu_si128(zeros.as_ptr().cast()) });
    let zeros = _mm512_or_si512(zeros, _mm512_slli_epi32::<8>(zeros));
    _mm512_or_si512(zeros, _mm512_slli_epi32::<16>(zeros))
}

/// Converts 16 words to four pairs of bf16 each.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn four_pairs<const SYMMETRIC: bool>(
    words: &[u32; 16],
    zeros: __m512i,
    table: __m512i,
) -> [__m512i; 4] {
    // SAFETY: the array has 64 bytes.
    let words = unsafe { _mm512_loadu_si512(words.as_ptr().cast()) };
    let shifted = _mm512_srli_epi16::<4>(words);
    // The lookup uses only the lower five bits.
    let [even, odd] = match SYMMETRIC {
        true => [words, shifted],
        false => [words, shifted].map(|words| {
            let integers = _mm512_and_si512(words, _mm512_set1_epi8(15));
            _mm512_sub_epi8(integers, zeros)
        }),
    };
    let pairs = [even, odd, _mm512_srli_epi16::<8>(even), _mm512_srli_epi16::<8>(odd)];
    pairs.map(|pair| _mm512_permutexvar_epi16(pair, table))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
fn widen_512(rows: &[[[u32; 16]; 4]], group: &Int4Group<'_>, room: &mut [PairRow; ROOM]) {
    match group.zeros {
        _ if group.is_float => widen_512_of::<true>(rows, &[0; PANEL], &FLOATS, room),
        Some(zeros) => {
            widen_512_of::<false>(rows, zeros, const { &table::<false>() }, room);
        }
        None => widen_512_of::<true>(rows, &[0; PANEL], const { &table::<true>() }, room),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn widen_512_of<const SYMMETRIC: bool>(
    rows: &[[[u32; 16]; 4]],
    zeros: &[i8; PANEL],
    table: &[u16; 32],
    room: &mut [PairRow; ROOM],
) {
    let table = load_table(table);
    for (quarter, zeros) in zeros.as_chunks::<16>().0.iter().enumerate() {
        let zeros = load_zeros(zeros);
        for (row, out) in rows.iter().zip(room.as_chunks_mut::<4>().0) {
            let pairs = four_pairs::<SYMMETRIC>(&row[quarter], zeros, table);
            for (pair, out) in pairs.into_iter().zip(out) {
                // SAFETY: the array has 64 bytes.
                unsafe { _mm512_storeu_si512(out[quarter].as_mut_ptr().cast(), pair) };
            }
        }
    }
}

/// One row times `P` panels: `out[p] = row * panels[p]`. After the row's last pair, `words`
/// contains zeros.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn row<const P: usize, const SYMMETRIC: bool>(
    words: &[u32],
    panels: &[Option<Int4Panel<'_>>; P],
    out: &mut [Acc; P],
) {
    let is_float = panels.iter().flatten().any(Int4Panel::is_float);
    let table = load_table(if is_float { &FLOATS } else { const { &table::<SYMMETRIC>() } });
    let groups = panels.iter().flatten().map(Int4Panel::num_groups).min().unwrap_or(0);
    for index in 0..groups {
        let Some(groups) = all(panels, index) else { return };
        let first = &groups[0];
        // In groups of four pairs: those after the last pair are multiplied by zero.
        let fours = words[first.first_pair..].as_chunks::<4>().0;
        let fours = &fours[..first.rows.len()];
        let rows: [&[[[u32; 16]; 4]]; P] = std::array::from_fn(|p| &groups[p].rows[..fours.len()]);
        let mut zeros = [[_mm512_setzero_si512(); 4]; P];
        if !SYMMETRIC {
            for (zeros, group) in zeros.iter_mut().zip(&groups) {
                let own = group.zeros.unwrap_or(const { &[MIDDLE; PANEL] });
                for (to, own) in zeros.iter_mut().zip(own.as_chunks().0) {
                    *to = load_zeros(own);
                }
            }
        }
        let mut sums = [[_mm512_setzero_ps(); 4]; P];
        for (i, four) in fours.iter().enumerate() {
            for p in 0..P {
                for q in 0..4 {
                    let pairs = four_pairs::<SYMMETRIC>(&rows[p][i][q], zeros[p][q], table);
                    for (&word, pair) in four.iter().zip(pairs) {
                        // SAFETY: both are 512 bits of plain data.
                        let pair = unsafe { std::mem::transmute::<__m512i, __m512bh>(pair) };
                        sums[p][q] = _mm512_dpbf16_ps(sums[p][q], broadcast(word), pair);
                    }
                }
            }
        }
        for ((sums, group), out) in sums.iter().zip(&groups).zip(out.iter_mut()) {
            for ((&sum, scales), out) in sums.iter().zip(group.scales.as_chunks().0).zip(out) {
                store(out, _mm512_add_ps(load(out), _mm512_mul_ps(sum, load(scales))));
            }
        }
    }
}

/// Group `index` of all panels.
#[cfg(target_arch = "x86_64")]
fn all<'a, const P: usize>(
    panels: &[Option<Int4Panel<'a>>; P],
    index: usize,
) -> Option<[Int4Group<'a>; P]> {
    let first = panels.first()?.as_ref()?.group(index);
    let mut groups = [first; P];
    for (to, panel) in groups.iter_mut().zip(panels) {
        *to = panel.as_ref()?.group(index);
    }
    Some(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_float_is_exact_in_any_place() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            // Each of the 64 outputs gets different floats.
            let code = |output: usize, place: usize| (output * 5 + place * 3) % 16;
            let mut row = [[0u32; 16]; 4];
            for (output, word) in row.as_flattened_mut().iter_mut().enumerate() {
                for pair in 0..4 {
                    *word |= (code(output, 2 * pair) << (4 * pair)) as u32;
                    *word |= (code(output, 2 * pair + 1) << (4 * pair + 16)) as u32;
                }
            }
            let rows = [row, row];
            let group = Int4Group {
                rows: &rows,
                first_pair: 0,
                pairs: 7,
                scales: &[1.0; PANEL],
                zeros: None,
                is_float: true,
            };
            let mut room = [[[u32::MAX; 16]; 4]; ROOM];
            widen(isa, &group, 0..7, &mut room);
            for (pair, words) in room[..7].iter().enumerate() {
                for (output, word) in words.as_flattened().iter().enumerate() {
                    let want = [0, 1].map(|half| E2M1[code(output, 2 * (pair % 4) + half)]);
                    let got = [word << 16, word & 0xFFFF_0000];
                    // Zeros keep their signs.
                    assert_eq!(got, want.map(f32::to_bits), "{isa} {pair} {output}");
                }
            }
        }
    }

    #[test]
    fn every_integer_less_every_zero_is_exact_in_any_place() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            for zero in 0..16i8 {
                // Each of the 64 outputs gets different integers.
                let integer = |output: usize, place: usize| ((output * 5 + place * 3) % 16) as u32;
                let mut row = [[0u32; 16]; 4];
                for (output, word) in row.as_flattened_mut().iter_mut().enumerate() {
                    for pair in 0..4 {
                        *word |= integer(output, 2 * pair) << (4 * pair);
                        *word |= integer(output, 2 * pair + 1) << (4 * pair + 16);
                    }
                }
                let zeros: [i8; PANEL] = std::array::from_fn(|i| (zero + i as i8) % 16);
                for zeros in [Some(&zeros), None] {
                    let rows = [row, row, row];
                    let group = Int4Group {
                        rows: &rows,
                        first_pair: 0,
                        pairs: 11,
                        scales: &[1.0; PANEL],
                        zeros,
                        is_float: false,
                    };
                    let mut room = [[[u32::MAX; 16]; 4]; ROOM];
                    widen(isa, &group, 4..11, &mut room);
                    for (pair, words) in room[..7].iter().enumerate() {
                        for (output, word) in words.as_flattened().iter().enumerate() {
                            let zero = zeros.map_or(8.0, |zeros| f32::from(zeros[output]));
                            let want = [0, 1]
                                .map(|half| integer(output, 2 * (pair % 4) + half) as f32 - zero);
                            let got = [word << 16, word & 0xFFFF_0000].map(f32::from_bits);
                            assert_eq!(got, want, "{isa} {pair} {output}");
                        }
                    }
                    assert_eq!(room[8], [[u32::MAX; 16]; 4], "{isa}");
                }
            }
        }
    }
}

//! 4-bit weights in the layout of the kernels (`tutti_skinny_int4_8` in kernels.h).
use crate::backend::HostMatrix;
use crate::weights::{Int4Groups, int4_integers, int4_row};

/// Unit of the layout in weights: rows begin at multiples of it.
pub(super) const UNIT: usize = 128;

/// Logarithm of the number of inputs that share a word of scale and zero: the length of the groups,
/// or, if the first one is cut, the largest power of two that divides its length and the others'.
/// `None` if that is below 32 inputs, or for 4-bit floats, which the kernels do not support.
pub(in crate::cuda) fn shift(groups: &Int4Groups) -> Option<u32> {
    match groups.count {
        _ if groups.is_float => None,
        1 => Some(31),
        _ => Some((groups.len | groups.first_len).trailing_zeros().min(30)).filter(|n| *n >= 5),
    }
}

/// Words of scale and zero for a row of `cols` inputs; each group is repeated as [`shift`]
/// requires.
pub(super) fn row_groups(
    part: &HostMatrix<'_>,
    row: usize,
    groups: &Int4Groups,
    shift: u32,
    out: &mut Vec<u32>,
) {
    let mut own = vec![0; groups.count];
    int4_row(part, row, groups, &mut [], |group, zero, scale| {
        // 16-bit scales have zeros in these bits; others are rounded.
        let bits = scale.to_bits();
        let rounded = bits.saturating_add(8) & !15;
        let kept = if scale.is_finite() { rounded } else { bits & !15 };
        own[group] = kept | u32::from(zero & 15);
    });
    out.extend((0..part.cols.div_ceil(1 << shift)).map(|unit| {
        let first = unit << shift;
        let behind = first.checked_sub(groups.first_len).map(|far| 1 + far / groups.len);
        own[behind.unwrap_or(0)]
    }));
}

/// Writes a row's integers in 16-bit words, padded with zeros; `room` is scratch to reuse.
pub(super) fn write_row(part: &HostMatrix<'_>, row: usize, room: &mut Vec<u8>, out: &mut [u16]) {
    room.clear();
    room.resize(out.len() * 4, 0);
    int4_integers(part, row, &mut room[..part.cols]);
    let units = room.as_chunks::<UNIT>().0.iter().zip(out.as_chunks_mut::<{ UNIT / 4 }>().0);
    for (integers, words) in units {
        let eights = integers.as_chunks::<8>().0;
        for (place, halves) in words.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            // Word j of lane t; the 16 bytes of a lane are contiguous.
            let (lane, word) = (place / 4, place % 4);
            let eight = &eights[4 * word + lane];
            for (half, to) in halves.iter_mut().enumerate() {
                *to = (0..4).fold(0, |bits, i| bits | u16::from(eight[2 * i + half]) << (4 * i));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_shares_a_word_divides_all_groups() {
        let groups =
            |first_len, len, count| Int4Groups { first: 0, first_len, len, count, is_float: false };
        assert_eq!(shift(&groups(128, 128, 32)), Some(7));
        assert_eq!(shift(&groups(64, 128, 33)), Some(6));
        assert_eq!(shift(&groups(96, 128, 33)), Some(5));
        assert_eq!(shift(&groups(96, 96, 3)), Some(5));
        assert_eq!(shift(&groups(100, 4096, 1)), Some(31));
        assert_eq!(shift(&groups(16, 16, 8)), None);
        assert_eq!(shift(&groups(8, 128, 3)), None);
        assert_eq!(shift(&Int4Groups { is_float: true, ..groups(32, 32, 4) }), None);
    }
}

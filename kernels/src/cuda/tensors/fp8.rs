//! Weights in FP8 in the layout of the kernels (`tutti_skinny_fp8_8` in kernels.h).
use crate::backend::HostMatrix;
use crate::weights::Fp8Groups;

/// Logarithm of the number of inputs that share a scale: the length of the groups, or, if the first
/// one is cut, the largest power of two that divides its length and the others'. `None` if that is
/// below the 64 inputs that the kernels load at once.
pub(in crate::cuda) fn shift(groups: &Fp8Groups) -> Option<u32> {
    match groups.count {
        1 => Some(31),
        _ => Some((groups.len | groups.first_len).trailing_zeros().min(30)).filter(|n| *n >= 6),
    }
}

/// Appends the scales of a row, each as often as [`shift`] requires, times `factor`.
pub(super) fn row_scales(
    part: &HostMatrix<'_>,
    row: usize,
    groups: &Fp8Groups,
    (shift, factor): (u32, f32),
    out: &mut Vec<f32>,
) {
    let mut own = vec![0.0; groups.count];
    part.fp8_row(row, groups, |group, scale| own[group] = scale * factor);
    out.extend((0..part.cols.div_ceil(1 << shift)).map(|unit| {
        let behind = (unit << shift).checked_sub(groups.first_len).map(|far| 1 + far / groups.len);
        own[behind.unwrap_or(0)]
    }));
}

/// Writes a row's bytes in 16-bit words, padded with zeros. Returns what its scales have to be
/// multiplied by: NaN if one of the bytes is, which the kernels do not see.
pub(super) fn write_row(
    part: &HostMatrix<'_>,
    row: usize,
    groups: &Fp8Groups,
    out: &mut [u16],
) -> f32 {
    let bytes = part.fp8_row(row, groups, |_, _| {});
    let (pairs, last) = bytes.as_chunks::<2>();
    let last = last.first().map(|&byte| [byte, 0]);
    let all = pairs.iter().copied().chain(last).chain(std::iter::repeat([0; 2]));
    out.iter_mut().zip(all).for_each(|(to, pair)| *to = u16::from_le_bytes(pair));
    if bytes.iter().any(|byte| byte & 0x7f == 0x7f) { f32::NAN } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{BlockScales, DType, Scales};

    #[test]
    fn what_shares_a_scale_divides_all_groups() {
        let groups = |first, cols, width| Fp8Groups::new(first, cols, width).unwrap();
        assert_eq!(shift(&groups(0, 4096, 128)), Some(7));
        assert_eq!(shift(&groups(64, 4096, 128)), Some(6));
        assert_eq!(shift(&groups(192, 192, 64)), Some(6));
        assert_eq!(shift(&groups(17, 100, usize::MAX)), Some(31));
        assert_eq!(shift(&groups(32, 4096, 128)), None);
        assert_eq!(shift(&groups(0, 96, 48)), None);
    }

    #[test]
    fn rows_have_their_bytes_and_scales() {
        // Two rows of 200 in blocks of 1 x 128; columns from 64 on.
        let mut data: Vec<u8> = (0..400).map(|i| (i % 120) as u8).collect();
        data[300] = 0xff;
        let bytes: Vec<u8> = [2.0f32, 3.0, 5.0, 7.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let part = HostMatrix {
            data: &data,
            dtype: DType::F8E4M3,
            rows: 2,
            cols: 133,
            col_start: 64,
            row_stride: 200,
            scales: Some(Scales::Blocks(BlockScales {
                data: &bytes,
                dtype: DType::F32,
                block: (1, 128),
                row_stride: 2,
                first_row: 0,
            })),
        };
        part.check("test", 133).unwrap();
        let groups = Fp8Groups::new(64, 133, 128).unwrap();
        assert_eq!(shift(&groups), Some(6));
        for (row, factor) in [(0, 1.0), (1, f32::NAN)] {
            let mut words = [7u16; 72];
            let found = write_row(&part, row, &groups, &mut words);
            assert_eq!(found.is_nan(), factor.is_nan());
            let written: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            assert_eq!(written[..133], data[row * 200 + 64..][..133]);
            assert!(written[133..].iter().all(|byte| *byte == 0));
        }
        let mut scales = Vec::new();
        row_scales(&part, 1, &groups, (6, 10.0), &mut scales);
        assert_eq!(scales, [50.0, 70.0, 70.0]);
    }
}

//! FP8 weights converted to bf16, exactly, for inner loops that support bf16 only; with prefetches
//! as for int8.
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    _mm_loadu_si128, _mm256_loadu_si256, _mm256_storeu_si256, _mm512_storeu_si512,
};

use super::super::fp8;
use super::super::isa::Isa;
use super::super::pack::{ByteRow, PairRow};
#[cfg(target_arch = "x86_64")]
use super::int8::fetch;

/// Converts `rows` to bf16 in `room`, which is large enough.
pub(super) fn widen<'a>(isa: Isa, rows: &[ByteRow], room: &'a mut [PairRow]) -> &'a [PairRow] {
    let room = &mut room[..rows.len()];
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the backend refuses an instruction set that this machine lacks.
        Isa::Avx512Bf16 | Isa::Avx512 => unsafe { widen_512(rows, room) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2Fma => unsafe { widen_256(rows, room) },
        _ => widen_portable(rows, room),
    }
    room
}

fn widen_portable(rows: &[ByteRow], out: &mut [PairRow]) {
    for (row, out) in rows.iter().zip(out) {
        let (pairs, _) = row.as_flattened().as_chunks::<2>();
        for (word, pair) in out.as_flattened_mut().iter_mut().zip(pairs) {
            *word = fp8::decode_pair(u16::from_le_bytes(pair.map(i8::cast_unsigned)));
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn widen_512(rows: &[ByteRow], out: &mut [PairRow]) {
    for (row, out) in rows.iter().zip(out) {
        fetch(row, rows.len());
        for (words, bytes) in out.iter_mut().zip(row) {
            // SAFETY: the array has 32 bytes.
            let bytes = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
            // SAFETY: this function needs the same instructions.
            let pairs = unsafe { fp8::x86::pairs_512(bytes) };
            // SAFETY: the array has 64 bytes.
            unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), pairs) };
        }
    }
}

/// As for 512 bits, in halves.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn widen_256(rows: &[ByteRow], out: &mut [PairRow]) {
    for (row, out) in rows.iter().zip(out) {
        fetch(row, rows.len());
        let halves = row.as_flattened().as_chunks::<16>().0;
        for (words, bytes) in out.as_flattened_mut().as_chunks_mut::<8>().0.iter_mut().zip(halves) {
            // SAFETY: the array has 16 bytes.
            let bytes = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
            // SAFETY: this function needs the same instructions.
            let pairs = unsafe { fp8::x86::pairs_256(bytes) };
            // SAFETY: the array has 32 bytes.
            unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), pairs) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_exact_in_either_half() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            for byte in 0..=255u8 {
                let pair = [byte, byte.wrapping_mul(57)];
                let stored = pair.map(|byte| fp8::encode_byte(byte).cast_signed());
                let mut row = [[0; 32]; 4];
                row.as_flattened_mut().as_chunks_mut::<2>().0.fill(stored);
                let mut room = [[[u32::MAX; 16]; 4]; 3];
                let words = widen(isa, &[row, row], &mut room);
                assert_eq!(words.len(), 2);
                for word in words.as_flattened().as_flattened() {
                    let got = [word << 16, word & 0xFFFF_0000].map(f32::from_bits);
                    for (got, want) in got.into_iter().zip(pair.map(crate::fp8::from_byte)) {
                        let is_same = got.to_bits() == want.to_bits();
                        assert!(is_same || got.is_nan() && want.is_nan(), "{isa}: {pair:?}");
                    }
                }
            }
        }
    }
}

//! Upload of weights to the GPU.
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};

use super::super::context::Context;
use super::super::memory::{DeviceMemory, Pinned};
use super::super::stream::{Event, Stream};
use super::fp8::{self, shift as fp8_shift};
use super::int4::{self, shift as int4_shift};
use super::{ALIGN, CudaMatrix};
use crate::backend::HostMatrix;
use crate::error::KernelError;
use crate::pool::Pool;
use crate::weights::{fp8_groups, int4_groups};

/// Size in bytes of each of the two staging pieces.
const PIECE: usize = 16 << 20;
/// Maximum number of threads that fill a piece.
const FILLERS: usize = 4;

/// Uploads weights piece by piece: one piece is filled while the other is copied.
#[derive(Debug)]
pub(in crate::cuda) struct Uploader {
    pieces: [(Pinned<u16>, Event); 2],
    next: usize,
    pool: Pool,
}

/// Writes a row of a part into its words, and returns the scale of its elements; the room is reused
/// from row to row.
type Write = dyn Fn(&HostMatrix<'_>, usize, &mut UploadScratch, &mut [u16]) -> f32 + Sync;

#[derive(Default)]
struct UploadScratch {
    wide: Vec<f32>,
    values: Vec<i8>,
    integers: Vec<u8>,
}

impl Uploader {
    pub(in crate::cuda) fn new(context: &Rc<Context>) -> Result<Self, KernelError> {
        let piece = || -> Result<_, KernelError> {
            let memory = Pinned::new(context, PIECE / 2, "pinned memory to load weights")?;
            Ok((memory, Event::new(context, false)?))
        };
        // Only a few threads, since ranks of the host's other GPUs do the same.
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(FILLERS);
        Ok(Self { pieces: [piece()?, piece()?], next: 0, pool: Pool::new(threads)? })
    }

    /// Loads the vertical concatenation of `parts` in bf16.
    pub(in crate::cuda) fn load(
        &mut self,
        context: &Rc<Context>,
        stream: &Stream,
        parts: &[HostMatrix<'_>],
    ) -> Result<CudaMatrix, KernelError> {
        let (matrix, _) =
            self.load_rows(context, stream, parts, ALIGN, 1, &|part, row, room, out| {
                copy_row(part, row, &mut room.wide, out);
                1.0
            })?;
        Ok(matrix)
    }

    /// As [`Self::load`], quantised to int8.
    pub(in crate::cuda) fn load_int8(
        &mut self,
        context: &Rc<Context>,
        stream: &Stream,
        parts: &[HostMatrix<'_>],
    ) -> Result<CudaMatrix, KernelError> {
        let (mut matrix, scales) =
            self.load_rows(context, stream, parts, 2 * ALIGN, 2, &|part, row, room, out| {
                let UploadScratch { wide, values, .. } = room;
                values.clear();
                // Padded with zeros.
                values.resize(out.len() * 2, 0);
                let scale = part.row_int8(row, wide, &mut values[..part.cols]);
                for (to, pair) in out.iter_mut().zip(values.chunks_exact(2)) {
                    *to = u16::from_le_bytes([biased(pair[0]), biased(pair[1])]);
                }
                scale
            })?;
        let memory = DeviceMemory::new(context, size_of_val(&scales[..]), "scales of weights")?;
        memory.upload(stream, 0, &scales)?;
        matrix.scales = Some(memory);
        Ok(matrix)
    }

    /// As in the files: in 4 bits or in FP8 if the kernels support it, otherwise in bf16.
    pub(in crate::cuda) fn load_as_is(
        &mut self,
        context: &Rc<Context>,
        stream: &Stream,
        parts: &[HostMatrix<'_>],
    ) -> Result<CudaMatrix, KernelError> {
        let found = int4_groups(parts).and_then(|groups| Some((groups, int4_shift(&groups)?)));
        let Some((groups, shift)) = found else { return self.load_fp8(context, stream, parts) };
        let (mut matrix, _) =
            self.load_rows(context, stream, parts, int4::UNIT, 4, &|part, row, room, out| {
                int4::write_row(part, row, &mut room.integers, out);
                1.0
            })?;
        let mut words = Vec::new();
        for (part, row) in parts.iter().flat_map(|part| (0..part.rows).map(move |row| (part, row)))
        {
            int4::row_groups(part, row, &groups, shift, &mut words);
        }
        let memory = DeviceMemory::new(context, size_of_val(&words[..]), "groups of weights")?;
        memory.upload(stream, 0, &words)?;
        matrix.groups = Some((memory, shift));
        Ok(matrix)
    }

    /// In FP8 if the files have it and the kernels support its groups, otherwise in bf16.
    pub(in crate::cuda) fn load_fp8(
        &mut self,
        context: &Rc<Context>,
        stream: &Stream,
        parts: &[HostMatrix<'_>],
    ) -> Result<CudaMatrix, KernelError> {
        let found = fp8_groups(parts).and_then(|groups| Some((groups, fp8_shift(&groups)?)));
        let Some((groups, shift)) = found else { return self.load(context, stream, parts) };
        let (mut matrix, factors) =
            self.load_rows(context, stream, parts, 2 * ALIGN, 2, &move |part, row, _, out| {
                fp8::write_row(part, row, &groups, out)
            })?;
        let mut scales = Vec::new();
        let rows = parts.iter().flat_map(|part| (0..part.rows).map(move |row| (part, row)));
        for ((part, row), factor) in rows.zip(factors) {
            fp8::row_scales(part, row, &groups, (shift, factor), &mut scales);
        }
        let memory = DeviceMemory::new(context, size_of_val(&scales[..]), "scales of weights")?;
        memory.upload(stream, 0, &scales)?;
        matrix.fp8 = Some((memory, shift));
        Ok(matrix)
    }

    /// Loads rows that begin at multiples of `align` elements, with `per_word` elements per 16-bit
    /// word. Also returns the scales that `write` returned.
    fn load_rows(
        &mut self,
        context: &Rc<Context>,
        stream: &Stream,
        parts: &[HostMatrix<'_>],
        align: usize,
        per_word: usize,
        write: &Write,
    ) -> Result<(CudaMatrix, Vec<f32>), KernelError> {
        let op = "load_matrix";
        let cols = parts.first().map_or(0, |part| part.cols);
        for part in parts {
            part.check(op, cols)?;
        }
        let rows: usize = parts.iter().map(|part| part.rows).sum();
        let stride = cols.next_multiple_of(align);
        let words_per_row = stride / per_word;
        let rows_per_piece = (PIECE / 2).checked_div(words_per_row).unwrap_or(0);
        if rows_per_piece == 0 || u32::try_from(rows.max(stride)).is_err() {
            let message = format!("{rows} x {cols}: no empty matrix, no row above {PIECE} bytes");
            return Err(KernelError::Shape { op, message });
        }
        let bytes = rows.saturating_mul(words_per_row).saturating_mul(2);
        let memory = DeviceMemory::new(context, bytes, "weights")?;
        let mut scales = vec![0.0; rows];
        self.upload_rows(stream, &memory, 0, parts, words_per_row, &mut scales, write)?;
        let [groups, fp8] = [None, None];
        Ok((CudaMatrix { memory, scales: None, groups, fp8, rows, cols, stride }, scales))
    }

    /// Uploads rows of `words_per_row` words, from row `at` of `memory` on.
    fn upload_rows(
        &mut self,
        stream: &Stream,
        memory: &DeviceMemory,
        at: usize,
        parts: &[HostMatrix<'_>],
        words_per_row: usize,
        mut scales: &mut [f32],
        write: &Write,
    ) -> Result<(), KernelError> {
        let rows_per_piece = PIECE / 2 / words_per_row;
        let rows: usize = parts.iter().map(|part| part.rows).sum();
        let mut row = 0;
        // A piece holds rows of many parts: where heads are rotated in another order than the
        // files', each row can be a part.
        while row < rows {
            let count = rows_per_piece.min(rows - row);
            let (piece, travelled) = &mut self.pieces[self.next];
            self.next = 1 - self.next;
            travelled.wait(std::time::Duration::from_secs(60))?;
            let words = &mut piece.as_mut_slice()[..count * words_per_row];
            let (own, rest) = std::mem::take(&mut scales).split_at_mut(count);
            fill(&mut self.pool, parts, row, words, own, write)?;
            let (offset, len) = ((at + row) * words_per_row * 2, count * words_per_row);
            memory.upload_pinned(stream, offset, piece, len)?;
            travelled.record(stream)?;
            scales = rest;
            row += count;
        }
        Ok(())
    }

    /// Overwrites rows of a matrix in bf16, from row `first` on, behind all work that is queued on
    /// the stream.
    pub(in crate::cuda) fn replace(
        &mut self,
        stream: &Stream,
        matrix: &CudaMatrix,
        first: usize,
        part: &HostMatrix<'_>,
    ) -> Result<(), KernelError> {
        if !matrix.weight().is_bf16() {
            return Err(KernelError::Unsupported("only stacks in bf16 change".to_owned()));
        }
        let mut scales = vec![0.0; part.rows];
        let parts = std::slice::from_ref(part);
        let write: &Write = &|part, row, room, out| {
            copy_row(part, row, &mut room.wide, out);
            1.0
        };
        self.upload_rows(stream, &matrix.memory, first, parts, matrix.stride, &mut scales, write)
    }
}

/// The rows of all parts from row `first` on, each as its part and its row there.
fn rows_from<'p, 'a>(
    parts: &'p [HostMatrix<'a>],
    first: usize,
) -> impl Iterator<Item = (&'p HostMatrix<'a>, usize)> {
    let mut before = 0;
    let is_before = |part: &&HostMatrix<'_>| {
        let is_before = before + part.rows <= first;
        before += if is_before { part.rows } else { 0 };
        is_before
    };
    let skipped = parts.iter().take_while(is_before).count();
    parts[skipped..].iter().enumerate().flat_map(move |(index, part)| {
        let first = if index == 0 { first - before } else { 0 };
        (first..part.rows).map(move |row| (part, row))
    })
}

/// Writes `scales.len()` rows of the parts from row `first` of all on, with several threads: a
/// single one writes rows more slowly than they are copied.
fn fill(
    pool: &mut Pool,
    parts: &[HostMatrix<'_>],
    first: usize,
    words: &mut [u16],
    scales: &mut [f32],
    write: &Write,
) -> Result<(), KernelError> {
    let words_per_row = words.len() / scales.len().max(1);
    let rows = scales.len().div_ceil(pool.num_threads()).max(1);
    let shares = words.chunks_mut((rows * words_per_row).max(1)).zip(scales.chunks_mut(rows));
    let shares: Vec<_> = shares.map(Mutex::new).collect();
    pool.run(shares.len(), &|index, _| {
        let mut share = shares[index].lock().unwrap_or_else(PoisonError::into_inner);
        let (words, scales) = &mut *share;
        let mut room = UploadScratch::default();
        let all = words.chunks_exact_mut(words_per_row).zip(scales.iter_mut());
        for ((part, row), (words, scale)) in rows_from(parts, first + index * rows).zip(all) {
            *scale = write(part, row, &mut room, words);
        }
    })
}

/// An integer in the representation of the kernels.
fn biased(value: i8) -> u8 {
    value.cast_unsigned() ^ 0x80
}

/// Copies a row in bf16, padded with zeros.
fn copy_row(part: &HostMatrix<'_>, row: usize, room: &mut Vec<f32>, out: &mut [u16]) {
    let (used, padding) = out.split_at_mut(part.cols);
    part.row_bf16(row, room, used);
    padding.fill(0);
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::backend::DType;

    #[test]
    fn rows_of_every_type_become_bf16() {
        let values = [1.0f32, -2.5, 0.1, 65504.0];
        let f32s: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let f16s: Vec<u8> = values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
        let bf16s: Vec<u8> = values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
        for (dtype, data) in [(DType::F32, f32s), (DType::F16, f16s), (DType::Bf16, bf16s)] {
            let (rows, row_stride) = (2, 2);
            let part = HostMatrix {
                data: &data,
                dtype,
                rows,
                cols: 1,
                col_start: 1,
                row_stride,
                scales: None,
            };
            part.check("test", 1).unwrap();
            let mut out = [7u16; 8];
            copy_row(&part, 1, &mut Vec::new(), &mut out);
            let got = bf16::from_bits(out[0]).to_f32();
            assert!((got - 65504.0).abs() < 300.0, "{dtype:?}: {got}");
            assert_eq!(out[1..], [0; 7]);
        }
    }

    #[test]
    fn threads_fill_every_row_once_with_its_own() {
        let data: Vec<u8> = (0..11 * 3).flat_map(|i: u16| (i * 256).to_le_bytes()).collect();
        let part = HostMatrix {
            data: &data,
            dtype: DType::Bf16,
            rows: 11,
            cols: 3,
            col_start: 0,
            row_stride: 3,
            scales: None,
        };
        // The same rows as parts of one, two, .. rows, and as one part.
        let one = |first: usize, rows: usize| HostMatrix { data: &data[first * 6..], rows, ..part };
        let whole = [part];
        let many = [one(0, 1), one(1, 2), one(3, 3), one(6, 1), one(7, 4)];
        for (threads, parts) in
            [1, 3, 4].into_iter().flat_map(|threads| [(threads, &many[..]), (threads, &whole[..])])
        {
            for (first, count) in [(0, 11), (2, 7), (4, 1), (10, 1)] {
                let mut words = vec![7u16; count * 8];
                let mut scales = vec![-1.0; count];
                let mut pool = Pool::new(threads).unwrap();
                fill(&mut pool, parts, first, &mut words, &mut scales, &|part, row, room, out| {
                    copy_row(part, row, &mut room.wide, out);
                    f32::from(out[0])
                })
                .unwrap();
                for (i, (words, scale)) in words.chunks_exact(8).zip(&scales).enumerate() {
                    let row = (first + i) as u16;
                    let want = [0, 1, 2].map(|col| (row * 3 + col) * 256);
                    assert_eq!(words[..3], want);
                    assert_eq!((*scale, &words[3..]), (f32::from(want[0]), &[0; 5][..]));
                }
            }
        }
    }
}

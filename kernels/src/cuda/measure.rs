//! Speed of the parts of decode steps on a GPU: for `tests/gpu`, and for choosing between kernels.
//! Inputs are not in the GPU's caches. Launches are recorded and replayed, so that the host's time
//! does not count.
//! - `delta`: linear attention
use std::time::Duration;

use super::backend::CudaBackend;
use super::batch::{AttentionTiling, Layout, live, sizes};
use super::device::Device;
use super::launch::{
    self, AttentionIo, DecodeWork, LayerCache, Partials, Rows, decode_attention, splits_of,
};
use super::matmul::Product;
use super::memory::{DeviceMemory, DevicePtr};
use super::parts::Windows;
use super::products::small;
use super::stream::{Event, Stream};
use crate::backend::{AttentionShape, Batch, KvStorage, SeqRows};
use crate::error::KernelError;

mod delta;

/// Number of replays that are measured together.
const TIMES: usize = 5;
/// Launches per graph: at least this many, and one for each copy of the inputs (at most
/// `TURNS_MOST`) that launches use in turn. From the second replay on, twenty copies of a small
/// input would be read from L2.
const RECORDED: usize = 20;
const TURNS_MOST: usize = 256;
/// Sufficient value for `cold`, in bytes: several times any GPU's L2.
pub const COLD: usize = 512 << 20;
/// Words (pairs of bf16) of the pattern that fills memory repeatedly: a prime, so that no two rows
/// are equal.
const WORDS: usize = 524_287;

/// Implementation of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Multiplier {
    /// This project's own kernels, for few rows.
    Own,
    /// cuBLASLt.
    Library,
}

/// `[rows, k]` times `[n, k]` transposed, with rows of both `stride` elements apart.
pub(super) fn product_of(
    (rows, n, k): (usize, usize, usize),
    stride: usize,
) -> Result<Product, KernelError> {
    Ok(Product {
        rows: small(rows)?,
        n: small(n)?,
        k: small(k)?,
        x_stride: small(stride)?,
        w_stride: small(stride)?,
        out_stride: small(n)?,
    })
}

/// Runs a product with one of the two implementations.
///
/// # Safety
/// As [`Device::multiply`].
pub(super) unsafe fn multiply(
    device: &mut Device,
    by: Multiplier,
    product: &Product,
    [x, w, out]: [DevicePtr; 3],
) -> Result<(), KernelError> {
    match by {
        Multiplier::Own => {
            let at = |ptr, stride: u32| Rows { ptr, stride: stride as usize };
            let (x, w) = (at(x, product.x_stride), at(w, product.w_stride));
            let out = at(out, product.out_stride);
            let sizes = (product.rows as usize, product.n as usize, product.k as usize);
            let call = launch::skinny((x, None), w, None, out, sizes, DevicePtr::default());
            // SAFETY: this function's contract.
            unsafe { device.launch(call) }
        }
        Multiplier::Library => {
            // SAFETY: as above.
            let done = unsafe { device.multiply(product, x, w, out) }?;
            let none = || KernelError::Unsupported("no algorithm".to_owned());
            if done { Ok(()) } else { Err(none()) }
        }
    }
}

/// Numbers of both signs, around 1/64. With constant numbers a GPU uses less power and is faster
/// than it ever is with weights.
pub(super) fn random_words(seed: u64) -> Vec<u32> {
    let mut state = seed;
    let mut word = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        0x3c80_3c80 ^ ((state >> 32) as u32 & 0x80ff_80ff)
    };
    std::iter::repeat_with(&mut word).take(WORDS).collect()
}

/// Fills memory with [`random_words`].
pub(super) fn fill(
    memory: &DeviceMemory,
    stream: &Stream,
    words: &[u32],
) -> Result<(), KernelError> {
    let count = memory.bytes() / 4;
    for from in (0..count).step_by(words.len()) {
        memory.upload(stream, from * 4, &words[..words.len().min(count - from)])?;
    }
    Ok(())
}

impl CudaBackend {
    /// Measures the bandwidth of the GPU's memory in bytes per second, over `bytes`: of a copy
    /// (bytes read and written together), and of a kernel that only reads.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn measure_bandwidth(&mut self, bytes: usize) -> Result<(f64, f64), KernelError> {
        let Device { context, stream, .. } = &self.device;
        let bytes = bytes / 16 * 16;
        let from = DeviceMemory::new(context, bytes, "memory to be read")?;
        let to = DeviceMemory::new(context, bytes, "memory to be written")?;
        fill(&from, stream, &random_words(1))?;
        let results = bytes.div_ceil(launch::READ_BLOCK) * launch::READ_RESULT;
        let found = DeviceMemory::new(context, results, "results")?;
        let (began, ended) = (Event::new(context, true)?, Event::new(context, true)?);
        let mut rates = [0.0; 2];
        for (reads, rate) in rates.iter_mut().enumerate() {
            for time in 0..=TIMES {
                if time == 1 {
                    // The first is not measured.
                    began.record(stream)?;
                }
                if reads == 0 {
                    to.copy_from(stream, &from, bytes)?;
                } else {
                    let call = launch::read(from.ptr(), found.ptr(), bytes);
                    // SAFETY: both have as many bytes, with a result for each block.
                    unsafe { self.device.launch(call) }?;
                }
            }
            ended.record(stream)?;
            ended.wait(self.device.stream.patience())?;
            let passes = if reads == 0 { 2 } else { 1 };
            *rate = (TIMES * passes * bytes) as f64 / ended.since(&began)?.as_secs_f64().max(1e-9);
        }
        Ok((rates[0], rates[1]))
    }

    /// Measures a product of `rows` rows with a matrix `[n, k]`, on copies of the matrix of at
    /// least `cold` bytes in total that are used in turn.
    ///
    /// # Errors
    /// [`KernelError`]; `Unsupported` if cuBLASLt is chosen but missing.
    pub fn measure_product(
        &mut self,
        (rows, n, k): (usize, usize, usize),
        by: Multiplier,
        cold: usize,
    ) -> Result<Duration, KernelError> {
        let Device { context, stream, .. } = &self.device;
        let (stride, what) = (k.next_multiple_of(8), "a product to be measured");
        let matrix = n * stride * 2;
        let copies = cold.div_ceil(matrix).clamp(1, TURNS_MOST);
        let weights = DeviceMemory::new(context, copies * matrix, what)?;
        let x = DeviceMemory::new(context, rows * stride * 2, what)?;
        let out = DeviceMemory::new(context, rows * n * 4, what)?;
        fill(&weights, stream, &random_words(1))?;
        fill(&x, stream, &random_words(2))?;
        let product = product_of((rows, n, k), stride)?;
        self.measure(copies, |device, turn| {
            let w = weights.ptr().offset(turn % copies * matrix);
            // SAFETY: operands and result have the rows and columns that are named.
            unsafe { multiply(device, by, &product, [x.ptr(), w, out.ptr()]) }
        })
    }

    /// Measures decode attention of one layer for sequences of `contexts` tokens, on layers of at
    /// least `cold` bytes in total that are used in turn. Reads
    /// `4 * tokens * num_kv_heads * head_dim` bytes.
    ///
    /// # Errors
    /// [`KernelError`]; `Unsupported` if no kernel supports these heads.
    pub fn measure_attention(
        &mut self,
        shape: &AttentionShape,
        contexts: &[usize],
        cold: usize,
    ) -> Result<Duration, KernelError> {
        const BLOCK_SHIFT: u32 = 4;
        let what = "attention to be measured";
        let (mut seqs, mut blocks, batch) = (Vec::new(), 0, contexts.len());
        for (row, &context) in contexts.iter().enumerate() {
            let own = context.div_ceil(1 << BLOCK_SHIFT);
            seqs.push(SeqRows {
                row_start: small(row)?,
                num_rows: 1,
                context_len: small(context)?,
                table_start: small(blocks)?,
                table_len: small(own)?,
            });
            blocks += own;
        }
        let tables: Vec<u32> = (0..small(blocks)?).collect();
        let plane = blocks * ((shape.num_kv_heads * shape.head_dim * 2) << BLOCK_SHIFT);
        let layers = cold.div_ceil(2 * plane).clamp(1, TURNS_MOST);
        let inputs = Batch { positions: &[], slots: &[], seqs: &seqs, block_tables: &tables };
        let windows = Windows::new(&[shape.sliding_window])?;
        let cut = AttentionTiling { group: 1, all_tiles: false, splits: splits_of(shape), windows };
        let layout = Layout::new(sizes(0, &inputs, cut, 0));
        let mut words = vec![0; layout.words(tables.len())];
        layout.fill(&mut words, &[], &inputs, cut, &[], &mut Vec::new())?;
        let Device { context: gpu, stream, .. } = &self.device;
        let lists = DeviceMemory::new(gpu, words.len() * 4, what)?;
        lists.upload(stream, 0, &words)?;
        let cache = DeviceMemory::new(gpu, layers * 2 * plane, what)?;
        fill(&cache, stream, &random_words(1))?;
        let rows = DeviceMemory::new(gpu, batch * shape.num_heads * shape.head_dim * 2, what)?;
        fill(&rows, stream, &random_words(2))?;
        let result = DeviceMemory::new(gpu, rows.bytes(), what)?;
        let (out, ml) = Partials::elements(shape, batch);
        let (out, ml) =
            (DeviceMemory::new(gpu, out * 4, what)?, DeviceMemory::new(gpu, ml * 4, what)?);
        let multiprocessors = gpu.info().multiprocessors;
        let at = |words: usize| lists.ptr().offset(words * 4);
        self.measure(layers, |device, turn| {
            let keys = cache.ptr().offset(turn % layers * 2 * plane);
            let io = AttentionIo {
                q: rows.ptr(),
                cache: LayerCache {
                    keys,
                    values: keys.offset(plane),
                    block_shift: BLOCK_SHIFT,
                    storage: KvStorage::AsTaken,
                },
                seqs: at(layout.seqs),
                block_tables: at(layout.tables),
                out: result.ptr(),
                sinks: None,
            };
            let partials = Partials { out: out.ptr(), ml: ml.ptr() };
            let work = DecodeWork {
                parts: at(layout.parts),
                parts_most: batch * splits_of(shape) as usize,
                live_parts: at(live::PARTS),
                items: at(layout.items),
                items_most: batch,
                live_items: at(live::ITEMS),
            };
            let calls = decode_attention(&io, shape, &work, partials, multiprocessors);
            let calls = calls.ok_or_else(|| {
                KernelError::Unsupported(format!("heads of {} elements", shape.head_dim))
            })?;
            for call in calls {
                // SAFETY: everything was allocated for these sequences.
                unsafe { device.launch(call) }?;
            }
            Ok(())
        })
    }

    /// Measures one `launch`, which gets the number of its turn; all `pieces` are used in turn.
    fn measure(
        &mut self,
        pieces: usize,
        mut launch: impl FnMut(&mut Device, usize) -> Result<(), KernelError>,
    ) -> Result<Duration, KernelError> {
        let device = &mut self.device;
        // Warms up everything that is chosen at first use.
        launch(device, 0)?;
        device.stream.synchronize()?;
        device.stream.begin_capture()?;
        let turns = pieces.max(RECORDED);
        for turn in 0..turns {
            if let Err(error) = launch(device, turn) {
                device.stream.abandon_capture();
                return Err(error);
            }
        }
        let graph = device.stream.end_capture()?;
        let (began, ended) =
            (Event::new(&device.context, true)?, Event::new(&device.context, true)?);
        graph.launch(&device.stream)?;
        began.record(&device.stream)?;
        for _ in 0..TIMES {
            graph.launch(&device.stream)?;
        }
        ended.record(&device.stream)?;
        ended.wait(self.device.stream.patience())?;
        Ok(ended.since(&began)? / u32::try_from(TIMES * turns).unwrap_or(u32::MAX))
    }
}

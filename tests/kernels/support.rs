//! Inputs, backends and comparisons that the kernel tests share.
use std::sync::{Arc, LazyLock};

use kernels::backend::prelude::*;
use kernels::backend::{Activation, Buffer, DType, ExpertActivation, HostMatrix};
use kernels::collective::{AbortHandle, Collective};
use kernels::cpu::{CpuBackend, CpuBuffer, CpuMatrix, Isa, Precision};
use kernels::error::CollectiveError;

/// A simulated collective: this is rank 0 of `world`, and rank r has r + 1 times this rank's data.
#[derive(Debug)]
pub(crate) struct Pretend {
    pub(crate) world: u32,
}

#[derive(Debug)]
struct NoAbort;

impl AbortHandle for NoAbort {
    fn abort(&self) {}
}

impl Collective for Pretend {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        self.world
    }

    fn all_reduce_sum(&mut self, data: &mut [f32]) -> Result<(), CollectiveError> {
        let factor: u32 = (1..=self.world).sum();
        data.iter_mut().for_each(|x| *x *= factor as f32);
        Ok(())
    }

    fn gather(
        &mut self,
        local: &[f32],
        global: &mut [f32],
        root: u32,
    ) -> Result<(), CollectiveError> {
        assert_eq!(root, 0);
        self.all_gather(local, global)
    }

    fn all_gather(&mut self, local: &[f32], global: &mut [f32]) -> Result<(), CollectiveError> {
        assert_eq!(global.len(), local.len() * self.world as usize);
        for (rank, part) in global.chunks_exact_mut(local.len()).enumerate() {
            for (to, from) in part.iter_mut().zip(local) {
                *to = from * (rank + 1) as f32;
            }
        }
        Ok(())
    }

    fn broadcast(&mut self, _data: &mut [u32], root: u32) -> Result<(), CollectiveError> {
        assert_eq!(root, 0);
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn abort_handle(&self) -> Arc<dyn AbortHandle> {
        Arc::new(NoAbort)
    }
}

/// A backend with products in f32 precision.
pub(crate) fn backend(isa: Isa, threads: usize) -> CpuBackend {
    backend_in(isa, Precision::Float32, threads)
}

pub(crate) fn backend_in(isa: Isa, precision: Precision, threads: usize) -> CpuBackend {
    CpuBackend::with_isa(threads, isa, precision, Box::new(Pretend { world: 1 })).unwrap()
}

/// Every instruction set of this machine, in every precision.
pub(crate) fn variants() -> impl Iterator<Item = (Isa, Precision)> {
    isas().flat_map(|isa| [(isa, Precision::Float32), (isa, Precision::Bfloat16)])
}

/// The activations as a product in this precision takes them: rounded in f64 arithmetic rather than
/// on the bits. Values must be normal numbers.
pub(crate) fn as_taken(precision: Precision, x: &[f32]) -> Vec<f32> {
    let round = |&x: &f32| {
        if x == 0.0 {
            return x;
        }
        // A bf16 has 8 significant bits; the last one is worth 2^(exponent - 7).
        let unit = 2f64.powi(f64::from(x).abs().log2().floor() as i32 - 7);
        ((f64::from(x) / unit).round_ties_even() * unit) as f32
    };
    match precision {
        Precision::Float32 => x.to_vec(),
        Precision::Bfloat16 => x.iter().map(round).collect(),
    }
}

/// The value of a byte of FP8, by the definition of E4M3.
pub(crate) fn fp8_value(byte: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    let size = match (exponent, byte & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa / 8.0 * 2f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    if byte < 0x80 { size } else { -size }
}

/// The byte of FP8 nearest to a finite number, found by search; of two, the even one.
pub(crate) fn nearest_fp8(x: f64) -> u8 {
    static VALUES: LazyLock<[f64; 0x7f]> =
        LazyLock::new(|| std::array::from_fn(|byte| fp8_value(byte as u8)));
    let values = &*VALUES;
    // Far beyond the largest, differences of distances would be lost.
    let away = |byte: u8| (values[byte as usize] - x.abs().min(1e6)).abs();
    let nearer = |a: u8, b: u8| {
        if away(a) < away(b) || away(a) == away(b) && a.is_multiple_of(2) { a } else { b }
    };
    (0..0x7f).fold(0, nearer) | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// The value of FP8 nearest to a finite number.
pub(crate) fn rounded_fp8(x: f64) -> f64 {
    fp8_value(nearest_fp8(x))
}

/// Every instruction set of this machine.
pub(crate) fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_supported())
}

/// SplitMix64: inputs independent of the code under test.
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    pub(crate) fn f32(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.f32()).collect()
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// A weight matrix, both as stored in a file and as numbers.
pub(crate) struct Weight {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Exactly representable in bf16.
    pub(crate) values: Vec<f32>,
    bytes: Vec<u8>,
    /// Loaded as int8; `values` are then the quantised values.
    pub(crate) is_int8: bool,
}

impl Weight {
    pub(crate) fn random(random: &mut Random, rows: usize, cols: usize) -> Self {
        let values: Vec<f32> = (0..rows * cols)
            .map(|_| f32::from_bits(random.f32().to_bits() & 0xFFFF_0000))
            .collect();
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()[2..].to_vec()).collect();
        Self { rows, cols, values, bytes, is_int8: false }
    }

    /// Sets other values, which must be exactly representable in bf16.
    pub(crate) fn set(&mut self, value: impl Fn(usize, usize) -> f32) {
        let cols = self.cols;
        self.values = (0..self.rows * cols).map(|i| value(i / cols, i % cols)).collect();
        self.bytes = self.values.iter().flat_map(|x| x.to_le_bytes()[2..].to_vec()).collect();
    }

    /// The same file, to be loaded as int8.
    pub(crate) fn quantised(&self) -> Self {
        let quantise = |row: &[f32]| {
            let most = row.iter().map(|x| x.abs()).fold(0.0, f32::max);
            let scale = most / 127.0;
            row.iter().map(|x| (x / scale).round_ties_even() * scale).collect::<Vec<f32>>()
        };
        let values = self.values.chunks(self.cols).flat_map(quantise).collect();
        Self { values, bytes: self.bytes.clone(), is_int8: true, ..*self }
    }

    pub(crate) fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..][..self.cols]
    }

    /// The matrix as in a file.
    pub(crate) fn host(&self) -> HostMatrix<'_> {
        HostMatrix {
            data: &self.bytes,
            dtype: DType::Bf16,
            rows: self.rows,
            cols: self.cols,
            col_start: 0,
            row_stride: self.cols,
            scales: None,
        }
    }

    pub(crate) fn load(&self, backend: &mut CpuBackend) -> CpuMatrix {
        match self.is_int8 {
            true => backend.load_int8_matrix(&[self.host()]).unwrap(),
            false => backend.load_matrix(&[self.host()]).unwrap(),
        }
    }

    /// `x W^T + bias` in f64, with the sum of absolute terms of each output.
    pub(crate) fn product(&self, x: &[f32], bias: Option<&[f32]>) -> Vec<(f64, f64)> {
        (0..self.rows)
            .map(|r| {
                let terms = self.row(r).iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x));
                let bias = bias.map_or(0.0, |bias| f64::from(bias[r]));
                let (mut sum, mut size) = (bias, bias.abs());
                for term in terms {
                    sum += term;
                    size += term.abs();
                }
                (sum, size)
            })
            .collect()
    }
}

/// A buffer with these rows, and room for more.
pub(crate) fn buffer(backend: &mut CpuBackend, values: &[f32], width: usize) -> CpuBuffer {
    let rows = values.len() / width;
    let mut buffer = backend.new_buffer(rows + 3, width).unwrap();
    buffer.set_rows(rows).unwrap();
    buffer.values_mut().copy_from_slice(values);
    buffer
}

/// A buffer of NaN.
pub(crate) fn poisoned(backend: &mut CpuBackend, rows: usize, width: usize) -> CpuBuffer {
    let mut buffer = backend.new_buffer(rows, width).unwrap();
    buffer.values_mut().fill(f32::NAN);
    buffer
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

pub(crate) fn assert_close(got: f32, want: f64, tolerance: f64, what: impl std::fmt::Display) {
    let error = (f64::from(got) - want).abs();
    // Written so that NaN fails.
    assert!(error <= tolerance, "{what}: got {got}, want {want}, error {error:e} > {tolerance:e}");
}

pub(crate) const ACTIVATIONS: [Activation; 2] = [Activation::Silu, Activation::GeluTanh];

/// The activation by definition, in f64.
pub(crate) fn activated(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
    }
}

/// The experts' activation by definition, in f64.
pub(crate) fn expert_activated(activation: ExpertActivation, gate: f64, up: f64) -> f64 {
    match activation {
        ExpertActivation::Silu => activated(Activation::Silu, gate) * up,
        ExpertActivation::Clamped { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let gate = gate.min(limit);
            (up.clamp(-limit, limit) + 1.0) * gate / (1.0 + (-alpha * gate).exp())
        }
    }
}

/// Compares the output of `tutti_skinny_gate_up_*` for `rows` rows, `inner + 1` words apart, the
/// last of which is not live, with the products and sums of absolute terms from `want`.
pub(crate) fn assert_gated(
    out: &[f32],
    (rows, inner): (usize, usize),
    activation: Activation,
    want: impl Fn(usize, usize) -> (f64, f64),
    what: impl std::fmt::Display,
) {
    for (row, out) in out.chunks(inner + 1).enumerate() {
        assert!(out[inner].is_nan());
        for (i, &got) in out[..inner].iter().enumerate() {
            if row == rows - 1 {
                assert!(got.is_nan(), "not live");
                continue;
            }
            let ((gate, gate_size), (up, up_size)) = (want(row, i), want(row, inner + i));
            let want = activated(activation, gate) * up;
            let error = 2e-6 * (gate_size * (1.2 + up.abs() * 1.2) + up_size * (1.0 + gate.abs()));
            assert_close(got, want, error + want.abs() / 250.0, format!("{what} {row} {i}"));
        }
    }
}

/// Checks that the products of 67 rows with a matrix have the same bits for all `sizes` of batches,
/// and, for a few sizes, with several threads.
pub(crate) fn assert_same_in_batches(
    (isa, precision): (Isa, Precision),
    random: &mut Random,
    [rows, cols]: [usize; 2],
    sizes: &[usize],
    load: impl Fn(&mut CpuBackend) -> CpuMatrix,
    what: impl std::fmt::Display,
) {
    let x = random.vec(67 * cols);
    let mut reference: Option<(Vec<u32>, [Vec<u32>; 2])> = None;
    for threads in [1, 2, 3] {
        let mut backend = backend_in(isa, precision, threads);
        let packed = load(&mut backend);
        // With several threads, what matters is where their shares begin.
        let few = threads > 1;
        for &m in sizes.iter().filter(|m| !few || [1, 12, 67].contains(*m)) {
            let (mut linear, mut gated) = (vec![], [vec![], vec![]]);
            for x in x.chunks(m * cols) {
                let input = buffer(&mut backend, x, cols);
                let mut out = poisoned(&mut backend, x.len() / cols, rows);
                backend.linear(&input, &packed, None, &mut out).unwrap();
                linear.extend(bits(out.values()));
                let mut out = poisoned(&mut backend, x.len() / cols, rows / 2);
                for (activation, gated) in ACTIVATIONS.into_iter().zip(&mut gated) {
                    backend.gate_up(&input, &packed, None, None, activation, &mut out).unwrap();
                    gated.extend(bits(out.values()));
                }
            }
            let got = (linear, gated);
            let same = *reference.get_or_insert_with(|| got.clone()) == got;
            assert!(same, "{isa} {precision} {what}, {m} rows at a time, {threads} threads");
        }
    }
}

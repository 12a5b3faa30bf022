//! Every operation against the reference backend, which computes the same inputs in f32. Inputs are
//! exact in bf16; outputs that are stored in bf16 may be off by their rounding.
use std::cell::RefCell;
use std::rc::Rc;

use kernels::backend::prelude::*;
use kernels::backend::{Activation, DType, HostMatrix, Inspect};
use kernels::collective::single_rank;
use kernels::cuda::CudaBackend;
use kernels::{Backend, KernelError, ReferenceBackend};
use shared::protocol::Quantization;

use crate::sampling::Sample;
use crate::{HANGS, Options, Step, Table};
use crate::{adapters, attention, delta, experts, fp8, int4, norms};

/// Relative error of one rounding to bf16, with some margin.
pub(crate) const ROUNDING: f32 = 1.0 / 128.0;
/// Relative error of a sum in another order.
pub(crate) const SUM: f32 = 1e-4;

/// Backends whose buffers can be written.
pub(crate) trait Writable: Backend + Inspect {
    fn write(&mut self, buffer: &mut Self::Buffer, values: &[f32]) -> Result<(), KernelError>;
    fn poison(&mut self, buffer: &Self::Buffer) -> Result<(), KernelError>;
}

impl Writable for CudaBackend {
    fn write(&mut self, buffer: &mut Self::Buffer, values: &[f32]) -> Result<(), KernelError> {
        self.write_buffer(buffer, values)
    }

    fn poison(&mut self, buffer: &Self::Buffer) -> Result<(), KernelError> {
        Self::poison(self, buffer)
    }
}

impl Writable for ReferenceBackend {
    fn write(&mut self, buffer: &mut Self::Buffer, values: &[f32]) -> Result<(), KernelError> {
        buffer.set_rows(values.len() / buffer.width())?;
        buffer.values_mut().copy_from_slice(values);
        Ok(())
    }

    fn poison(&mut self, _: &Self::Buffer) -> Result<(), KernelError> {
        Ok(())
    }
}

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In -1..1, exact in bf16.
    fn f32(&mut self) -> f32 {
        let wide = (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        f32::from_bits(wide.to_bits() & 0xFFFF_0000)
    }

    pub(crate) fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.f32()).collect()
    }
}

pub(crate) fn bytes(values: &[f32]) -> Vec<u8> {
    let halves = |x: &f32| {
        let [_, _, low, high] = x.to_le_bytes();
        [low, high]
    };
    values.iter().flat_map(halves).collect()
}

pub(crate) fn matrix<B: Backend>(
    backend: &mut B,
    values: &[f32],
    cols: usize,
) -> Result<B::Matrix, KernelError> {
    load(backend, values, cols, Quantization::None)
}

pub(crate) fn load<B: Backend>(
    backend: &mut B,
    values: &[f32],
    cols: usize,
    quantization: Quantization,
) -> Result<B::Matrix, KernelError> {
    let data = bytes(values);
    let rows = values.len() / cols;
    let part = HostMatrix {
        data: &data,
        dtype: DType::Bf16,
        rows,
        cols,
        col_start: 0,
        row_stride: cols,
        scales: None,
    };
    match quantization {
        Quantization::None => backend.load_matrix(&[part]),
        Quantization::Int8 => backend.load_int8_matrix(&[part]),
    }
}

/// Suffix of the name of a case with such weights.
fn weights(quantization: Quantization) -> &'static str {
    match quantization {
        Quantization::None => "",
        Quantization::Int8 => ", int8",
    }
}

pub(crate) fn input<B: Writable>(
    backend: &mut B,
    values: &[f32],
    width: usize,
) -> Result<B::Buffer, KernelError> {
    let mut buffer = backend.new_input_buffer(values.len() / width + 1, width)?;
    backend.write(&mut buffer, values)?;
    Ok(buffer)
}

pub(crate) fn wide<B: Writable>(
    backend: &mut B,
    values: &[f32],
    width: usize,
) -> Result<B::Buffer, KernelError> {
    let mut buffer = backend.new_buffer(values.len() / width + 1, width)?;
    backend.write(&mut buffer, values)?;
    Ok(buffer)
}

pub(crate) fn poisoned<B: Writable>(
    backend: &mut B,
    rows: usize,
    width: usize,
    is_input: bool,
) -> Result<B::Buffer, KernelError> {
    let buffer = match is_input {
        true => backend.new_input_buffer(rows, width)?,
        false => backend.new_buffer(rows, width)?,
    };
    backend.poison(&buffer)?;
    Ok(buffer)
}

/// One operation with its inputs, run on both backends, which must agree.
pub(crate) trait Case {
    fn name(&self) -> String;
    /// Relative and absolute tolerance.
    fn tolerance(&self) -> (f32, f32);
    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError>;
}

/// Describes wrong values, if any: how many, where, the first ones.
fn difference(
    got: &[f32],
    expected: &[f32],
    (relative, absolute): (f32, f32),
) -> Result<f32, String> {
    if got.len() != expected.len() {
        return Err(format!("{} values, not {}", got.len(), expected.len()));
    }
    let error = |i: usize| (got[i] - expected[i]).abs();
    let is_wrong = |i: &usize| {
        let error = error(*i);
        error.is_nan() || error > absolute + relative * expected[*i].abs()
    };
    let wrong: Vec<usize> = (0..got.len()).filter(is_wrong).collect();
    let (Some(first), Some(last)) = (wrong.first(), wrong.last()) else {
        return Ok((0..got.len()).map(error).fold(0.0, f32::max));
    };
    let nan = wrong.iter().filter(|i| got[**i].is_nan()).count();
    let some: Vec<String> = wrong
        .iter()
        .take(4)
        .map(|i| format!("[{i}] is {} not {}", got[*i], expected[*i]))
        .collect();
    Err(format!(
        "{} of {} values wrong ({nan} NaN), from {first} to {last}: {}",
        wrong.len(),
        got.len(),
        some.join(", ")
    ))
}

/// The backend under test, created when first needed.
struct Checked<'a> {
    options: &'a Options,
    ordinal: u32,
    backend: Option<CudaBackend>,
}

impl Checked<'_> {
    fn get(&mut self) -> Result<&mut CudaBackend, KernelError> {
        if self.backend.is_none() {
            self.backend = Some(self.options.backend(self.ordinal, false)?);
        }
        self.backend.as_mut().ok_or_else(|| KernelError::Device("no backend".to_owned()))
    }
}

/// Runs a case with inputs that arrive late; those of the run before do as what must not be read.
fn behind_slow_kernels<C: Case>(case: &C, cuda: &mut CudaBackend) -> Result<Vec<f32>, KernelError> {
    cuda.set_late(true)?;
    let got = case.run(cuda);
    cuda.set_late(false)?;
    got
}

fn compare<C: Case>(case: &C, checked: &RefCell<Checked<'_>>, table: &mut Table) {
    let mut reference = ReferenceBackend::new(single_rank());
    let words = |error: KernelError| error.to_string();
    let mut run = || -> Result<String, String> {
        let expected = case.run(&mut reference).map_err(words)?;
        let mut checked = checked.borrow_mut();
        let judge = |got: Vec<f32>| {
            let worst = difference(&got, &expected, case.tolerance())?;
            Ok(format!("{} values, worst error {worst:.1e}", got.len()))
        };
        let first = checked.get().and_then(|cuda| case.run(cuda)).map_err(words).and_then(judge);
        // Once more behind a slow kernel: what is read without waiting for it is not there yet.
        let first = first.and_then(|figure| {
            let late = checked.get().and_then(|cuda| behind_slow_kernels(case, cuda));
            let late = late.map_err(words).and_then(judge);
            late.map(|_| figure).map_err(|fault| format!("with inputs that arrive late: {fault}"))
        });
        let Err(fault) = first else { return first };
        if fault.contains(HANGS) {
            // All other work on this GPU waits for that kernel.
            let name = case.name();
            return Err(format!("{fault}; alone, without overlap: --no-overlap --step '{name}'"));
        }
        // Kernels that begin early are the first thing to suspect.
        let plain = Options { overlap: false, ..checked.options.clone() };
        let second = plain.backend(checked.ordinal, false);
        let second = second.and_then(|mut cuda| case.run(&mut cuda)).map_err(words).and_then(judge);
        let again = second.unwrap_or_else(|fault| fault);
        Err(format!("{fault}; without overlap: {again}"))
    };
    let result = run();
    table.add(case.name(), result);
}

struct Norm {
    rows: usize,
    width: usize,
    has_delta: bool,
}

impl Case for Norm {
    fn name(&self) -> String {
        let delta = if self.has_delta { " with delta" } else { "" };
        format!("add_rmsnorm {} x {}{delta}", self.rows, self.width)
    }

    fn tolerance(&self) -> (f32, f32) {
        (ROUNDING, 1e-5)
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let mut random = Random(1);
        let mut residual = wide(backend, &random.vec(self.rows * self.width), self.width)?;
        let delta = wide(backend, &random.vec(self.rows * self.width), self.width)?;
        let weight = backend.load_vector(&random.vec(self.width))?;
        let mut out = poisoned(backend, self.rows, self.width, true)?;
        let delta = self.has_delta.then_some(&delta);
        backend.add_rmsnorm(&mut residual, delta, &weight, 1e-5, &mut out)?;
        let mut values = backend.read_buffer(&out)?;
        values.extend(backend.read_buffer(&residual)?);
        Ok(values)
    }
}

/// Add and norm, with a norm of the addend as well.
struct NormedNorm {
    rows: usize,
    width: usize,
}

impl Case for NormedNorm {
    fn name(&self) -> String {
        format!("add_normed_rmsnorm {} x {}", self.rows, self.width)
    }

    fn tolerance(&self) -> (f32, f32) {
        (ROUNDING, 1e-4)
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let mut random = Random(8);
        let mut residual = wide(backend, &random.vec(self.rows * self.width), self.width)?;
        let delta = wide(backend, &random.vec(self.rows * self.width), self.width)?;
        let delta_weight = backend.load_vector(&random.vec(self.width))?;
        let weight = backend.load_vector(&random.vec(self.width))?;
        let mut out = poisoned(backend, self.rows, self.width, true)?;
        let weights = (&delta_weight, &weight);
        backend.add_normed_rmsnorm(&mut residual, &delta, weights.0, weights.1, 1e-6, &mut out)?;
        let mut values = backend.read_buffer(&out)?;
        values.extend(backend.read_buffer(&residual)?);
        Ok(values)
    }
}

struct Embed;

impl Case for Embed {
    fn name(&self) -> String {
        "embed".to_owned()
    }

    fn tolerance(&self) -> (f32, f32) {
        (0.0, 0.0)
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let table = matrix(backend, &Random(2).vec(50 * 64), 64)?;
        let mut out = poisoned(backend, 5, 64, false)?;
        backend.embed(&table, &[100, 149, 99, 150, 120], 100, 33.75, &mut out)?;
        backend.read_buffer(&out)
    }
}

/// `linear` or `linear_columns`.
struct Linear {
    rows: usize,
    k: usize,
    n: usize,
    first: usize,
    has_bias: bool,
    quantization: Quantization,
}

impl Case for Linear {
    fn name(&self) -> String {
        let Self { rows, k, n, first, quantization, .. } = self;
        let weights = weights(*quantization);
        format!("linear {rows} x {k} -> {n}, columns from {first}{weights}")
    }

    fn tolerance(&self) -> (f32, f32) {
        (SUM, 1e-5 * self.k as f32)
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let mut random = Random(3);
        let width = self.k + self.first;
        let x = input(backend, &random.vec(self.rows * width), width)?;
        let weight = load(backend, &random.vec(self.n * self.k), self.k, self.quantization)?;
        let bias = backend.load_vector(&random.vec(self.n))?;
        let mut out = poisoned(backend, self.rows, self.n, false)?;
        let bias = self.has_bias.then_some(&bias);
        backend.linear_columns(&x, self.first, &weight, bias, &mut out)?;
        backend.read_buffer(&out)
    }
}

struct GateUp {
    rows: usize,
    k: usize,
    inner: usize,
    has_bias: bool,
    activation: Activation,
    quantization: Quantization,
}

impl Case for GateUp {
    fn name(&self) -> String {
        let Self { rows, k, inner, activation, .. } = self;
        let weights = weights(self.quantization);
        format!("gate_up {activation:?} {rows} x {k} -> {inner}{weights}")
    }

    fn tolerance(&self) -> (f32, f32) {
        (ROUNDING, 1e-3)
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let mut random = Random(4);
        let x = input(backend, &random.vec(self.rows * self.k), self.k)?;
        // Small, so that products with both are of the order of one.
        let small: Vec<f32> =
            random.vec(2 * self.inner * self.k).iter().map(|x| x / 16.0).collect();
        let weight = load(backend, &small, self.k, self.quantization)?;
        let bias = backend.load_vector(&random.vec(2 * self.inner))?;
        let mut out = poisoned(backend, self.rows, self.inner, true)?;
        let bias = self.has_bias.then_some(&bias);
        backend.gate_up(&x, &weight, bias, None, self.activation, &mut out)?;
        backend.read_buffer(&out)
    }
}

struct Head {
    rows: Vec<u32>,
}

impl Case for Head {
    fn name(&self) -> String {
        format!("lm_head of {} rows", self.rows.len())
    }

    fn tolerance(&self) -> (f32, f32) {
        (SUM, 1e-3)
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let mut random = Random(5);
        let x = input(backend, &random.vec(200 * 128), 128)?;
        let weight = matrix(backend, &random.vec(777 * 128), 128)?;
        let mut out = poisoned(backend, self.rows.len(), 777, false)?;
        backend.lm_head(&x, &self.rows, &weight, None, &mut out)?;
        backend.read_buffer(&out)
    }
}

/// One step for each case.
pub(crate) fn steps(options: &Options, ordinal: u32) -> Vec<Step<'_>> {
    let checked = Rc::new(RefCell::new(Checked { options, ordinal, backend: None }));
    let library = Step::new("cuBLASLt", move |table| {
        let found = options.backend(ordinal, false).map_err(|error| error.to_string());
        let found = found.and_then(|backend| backend.library_of_products());
        table.add("cuBLASLt", found);
    });
    let mut cases = Cases { checked, steps: vec![library] };
    cases.all(options.quick);
    cases.steps
}

struct Cases<'a> {
    checked: Rc<RefCell<Checked<'a>>>,
    steps: Vec<Step<'a>>,
}

impl<'a> Cases<'a> {
    fn add(&mut self, case: impl Case + 'a) {
        let checked = self.checked.clone();
        let name = case.name();
        self.steps.push(Step::new(name, move |table| compare(&case, &checked, table)));
    }

    fn all(&mut self, quick: bool) {
        self.add(Embed);
        let widths: &[usize] = if quick { &[64, 200] } else { &[64, 200, 4096, 8192] };
        for &width in widths {
            for has_delta in [false, true] {
                self.add(Norm { rows: 3, width, has_delta });
            }
            self.add(NormedNorm { rows: 3, width });
        }
        let rows: &[usize] = match quick {
            true => &[1, 9, 65],
            false => &[1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 130, 256, 1030],
        };
        let (k, n) = if quick { (96, 80) } else { (1000, 520) };
        for &rows in rows {
            let has_bias = rows % 2 == 1;
            for quantization in [Quantization::None, Quantization::Int8] {
                self.add(Linear { rows, k, n, first: 0, has_bias, quantization });
                for activation in [Activation::Silu, Activation::GeluTanh] {
                    let inner = n / 2;
                    self.add(GateUp { rows, k, inner, has_bias, activation, quantization });
                }
            }
        }
        for (rows, first) in [(5, 8), (5, 3), (70, 8), (70, 3)] {
            let quantization = Quantization::None;
            self.add(Linear { rows, k: 64, n: 40, first, has_bias: false, quantization });
        }
        for case in norms::layers(quick) {
            self.add(case);
        }
        for case in norms::all_heads(quick) {
            self.add(case);
        }
        for case in norms::ungated(quick) {
            self.add(case);
        }
        for case in int4::cases(quick) {
            self.add(case);
        }
        for case in fp8::cases(quick) {
            self.add(case);
        }
        for case in experts::cases(quick) {
            self.add(case);
        }
        for case in adapters::cases(quick) {
            self.add(case);
        }
        self.add(Head { rows: vec![199, 0, 7] });
        self.add(Head { rows: (0..150).rev().collect() });
        for case in attention::cases(quick) {
            self.add(case);
        }
        for case in delta::cases(quick) {
            self.add(case);
        }
        for case in delta::gates(quick) {
            self.add(case);
        }
        for vocab in if quick { vec![300] } else { vec![300, 32_000, 151_936] } {
            self.add(Sample { vocab });
        }
    }
}

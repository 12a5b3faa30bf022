//! Operations that few models have: LayerNorms, q and k normalised over all heads, MLPs without a
//! gate.
use kernels::KernelError;
use kernels::backend::{LayerNorm, PlainActivation, QkNorm};
use shared::protocol::Quantization;

use crate::operations::{Case, ROUNDING, Random, SUM, Writable, input, load, poisoned, wide};

/// A LayerNorm after a sum.
pub(crate) struct Layer {
    width: usize,
}

impl Case for Layer {
    fn name(&self) -> String {
        format!("add_layernorm 3 x {}", self.width)
    }

    fn tolerance(&self) -> (f32, f32) {
        (ROUNDING, 1e-4)
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let mut random = Random(31);
        let values: Vec<f32> = random.vec(3 * self.width).iter().map(|x| x + 2.0).collect();
        let mut residual = wide(backend, &values, self.width)?;
        let delta = wide(backend, &random.vec(3 * self.width), self.width)?;
        let weight = backend.load_vector(&random.vec(self.width))?;
        let bias = backend.load_vector(&random.vec(self.width))?;
        let mut out = poisoned(backend, 3, self.width, true)?;
        let norm = LayerNorm { weight: &weight, bias: &bias };
        backend.add_layernorm(&mut residual, Some(&delta), norm, 1e-5, &mut out)?;
        let mut values = backend.read_buffer(&out)?;
        values.extend(backend.read_buffer(&residual)?);
        Ok(values)
    }
}

/// q and k normalised over all heads, with the sums of as many ranks as there are parts.
pub(crate) struct AllHeads {
    heads: [usize; 2],
    parts: usize,
}

impl Case for AllHeads {
    fn name(&self) -> String {
        format!("norm of {:?} heads in {} parts", self.heads, self.parts)
    }

    fn tolerance(&self) -> (f32, f32) {
        (SUM, 1e-4)
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let mut random = Random(32);
        let [q, k] = self.heads.map(|heads| heads * 128);
        let sections = [self.parts, self.parts.min(self.heads[1])];
        let counts = [q, k * self.parts / sections[1]];
        let norm = QkNorm { columns: [q, k], sections, parts: self.parts, counts, eps: 1e-6 };
        let mut qkv = wide(backend, &random.vec(5 * (q + 2 * k)), q + 2 * k)?;
        let mut squares = poisoned(backend, 5, 2, false)?;
        let weight = backend.load_vector(&random.vec(q + k))?;
        backend.qk_squares(&qkv, &norm, &mut squares)?;
        backend.qk_scale(&mut qkv, &norm, &squares, &weight)?;
        let mut values = backend.read_buffer(&qkv)?;
        values.extend(backend.read_buffer(&squares)?);
        Ok(values)
    }
}

/// The first product of an MLP without a gate.
pub(crate) struct Ungated {
    rows: usize,
    activation: PlainActivation,
    quantization: Quantization,
}

impl Case for Ungated {
    fn name(&self) -> String {
        let Self { rows, activation, quantization } = self;
        format!("activated {activation:?} of {rows} rows, {quantization:?}")
    }

    fn tolerance(&self) -> (f32, f32) {
        (ROUNDING, 1e-3)
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let (mut random, k, inner) = (Random(33), 96, 200);
        let x = input(backend, &random.vec(self.rows * k), k)?;
        // Small, so that products with both are of the order of one.
        let small: Vec<f32> = random.vec(inner * k).iter().map(|x| x / 16.0).collect();
        let weight = load(backend, &small, k, self.quantization)?;
        let bias = backend.load_vector(&random.vec(inner))?;
        let mut out = poisoned(backend, self.rows, inner, true)?;
        backend.activated(&x, &weight, Some(&bias), None, self.activation, &mut out)?;
        backend.read_buffer(&out)
    }
}

pub(crate) fn layers(quick: bool) -> Vec<Layer> {
    let widths: &[usize] = if quick { &[64] } else { &[64, 200, 4096, 12_288] };
    widths.iter().map(|width| Layer { width: *width }).collect()
}

pub(crate) fn all_heads(quick: bool) -> Vec<AllHeads> {
    let cases: &[([usize; 2], usize)] =
        if quick { &[([4, 2], 4)] } else { &[([4, 2], 4), ([32, 32], 1), ([40, 8], 8)] };
    cases.iter().map(|(heads, parts)| AllHeads { heads: *heads, parts: *parts }).collect()
}

pub(crate) fn ungated(quick: bool) -> Vec<Ungated> {
    let rows: &[usize] = if quick { &[3] } else { &[3, 65, 2100] };
    let mut cases = Vec::new();
    for (rows, quantization) in
        rows.iter().flat_map(|rows| [(*rows, Quantization::None), (*rows, Quantization::Int8)])
    {
        for activation in [PlainActivation::GeluTanh, PlainActivation::SquaredRelu] {
            cases.push(Ungated { rows, activation, quantization });
        }
    }
    cases
}

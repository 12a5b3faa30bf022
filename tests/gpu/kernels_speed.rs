//! Measures single kernels: products with this project's kernels and with cuBLASLt, decode
//! attention.
use kernels::KernelError;
use kernels::backend::AttentionShape;
use kernels::cuda::measure::{COLD, Multiplier};

use crate::shapes::Shape;
use crate::{Options, Table};

fn cold(options: &Options) -> usize {
    if options.quick { 1 << 16 } else { COLD }
}

/// The products of a layer and of the logits: rows and columns of their matrices.
pub(crate) fn matrices(shape: &Shape) -> [(&'static str, usize, usize); 5] {
    let (q, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    [
        ("qkv", q + 2 * kv, shape.hidden),
        ("output", shape.hidden, q),
        ("gate_up", 2 * shape.inner, shape.hidden),
        ("down", shape.hidden, shape.inner),
        ("lm_head", shape.vocab, shape.hidden),
    ]
}

/// Times those products, with this project's kernels and with cuBLASLt. If cuBLASLt is faster at up
/// to 32 rows, or this project's kernels at more, `SKINNY_MAX` should change.
pub(crate) fn products(options: &Options, ordinal: u32, shape: &Shape, table: &mut Table) {
    let all: &[usize] = if options.quick { &[1, 9] } else { &[1, 8, 16, 32, 40, 64, 128] };
    let mut backend = match options.backend(ordinal, true) {
        Ok(backend) => backend,
        Err(error) => return table.add("products", Err(error.to_string())),
    };
    for (what, n, k) in matrices(shape) {
        for &rows in all {
            let mut figure = |by| {
                let took = backend.measure_product((rows, n, k), by, cold(options))?.as_secs_f64();
                let rate = (2 * n * k) as f64 / took / 1e12;
                Ok(format!("{:.1} us {rate:.2} TB/s", took * 1e6))
            };
            let own = figure(Multiplier::Own);
            let library = figure(Multiplier::Library);
            let both = own.and_then(|own| Ok(format!("own {own}, cuBLASLt {}", library?)));
            let name = format!("{} {what} {n} x {k}, {rows} rows", shape.name);
            table.add(name, both.map_err(|error: KernelError| error.to_string()));
        }
    }
}

pub(crate) fn attention(options: &Options, ordinal: u32, shape: &Shape, table: &mut Table) {
    // Two groups, each (number of sequences, tokens of each).
    type Case = [(usize, usize); 2];
    let cases: &[Case] = match options.quick {
        true => &[[(2, 100), (0, 0)], [(3, 20), (1, 300)]],
        false => &[
            [(1, 512), (0, 0)],
            [(1, 8192), (0, 0)],
            [(8, 2048), (0, 0)],
            [(64, 512), (0, 0)],
            [(64, 4096), (0, 0)],
            [(64, 200), (0, 0)],
            [(64, 200), (1, 8192)],
            [(255, 512), (1, 4096)],
        ],
    };
    let heads = AttentionShape {
        num_heads: shape.heads,
        num_kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        norm_eps: 1e-5,
        sliding_window: None,
        softcap: None,
        latent: None,
    };
    for case in cases {
        let contexts: Vec<usize> =
            case.iter().flat_map(|&(count, tokens)| std::iter::repeat_n(tokens, count)).collect();
        let run = || -> Result<String, KernelError> {
            let mut backend = options.backend(ordinal, true)?;
            let took = backend.measure_attention(&heads, &contexts, cold(options))?.as_secs_f64();
            let tokens: usize = contexts.iter().sum();
            let bytes = 4 * tokens * shape.kv_heads * shape.head_dim;
            Ok(format!("{:.1} us {:.2} TB/s", took * 1e6, bytes as f64 / took / 1e12))
        };
        let parts = case.iter().filter(|(count, _)| *count > 0);
        let parts: Vec<String> = parts.map(|(count, of)| format!("{count} x {of}")).collect();
        let name = format!("{} decode attention, {} tokens", shape.name, parts.join(" and "));
        table.add(name, run().map_err(|error| error.to_string()));
    }
}

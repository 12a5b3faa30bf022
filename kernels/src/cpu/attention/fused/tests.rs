//! Attention has the same bits by fused multiply-adds as by dot products.
use super::super::super::gemm::have_same_bits;
use super::super::super::isa::Isa;
use super::super::super::kv::CpuKvCache;
use super::super::super::memory::Disjoint;
use super::super::super::precision::Precision;
use super::super::{Attention, AttentionScratch, View, avx512bf16, cut};
use crate::backend::{AttentionShape, Batch, KvShape, KvStorage, SeqRows};

/// Pseudorandom numbers between -2 and 2, some of them subnormal in products.
fn numbers(mut state: u64) -> impl FnMut() -> f32 {
    move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let number = ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 2.0;
        if state >> 33 & 31 == 0 { number * 1e-30 } else { number }
    }
}

/// A prompt of `rows` tokens behind others, up to `context` in all.
fn check(shape: AttentionShape, block_size: usize, rows: usize, context: usize) {
    let num_blocks = context.div_ceil(block_size) + 1;
    let cache_shape = KvShape {
        num_layers: 1,
        num_kv_heads: shape.num_kv_heads,
        head_dim: shape.head_dim,
        latent: shape.latent,
        block_size,
        num_blocks,
        storage: KvStorage::AsTaken,
    };
    let mut number = numbers((rows * 1000 + context) as u64);
    let mut cache = CpuKvCache::new(cache_shape, Precision::Bfloat16).unwrap();
    // Blocks in falling order, so that distances between them are negative, too.
    let table: Vec<u32> = (0..num_blocks as u32 - 1).rev().collect();
    for (position, head) in
        (0..context).flat_map(|position| (0..shape.num_kv_heads).map(move |head| (position, head)))
    {
        let k: Vec<f32> = (0..shape.head_dim).map(|_| number()).collect();
        let v: Vec<f32> = (0..shape.value_dim()).map(|_| number()).collect();
        let block = table[position / block_size] as usize;
        let tile = (cache.tile_offset(0, block, head), cache.tile_len());
        let offset = position % block_size;
        let isa = Isa::Avx512Bf16;
        // SAFETY: there is one thread.
        unsafe { cache.tiles_mut().write_token(isa, tile, block_size, offset, &k, &v) };
    }
    let q: Vec<f32> = (0..rows * shape.num_heads * shape.head_dim).map(|_| number()).collect();
    let sinks: Vec<f32> = (0..shape.num_heads).map(|_| number()).collect();
    let seqs = [SeqRows {
        row_start: 0,
        num_rows: rows as u32,
        context_len: context as u32,
        table_start: 0,
        table_len: table.len() as u32,
    }];
    let batch = Batch { positions: &[], slots: &[], seqs: &seqs, block_tables: &table };
    let mut tiles = Vec::new();
    cut(&batch, &shape, &mut tiles);
    let mut scratch = AttentionScratch::new().unwrap();
    scratch.reserve(Isa::Avx512Bf16, table.len(), &cache).unwrap();
    let [dots, fused] = [false, true].map(|is_fused| {
        let mut out = vec![f32::NAN; rows * shape.num_heads * shape.value_dim()];
        let attention = Attention {
            isa: Isa::Avx512Bf16,
            shape: &shape,
            batch: &batch,
            cache: &cache,
            layer: 0,
            q: &q,
            sinks: Some(&sinks),
            out: Disjoint::new(&mut out),
        };
        for (&tile, kv_head) in
            tiles.iter().flat_map(|tile| (0..shape.num_kv_heads).map(move |head| (tile, head)))
        {
            let view = View {
                cache: &cache,
                layer: 0,
                kv_head,
                table: &table,
                block_size,
                head_dim: shape.head_dim,
                value_dim: shape.value_dim(),
            };
            // SAFETY: only called where the machine has the instructions.
            unsafe {
                avx512bf16::run_tile::<u32>(&attention, tile, &view, &mut scratch, is_fused);
            }
        }
        out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    });
    assert!(dots.iter().all(|bits| f32::from_bits(*bits).is_finite()));
    assert!(dots == fused, "{shape:?}, blocks of {block_size}, {rows} rows up to {context}");
}

#[test]
fn the_bits_are_those_of_dot_products() {
    if !Isa::Avx512Bf16.is_supported() || !have_same_bits() {
        return;
    }
    let shape = |num_heads, num_kv_heads, head_dim| AttentionShape {
        num_heads,
        num_kv_heads,
        head_dim,
        norm_eps: 1e-5,
        sliding_window: None,
        softcap: None,
        latent: None,
    };
    // One to eight queries of a row; several rows; parts of blocks at both ends.
    for (heads, rows, context) in
        [(1, 1, 100), (2, 1, 77), (3, 1, 64), (5, 1, 1), (6, 1, 1100), (7, 1, 129), (8, 1, 300)]
            .into_iter()
            .chain([(1, 23, 23), (2, 40, 555), (3, 17, 200), (4, 33, 97)])
    {
        for (head_dim, block_size) in [(64, 16), (128, 32), (80, 16), (192, 16), (64, 1024)] {
            check(shape(2 * heads, 2, head_dim), block_size, rows, context);
        }
    }
    check(AttentionShape { sliding_window: Some(50), ..shape(8, 2, 64) }, 16, 37, 230);
    check(AttentionShape { sliding_window: Some(5), ..shape(6, 1, 128) }, 16, 9, 40);
    check(AttentionShape { softcap: Some(3.0), ..shape(4, 1, 64) }, 16, 20, 150);
    // Latents: keys longer than a cache line of queries, and the values are a part of them.
    check(AttentionShape { latent: Some(512), ..shape(20, 1, 576) }, 16, 3, 200);
    check(AttentionShape { latent: Some(64), ..shape(4, 1, 1104) }, 16, 2, 90);
    // The thread's mode is as it was.
    assert!(std::hint::black_box(f32::MIN_POSITIVE) / 2.0 > 0.0);
}

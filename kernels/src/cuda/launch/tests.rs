//! Compares the host's view of every kernel with `kernels/cuda/kernels.h` itself.
use std::collections::HashMap;
use std::time::Duration;

use super::*;
use crate::backend::{
    Activation, AttentionShape, DeltaShape, ExpertActivation, KvStorage, PlainActivation, QkNorm,
    Routing, Rule,
};
use crate::cuda::group::FusedNorm;

/// Resources of each kernel, as reported by the assembler.
const RESOURCES: &str = include_str!("../../../cuda/resources.txt");
const HEADER: &str = include_str!("../../../cuda/kernels.h");

/// Bytes of each parameter of every kernel that the header declares.
fn declared() -> HashMap<String, Vec<usize>> {
    // Macros of arguments, then declarations, on one line each.
    let joined = HEADER.replace("\\\n", " ");
    let mut macros = HashMap::new();
    for line in joined.lines() {
        if let Some(rest) = line.strip_prefix("#define ")
            && let Some((name, body)) = rest.split_once(' ')
            && name.ends_with("_ARGUMENTS")
        {
            macros.insert(name.to_owned(), body.trim().to_owned());
        }
    }
    let code: String =
        joined.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join(" ");
    let mut found = HashMap::new();
    for part in code.split("__global__ void ").skip(1) {
        let (name, rest) = part.split_once('(').unwrap();
        let (parameters, _) = rest.split_once(')').unwrap();
        let mut text = parameters.to_owned();
        // A macro can use another.
        while let Some((name, body)) = macros.iter().find(|(name, _)| text.contains(*name)) {
            text = text.replace(name, body);
        }
        let sizes = text.split(',').map(size_of_parameter).collect();
        found.insert(name.trim().to_owned(), sizes);
    }
    found
}

fn size_of_parameter(text: &str) -> usize {
    if text.contains('*') || text.contains("uint64_t") {
        return 8;
    }
    assert!(text.contains("uint32_t") || text.contains("float"), "{text}");
    4
}

fn shape(head_dim: usize, num_heads: usize, num_kv_heads: usize) -> AttentionShape {
    AttentionShape {
        num_heads,
        num_kv_heads,
        head_dim,
        norm_eps: 1e-5,
        sliding_window: None,
        softcap: None,
        latent: None,
    }
}

/// Sizes of a call's operands.
#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    seqs: usize,
    width: usize,
    vocab: usize,
    heads: (usize, usize),
}

const SMALL: Sizes = Sizes { rows: 3, seqs: 3, width: 64, vocab: 100, heads: (8, 2) };
/// The largest step that the options allow, with a model larger than any known.
const LARGE: Sizes =
    Sizes { rows: 131_072, seqs: 4096, width: 65_536, vocab: 1 << 20, heads: (256, 64) };

fn work(items: usize) -> DecodeWork {
    let ptr = DevicePtr(0x1000);
    DecodeWork {
        parts: ptr,
        parts_most: 64 * items,
        live_parts: ptr,
        items: ptr,
        items_most: items,
        live_items: ptr,
    }
}

/// Every head dimension that has kernels of its own, in bf16 and in FP8.
fn every_head_dim<'a>(
    bf16: &'a AttentionIo,
    fp8: &'a AttentionIo,
) -> impl Iterator<Item = (&'a AttentionIo, usize)> {
    let of = |io, dims: &'static [usize]| dims.iter().map(move |dim| (io, *dim));
    of(bf16, &HEAD_DIMS).chain(of(fp8, &FP8_HEAD_DIMS))
}

/// Calls of every kernel.
fn all(sizes: Sizes) -> Vec<Call> {
    let Sizes { rows: number, seqs, width, vocab, heads: (heads, kv_heads) } = sizes;
    let ptr = DevicePtr(0x1000);
    let rows = Rows { ptr, stride: width };
    let int8 = Weight { scales: Some(ptr), ..rows.into() };
    let int4 = Weight { groups: Some((ptr, 7)), ..rows.into() };
    let fp8_weight = Weight { fp8: Some((ptr, 7)), ..rows.into() };
    let storage = KvStorage::AsTaken;
    let cache = LayerCache { keys: ptr, values: ptr, block_shift: 4, storage };
    let io =
        AttentionIo { q: ptr, cache, seqs: ptr, block_tables: ptr, out: ptr, sinks: Some(ptr) };
    let partials = Partials { out: ptr, ml: ptr };
    let qkv = QkvFinish {
        qkv: ptr,
        bias: None,
        q_norm: None,
        k_norm: None,
        cos: ptr,
        sin: ptr,
        q_scale: None,
        positions: ptr,
        slots: ptr,
        q_out: ptr,
        cache,
    };
    let sampling = SampleIo {
        logits: rows,
        params: ptr,
        biases: None,
        ids: None,
        masks: None,
        scratch: None,
        out: ptr,
        top: None,
        top_stride: 0,
    };
    let fused = FusedNorm {
        data: ptr,
        residual: ptr,
        weight: ptr,
        out: rows,
        width,
        eps: 1e-5,
        rows: seqs,
        live: ptr,
    };
    let norm = QkNorm {
        columns: [width, width / 4],
        sections: [2, 2],
        parts: 4,
        counts: [width, width],
        eps: 1e-5,
    };
    let mut calls = vec![
        embed(ptr, (ptr, vocab), rows, width, 0, 1.0, number, ptr),
        add_rmsnorm((ptr, None), ptr, rows, width, 1e-5, number, ptr),
        add_rmsnorm_bf16((ptr, ptr), ptr, rows, width, 1e-5, number, ptr),
        add_normed_rmsnorm(ptr, (ptr, ptr), ptr, rows, width, 1e-6, number, ptr),
        add_normed(ptr, Some((ptr, ptr)), rows, width, 1e-6, number, ptr),
        cap(ptr, 30.0, width, number, ptr),
        activate_mul(ptr, None, rows, width, Activation::GeluTanh, number, ptr),
        add_bias(ptr, ptr, width, number, ptr),
        activate(ptr, rows, width, PlainActivation::GeluTanh, number, ptr),
        add_layernorm((ptr, None), (ptr, ptr), rows, width, 1e-5, number, ptr),
        qk_squares(rows, &norm, ptr, number, ptr),
        qk_scale(rows, &norm, ptr, ptr, number, ptr),
        scale_add_bias(ptr, ptr, None, width, number, ptr),
        widen_int8(rows, ptr, number),
        widen_fp8(rows, (ptr, 7), ptr, number, width),
        widen_int4(rows, (ptr, 7), ptr, number, width),
        add(ptr, ptr, width, number, ptr),
        gather_rows(rows, ptr, rows, width, number, ptr),
        copy_columns(rows, rows, 3, width, number, ptr),
        read(ptr, ptr, number * width),
        late(ptr, ptr, number * width, Duration::from_micros(1)),
        qkv_finish(&qkv, &shape(64, heads, kv_heads), number, ptr),
        attention_any(&io, &shape(80, heads, kv_heads), ptr, number, ptr),
        sample(&sampling, vocab, seqs, None),
        logprobs(rows, ptr, ptr, None, (vocab, 0, seqs)),
        peer_sum(ptr, ptr, number * width, false),
        peer_sum(ptr, ptr, number * width, true),
        peer_gather(ptr, ptr, ptr, number * width),
        peer_sum_add_rmsnorm(ptr, &fused),
        argmax(rows, Some((ptr, ptr)), ptr, (vocab, 5), seqs, Some(ptr)),
        tree_sum(ptr, ptr, (8, number, width), ptr),
        narrow_rows(ptr, ptr, (number, width), ptr),
        widen_rows(ptr, ptr, (number, width), ptr),
        blocks_out(ptr, ptr, ptr, (number, 64, width, number * width)),
        blocks_in(ptr, ptr, ptr, (number, 64, width, number * width)),
        argmax_merge(ptr, ptr, (8, seqs), ptr),
        best_keys(rows, (ptr, ptr), ptr, (vocab, 5, 128), seqs, ptr),
        draw_best(ptr, ptr, ptr, (8, seqs, 128), ptr),
        interleave_ranks(ptr, rows, (8, seqs, vocab), ptr),
    ];
    let fp8 = LayerCache { storage: KvStorage::Fp8, ..cache };
    let fp8_io = AttentionIo { cache: fp8, ..io };
    calls.push(qkv_finish(
        &QkvFinish { cache: fp8, ..qkv },
        &shape(64, heads, kv_heads),
        number,
        ptr,
    ));
    let latent = AttentionShape { latent: Some(512), ..shape(576, heads, 1) };
    for (io, cache) in [(io, cache), (fp8_io, fp8)] {
        let finish = LatentFinish {
            q: ptr,
            kv: ptr,
            norm: ptr,
            cos: ptr,
            sin: ptr,
            positions: ptr,
            slots: ptr,
            plain_out: ptr,
            q_out: ptr,
            cache,
        };
        calls.push(latent_finish(&finish, &latent, [128, 512, 64], 1.0, number, ptr));
        calls.push(latent_attention(&io, &latent, (ptr, true), number, ptr));
        calls.extend(latent_decode(&io, &latent, &work(seqs), partials, 132));
    }
    for rows_of in [number.min(8), number.max(9)] {
        let sizes = (rows_of, heads, 512, 128);
        calls.push(heads_product(rows, rows, rows, sizes, 576, 1.0, ptr));
    }
    for key_dim in [16, 128, 256] {
        let of = DeltaShape {
            rule: if key_dim == 128 { Rule::Mamba2 } else { Rule::GatedDelta },
            key_heads: kv_heads,
            value_heads: heads,
            key_dim,
            value_dim: 256,
            kernel: 8,
        };
        let io = DeltaIo {
            qkvz: ptr,
            ba: ptr,
            conv: ptr,
            conv_bias: ptr,
            decay: ptr,
            dt_bias: ptr,
            skip: ptr,
            norm: ptr,
            slots: ptr,
            seqs: ptr,
            states: ptr,
            num_seqs: ptr,
            mixed: ptr,
            gates: ptr,
            out: rows,
        };
        calls.extend(delta_attention(&io, &of, 1e-6, (number, ptr), seqs));
    }
    calls.push(gate(ptr, rows, width, number, ptr));
    calls.push(attention_any(&fp8_io, &shape(32, heads, kv_heads), ptr, number, ptr));
    for (io, head_dim) in every_head_dim(&io, &fp8_io) {
        let shape = shape(head_dim, heads, kv_heads);
        let tiles = 2 * number * heads / kv_heads / 64 + seqs;
        calls.extend(prefill_attention(io, &shape, ptr, tiles, ptr));
        calls.extend(decode_attention(io, &shape, &work(seqs), partials, 132).unwrap());
    }
    let routing = Routing::softmax(128, 8, true);
    let most = Routing::softmax(1024, 32, false);
    for (routing, tile_slots) in SKINNY.into_iter().flat_map(|n| [(routing, n), (most, n)]) {
        let slots = (number * routing.top_k).min(8192);
        let tiles_most = experts::tiles_most(slots, tile_slots, routing.num_experts);
        let grouped =
            experts::Grouped { slots: ptr, tiles: ptr, num_tiles: ptr, tiles_most, tile_slots };
        let (top_k, silu) = (routing.top_k, ExpertActivation::Silu);
        calls.extend([
            experts::route((ptr, Some(ptr)), (ptr, ptr), &routing, number, ptr),
            experts::group(ptr, &grouped, &routing, (number, 256, tiles_most), ptr),
            experts::gate_up(rows, (rows, None), silu, rows, &grouped, (top_k, width, width)),
            experts::gate_up(rows, (int8, Some(ptr)), silu, rows, &grouped, (top_k, width, width)),
            experts::gate_up(rows, (fp8_weight, None), silu, rows, &grouped, (top_k, width, width)),
            experts::down(rows, (fp8_weight, None), rows, &grouped, (0, width, width)),
            experts::down(rows, (rows, None), rows, &grouped, (0, width, width)),
            experts::down(rows, (int8, Some(ptr)), rows, &grouped, (0, width, width)),
            experts::sum(ptr, ptr, ptr, (number, top_k, width), (number, ptr)),
            experts::assigned_rows((ptr, ptr), ptr, (number, width), (number, ptr)),
            experts::assigned_rows_bf16((ptr, ptr), rows, (number, width), (number, ptr)),
        ]);
    }
    for count in SKINNY.into_iter().chain([number]) {
        calls.push(skinny((rows, None), rows, None, rows, (count, vocab, width), ptr));
        calls.push(skinny((rows, None), int8, None, rows, (count, vocab, width), ptr));
        calls.push(skinny((rows, None), int4, None, rows, (count, vocab, width), ptr));
        calls.push(skinny((rows, None), fp8_weight, None, rows, (count, vocab, width), ptr));
        for weight in [rows.into(), int8, fp8_weight, int4] {
            let sizes = (count, width, width);
            calls.push(skinny_gate_up(rows, weight, None, rows, sizes, Activation::Silu, ptr));
        }
    }
    calls
}

#[test]
fn arguments_are_as_many_and_as_large_as_the_kernels_take() {
    let declared = declared();
    // Everything compiled is launched.
    assert_eq!(declared.len(), NAMES.len());
    let calls = all(SMALL);
    for name in NAMES {
        let sizes = declared.get(*name).unwrap_or_else(|| panic!("{name} is not declared"));
        let mut made = calls.iter().filter(|call| call.entry.name() == *name).peekable();
        assert!(made.peek().is_some(), "{name} is never called here");
        for call in made {
            assert_eq!(&call.args.sizes(), sizes, "{name}");
        }
    }
}

/// Maximum number of threads; registers and static shared memory for each architecture.
type Resources = (u32, [(u32, u32); 2]);

fn resources() -> HashMap<&'static str, Resources> {
    let lines = RESOURCES.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, numbers) = line.split_once(' ').unwrap();
            let numbers: Vec<u32> = numbers.split(' ').map(|n| n.parse().unwrap()).collect();
            let [threads, a, b, c, d] = numbers[..] else { panic!("{line}") };
            (name, (threads, [(a, b), (c, d)]))
        })
        .collect()
}

/// Rules of CUDA's programming guide for compute capability 8.0 and 9.0.
#[test]
fn no_launch_is_beyond_what_hardware_takes() {
    let resources = resources();
    for sizes in [SMALL, LARGE] {
        for call in all(sizes) {
            let (name, launch) = (call.entry.name(), call.launch);
            let (threads_max, images) = resources[name];
            let threads = launch.block.0 * launch.block.1 * launch.block.2;
            assert!(threads <= threads_max, "{name}: {threads} threads, of {threads_max}");
            let (x, y, z) = launch.grid;
            assert!(x > 0 && y > 0 && z > 0, "{name}: {launch:?}");
            assert!(x <= i32::MAX as u32 && y <= 65_535 && z <= 65_535, "{name}: {launch:?}");
            assert!(launch.shared <= call.entry.shared(), "{name}: {launch:?}");
            for ((registers, shared), most) in images.into_iter().zip([163 << 10, 227 << 10]) {
                // Registers are allocated per warp, in units of 256.
                let registers = (registers * 32).next_multiple_of(256) * threads.div_ceil(32);
                assert!(registers <= 65_536, "{name}: {registers} registers");
                assert!(shared <= 48 << 10, "{name}: {shared} bytes of static shared memory");
                // The system reserves 1 KiB of shared memory per block.
                assert!(shared + launch.shared + 1024 <= most, "{name}: {launch:?}");
            }
        }
    }
}

#[test]
fn tiles_hold_all_slots_of_every_expert_however_they_are_spread() {
    let routing = Routing::softmax(6, 2, true);
    // Each expert has all its tiles full, except the last.
    for counts in [[8, 0, 0, 0, 0, 0], [9, 9, 9, 9, 9, 1], [1; 6], [64, 65, 1, 8, 7, 0]] {
        for tile_slots in SKINNY {
            let tiles: usize = counts.iter().map(|count: &usize| count.div_ceil(tile_slots)).sum();
            let slots = counts.iter().sum();
            assert!(experts::tiles_most(slots, tile_slots, routing.num_experts) >= tiles);
        }
    }
    // Small tiles for few rows; larger ones for the rows that an expert is likely to have.
    for (rows, want) in [(1, 8), (8, 8), (40, 32), (2000, 64)] {
        assert_eq!(experts::tile_slots(rows, &routing), want, "{rows} rows");
    }
    assert_eq!(Routing::MOST, (1024, 32), "as kernels.h says");
}

#[test]
fn constants_are_the_headers() {
    for line in [
        "#define TUTTI_PREFILL_SHARED(head_dim) (320u * 2u * (head_dim))",
        "#define TUTTI_LATENT_WIDTH_MAX 576",
        "#define TUTTI_DELTA_COLUMNS 32u",
        "#define TUTTI_DELTA_KEPT 1024u",
        "#define TUTTI_LATENT_SHARED (3u * 16u * 2u * (TUTTI_LATENT_WIDTH_MAX + 8u))",
        "#define TUTTI_DECODE_BLOCKS(group) (((group) + 15u) / 16u)",
        "#define TUTTI_SKINNY_FEATURES(number) ((number) <= 16u ? 16u : 32u)",
        "#define TUTTI_BIAS_MAX 1024u",
        "#define TUTTI_TOP_MAX 128u",
        "#define TUTTI_EXPERTS_MAX 1024u",
        "#define TUTTI_QK_PARTS_MAX 64u",
        "#define TUTTI_TOP_EXPERTS_MAX 32u",
        "#define TUTTI_NO_LOGPROBS 0xffffffffu",
        "#define TUTTI_NO_MASK 0xffffffffu",
        "#define TUTTI_NO_ROW 0xffffffffu",
        "#define TUTTI_PREFILL_QUERIES 64u",
        "#define TUTTI_PART_SHIFT 8u",
    ] {
        assert!(HEADER.contains(line), "kernels.h lacks: {line}");
    }
}

#[test]
fn grids_cover_all_rows_features_and_heads() {
    let ptr = DevicePtr(0x1000);
    let rows = Rows { ptr, stride: 64 };
    for count in [1, 8, 9, 33, 64, 65, 200] {
        let call = skinny((rows, None), rows, None, rows, (count, 100, 64), ptr);
        let number = SKINNY[call.entry.0 - SKINNY_8.0];
        assert!(count <= number || number == 64);
        let features = if number <= 16 { 16 } else { 32 };
        let (x, y, _) = call.launch.grid;
        assert!(x as usize * features >= 100 && y as usize * number >= count);
        assert!((y as usize - 1) * number < count);
    }
    // Tiles are along x, so that the tiles of one expert, which are neighbours, run at about the
    // same time.
    for (tile_slots, features) in SKINNY.into_iter().zip([16, 16, 32, 32]) {
        let (tiles_most, k, silu) = (77, 64, ExpertActivation::Silu);
        let grouped =
            experts::Grouped { slots: ptr, tiles: ptr, num_tiles: ptr, tiles_most, tile_slots };
        let call = experts::gate_up(rows, (rows, None), silu, rows, &grouped, (2, 100, k));
        assert_eq!(call.launch.grid, (77, 7, 1));
        let call = experts::down(rows, (rows, None), rows, &grouped, (0, 100, k));
        assert_eq!(call.launch.grid, (77, 100usize.div_ceil(features) as u32, 1));
    }
    // 20 query heads of one KV head need two blocks.
    let io = AttentionIo {
        q: ptr,
        cache: LayerCache { keys: ptr, values: ptr, block_shift: 4, storage: KvStorage::AsTaken },
        seqs: ptr,
        block_tables: ptr,
        out: ptr,
        sinks: None,
    };
    let partials = Partials { out: ptr, ml: ptr };
    let calls = decode_attention(&io, &shape(64, 60, 3), &work(5), partials, 132).unwrap();
    // 4 at once on each of 132 multiprocessors, divided by the 6 blocks along y.
    assert_eq!(calls[0].launch.grid, (88, 6, 1));
    assert_eq!(calls[1].launch.grid, (60, 5, 1));
    let across = |items, multiprocessors| {
        let calls =
            decode_attention(&io, &shape(128, 32, 8), &work(items), partials, multiprocessors);
        calls.unwrap()[0].launch.grid.0
    };
    // Independent of the number and length of the sequences.
    assert_eq!([across(1, 132), across(64, 132), across(4096, 132)], [49, 49, 49]);
    assert_eq!([across(1, 0), across(1, 1), across(1, 10_000)], [1, 1, 64]);
    // A single KV head: with 128 parts of one sequence, nearly every multiprocessor has a block.
    let alone = [shape(128, 8, 1), shape(128, 8, 2), shape(128, 20, 1)].map(|shape| {
        (splits_of(&shape), Partials::elements(&shape, 3).1 / (2 * 3 * shape.num_heads))
    });
    assert_eq!(alone, [(128, 128), (64, 64), (64, 64)]);
    assert!(decode_attention(&io, &shape(80, 8, 2), &work(5), partials, 132).is_none());
    assert!(prefill_attention(&io, &shape(80, 8, 2), ptr, 5, ptr).is_none());
}

/// Blocks that loop over parts must all be resident at once: another would only start after one of
/// them ends.
#[test]
fn decode_attention_has_as_many_blocks_as_run_at_once() {
    let resources = resources();
    let ptr = DevicePtr(0x1000);
    let io = AttentionIo {
        q: ptr,
        cache: LayerCache { keys: ptr, values: ptr, block_shift: 4, storage: KvStorage::AsTaken },
        seqs: ptr,
        block_tables: ptr,
        out: ptr,
        sinks: None,
    };
    let fp8 = AttentionIo { cache: LayerCache { storage: KvStorage::Fp8, ..io.cache }, ..io };
    let partials = Partials { out: ptr, ml: ptr };
    for (io, head_dim) in every_head_dim(&io, &fp8) {
        let calls = decode_attention(io, &shape(head_dim, 1, 1), &work(512), partials, 1).unwrap();
        let (across, ..) = calls[0].launch.grid;
        // The registers and the shared memory of a multiprocessor.
        let images = resources[calls[0].entry.name()].1;
        let fit = |((registers, shared), memory): ((u32, u32), u32)| {
            let warp = (registers * 32).next_multiple_of(256);
            (65_536 / warp / 4).min(memory / (shared + 1024))
        };
        let fit: Vec<u32> = images.into_iter().zip([164 << 10, 228 << 10]).map(fit).collect();
        let storage = io.cache.storage;
        assert_eq!(across, fit.iter().copied().min().unwrap(), "{head_dim} {storage:?}: {fit:?}");
    }
    let latent = AttentionShape { latent: Some(512), ..shape(576, 16, 1) };
    for io in [&io, &fp8] {
        let call = &latent_decode(io, &latent, &work(512), partials, 1)[0];
        for ((registers, shared), memory) in
            resources[call.entry.name()].1.into_iter().zip([164 << 10, 228 << 10])
        {
            let warp = (registers * 32).next_multiple_of(256);
            let fit = (65_536 / warp / 8).min(memory / (shared + call.launch.shared + 1024));
            assert!(call.launch.grid.0 <= fit, "{}: {fit}", call.entry.name());
        }
    }
}

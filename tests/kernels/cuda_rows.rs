//! Emulated kernels that work on rows and blocks: embedding, SiLU, sums, copies, QKV.
use crate::cuda_emulation::{
    Arg, bf16s, f32s, launch, poison_bf16, poison_f32, read_bf16, read_f32, read_u32, rounded_all,
    some_f32s, u32s,
};
use crate::support::{ACTIVATIONS, Random, activated, assert_close, bits, fp8_value, nearest_fp8};

/// Half a unit in the last place of bf16, relative, with some margin.
const BF16: f64 = 1.01 / 256.0;

fn tiles(width: usize) -> usize {
    width.div_ceil(1024)
}

#[test]
fn embeddings_of_other_ranks_are_zero() {
    let mut random = Random(1);
    for ((width, stride), scale) in
        [(8, 8), (64, 64), (30, 32), (1028, 1032), (5, 5)].into_iter().zip([1.0, 33.75].repeat(3))
    {
        let table = rounded_all(&random.vec(6 * stride));
        // This rank has rows 10 to 15.
        let ids = [10, 15, 9, 16, 0, u32::MAX, 12, 11];
        // The last two rows are not live.
        let args = [
            u32s(&ids),
            bf16s(&table),
            poison_f32(ids.len() * width),
            Arg::U32(width as u32),
            Arg::U32(stride as u32),
            Arg::U32(10),
            Arg::U32(6),
            Arg::F32(scale),
            u32s(&[7]),
        ];
        let out = read_f32(&launch("tutti_embed", [ids.len(), 1, 1], 256).run(&args)[2]);
        for (i, row) in out.chunks(width).enumerate() {
            match ids[i] {
                _ if i == 7 => assert!(row.iter().all(|x| x.is_nan())),
                id @ 10..16 => {
                    let start = (id as usize - 10) * stride;
                    let want: Vec<f32> =
                        table[start..start + width].iter().map(|x| x * scale).collect();
                    assert_eq!(bits(row), bits(&want));
                }
                _ => assert_eq!(bits(row), vec![0; width]),
            }
        }
    }
}

#[test]
fn rows_are_narrowed_and_widened() {
    let mut random = Random(22);
    for width in [4, 63, 1, 1028, 2500] {
        let rows = 3;
        let mut values = random.vec(rows * width);
        // A tie between two neighbours, which goes to the even one, and what bf16 cannot hold.
        values[0] = f32::from_bits(0x3f80_8000);
        values[rows * width / 3] = f32::from_bits(0x3f81_8000);
        values[rows * width / 2] = f32::MAX;
        let live = [2];
        let args = [f32s(&values), poison_bf16(rows * width), Arg::U32(width as u32), u32s(&live)];
        let tiles = [rows, tiles(width), 1];
        let narrow = read_bf16(&launch("tutti_narrow_rows", tiles, 256).run(&args)[1]);
        let (live_part, rest) = narrow.split_at(2 * width);
        assert_eq!(bits(live_part), bits(&rounded_all(&values[..2 * width])), "{width}");
        assert!(rest.iter().all(|x| x.is_nan()), "not live");
        let args = [bf16s(&narrow), poison_f32(rows * width), Arg::U32(width as u32), u32s(&live)];
        let wide = read_f32(&launch("tutti_widen_rows", tiles, 256).run(&args)[1]);
        assert_eq!(bits(&wide[..2 * width]), bits(live_part), "{width}");
        assert!(wide[2 * width..].iter().all(|x| x.is_nan()), "not live");
    }
}

#[test]
fn capped_logits_are_their_definition() {
    let mut random = Random(15);
    for (width, cap) in [(1, 30.0f32), (7, 0.5), (1024, 3.0), (1030, 30.0)] {
        let rows = 3;
        let values: Vec<f32> = random.vec(rows * width).iter().map(|x| x * 50.0).collect();
        let args = [f32s(&values), Arg::F32(cap), Arg::U32(width as u32), u32s(&[2])];
        let made = read_f32(&launch("tutti_cap", [rows, tiles(width), 1], 256).run(&args)[0]);
        for (i, (made, value)) in made.iter().zip(&values).enumerate() {
            let capped = f64::from(cap) * f64::from(value / cap).tanh();
            let want = if i < 2 * width { capped } else { f64::from(*value) };
            assert_close(*made, want, want.abs() * 1e-5 + 1e-6, width);
        }
    }
}

#[test]
fn activated_times_up_is_its_definition() {
    let mut random = Random(3);
    let shapes = [(4, false), (7, true), (128, true), (1026, false), (2052, true)].into_iter();
    let cases = shapes.flat_map(|shape| ACTIVATIONS.map(|activation| (shape, activation)));
    for ((inner, with_bias), activation) in cases {
        let rows = 2;
        let stride = inner + inner % 2;
        let values: Vec<f32> =
            rounded_all(&random.vec(rows * 2 * inner)).iter().map(|x| x * 8.0).collect();
        let bias = random.vec(2 * inner);
        let args = [
            f32s(&values),
            some_f32s(with_bias.then_some(&bias)),
            poison_bf16(rows * stride),
            Arg::U32(inner as u32),
            Arg::U32(stride as u32),
            Arg::U32(u32::from(activation == ACTIVATIONS[1])),
            Arg::Null,
        ];
        let results = launch("tutti_activate_mul_f32", [rows, tiles(inner), 1], 256).run(&args);
        let out = read_bf16(results.last().unwrap());
        for row in 0..rows {
            for i in 0..inner {
                let of = |at: usize| {
                    let bias = if with_bias { f64::from(bias[at]) } else { 0.0 };
                    f64::from(values[row * 2 * inner + at]) + bias
                };
                let (gate, up) = (of(i), of(inner + i));
                let want = activated(activation, gate) * up;
                assert_close(out[row * stride + i], want, want.abs() * BF16 + 1e-6, i);
            }
        }
    }
}

#[test]
fn activated_is_its_definition() {
    let mut random = Random(6);
    for (inner, squared_relu) in [(4, 0), (7, 1), (1026, 0), (2052, 1)] {
        let (rows, stride) = (2, inner + inner % 2);
        let mut values: Vec<f32> = random.vec(rows * inner).iter().map(|x| x * 8.0).collect();
        values[inner / 2] = f32::NAN;
        let args = [
            f32s(&values),
            poison_bf16(rows * stride),
            Arg::U32(inner as u32),
            Arg::U32(stride as u32),
            Arg::U32(squared_relu),
            u32s(&[1]),
        ];
        let results = launch("tutti_activate_f32", [rows, tiles(inner), 1], 256).run(&args);
        let out = read_bf16(&results[1]);
        for i in 0..inner {
            let x = f64::from(values[i]);
            if x.is_nan() {
                assert!(out[i].is_nan(), "NaN stays NaN");
                continue;
            }
            let want = match squared_relu {
                0 => activated(ACTIVATIONS[1], x),
                _ => x.max(0.0).powi(2),
            };
            assert_close(out[i], want, want.abs() * BF16 + 1e-6, i);
            assert!(out[stride + i].is_nan(), "not live");
        }
    }
}

#[test]
fn sums_of_rows() {
    let mut random = Random(4);
    for width in [1, 4, 6, 1024, 1030, 2052] {
        let rows = 3;
        let (a, b) = (random.vec(rows * width), random.vec(rows * width));
        let bias = random.vec(width);
        let args = [f32s(&a), f32s(&b), Arg::U32(width as u32), u32s(&[2])];
        let sum = read_f32(&launch("tutti_add", [rows, tiles(width), 1], 256).run(&args)[0]);
        let args = [f32s(&a), f32s(&bias), Arg::U32(width as u32), u32s(&[2])];
        let biased =
            read_f32(&launch("tutti_add_bias", [rows, tiles(width), 1], 256).run(&args)[0]);
        for i in 0..rows * width {
            let live = i < 2 * width;
            assert_eq!(sum[i], if live { a[i] + b[i] } else { a[i] });
            assert_eq!(biased[i], if live { a[i] + bias[i % width] } else { a[i] });
        }
    }
}

/// Adds as the collectives do: each trailing 1 bit of the count so far completes a subtree.
fn tree(values: &[f32]) -> f32 {
    let mut levels: Vec<f32> = Vec::new();
    for (i, &x) in values.iter().enumerate() {
        levels.push(x);
        let mut bits = i;
        while bits & 1 == 1 {
            let last = levels.pop().unwrap();
            *levels.last_mut().unwrap() += last;
            bits >>= 1;
        }
    }
    while levels.len() > 1 {
        let last = levels.pop().unwrap();
        *levels.last_mut().unwrap() += last;
    }
    levels[0]
}

#[test]
fn ranks_are_added_as_a_tree() {
    let mut random = Random(5);
    for ranks in [1, 2, 3, 4, 5, 6, 7, 8, 16, 33, 64] {
        let (rows, width) = (2, 10);
        let part = rows * width + 4;
        let parts = random.vec(ranks * part);
        let args = [
            f32s(&parts),
            Arg::Same(0, 0),
            Arg::U32(ranks as u32),
            Arg::U64(part as u64),
            Arg::U32(width as u32),
            Arg::Null,
        ];
        let out = read_f32(&launch("tutti_tree_sum", [rows, 1, 1], 256).run(&args)[0]);
        for i in 0..rows * width {
            let terms: Vec<f32> = (0..ranks).map(|rank| parts[rank * part + i]).collect();
            assert_eq!(out[i].to_bits(), tree(&terms).to_bits(), "{ranks} ranks, element {i}");
        }
        assert_eq!(bits(&out[rows * width..]), bits(&parts[rows * width..]));
    }
}

#[test]
fn rows_and_columns_are_copied() {
    let mut random = Random(6);
    for (width, stride) in [(8, 8), (7, 7), (1028, 1032), (3, 8)] {
        let values = rounded_all(&random.vec(5 * stride));
        // The second row stays unchanged, the last one is not live.
        let rows = [4u32, u32::MAX, 4, 2];
        let args = [
            bf16s(&values),
            u32s(&rows),
            poison_bf16(rows.len() * width),
            Arg::U32(width as u32),
            Arg::U32(stride as u32),
            Arg::U32(width as u32),
            u32s(&[3]),
        ];
        let grid = [rows.len(), tiles(width), 1];
        let out = read_bf16(&launch("tutti_gather_rows", grid, 256).run(&args)[2]);
        for (i, row) in out.chunks(width).enumerate() {
            let is_copied = i < 3 && rows[i] != u32::MAX;
            assert!(match is_copied {
                true => row == &values[rows[i] as usize * stride..][..width],
                false => row.iter().all(|x| x.is_nan()),
            });
        }
    }
    let values = rounded_all(&random.vec(3 * 40));
    let args = [
        bf16s(&values),
        poison_bf16(3 * 16),
        Arg::U32(13),
        Arg::U32(10),
        Arg::U32(40),
        Arg::U32(16),
        Arg::Null,
    ];
    let out = read_bf16(&launch("tutti_copy_columns", [3, 1, 1], 256).run(&args)[1]);
    for (i, row) in out.chunks(16).enumerate() {
        assert_eq!(row[..10], values[i * 40 + 13..][..10]);
        assert!(row[10..].iter().all(|x| x.is_nan()));
    }
}

#[test]
fn ranks_logits_become_rows() {
    let mut random = Random(7);
    for (width, stride) in [(4, 12), (5, 15), (4, 13), (1028, 3084)] {
        let (ranks, rows) = (3, 2);
        let gathered = random.vec(ranks * rows * width);
        let args = [
            f32s(&gathered),
            poison_f32(rows * stride),
            Arg::U32(rows as u32),
            Arg::U32(width as u32),
            Arg::U32(stride as u32),
            Arg::Null,
        ];
        let grid = [rows, tiles(width), ranks];
        let full = read_f32(&launch("tutti_interleave_ranks", grid, 256).run(&args)[1]);
        for row in 0..rows {
            for rank in 0..ranks {
                let from = &gathered[(rank * rows + row) * width..][..width];
                assert_eq!(&full[row * stride + rank * width..][..width], from);
            }
        }
    }
}

#[test]
fn every_word_is_read_once() {
    let mut random = Random(12);
    // In units of 16 bytes; a block reads 2048 units.
    for n in [1, 256, 2047, 2048, 2049, 5000] {
        let words: Vec<u32> = random.vec(4 * n).into_iter().map(f32::to_bits).collect();
        let blocks = n.div_ceil(2048);
        let args = [u32s(&words), u32s(&vec![u32::MAX; 8 * blocks]), Arg::U32(n as u32)];
        let out = read_u32(&launch("tutti_read", [blocks, 1, 1], 256).run(&args)[1]);
        let mut want = vec![0; 8 * blocks];
        for (i, word) in words.iter().enumerate() {
            let sixteen = i / 4;
            want[sixteen / 2048 * 8 + sixteen % 256 / 32] ^= word;
        }
        assert_eq!(out, want, "{n} times 16 bytes");
    }
}

#[test]
fn what_arrives_late_arrives_whole() {
    for (words, blocks) in [(1, 1), (256, 2), (1000, 3), (1024, 2)] {
        let from: Vec<u32> = (0..words).map(|word| word * 7 + 1).collect();
        let to = u32s(&vec![u32::MAX; from.len()]);
        let args = [u32s(&from), to, Arg::U64(u64::from(words)), Arg::U64(20_000)];
        let began = std::time::Instant::now();
        let results = launch("tutti_late", [blocks, 1, 1], 256).run(&args);
        assert_eq!(read_u32(&results[1]), from);
        // Each block waits, one behind the other here.
        assert!(began.elapsed().as_nanos() >= 20_000 * blocks as u128);
    }
}

#[test]
fn blocks_are_copied_out_and_in() {
    let mut random = Random(9);
    let (planes, blocks, elements) = (3, 5, 2056);
    let plane = blocks * elements + 8;
    let cache = rounded_all(&random.vec(planes * plane));
    let block = |cache: &[f32], plane_index: usize, index: usize| {
        cache[plane_index * plane + index * elements..][..elements].to_vec()
    };
    let shape = [Arg::U64(plane as u64), Arg::U32(elements as u32), u32s(&[2])];

    let staging = poison_bf16(3 * planes * elements);
    let args = [vec![bf16s(&cache), u32s(&[4, 1, 0]), staging], shape.to_vec()].concat();
    let results = launch("tutti_blocks_out", [3, planes, 1], 256).run(&args);
    let staged = read_bf16(&results[2]);
    for (i, from) in [4, 1].into_iter().enumerate() {
        for p in 0..planes {
            assert_eq!(staged[(i * planes + p) * elements..][..elements], block(&cache, p, from));
        }
    }
    assert!(staged[2 * planes * elements..].iter().all(|x| x.is_nan()));

    let empty = poison_bf16(planes * plane);
    let args =
        [vec![empty, u32s(&[2, 0, 1]), Arg::Buffer(results[2].clone())], shape.to_vec()].concat();
    let back = read_bf16(&launch("tutti_blocks_in", [3, planes, 1], 256).run(&args)[0]);
    for p in 0..planes {
        assert_eq!(block(&back, p, 2), block(&cache, p, 4));
        assert_eq!(block(&back, p, 0), block(&cache, p, 1));
        assert!(block(&back, p, 1).iter().all(|x| x.is_nan()));
    }
}

/// One test case for the kernel that follows the QKV product.
struct Qkv {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    shift: u32,
    with_bias: bool,
    with_norms: bool,
    /// Whether the cache is in FP8.
    fp8: bool,
}

impl Qkv {
    fn check(&self, random: &mut Random) {
        let &Self { heads, kv_heads, head_dim, shift, with_bias, with_norms, fp8 } = self;
        let (rows, live, blocks, positions_max) = (4, 3, 6, 50);
        let block_size = 1usize << shift;
        let all = heads + 2 * kv_heads;
        let half = head_dim / 2;
        let qkv = random.vec(rows * all * head_dim);
        let bias = random.vec(all * head_dim);
        let (q_norm, k_norm) = (random.vec(head_dim), random.vec(head_dim));
        let (cos, sin) = (random.vec(positions_max * half), random.vec(positions_max * half));
        let q_scale: Vec<f32> = random.vec(positions_max).iter().map(|x| 1.0 + 0.5 * x).collect();
        let positions: Vec<u32> = (0..rows).map(|_| random.below(positions_max) as u32).collect();
        // Distinct slots.
        let slots: Vec<u32> =
            (0..rows).map(|i| ((i * 7 + 3) % (blocks * block_size)) as u32).collect();
        let cache_len = blocks * kv_heads * block_size * head_dim;
        let cache = match fp8 {
            true => Arg::Buffer(vec![0xff; cache_len]),
            false => poison_bf16(cache_len),
        };
        let args = [
            f32s(&qkv),
            some_f32s(with_bias.then_some(&bias)),
            some_f32s(with_norms.then_some(&q_norm)),
            some_f32s(with_norms.then_some(&k_norm)),
            f32s(&cos),
            f32s(&sin),
            some_f32s(with_bias.then_some(&q_scale)),
            u32s(&positions),
            u32s(&slots),
            poison_bf16(rows * heads * head_dim),
            cache.clone(),
            cache,
            Arg::U32(heads as u32),
            Arg::U32(kv_heads as u32),
            Arg::U32(head_dim as u32),
            Arg::U32(shift),
            Arg::F32(1e-6),
            u32s(&[live as u32]),
        ];
        let grid = [rows, all.div_ceil(8), 1];
        let name = if fp8 { "tutti_qkv_finish_fp8" } else { "tutti_qkv_finish" };
        let mut results = launch(name, grid, 256).run(&args);
        results.pop();
        let read = |bytes: &[u8]| match fp8 {
            true => bytes.iter().map(|&byte| fp8_value(byte) as f32).collect(),
            false => read_bf16(bytes),
        };
        let v_cache = read(&results.pop().unwrap());
        let k_cache = read(&results.pop().unwrap());
        let q_out = read_bf16(&results.pop().unwrap());

        let mut written = 0;
        for row in 0..live {
            for head in 0..all {
                let mut x: Vec<f64> = (0..head_dim)
                    .map(|i| {
                        let bias =
                            if with_bias { f64::from(bias[head * head_dim + i]) } else { 0.0 };
                        f64::from(qkv[(row * all + head) * head_dim + i]) + bias
                    })
                    .collect();
                let is_v = head >= heads + kv_heads;
                if with_norms && !is_v {
                    let norm = if head < heads { &q_norm } else { &k_norm };
                    let mean = x.iter().map(|x| x * x).sum::<f64>() / head_dim as f64;
                    let scale = 1.0 / (mean + 1e-6).sqrt();
                    x.iter_mut().zip(norm).for_each(|(x, &w)| *x *= scale * f64::from(w));
                }
                if !is_v {
                    for i in 0..half {
                        let at = positions[row] as usize * half + i;
                        let (c, s) = (f64::from(cos[at]), f64::from(sin[at]));
                        let (a, b) = (x[i], x[i + half]);
                        x[i] = a * c - b * s;
                        x[i + half] = b * c + a * s;
                    }
                }
                if with_bias && head < heads {
                    let scale = f64::from(q_scale[positions[row] as usize]);
                    x.iter_mut().for_each(|x| *x *= scale);
                }
                let got = if head < heads {
                    &q_out[(row * heads + head) * head_dim..][..head_dim]
                } else {
                    let kv_head = (head - heads) % kv_heads;
                    let (block, offset) =
                        (slots[row] as usize / block_size, slots[row] as usize % block_size);
                    let token = (block * kv_heads + kv_head) * block_size + offset;
                    let cache = if is_v { &v_cache } else { &k_cache };
                    written += head_dim;
                    &cache[token * head_dim..][..head_dim]
                };
                for i in 0..head_dim {
                    // Half a unit in the last of 4 places, or of the subnormal numbers.
                    let tolerance = match fp8 && head >= heads {
                        true => x[i].abs() / 16.0 + 1.0 / 1024.0 + 1e-5,
                        false => x[i].abs() * BF16 + 1e-5,
                    };
                    assert_close(got[i], x[i], tolerance, (row, head, i).2);
                }
            }
        }
        let left = k_cache.iter().chain(&v_cache).filter(|x| x.is_nan()).count();
        assert_eq!(left, 2 * cache_len - written, "other slots are written");
        assert!(q_out[live * heads * head_dim..].iter().all(|x| x.is_nan()));
    }
}

/// Numbers that pass through unchanged, so that every byte is known: those of FP8, halfway between
/// them, and beyond them.
#[test]
fn k_and_v_are_rounded_to_fp8() {
    let mut numbers: Vec<f32> = (0..127u8).map(|byte| fp8_value(byte) as f32).collect();
    let next = numbers[1..].to_vec();
    numbers.extend(next.iter().zip(numbers.clone()).map(|(a, b)| (a + b) / 2.0));
    numbers.extend([449.0, 1e4, f32::MAX, 1e-4, 1e-40, 0.1]);
    numbers.extend([f32::NAN, f32::INFINITY]);
    let head_dim = 256;
    let all: Vec<f32> = numbers.iter().flat_map(|&x| [x, -x]).collect();
    let rows = all.len().div_ceil(head_dim);
    let mut v = all.clone();
    v.resize(rows * head_dim, 1.0);
    // One head of q, of k and of v; as k, RoPE of position 0 turns nothing.
    let qkv: Vec<f32> =
        v.chunks(head_dim).flat_map(|v| [&vec![0.0; head_dim][..], v, v].concat()).collect();
    let len = rows * head_dim;
    let args = [
        f32s(&qkv),
        Arg::Null,
        Arg::Null,
        Arg::Null,
        f32s(&vec![1.0; head_dim / 2]),
        f32s(&vec![0.0; head_dim / 2]),
        Arg::Null,
        u32s(&vec![0; rows]),
        u32s(&(0..rows as u32).collect::<Vec<_>>()),
        poison_bf16(len),
        Arg::Buffer(vec![0; len]),
        Arg::Buffer(vec![0; len]),
        Arg::U32(1),
        Arg::U32(1),
        Arg::U32(head_dim as u32),
        Arg::U32(0),
        Arg::F32(1e-6),
        Arg::Null,
    ];
    let results = launch("tutti_qkv_finish_fp8", [rows, 1, 1], 256).run(&args);
    let caches = results.iter().rev().filter(|bytes| bytes.len() == len).take(2);
    for (cache, what) in caches.zip(["V", "K"]) {
        for (&x, &byte) in all.iter().zip(cache) {
            match x.is_finite() {
                // RoPE adds products with zero, which turn -0 into 0.
                _ if x == 0.0 => assert_eq!(byte & 0x7f, 0, "{what}"),
                true => assert_eq!(byte, nearest_fp8(x.into()), "{what}: {x:e}"),
                // In K, RoPE multiplies infinity by zero.
                false => assert_eq!(byte & 0x7f, 0x7f, "{what}: {x}"),
            }
        }
    }
}

#[test]
fn qkv_is_finished_and_written() {
    let mut random = Random(10);
    for (heads, kv_heads, head_dim, shift) in
        [(4, 2, 16, 2), (3, 1, 64, 4), (8, 8, 128, 4), (2, 2, 96, 0), (5, 1, 256, 5), (2, 1, 6, 1)]
    {
        for (with_bias, with_norms) in [(false, false), (true, true)] {
            let fp8 = false;
            Qkv { heads, kv_heads, head_dim, shift, with_bias, with_norms, fp8 }.check(&mut random);
        }
    }
    for (heads, kv_heads, head_dim, shift) in [(4, 2, 16, 2), (5, 1, 256, 5)] {
        let (with_bias, with_norms, fp8) = (true, true, true);
        Qkv { heads, kv_heads, head_dim, shift, with_bias, with_norms, fp8 }.check(&mut random);
    }
}

//! Emulated kernels of multi-head latent attention, with their definitions in f64, on a cache that
//! is NaN except where the batch has tokens.
use crate::cuda_emulation::{
    Arg, Launch, bf16s, f32s, launch, poison_bf16, poison_f32, read_bf16, read_u32, rounded_all,
    u32s,
};
use crate::support::{Random, assert_close, bits, fp8_value, nearest_fp8, rounded_fp8};

/// Half a unit in the last place of bf16, relative, with some margin.
const BF16: f64 = 1.01 / 256.0;

fn n(n: usize) -> Arg {
    Arg::U32(n as u32)
}

/// Values as the cache holds them, `NaN` included.
fn stored(values: &[f32], fp8: bool) -> Arg {
    match fp8 {
        true => Arg::Buffer(
            values.iter().map(|&x| if x.is_nan() { 0x7f } else { nearest_fp8(x.into()) }).collect(),
        ),
        false => bf16s(values),
    }
}

#[test]
fn latents_are_normalised_and_shared_parts_rotated() {
    let mut random = Random(61);
    for (heads, plain, latent, rotated, fp8) in
        [(3, 8, 32, 16, false), (9, 24, 48, 16, true), (1, 128, 512, 64, false)]
    {
        let (rows, slots_most, width, half) = (3, 8, latent + rotated, rotated / 2);
        let q = random.vec(rows * heads * (plain + rotated));
        let kv = random.vec(rows * width);
        let norm = random.vec(latent);
        let (cos, sin) = (random.vec(5 * half), random.vec(5 * half));
        let (positions, slots) = ([4, 0, 2], [7, 3, 0]);
        let scale = 1.5f32;
        let cache = match fp8 {
            true => Arg::Buffer(vec![0x7f; slots_most * width]),
            false => poison_bf16(slots_most * width),
        };
        let args = [
            f32s(&q),
            f32s(&kv),
            f32s(&norm),
            f32s(&cos),
            f32s(&sin),
            u32s(&positions),
            u32s(&slots),
            poison_bf16(rows * heads * plain),
            poison_bf16(rows * heads * width),
            cache,
            n(heads),
            n(plain),
            n(latent),
            n(rotated),
            Arg::F32(1e-6),
            Arg::F32(scale),
            u32s(&[2]),
        ];
        let name = if fp8 { "tutti_latent_finish_fp8" } else { "tutti_latent_finish" };
        let made = launch(name, [rows, (heads + 1usize).div_ceil(8), 1], 256).run(&args);
        let (plain_out, q_out) = (read_bf16(&made[7]), read_bf16(&made[8]));
        let cached: Vec<f64> = match fp8 {
            true => made[9].iter().map(|&byte| fp8_value(byte)).collect(),
            false => read_bf16(&made[9]).into_iter().map(f64::from).collect(),
        };
        let rotate = |x: &[f32], row: usize, i: usize| {
            let table = positions[row] as usize * half + i % half;
            let (cos, sin) = (f64::from(cos[table]), f64::from(sin[table]));
            let [a, b] = [x[i % half], x[i % half + half]].map(f64::from);
            if i < half { a * cos - b * sin } else { b * cos + a * sin }
        };
        let close = |got: f64, want: f64, what: &str| {
            let step = if fp8 && what == "cache" { 1.0 / 15.0 } else { BF16 };
            assert_close(got as f32, want, want.abs() * step + 2e-3, what);
        };
        for row in 0..rows {
            let token = &cached[slots[row] as usize * width..][..width];
            if row == 2 {
                assert!(token.iter().all(|x| x.is_nan()), "not live");
                assert!(plain_out[row * heads * plain..].iter().all(|x| x.is_nan()), "not live");
                continue;
            }
            let own = &kv[row * width..][..width];
            let squares: f64 = own[..latent].iter().map(|&x| f64::from(x).powi(2)).sum();
            let rms = (squares / latent as f64 + 1e-6).sqrt();
            for i in 0..latent {
                let want = f64::from(own[i]) / rms * f64::from(norm[i]);
                close(token[i], if fp8 { rounded_fp8(want) } else { want }, "cache");
            }
            for i in 0..rotated {
                close(token[latent + i], rotate(&own[latent..], row, i), "cache");
            }
            for head in 0..heads {
                let at = row * heads + head;
                let own = &q[at * (plain + rotated)..][..plain + rotated];
                let rounded = rounded_all(&own[..plain]);
                assert_eq!(bits(&plain_out[at * plain..][..plain]), bits(&rounded));
                let out = &q_out[at * width..][..width];
                assert!(out[..latent].iter().all(|x| x.is_nan()), "written by the product");
                for i in 0..rotated {
                    let want = rotate(&own[plain..], row, i) * f64::from(scale);
                    close(out[latent + i].into(), want, "q");
                }
            }
        }
        let written: Vec<usize> =
            (0..slots_most).filter(|at| !cached[at * width].is_nan()).collect();
        assert_eq!(written, [3, 7]);
    }
}

#[test]
fn every_head_has_a_matrix_of_its_own() {
    let mut random = Random(62);
    for (rows, live, heads, count, k) in
        [(3, 2, 3, 20, 24), (13, 13, 2, 130, 40), (40, 37, 2, 16, 64), (1, 1, 1, 512, 128)]
    {
        let (head_stride, stride) = (count + 3, heads * (count + 3) + 5);
        let (x_stride, w_stride) = (heads * k + 8, k + 8);
        // What lies behind a row must not count.
        let padded = |values: &[f32], width: usize, stride: usize| -> Vec<f32> {
            let row = |row: &[f32]| [row, &vec![f32::NAN; stride - width]].concat();
            values.chunks(width).flat_map(row).collect()
        };
        let x = rounded_all(&random.vec(rows * heads * k));
        let w = rounded_all(&random.vec(heads * count * k));
        let args = [
            bf16s(&padded(&x, heads * k, x_stride)),
            bf16s(&padded(&w, k, w_stride)),
            poison_bf16(rows * stride),
            n(rows),
            n(count),
            n(k),
            n(x_stride),
            n(w_stride),
            n(stride),
            n(head_stride),
            Arg::F32(0.5),
            u32s(&[live as u32]),
        ];
        let run = |most: usize| {
            let grid = [rows.div_ceil(most), count.div_ceil(128), heads];
            let name = format!("tutti_heads_product_{most}");
            read_bf16(&launch(&name, grid, 256).run(&args)[2])
        };
        let out = run(8);
        assert_eq!(bits(&out), bits(&run(32)), "whatever is computed together");
        for (at, &got) in out.iter().enumerate() {
            let (row, column) = (at / stride, at % stride);
            let (head, feature) = (column / head_stride, column % head_stride);
            if row >= live || head >= heads || feature >= count {
                assert!(got.is_nan(), "row {row}, column {column} is written");
                continue;
            }
            let x = &x[(row * heads + head) * k..][..k];
            let w = &w[(head * count + feature) * k..][..k];
            let want: f64 = x.iter().zip(w).map(|(x, w)| 0.5 * f64::from(x * w)).sum();
            assert_close(got, want, want.abs() * BF16 + 1e-4, format!("{row}, {column}"));
        }
    }
}

/// A launch with TUTTI_LATENT_SHARED.
fn attention(kernel: &str, grid: [usize; 3]) -> Launch<'_> {
    Launch { shared: 3 * 16 * 2 * (576 + 8), ..launch(kernel, grid, 256) }
}

/// A sequence: its rows, its tokens.
type Seq = (usize, usize);

struct Attention {
    heads: usize,
    latent: usize,
    rotated: usize,
    shift: u32,
    window: usize,
    fp8: bool,
}

impl Attention {
    fn width(&self) -> usize {
        self.latent + self.rotated
    }

    fn name(&self, which: &str) -> String {
        format!("tutti_latent_{which}{}", if self.fp8 { "_fp8" } else { "" })
    }

    /// Where sequences' tokens are: the cache, block tables, and what kernels know of sequences.
    fn place(
        &self,
        random: &mut Random,
        seqs: &[Seq],
        keys: &[Vec<f32>],
    ) -> (Vec<f32>, Vec<u32>, Vec<u32>) {
        let (width, size) = (self.width(), 1usize << self.shift);
        let lens: Vec<usize> = seqs.iter().map(|(_, context)| context.div_ceil(size) + 1).collect();
        let blocks = lens.iter().sum::<usize>() + 1;
        let mut free = crate::attention::shuffled(random, blocks);
        let mut cache = vec![f32::NAN; blocks * size * width];
        let (mut tables, mut metadata, mut row) = (vec![u32::MAX; 2], Vec::new(), 0);
        for ((&(rows, context), len), keys) in seqs.iter().zip(lens).zip(keys) {
            let table = free.split_off(free.len() - len);
            for position in 0..context {
                let at = table[position / size] as usize * size + position % size;
                cache[at * width..][..width].copy_from_slice(&keys[position * width..][..width]);
            }
            metadata.extend([row, rows, context, tables.len(), len].map(|n| n as u32));
            tables.extend(table);
            row += rows;
        }
        (cache, tables, metadata)
    }

    /// Results of all rows. `keys` has every sequence's tokens, `queries` every row's heads.
    fn run(
        &self,
        random: &mut Random,
        seqs: &[Seq],
        keys: &[Vec<f32>],
        queries: &[Vec<f32>],
    ) -> Vec<f32> {
        self.run_some(random, seqs, keys, queries, false)
    }

    /// The same, without sequences of one row if that is true.
    fn run_some(
        &self,
        random: &mut Random,
        seqs: &[Seq],
        keys: &[Vec<f32>],
        queries: &[Vec<f32>],
        skips_single: bool,
    ) -> Vec<f32> {
        let (width, row) = (self.width(), seqs.iter().map(|(rows, _)| rows).sum::<usize>());
        let (cache, tables, metadata) = self.place(random, seqs, keys);
        let args = [
            bf16s(&queries.concat()),
            stored(&cache, self.fp8),
            u32s(&metadata),
            u32s(&[seqs.len() as u32]),
            u32s(&tables),
            poison_bf16((row + 1) * self.heads * self.latent),
            n(self.heads),
            n(self.latent),
            n(self.rotated),
            Arg::U32(self.shift),
            n(self.window),
            Arg::F32(1.0 / (width as f32).sqrt()),
            n(usize::from(skips_single)),
            u32s(&[row as u32]),
        ];
        let made =
            attention(&self.name("attention"), [row + 1, self.heads.div_ceil(16), 1]).run(&args);
        let mut out = read_bf16(&made[5]);
        let behind = out.split_off(row * self.heads * self.latent);
        assert!(behind.iter().all(|x| x.is_nan()), "not live");
        assert_eq!(read_u32(&made[3]), [seqs.len() as u32]);
        out
    }

    /// Results of sequences of one row, split into parts of at least `least` tokens.
    fn decode(
        &self,
        random: &mut Random,
        seqs: &[Seq],
        keys: &[Vec<f32>],
        queries: &[Vec<f32>],
        least: usize,
    ) -> Vec<f32> {
        let (width, max_splits) = (self.width(), 5);
        let (cache, tables, metadata) = self.place(random, seqs, keys);
        let parts: Vec<u32> = (0..)
            .zip(seqs)
            .flat_map(|(index, &(_, context))| {
                let visible = if self.window == 0 { context } else { self.window };
                let tokens = context - context.saturating_sub(visible) / 16 * 16;
                let len = tokens.div_ceil(max_splits).next_multiple_of(16).max(least);
                (0..tokens.div_ceil(len)).map(move |split| index << 8 | split as u32)
            })
            .collect();
        assert!(least > 16 || parts.len() > seqs.len(), "nothing is split");
        let slots = seqs.len() * self.heads * max_splits;
        let args = [
            bf16s(&queries.concat()),
            stored(&cache, self.fp8),
            u32s(&metadata),
            u32s(&parts),
            u32s(&tables),
            poison_f32(slots * self.latent),
            poison_f32(slots * 2),
            poison_bf16(seqs.len() * self.heads * self.latent),
            n(self.heads),
            n(self.latent),
            n(self.rotated),
            Arg::U32(self.shift),
            n(self.window),
            n(max_splits),
            n(least),
            Arg::F32(1.0 / (width as f32).sqrt()),
            u32s(&[parts.len() as u32]),
        ];
        let made = attention(&self.name("decode"), [2, self.heads.div_ceil(16), 1]).run(&args);
        let items: Vec<u32> = (0..seqs.len() as u32).collect();
        let args = [
            Arg::Buffer(made[5].clone()),
            Arg::Buffer(made[6].clone()),
            u32s(&metadata),
            u32s(&items),
            Arg::Buffer(made[7].clone()),
            n(self.heads),
            n(self.latent),
            n(self.window),
            n(max_splits),
            n(least),
            Arg::Null,
        ];
        let reduce = launch("tutti_decode_reduce", [self.heads, seqs.len(), 1], 128);
        read_bf16(&reduce.run(&args)[4])
    }

    fn want(&self, keys: &[f32], query: &[f32], position: usize) -> Vec<f64> {
        let width = self.width();
        let first = if self.window == 0 { 0 } else { (position + 1).saturating_sub(self.window) };
        let key = |at: usize| &keys[at * width..][..width];
        let scores: Vec<f64> = (first..=position)
            .map(|at| {
                let terms = query.iter().zip(key(at)).map(|(&q, &k)| f64::from(q) * f64::from(k));
                terms.sum::<f64>() / (width as f64).sqrt()
            })
            .collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let total: f64 = weights.iter().sum();
        let of = |d: usize| -> f64 {
            let all = weights.iter().zip(first..=position);
            all.map(|(weight, at)| weight * f64::from(key(at)[d])).sum()
        };
        (0..self.latent).map(|d| of(d) / total).collect()
    }
}

#[test]
fn attention_takes_values_from_its_keys() {
    let mut random = Random(63);
    let small =
        |shift, window, fp8| Attention { heads: 19, latent: 32, rotated: 16, shift, window, fp8 };
    let real = Attention { heads: 3, latent: 512, rotated: 64, shift: 4, window: 0, fp8: false };
    for (shape, seqs) in [
        (small(4, 0, false), &[(3, 20), (1, 1), (2, 33)][..]),
        (small(1, 7, false), &[(2, 19), (1, 40)]),
        (small(6, 0, true), &[(1, 37), (2, 2)]),
        // Each buffer is used again and again, from within a tile on.
        (small(3, 50, false), &[(1, 119)]),
        (small(4, 50, true), &[(2, 131)]),
        (real, &[(2, 21)]),
    ] {
        let width = shape.width();
        let kept = |values: Vec<f32>| match shape.fp8 {
            true => values.iter().map(|&x| rounded_fp8(x.into()) as f32).collect(),
            false => rounded_all(&values),
        };
        let keys: Vec<Vec<f32>> =
            seqs.iter().map(|(_, context)| kept(random.vec(context * width))).collect();
        let queries: Vec<Vec<f32>> = seqs
            .iter()
            .map(|(rows, _)| {
                let peaked = random.vec(rows * shape.heads * width).into_iter().map(|x| 4.0 * x);
                rounded_all(&peaked.collect::<Vec<f32>>())
            })
            .collect();
        let out = shape.run(&mut random, seqs, &keys, &queries);
        let mut results = out.chunks(shape.heads * shape.latent);
        if seqs.iter().any(|(rows, _)| *rows == 1) {
            let some = shape.run_some(&mut random, seqs, &keys, &queries, true);
            let mut some = some.chunks(shape.heads * shape.latent).zip(results.clone());
            for &(rows, _) in seqs {
                for (got, want) in some.by_ref().take(rows) {
                    let is_skipped = got.iter().all(|x| x.is_nan());
                    assert!(if rows == 1 { is_skipped } else { bits(got) == bits(want) });
                }
            }
        }
        for (index, &(rows, context)) in seqs.iter().enumerate() {
            let mut last = Vec::new();
            for row in 0..rows {
                last = results.next().unwrap().to_vec();
                for head in 0..shape.heads {
                    let query = &queries[index][(row * shape.heads + head) * width..][..width];
                    let want = shape.want(&keys[index], query, context - rows + row);
                    let got = &last[head * shape.latent..][..shape.latent];
                    for (&got, want) in got.iter().zip(want) {
                        // Weights are rounded, too.
                        let what = format!("sequence {index}, row {row}, head {head}");
                        assert_close(got, want, 2.0 * BF16 * want.abs() + 6e-3, what);
                    }
                }
            }
            // Alone, and as a decode step: the same bits.
            let own = &queries[index][(rows - 1) * shape.heads * width..];
            let alone = [(1, context)];
            let (keys, own) = (&keys[index..=index], [own.to_vec()]);
            let again = shape.run(&mut random, &alone, keys, &own);
            assert_eq!(bits(&last), bits(&again), "sequence {index}");
            let whole = shape.decode(&mut random, &alone, keys, &own, 64);
            assert_eq!(bits(&last), bits(&whole), "sequence {index}, as one part");
            if context > 32 && shape.window == 0 {
                let split = shape.decode(&mut random, &alone, keys, &own, 16);
                for (&got, &want) in split.iter().zip(&last) {
                    assert_close(got, want.into(), 0.01, index);
                }
            }
        }
    }
}

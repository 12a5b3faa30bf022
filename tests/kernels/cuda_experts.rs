//! Emulated kernels for mixtures of experts. Choices, groups and sums are compared with their
//! definitions; products of slots with sums in f64, and they must have the same bits in every
//! variant.
use kernels::backend::ExpertActivation;

use crate::cuda_emulation::{
    Arg, bf16s, f32s, launch, poison_bf16, poison_f32, read_bf16, read_f32, read_u32, rounded_all,
    some_f32s, u32s,
};
use crate::cuda_fp8::Fp8;
use crate::cuda_int8::Int8;
use crate::support::{Random, assert_close, bits, expert_activated};

/// Runs `tutti_route`.
fn route(logits: &[f32], experts: usize, top_k: usize, normalise: bool, live: Arg) -> Chosen {
    route_with(logits, Arg::Null, (experts, top_k, 0), (u32::from(normalise), 1.0, (1, 1)), live)
}

/// The same with all arguments: a bias, how many experts can be chosen, are, and are shared, flags,
/// a factor, and how many groups there are and are kept.
fn route_with(
    logits: &[f32],
    bias: Arg,
    (experts, chosen, shared): (usize, usize, usize),
    (flags, scale, (groups, kept)): (u32, f32, (usize, usize)),
    live: Arg,
) -> Chosen {
    let rows = logits.len() / (experts + usize::from(flags & GATED != 0));
    let args = [
        f32s(logits),
        bias,
        poison_f32(rows * (chosen + shared)),
        poison_f32(rows * (chosen + shared)),
        Arg::U32(experts as u32),
        Arg::U32(chosen as u32),
        Arg::U32(shared as u32),
        Arg::U32(groups as u32),
        Arg::U32(kept as u32),
        Arg::U32(flags),
        Arg::F32(scale),
        live,
    ];
    let results = launch("tutti_route", [rows, 1, 1], 32).run(&args);
    // There are results of buffers only.
    let first = if matches!(args[1], Arg::Null) { 1 } else { 2 };
    (read_u32(&results[first]), read_f32(&results[first + 1]))
}

/// Flags, as in kernels.h.
const NORMALISE: u32 = 1;
const SIGMOID: u32 = 2;
const GATED: u32 = 4;

type Chosen = (Vec<u32>, Vec<f32>);

#[test]
fn rows_choose_the_largest_ties_by_number() {
    let mut random = Random(71);
    for (experts, top_k, normalise) in
        [(1, 1, true), (3, 3, false), (40, 8, true), (128, 8, false), (1024, 32, true)]
    {
        let rows = 3;
        // Few distinct values, so that many are equal.
        let logits: Vec<f32> =
            (0..rows * experts).map(|_| random.below(experts / 2 + 2) as f32 * 0.25).collect();
        let (chosen, weights) = route(&logits, experts, top_k, normalise, u32s(&[2]));
        for row in 0..rows {
            let own = row * top_k..(row + 1) * top_k;
            if row == 2 {
                assert!(chosen[own].iter().all(|expert| *expert == u32::MAX), "not live");
                continue;
            }
            let logits = &logits[row * experts..][..experts];
            let mut want: Vec<u32> = (0..experts as u32).collect();
            want.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
            want.truncate(top_k);
            assert_eq!(chosen[own.clone()], want, "{experts} {top_k}");
            let e = |expert: u32| f64::from(logits[expert as usize]).exp();
            let sum: f64 = match normalise {
                true => want.iter().map(|expert| e(*expert)).sum(),
                false => (0..experts as u32).map(e).sum(),
            };
            for (expert, weight) in want.into_iter().zip(&weights[own]) {
                assert_close(*weight, e(expert) / sum, 1e-6, "weight");
            }
        }
    }
}

#[test]
fn what_is_not_a_number_is_chosen_last() {
    let logits = [f32::NAN, 1.0, f32::NAN, f32::NEG_INFINITY, 2.0];
    let (chosen, weights) = route(&logits, 5, 5, true, Arg::Null);
    assert_eq!(chosen, [4, 1, 0, 2, 3]);
    let e = std::f64::consts::E;
    assert_close(weights[0], e / (e + 1.0), 1e-6, "the larger one");
}

#[test]
fn rows_choose_of_their_best_groups_and_shared_experts_follow() {
    let mut random = Random(72);
    let sigmoid = |x: f32| 1.0 / (1.0 + (-f64::from(x)).exp());
    for (experts, chosen, shared, flags, scale, (groups, kept)) in [
        (60, 4, 4, GATED, 1.0, (1, 1)),
        (5, 2, 1, GATED | NORMALISE, 1.0, (1, 1)),
        (128, 8, 1, SIGMOID | NORMALISE, 2.5, (1, 1)),
        (40, 30, 2, SIGMOID, 0.5, (1, 1)),
        (160, 6, 2, 0, 16.0, (8, 3)),
        (256, 8, 1, SIGMOID | NORMALISE, 2.5, (8, 4)),
        (96, 5, 0, SIGMOID, 1.0, (32, 2)),
    ] {
        let (rows, top_k) = (3, chosen + shared);
        let width = experts + usize::from(flags & GATED != 0);
        let logits = random.vec(rows * width);
        let bias = random.vec(experts);
        let of = if flags & SIGMOID == 0 { Arg::Null } else { f32s(&bias) };
        let sizes = (experts, chosen, shared);
        let (found, weights) =
            route_with(&logits, of, sizes, (flags, scale, (groups, kept)), u32s(&[2]));
        assert!(found[2 * top_k..].iter().all(|expert| *expert == u32::MAX), "not live");
        for row in 0..2 {
            let logits = &logits[row * width..][..width];
            let (found, weights) = (&found[row * top_k..], &weights[row * top_k..]);
            let (score, key): (Vec<f64>, Vec<f64>) = (0..experts)
                .map(|i| match flags & SIGMOID {
                    0 => (f64::from(logits[i]).exp(), f64::from(logits[i])),
                    _ => (sigmoid(logits[i]), sigmoid(logits[i]) + f64::from(bias[i])),
                })
                .unzip();
            let size = experts / groups;
            let score_of = |group: &usize| -> f64 {
                let mut own = key[group * size..(group + 1) * size].to_vec();
                own.sort_by(|a, b| b.total_cmp(a));
                own[..if flags & SIGMOID == 0 { 1 } else { 2.min(size) }].iter().sum()
            };
            let mut best: Vec<usize> = (0..groups).collect();
            best.sort_by(|a, b| score_of(b).total_cmp(&score_of(a)));
            let is_kept = |expert: &usize| best[..kept].contains(&(expert / size));
            let mut want: Vec<usize> = (0..experts).filter(is_kept).collect();
            want.sort_by(|a, b| key[*b].total_cmp(&key[*a]));
            want.truncate(chosen);
            let sum: f64 = match flags & (SIGMOID | NORMALISE) {
                0 => score.iter().sum(),
                SIGMOID => 1.0,
                _ => want.iter().map(|expert| score[*expert]).sum(),
            };
            for (i, expert) in want.into_iter().enumerate() {
                assert_eq!(found[i] as usize, expert, "{experts} {chosen}");
                let weight = score[expert] / sum * f64::from(scale);
                assert_close(weights[i], weight, 1e-5, "weight");
            }
            let gate = if flags & GATED == 0 { 1.0 } else { sigmoid(logits[experts]) };
            for i in 0..shared {
                assert_eq!(found[chosen + i] as usize, experts + i);
                assert_close(weights[chosen + i], gate, 1e-6, "gate");
            }
        }
    }
}

/// The tiles that `tutti_group_experts` builds for one chunk: (expert, slots) each.
type Tiles = Vec<(u32, Vec<u32>)>;

struct Group<'a> {
    experts: &'a [u32],
    top_k: usize,
    num_experts: usize,
    chunk_rows: usize,
    tile_slots: usize,
    live: Option<usize>,
}

impl Group<'_> {
    fn stride(&self) -> usize {
        let slots = self.chunk_rows * self.top_k;
        slots.min(slots / self.tile_slots + self.num_experts)
    }

    /// The slots, the tiles and the numbers of tiles, as the kernel leaves them.
    fn run(&self) -> [Vec<u32>; 3] {
        let rows = self.experts.len() / self.top_k;
        let chunks = rows.div_ceil(self.chunk_rows);
        let stride = self.stride();
        let mut args = vec![
            u32s(self.experts),
            poison_f32(self.experts.len()),
            poison_f32(chunks * stride * 3),
            poison_f32(chunks),
        ];
        let sizes = [rows, self.top_k, self.num_experts, self.chunk_rows, self.tile_slots, stride];
        args.extend(sizes.map(|n| Arg::U32(n as u32)));
        args.push(self.live.map_or(Arg::Null, |live| u32s(&[live as u32])));
        let results = launch("tutti_group_experts", [chunks, 1, 1], 1024).run(&args);
        [1, 2, 3].map(|i| read_u32(&results[i]))
    }

    fn tiles(&self) -> Vec<Tiles> {
        let [slots, tiles, counts] = self.run();
        let chunk = |(index, count): (usize, &u32)| {
            let own = tiles[index * self.stride() * 3..].as_chunks::<3>().0;
            own[..*count as usize]
                .iter()
                .map(|&[expert, first, len]| {
                    (expert, slots[first as usize..][..len as usize].to_vec())
                })
                .collect()
        };
        counts.iter().enumerate().map(chunk).collect()
    }
}

#[test]
fn groups_have_every_live_slot_once_by_expert() {
    let mut random = Random(72);
    for (rows, top_k, num_experts, chunk_rows, tile_slots, live) in [
        (1, 8, 128, 1024, 8, None),
        (1, 1, 1, 1, 8, None),
        (70, 2, 5, 32, 8, None),
        (64, 3, 40, 64, 16, Some(13)),
        (50, 4, 1024, 20, 64, Some(20)),
        (30, 1, 2, 30, 8, Some(0)),
    ] {
        let experts: Vec<u32> = (0..rows)
            .flat_map(|_| {
                // Different experts within a row.
                let first = random.below(num_experts);
                (0..top_k).map(move |j| ((first + j * 7) % num_experts) as u32)
            })
            .collect();
        let group = Group { experts: &experts, top_k, num_experts, chunk_rows, tile_slots, live };
        let live = live.unwrap_or(rows).min(rows);
        for (index, tiles) in group.tiles().into_iter().enumerate() {
            let first = (index * chunk_rows).min(live) * top_k;
            let end = ((index + 1) * chunk_rows).min(live) * top_k;
            let mut want: Vec<u32> = (first as u32..end as u32).collect();
            want.sort_by_key(|slot| experts[*slot as usize]);
            let all: Vec<u32> = tiles.iter().flat_map(|tile| tile.1.clone()).collect();
            assert_eq!(all, want, "{rows} rows, chunk {index}");
            assert!(tiles.len() <= group.stride());
            for (i, (expert, slots)) in tiles.iter().enumerate() {
                assert!((1..=tile_slots).contains(&slots.len()));
                assert!(slots.iter().all(|slot| experts[*slot as usize] == *expert));
                // Only the last tile of an expert may be partly filled.
                let next = tiles.get(i + 1).map(|tile| tile.0);
                assert!(slots.len() == tile_slots || next != Some(*expert));
            }
        }
    }
}

/// Slots of 5 experts, 2 per row.
struct Products {
    rows: usize,
    k: usize,
    experts: Vec<u32>,
    x: Vec<f32>,
    w: Vec<f32>,
    /// Quantised weights instead.
    quantised: Option<Quantised>,
}

enum Quantised {
    Int8(Int8),
    Fp8(Fp8),
}

#[derive(Clone, Copy, PartialEq)]
enum Form {
    Bf16,
    Int8,
    /// With this many inputs per scale, as a logarithm.
    Fp8(u32),
}

const EXPERTS: usize = 5;

impl Products {
    fn random(random: &mut Random, rows: usize, inner: usize, k: usize) -> Self {
        // One expert has most slots, one has none.
        let experts = (0..rows).flat_map(|row| [0, 1 + (row % 3) as u32]).collect();
        let x = rounded_all(&random.vec(rows * k));
        let w = rounded_all(&random.vec(EXPERTS * 2 * inner * k));
        Self { rows, k, experts, x, w, quantised: None }
    }

    /// The same with different weights, unless they are to be bf16.
    fn in_form(mut self, random: &mut Random, form: Form) -> Self {
        let (rows, k) = (self.w.len() / self.k, self.k);
        self.quantised = match form {
            Form::Bf16 => None,
            Form::Int8 => Some(Quantised::Int8(Int8::random(random, rows, k))),
            Form::Fp8(shift) => Some(Quantised::Fp8(Fp8::random(random, rows, k, shift))),
        };
        self
    }

    /// The weights with their scales, and their stride.
    fn weights(&self) -> (Vec<Arg>, Arg) {
        let (w, scales, stride) = match &self.quantised {
            None => {
                let (w, stride) = Self::padded(&self.w, self.k);
                return (vec![w], stride);
            }
            Some(Quantised::Int8(int8)) => int8.args(),
            Some(Quantised::Fp8(fp8)) => fp8.args(),
        };
        (vec![w, scales], stride)
    }

    /// For tiles of `number` slots: the name of this family's kernel, the number of slots that it
    /// takes, and the number of buffers before its result.
    fn kernel(&self, family: &str, number: usize) -> (String, usize, usize) {
        match self.quantised {
            None => (format!("tutti_experts_{family}_{number}"), number, 2),
            Some(Quantised::Int8(_)) => {
                (format!("tutti_experts_{family}_int8_{number}"), number, 3)
            }
            Some(Quantised::Fp8(_)) => {
                let most = number.min(32);
                (format!("tutti_experts_{family}_fp8_{most}"), most, 3)
            }
        }
    }

    /// The argument that only kernels for FP8 take.
    fn shift(&self) -> Option<Arg> {
        match &self.quantised {
            Some(Quantised::Fp8(fp8)) => Some(Arg::U32(fp8.shift)),
            _ => None,
        }
    }

    fn padded(values: &[f32], width: usize) -> (Arg, Arg) {
        let stride = width.next_multiple_of(8) + 8;
        let padding = vec![f32::NAN; stride - width];
        let rows = values.chunks(width).flat_map(|row| [row, &padding].concat());
        (bf16s(&rows.collect::<Vec<_>>()), Arg::U32(stride as u32))
    }

    fn grouped(&self, tile_slots: usize, live: usize) -> ([Arg; 3], usize) {
        let group = Group {
            experts: &self.experts,
            top_k: 2,
            num_experts: EXPERTS,
            chunk_rows: self.rows,
            tile_slots,
            live: Some(live),
        };
        (group.run().map(|words| u32s(&words)), group.stride())
    }

    fn dot(&self, x: &[f32], row: usize) -> (f64, f64) {
        match &self.quantised {
            Some(Quantised::Int8(int8)) => return int8.dot(x, row),
            Some(Quantised::Fp8(fp8)) => return fp8.dot(x, row),
            None => {}
        }
        let w = &self.w[row * self.k..][..self.k];
        let terms = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
        terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
    }
}

#[test]
fn gate_and_up_of_every_slot() {
    let mut random = Random(73);
    let shapes = [(3, 20, 40), (70, 33, 300), (9, 16, 1031)].into_iter();
    let cases = shapes.flat_map(|it| [(it, false), (it, true)]);
    let forms = [Form::Bf16, Form::Int8];
    let cases = cases.map(|(shape, is_int8)| (shape, forms[usize::from(is_int8)]));
    let fp8 = [((70, 33, 300), Form::Fp8(6)), ((9, 16, 1031), Form::Fp8(31))];
    let clamped = [false, true, true, false].repeat(2);
    for (((rows, inner, k), form), clamped) in cases.chain(fp8).zip(clamped) {
        let bias = clamped.then(|| random.vec(EXPERTS * 2 * inner));
        let activation = match clamped {
            true => ExpertActivation::Clamped { alpha: 1.702, limit: 1.5 },
            false => ExpertActivation::Silu,
        };
        let constants = match activation {
            ExpertActivation::Silu => [1.0, f32::INFINITY, 0.0],
            ExpertActivation::Clamped { alpha, limit } => [alpha, limit, 1.0],
        };
        let all = Products::random(&mut random, rows, inner, k);
        let all = all.in_form(&mut random, form);
        let live = rows - 1;
        let mut first: Option<Vec<u32>> = None;
        for number in [8, 16, 32, 64] {
            let ([slots, tiles, count], most) = all.grouped(number, live);
            let ((x, x_stride), (w, w_stride)) = (Products::padded(&all.x, k), all.weights());
            let mut args = vec![x];
            args.extend(w);
            args.extend([poison_bf16(2 * rows * (inner + 1)), slots, tiles, count]);
            args.extend([2, inner, k].map(|n| Arg::U32(n as u32)));
            args.extend([x_stride, w_stride, Arg::U32(inner as u32 + 1)]);
            args.push(some_f32s(bias.as_deref()));
            args.extend(constants.map(Arg::F32));
            args.extend(all.shift());
            let (name, slots, at) = all.kernel("gate_up", number);
            let grid = [most, inner.div_ceil(16), number / slots];
            let out = read_bf16(&launch(&name, grid, 256).run(&args)[at]);
            for (slot, out) in out.chunks(inner + 1).enumerate() {
                assert!(out[inner].is_nan());
                if slot / 2 >= live {
                    assert!(out.iter().all(|x| x.is_nan()), "slot {slot} is not live");
                    continue;
                }
                let x = &all.x[slot / 2 * k..][..k];
                let row = all.experts[slot] as usize * 2 * inner;
                for (i, got) in out[..inner].iter().enumerate() {
                    let added = |row: usize| bias.as_ref().map_or(0.0, |bias| f64::from(bias[row]));
                    let (gate, gate_size) = all.dot(x, row + i);
                    let (up, up_size) = all.dot(x, row + inner + i);
                    let (gate, up) = (gate + added(row + i), up + added(row + inner + i));
                    let want = expert_activated(activation, gate, up);
                    let error =
                        4e-6 * (gate_size * (2.0 + up.abs()) + up_size * (1.0 + gate.abs()));
                    assert_close(*got, want, error + want.abs() / 250.0, format!("slot {slot}"));
                }
            }
            let out = bits(&out);
            assert_eq!(*first.get_or_insert_with(|| out.clone()), out, "variant {number}");
        }
    }
}

#[test]
fn down_of_every_slot() {
    let mut random = Random(74);
    let shapes = [(3, 40, 20), (70, 66, 136)].into_iter();
    let forms = [Form::Bf16, Form::Int8, Form::Fp8(7)];
    for ((rows, n, k), form) in shapes.flat_map(|it| forms.map(|form| (it, form))) {
        let all = Products::random(&mut random, rows, n, k);
        let mut all = all.in_form(&mut random, form);
        all.x = rounded_all(&random.vec(2 * rows * k));
        let bias = (form == Form::Int8).then(|| random.vec(EXPERTS * n));
        let mut first: Option<Vec<u32>> = None;
        for number in [8, 16, 32, 64] {
            let ([slots, tiles, count], most) = all.grouped(number, rows);
            let ((x, x_stride), (w, w_stride)) = (Products::padded(&all.x, k), all.weights());
            let mut args = vec![x];
            args.extend(w);
            args.extend([poison_f32(2 * rows * n), slots, tiles, count]);
            args.extend([0, n, k].map(|n| Arg::U32(n as u32)));
            args.extend([x_stride, w_stride, Arg::U32(n as u32)]);
            args.push(some_f32s(bias.as_deref()));
            args.extend(all.shift());
            let (name, slots, at) = all.kernel("down", number);
            let features = if slots <= 16 { 16 } else { 32 };
            let grid = [most, n.div_ceil(features), number / slots];
            let out = read_f32(&launch(&name, grid, 256).run(&args)[at]);
            for (slot, out) in out.chunks(n).enumerate() {
                let x = &all.x[slot * k..][..k];
                for (i, got) in out.iter().enumerate() {
                    let row = all.experts[slot] as usize * n + i;
                    let (want, size) = all.dot(x, row);
                    let added = bias.as_ref().map_or(0.0, |bias| f64::from(bias[row]));
                    let error = (size + added.abs()) * 1e-6;
                    assert_close(*got, want + added, error, format!("slot {slot}"));
                }
            }
            let out = bits(&out);
            assert_eq!(*first.get_or_insert_with(|| out.clone()), out, "variant {number}");
        }
    }
}

#[test]
fn experts_are_weighted_and_added_in_order() {
    let mut random = Random(75);
    // The last four: a later chunk of a graph, with all, some and none of its rows live.
    for (rows, top_k, width, first_row, live) in [
        (3, 2, 8, 0, 3),
        (2, 8, 1030, 0, 2),
        (1, 1, 5, 0, 1),
        (3, 2, 8, 5, 8),
        (3, 2, 8, 5, 6),
        (3, 2, 8, 5, 4),
    ] {
        let there = rows.min(live.max(first_row) - first_row);
        let parts = random.vec(rows * top_k * width);
        let weights = random.vec(rows * top_k);
        let args = [
            f32s(&parts),
            f32s(&weights),
            poison_f32(rows * width),
            Arg::U32(top_k as u32),
            Arg::U32(width as u32),
            Arg::U32(first_row as u32),
            u32s(&[live as u32]),
        ];
        let grid = [rows, width.div_ceil(1024), 1];
        let out = read_f32(&launch("tutti_experts_sum", grid, 256).run(&args)[2]);
        for (i, got) in out.iter().enumerate() {
            let (row, column) = (i / width, i % width);
            if row >= there {
                assert!(got.is_nan(), "row {row} is not there");
                continue;
            }
            let mut want = 0.0f32;
            for j in 0..top_k {
                let slot = row * top_k + j;
                want += weights[slot] * parts[slot * width + column];
            }
            assert_eq!(got.to_bits(), want.to_bits(), "row {row}, column {column}");
        }
    }
}

/// Rows with assigned matrices: those without a matrix become zeros, whatever their memory held.
#[test]
fn rows_that_go_to_no_matrix_are_zeros() {
    let mut random = Random(79);
    for (rows, width, there) in [(1, 24, 1), (5, 2052, 4), (3, 7, 3)] {
        let experts: Vec<u32> =
            (0..rows).map(|row| if row % 2 == 1 { u32::MAX } else { row as u32 }).collect();
        let mut parts = random.vec(rows * width);
        for (row, part) in parts.chunks_mut(width).enumerate() {
            if row % 2 == 1 {
                part.fill(f32::NAN);
            }
        }
        let live = 3 + there;
        let tail = |out: Arg, strides: &[usize]| {
            let mut args = vec![f32s(&parts), u32s(&experts), out];
            args.extend(strides.iter().map(|n| Arg::U32(*n as u32)));
            args.extend([Arg::U32(3), u32s(&[live as u32])]);
            args
        };
        let grid = [rows, width.div_ceil(1024), 1];
        let args = tail(poison_f32(rows * width), &[width]);
        let out = read_f32(&launch("tutti_assigned_rows", grid, 256).run(&args)[2]);
        let stride = width + 4;
        let args = tail(poison_bf16(rows * stride), &[width, stride]);
        let rounded = read_bf16(&launch("tutti_assigned_rows_bf16", grid, 256).run(&args)[2]);
        for row in 0..rows {
            for column in 0..width {
                let (got, short) = (out[row * width + column], rounded[row * stride + column]);
                if row >= there {
                    assert!(got.is_nan() && short.is_nan(), "row {row} is not there");
                    continue;
                }
                let want = if row % 2 == 1 { 0.0 } else { parts[row * width + column] };
                assert_eq!(got, want, "row {row}, column {column}");
                assert_eq!(short, rounded_all(&[want])[0], "row {row}, column {column}");
            }
        }
    }
}

/// Rows without a matrix are in no tile.
#[test]
fn rows_that_go_to_no_matrix_are_in_no_tile() {
    let experts = [1, u32::MAX, 0, 1, u32::MAX, u32::MAX, 2, 1];
    let group = Group {
        experts: &experts,
        top_k: 1,
        num_experts: 3,
        chunk_rows: 8,
        tile_slots: 8,
        live: Some(7),
    };
    let tiles = group.tiles().remove(0);
    assert_eq!(tiles, [(0, vec![2]), (1, vec![0, 3]), (2, vec![6])]);
}

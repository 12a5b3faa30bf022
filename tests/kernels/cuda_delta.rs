//! Emulated kernels of linear attention, with the recurrence in f64 of `delta`, on slots that are
//! NaN except where a sequence goes on.
use kernels::backend::{DeltaShape, Rule};

use crate::cuda_emulation::{
    Arg, bf16s, f32s, launch, poison_bf16, poison_f32, read_bf16, read_f32, rounded_all, u32s,
};
use crate::delta::{EPS, Layer, Part, SLOTS, Tokens, seq_rows, steps};
use crate::support::{Random, assert_close, bits};

fn n(n: usize) -> Arg {
    Arg::U32(n as u32)
}

/// A slot of `kernels.h`.
fn slot_len(shape: &DeltaShape) -> usize {
    shape.value_width() * shape.key_dim + (shape.kernel - 1) * shape.channels()
}

/// One step, with a row and a sequence more than are live; returns the results of its rows. `each`:
/// rows of a block that mixes them.
fn step(
    layer: &Layer,
    slots: &mut Vec<f32>,
    seqs: &[Tokens],
    parts: &[Part],
    each: usize,
) -> Vec<f32> {
    let shape = layer.shape;
    let DeltaShape { rule, key_heads, value_heads, key_dim, value_dim, kernel } = shape;
    let adds = rule == Rule::Mamba2;
    let null = Arg::Null;
    let [mut qkvz, ba] = layer.projected(seqs, parts);
    let rows = qkvz.len() / layer.qkvz_width();
    // Rows that are not live must not count.
    qkvz.resize((rows + 1) * layer.qkvz_width(), f32::NAN);
    let qkvz = f32s(&qkvz);
    let mut words: Vec<u32> = seq_rows(parts)
        .iter()
        .flat_map(|seq| [seq.row_start, seq.num_rows, seq.context_len, 0, 0])
        .collect();
    words.resize((parts.len() + 1) * 5, u32::MAX);
    let metadata = u32s(&words);
    let mut named: Vec<u32> = parts.iter().map(|part| part.slot).collect();
    named.push(u32::MAX);
    let states = u32s(&named);
    let (live_rows, live_seqs) = (u32s(&[rows as u32]), u32s(&[parts.len() as u32]));
    let sizes = [key_heads, value_heads, key_dim, value_dim, kernel, usize::from(adds)].map(n);
    let channels = shape.channels();

    let mut args = vec![
        qkvz.clone(),
        f32s(&ba),
        f32s(&layer.conv),
        layer.conv_bias.as_ref().filter(|_| adds).map_or(null.clone(), |bias| f32s(bias)),
        f32s(&layer.decay),
        f32s(&layer.dt_bias),
        if adds { f32s(&layer.skip) } else { null.clone() },
        f32s(slots),
        metadata.clone(),
        states.clone(),
        live_seqs.clone(),
        poison_f32((rows + 1) * channels),
        poison_f32((rows + 1) * value_heads * 4),
    ];
    args.extend(sizes.clone());
    let releases = n(usize::from(rows == parts.len()));
    args.extend([n(rows + 1), n(each), releases, live_rows.clone()]);
    let grid = [(rows + 1).div_ceil(each), (key_heads + value_heads).div_ceil(8), 1];
    let made = launch("tutti_delta_mix", grid, 256).run(&args);
    // The last ones before the number of rows.
    let [mixed, gates] = [3, 2].map(|from_end| made[made.len() - from_end].clone());
    let behind = read_f32(&mixed).split_off(rows * channels);
    assert!(behind.iter().all(|x| x.is_nan()), "not live");

    let mut args =
        vec![qkvz.clone(), Arg::Buffer(gates), metadata, states, Arg::Buffer(mixed), f32s(slots)];
    args.extend(sizes);
    args.push(live_seqs);
    let most = [32, 128, 256].into_iter().find(|most| *most >= key_dim).unwrap();
    let blocks = value_heads * value_dim.div_ceil(32) + channels.div_ceil(1024);
    let name = format!("tutti_delta_update_{most}");
    let made = launch(&name, [blocks, parts.len() + 1, 1], 256).run(&args);
    *slots = read_f32(&made[5]);

    let width = shape.value_width();
    let [norm, out, gated] = match adds {
        true => [null.clone(), null, poison_f32((rows + 1) * width)],
        false => [f32s(&layer.norm), poison_bf16((rows + 1) * (width + 8)), null],
    };
    let args = [
        qkvz,
        Arg::Buffer(made[4].clone()),
        norm,
        out,
        gated,
        n(value_heads),
        n(value_dim),
        n(channels),
        n(width + 8),
        Arg::F32(EPS),
        live_rows,
    ];
    let grid = [rows + 1, value_heads.div_ceil(8), 1];
    let made = launch("tutti_delta_finish", grid, 256).run(&args);
    if adds {
        let mut out = read_f32(&made[2]);
        assert!(out.split_off(rows * width).iter().all(|x| x.is_nan()), "behind what exists");
        return out;
    }
    let out = read_bf16(&made[3]);
    for (row, out) in out.chunks(width + 8).enumerate() {
        let behind = &out[if row == rows { 0 } else { width }..];
        assert!(behind.iter().all(|x| x.is_nan()), "row {row}: behind what exists");
    }
    out.chunks(width + 8).take(rows).flat_map(|row| row[..width].to_vec()).collect()
}

/// Computes all steps; returns each sequence's results, and the slots.
fn run(
    layer: &Layer,
    seqs: &[Tokens],
    steps: &[Vec<Part>],
    each: usize,
) -> (Vec<Vec<f32>>, Vec<f32>) {
    let mut slots = vec![f32::NAN; SLOTS * slot_len(&layer.shape)];
    let mut results = vec![Vec::new(); seqs.len()];
    for parts in steps {
        let out = step(layer, &mut slots, seqs, parts, each);
        let mut rows = out.chunks(layer.shape.value_width());
        for part in parts {
            rows.by_ref().take(part.rows).for_each(|row| results[part.seq].extend(row));
        }
    }
    (results, slots)
}

/// Runs the sequences in one step, and in `shares` of several. `biases`: instead of random ones.
fn check(
    (rule, sizes): (Rule, [usize; 5]),
    counts: &[usize],
    shares: &[&[usize]],
    each: usize,
    biases: Option<&[f32]>,
) {
    let mut random = Random(75);
    let mut layer = Layer::random(&mut random, rule, sizes);
    if let Some(biases) = biases {
        layer.dt_bias = biases.to_vec();
    }
    let seqs: Vec<Tokens> = counts.iter().map(|count| layer.tokens(&mut random, *count)).collect();
    let places = &[5, 0, 3][..counts.len()];
    let (whole, slots) = run(&layer, &seqs, &steps(&seqs, places, &[counts]), 1);
    for (seq, got) in whole.iter().enumerate() {
        for (i, (&got, want)) in got.iter().zip(layer.want(&seqs[seq])).enumerate() {
            let error = match rule {
                Rule::GatedDelta => want.abs() * (1.01 / 256.0) + 1e-3,
                Rule::Mamba2 => want.abs() * 1e-4 + 1e-3,
            };
            assert_close(got, want, error, format!("{rule:?} {sizes:?}, sequence {seq}: {i}"));
        }
    }
    for (slot, state) in slots.chunks(slot_len(&layer.shape)).enumerate() {
        let is_used = places.contains(&(slot as u32));
        assert!(state.iter().all(|x| x.is_nan() != is_used), "{sizes:?}: slot {slot}");
    }
    let (parted, others) = run(&layer, &seqs, &steps(&seqs, places, shares), each);
    for (whole, parted) in whole.iter().zip(&parted) {
        assert_eq!(bits(whole), bits(parted), "{sizes:?}: however steps divide it");
    }
    assert_eq!(bits(&slots), bits(&others), "{sizes:?}: the states");
}

#[test]
fn sequences_go_on_where_their_states_are() {
    for rule in [Rule::GatedDelta, Rule::Mamba2] {
        let sizes = (rule, [2, 4, 16, 16, 4]);
        check(sizes, &[11, 4, 1], &[&[1, 4], &[3, 0, 1], &[7]], 3, None);
        // Of one head all is kept, of another nothing, where an exponential would overflow.
        let biases = [-60.0, 0.5, 90.0];
        check((rule, [1, 3, 32, 24, 2]), &[3, 2], &[&[2, 1], &[1, 1]], 2, Some(&biases));
    }
}

/// More tokens than come to shared memory at a time.
#[test]
fn heads_of_every_size_are_updated() {
    let delta = Rule::GatedDelta;
    check((delta, [1, 1, 128, 128, 4]), &[18], &[&[1], &[3], &[14]], 8, None);
    check((delta, [1, 2, 136, 40, 8]), &[3], &[&[2], &[1]], 1, None);
    // Keys too wide for their weights to be kept.
    check((delta, [1, 1, 136, 40, 4]), &[2], &[&[1], &[1]], 1, None);
    check((Rule::Mamba2, [1, 2, 136, 64, 4]), &[2], &[&[1], &[1]], 1, None);
    check((Rule::Mamba2, [1, 11, 16, 8, 3]), &[3], &[&[1], &[2]], 1, None);
}

#[test]
fn gates_are_multiplied_in_place() {
    let mut random = Random(76);
    for (rows, width, stride) in [(3, 1030, 1032), (2, 24, 24)] {
        let x = rounded_all(&random.vec(rows * stride));
        let gate: Vec<f32> = random.vec(rows * width).iter().map(|x| 20.0 * x).collect();
        let live = rows - 1;
        let args = [f32s(&gate), bf16s(&x), n(width), n(stride), u32s(&[live as u32])];
        let made = launch("tutti_gate", [rows, width.div_ceil(1024), 1], 256).run(&args);
        for (at, &got) in read_bf16(&made[1]).iter().enumerate() {
            let (row, column) = (at / stride, at % stride);
            if row >= live || column >= width {
                assert_eq!(got.to_bits(), x[at].to_bits(), "{row}, {column} is written");
                continue;
            }
            let gate = f64::from(gate[row * width + column]);
            let want = f64::from(x[at]) / (1.0 + (-gate).exp());
            assert_close(got, want, want.abs() / 250.0 + 1e-30, format!("{row}, {column}"));
        }
    }
}

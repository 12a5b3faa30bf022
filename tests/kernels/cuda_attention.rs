//! Emulated attention kernels compared with softmax in f64, on a cache that is NaN except where the
//! batch has tokens; and with each other: bits must depend neither on the batch nor on how a prompt
//! is chunked.
use crate::cuda_emulation::{
    Arg, Launch, bf16s, launch, poison_bf16, poison_f32, read_bf16, rounded_all, some_f32s, u32s,
};
use crate::support::{Random, assert_close, bits, nearest_fp8, rounded_fp8};

#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    shift: u32,
    /// 0: none.
    window: usize,
    has_sinks: bool,
    /// 0: none.
    cap: f32,
    /// Whether K and V are in FP8.
    fp8: bool,
}

impl Shape {
    fn with_sinks(self) -> Self {
        Self { has_sinks: true, ..self }
    }

    fn capped(self, cap: f32) -> Self {
        Self { cap, ..self }
    }

    fn in_fp8(self) -> Self {
        Self { fp8: true, ..self }
    }

    /// Values that K and V can have.
    fn stored(&self, values: &[f32]) -> Vec<f32> {
        match self.fp8 {
            true => values.iter().map(|&x| rounded_fp8(x.into()) as f32).collect(),
            false => rounded_all(values),
        }
    }

    /// K or V in the cache.
    fn cached(&self, values: &[f32]) -> Arg {
        match self.fp8 {
            true => Arg::Buffer(
                values
                    .iter()
                    .map(|&x| if x.is_nan() { 0x7f } else { nearest_fp8(x.into()) })
                    .collect(),
            ),
            false => bf16s(values),
        }
    }

    /// What the names of kernels have before the head dimension.
    fn family(&self) -> &'static str {
        if self.fp8 { "fp8_" } else { "" }
    }

    /// Bytes of shared memory for prefill attention.
    fn shared(&self) -> u32 {
        self.head_dim as u32 * if self.fp8 { 512 } else { 640 }
    }

    /// The sink of a head: weights from below that of any token to above all tokens' together.
    fn sink(&self, head: usize) -> Option<f32> {
        self.has_sinks.then_some((head * 7 % 5) as f32 * 2.5 - 3.0)
    }

    fn sinks(&self) -> Arg {
        let all: Option<Vec<f32>> = (0..self.heads).map(|head| self.sink(head)).collect();
        some_f32s(all.as_deref())
    }

    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

/// One sequence: its keys, values `[context, kv_heads, head_dim]` and queries
/// `[rows, heads, head_dim]`, all exact in bf16.
#[derive(Clone)]
struct Seq {
    rows: usize,
    context: usize,
    keys: Vec<f32>,
    values: Vec<f32>,
    queries: Vec<f32>,
}

impl Seq {
    fn random(random: &mut Random, shape: &Shape, rows: usize, context: usize) -> Self {
        let width = shape.kv_heads * shape.head_dim;
        let peaked: Vec<f32> =
            random.vec(rows * shape.heads * shape.head_dim).iter().map(|x| 4.0 * x).collect();
        Self {
            rows,
            context,
            keys: shape.stored(&random.vec(context * width)),
            values: shape.stored(&random.vec(context * width)),
            queries: rounded_all(&peaked),
        }
    }

    /// The first `context` tokens, of which the last `rows` are computed.
    fn chunk(&self, shape: &Shape, rows: usize, context: usize) -> Self {
        let width = shape.kv_heads * shape.head_dim;
        let first = context - rows - (self.context - self.rows);
        let row = shape.heads * shape.head_dim;
        Self {
            rows,
            context,
            keys: self.keys[..context * width].to_vec(),
            values: self.values[..context * width].to_vec(),
            queries: self.queries[first * row..(first + rows) * row].to_vec(),
        }
    }

    fn want(&self, shape: &Shape, row: usize, head: usize) -> Vec<f64> {
        let dim = shape.head_dim;
        let end = self.context - self.rows + row + 1;
        let start = if shape.window == 0 { 0 } else { end.saturating_sub(shape.window) };
        let query = &self.queries[(row * shape.heads + head) * dim..][..dim];
        let at = |position: usize| (position * shape.kv_heads + head / shape.group()) * dim;
        let scores: Vec<f64> = (start..end)
            .map(|position| {
                let key = &self.keys[at(position)..][..dim];
                let dot: f64 =
                    query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                let score = dot / (dim as f64).sqrt();
                match f64::from(shape.cap) {
                    0.0 => score,
                    cap => cap * (score / cap).tanh(),
                }
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sink = shape.sink(head).map_or(0.0, |sink| (f64::from(sink) - max).exp());
        let total: f64 = scores.iter().map(|score| (score - max).exp()).sum::<f64>() + sink;
        let mut mixed = vec![0.0; dim];
        for (position, score) in (start..end).zip(&scores) {
            let weight = (score - max).exp() / total;
            for (y, &v) in mixed.iter_mut().zip(&self.values[at(position)..][..dim]) {
                *y += weight * f64::from(v);
            }
        }
        mixed
    }
}

/// A batch in the device's form.
struct Device {
    shape: Shape,
    seqs: Vec<Seq>,
    rows: usize,
    /// `TuttiSeq`s.
    metadata: Vec<u32>,
    tables: Vec<u32>,
    keys: Arg,
    values: Arg,
    queries: Arg,
}

impl Device {
    fn new(random: &mut Random, shape: Shape, seqs: &[Seq]) -> Self {
        let block_size = 1usize << shape.shift;
        // One block more than needed per sequence; its contents must not matter.
        let lens: Vec<usize> =
            seqs.iter().map(|seq| seq.context.div_ceil(block_size) + 1).collect();
        let blocks = lens.iter().sum::<usize>() + 2;
        let mut free: Vec<u32> = (0..blocks as u32).collect();
        for i in (1..blocks).rev() {
            free.swap(i, random.below(i + 1));
        }
        let mut keys = vec![f32::NAN; blocks * block_size * shape.kv_heads * shape.head_dim];
        let mut values = keys.clone();
        // The block tables do not begin at index 0.
        let mut tables = vec![u32::MAX; 3];
        let mut metadata = Vec::new();
        let mut row = 0;
        for (seq, len) in seqs.iter().zip(lens) {
            let table = free.split_off(free.len() - len);
            // Positions outside of every row's window are NaN, too.
            let first = if shape.window == 0 {
                0
            } else {
                (seq.context - seq.rows + 1).saturating_sub(shape.window)
            };
            for position in first..seq.context {
                let block = table[position / block_size] as usize;
                for head in 0..shape.kv_heads {
                    let token =
                        (block * shape.kv_heads + head) * block_size + position % block_size;
                    let from = (position * shape.kv_heads + head) * shape.head_dim;
                    let to = token * shape.head_dim..(token + 1) * shape.head_dim;
                    let from = from..from + shape.head_dim;
                    keys[to.clone()].copy_from_slice(&seq.keys[from.clone()]);
                    values[to].copy_from_slice(&seq.values[from]);
                }
            }
            metadata.extend([row, seq.rows, seq.context, tables.len(), len].map(|n| n as u32));
            tables.extend(table);
            row += seq.rows;
        }
        let queries: Vec<f32> = seqs.iter().flat_map(|seq| seq.queries.clone()).collect();
        Self {
            shape,
            seqs: seqs.to_vec(),
            rows: row,
            metadata,
            tables,
            keys: shape.cached(&keys),
            values: shape.cached(&values),
            queries: bf16s(&queries),
        }
    }

    fn out(&self) -> Arg {
        poison_bf16(self.rows * self.shape.heads * self.shape.head_dim)
    }

    /// All tiles of all sequences, the last one first.
    fn tiles(&self) -> Vec<[u32; 2]> {
        let mut tiles: Vec<[u32; 2]> = (0..)
            .zip(&self.seqs)
            .flat_map(|(index, seq)| {
                let queries = seq.rows * self.shape.group();
                (0..queries.div_ceil(64)).map(move |tile| [index, 64 * tile as u32])
            })
            .collect();
        tiles.reverse();
        tiles
    }

    fn prefill(&self, tiles: &[[u32; 2]], live: Arg) -> Vec<f32> {
        let Shape { heads, kv_heads, head_dim, shift, window, .. } = self.shape;
        let args = [
            self.queries.clone(),
            self.keys.clone(),
            self.values.clone(),
            u32s(&self.metadata),
            u32s(tiles.as_flattened()),
            u32s(&self.tables),
            self.out(),
            Arg::U32(heads as u32),
            Arg::U32(kv_heads as u32),
            Arg::U32(shift),
            Arg::U32(window as u32),
            Arg::F32(self.shape.scale()),
            Arg::F32(self.shape.cap),
            self.shape.sinks(),
            live,
        ];
        let name = format!("tutti_prefill_attention_{}{head_dim}", self.shape.family());
        let grid = [tiles.len(), kv_heads, 1];
        let shared = self.shape.shared();
        let launch = Launch { kernel: &name, grid, threads: 128, shared };
        read_bf16(&launch.run(&args)[6])
    }

    /// All parts of the sequences in `items`, by the rule of `kernels.h`.
    fn parts(&self, items: &[u32], rule: Rule) -> Vec<u32> {
        let of = |index: u32| {
            let context = self.seqs[index as usize].context;
            let visible = if self.shape.window == 0 { context } else { self.shape.window };
            let tokens = context - context.saturating_sub(visible) / 16 * 16;
            let len = tokens.div_ceil(rule.max_splits).next_multiple_of(16).max(rule.least);
            (0..tokens.div_ceil(len)).map(move |split| index << 8 | split as u32)
        };
        items.iter().copied().flat_map(of).collect()
    }

    fn decode_args(&self, parts: &[u32], rule: Rule) -> Vec<Arg> {
        let Shape { heads, kv_heads, head_dim, shift, window, .. } = self.shape;
        let slots = self.seqs.len() * heads * rule.max_splits;
        // The kernel must not read beyond the list.
        let listed: Vec<u32> = parts.iter().copied().chain([u32::MAX; 3]).collect();
        vec![
            self.queries.clone(),
            self.keys.clone(),
            self.values.clone(),
            u32s(&self.metadata),
            u32s(&listed),
            u32s(&self.tables),
            poison_f32(slots * head_dim),
            poison_f32(slots * 2),
            self.out(),
            Arg::U32(heads as u32),
            Arg::U32(kv_heads as u32),
            Arg::U32(shift),
            Arg::U32(window as u32),
            Arg::U32(rule.max_splits as u32),
            Arg::U32(rule.least as u32),
            Arg::F32(self.shape.scale()),
            Arg::F32(self.shape.cap),
            self.shape.sinks(),
            u32s(&[parts.len() as u32]),
        ]
    }

    /// Decodes the first `live` sequences in `items`; `across` blocks per group of heads share
    /// `parts`.
    fn decode_parts(
        &self,
        (items, live): (&[u32], Option<usize>),
        rule: Rule,
        parts: &[u32],
        across: usize,
    ) -> Vec<f32> {
        let Shape { heads, kv_heads, head_dim, window, .. } = self.shape;
        let blocks = kv_heads * self.shape.group().div_ceil(16);
        let name = format!("tutti_decode_attention_{}{head_dim}", self.shape.family());
        let attention = launch(&name, [across, blocks, 1], 128);
        let made = attention.run(&self.decode_args(parts, rule));
        let args = [
            Arg::Buffer(made[6].clone()),
            Arg::Buffer(made[7].clone()),
            u32s(&self.metadata),
            u32s(items),
            Arg::Buffer(made[8].clone()),
            Arg::U32(heads as u32),
            Arg::U32(head_dim as u32),
            Arg::U32(window as u32),
            Arg::U32(rule.max_splits as u32),
            Arg::U32(rule.least as u32),
            live.map_or(Arg::Null, |live| u32s(&[live as u32])),
        ];
        let reduce = launch("tutti_decode_reduce", [heads, items.len(), 1], 128);
        let out = reduce.run(&args).swap_remove(4);
        read_bf16(&out)
    }

    /// The same for all of their parts.
    fn decode(&self, items: &[u32], rule: Rule, across: usize, live: Option<usize>) -> Vec<f32> {
        let parts = self.parts(&items[..live.unwrap_or(items.len())], rule);
        self.decode_parts((items, live), rule, &parts, across)
    }

    fn any(&self) -> Vec<f32> {
        let Shape { heads, kv_heads, head_dim, shift, window, .. } = self.shape;
        let args = [
            self.queries.clone(),
            self.keys.clone(),
            self.values.clone(),
            u32s(&self.metadata),
            u32s(&[self.seqs.len() as u32]),
            u32s(&self.tables),
            self.out(),
            Arg::U32(heads as u32),
            Arg::U32(kv_heads as u32),
            Arg::U32(head_dim as u32),
            Arg::U32(shift),
            Arg::U32(window as u32),
            Arg::F32(self.shape.scale()),
            Arg::F32(self.shape.cap),
            self.shape.sinks(),
            Arg::Null,
        ];
        let grid = [self.rows, heads.div_ceil(4), 1];
        let name = format!("tutti_attention_any{}", if self.shape.fp8 { "_fp8" } else { "" });
        read_bf16(&launch(&name, grid, 128).run(&args)[6])
    }

    /// `weight_error` is the relative error of one token's weight.
    fn check(&self, out: &[f32], weight_error: f64, rows_of: impl Fn(usize) -> bool) {
        let dim = self.shape.head_dim;
        let mut row = 0;
        for (index, seq) in self.seqs.iter().enumerate() {
            for i in 0..seq.rows {
                for head in 0..self.shape.heads {
                    let got = &out[((row + i) * self.shape.heads + head) * dim..][..dim];
                    if !rows_of(index) {
                        assert!(got.iter().all(|x| x.is_nan()), "row {i} of {index} is written");
                        continue;
                    }
                    for (d, want) in seq.want(&self.shape, i, head).into_iter().enumerate() {
                        // |v| < 1. Weights are off by at most their rounding, in either direction.
                        let tolerance = weight_error + want.abs() / 250.0 + 1e-5;
                        assert_close(
                            got[d],
                            want,
                            tolerance,
                            format!("{:?}: seq {index}, row {i}, head {head}, {d}", self.shape),
                        );
                    }
                }
            }
            row += seq.rows;
        }
    }
}

/// Parameters of the rule that splits sequences with one row.
#[derive(Clone, Copy, Debug)]
struct Rule {
    max_splits: usize,
    least: usize,
}

fn rule(max_splits: usize) -> Rule {
    Rule { max_splits, least: 64 }
}

/// Weights in bf16 are off by half a unit in the last place, at worst all in the same direction.
const ROUNDED: f64 = 1.0 / 256.0;

fn shape(heads: usize, kv_heads: usize, head_dim: usize, shift: u32, window: usize) -> Shape {
    Shape { heads, kv_heads, head_dim, shift, window, has_sinks: false, cap: 0.0, fp8: false }
}

fn seqs(random: &mut Random, shape: &Shape, sizes: &[(usize, usize)]) -> Vec<Seq> {
    sizes.iter().map(|&(rows, context)| Seq::random(random, shape, rows, context)).collect()
}

#[test]
fn prefill_attention_matches_softmax_in_f64() {
    let mut random = Random(31);
    for (shape, sizes) in [
        (shape(4, 1, 64, 4, 0), vec![(17, 17), (1, 1), (5, 100), (33, 64)]),
        (shape(2, 2, 128, 4, 0), vec![(70, 70), (3, 130)]),
        (shape(8, 1, 128, 5, 0), vec![(9, 75)]),
        (shape(6, 2, 96, 3, 0), vec![(25, 90)]),
        (shape(4, 2, 32, 2, 16), vec![(40, 40), (7, 90), (1, 20)]),
        (shape(4, 2, 16, 0, 0), vec![(20, 31)]),
        (shape(4, 1, 256, 4, 0), vec![(19, 140), (1, 1)]),
        (shape(2, 2, 256, 5, 40), vec![(66, 110)]),
        (shape(3, 3, 64, 6, 70), vec![(30, 200)]),
        (shape(5, 1, 64, 4, 1), vec![(14, 80)]),
        (shape(8, 1, 64, 4, 16).with_sinks(), vec![(17, 17), (1, 1), (40, 100)]),
        (shape(6, 2, 96, 3, 0).with_sinks(), vec![(25, 90)]),
        (shape(4, 2, 256, 4, 0).with_sinks(), vec![(19, 140)]),
        (shape(4, 2, 256, 4, 40).capped(2.0), vec![(19, 90), (1, 1)]),
        (shape(4, 1, 64, 4, 0).with_sinks().capped(0.5), vec![(17, 40)]),
        (shape(4, 1, 64, 4, 0).in_fp8(), vec![(17, 17), (1, 1), (5, 150)]),
        (shape(6, 2, 96, 3, 0).with_sinks().in_fp8(), vec![(25, 90)]),
        (shape(2, 2, 128, 4, 40).in_fp8(), vec![(70, 70), (3, 130)]),
        (shape(4, 2, 256, 4, 40).capped(2.0).in_fp8(), vec![(19, 90), (1, 1)]),
    ] {
        let seqs = seqs(&mut random, &shape, &sizes);
        let device = Device::new(&mut random, shape, &seqs);
        let tiles = device.tiles();
        device.check(&device.prefill(&tiles, Arg::Null), ROUNDED, |_| true);
        // Only the tiles of the last sequence.
        let live = tiles.iter().filter(|tile| tile[0] as usize == seqs.len() - 1).count();
        let out = device.prefill(&tiles, u32s(&[live as u32]));
        device.check(&out, ROUNDED, |index| index == seqs.len() - 1);
    }
}

#[test]
fn a_prompt_gives_the_same_bits_however_it_is_cut() {
    let mut random = Random(32);
    for shape in [
        shape(3, 1, 64, 4, 0),
        shape(2, 2, 32, 3, 50),
        shape(2, 1, 256, 4, 50),
        shape(3, 1, 64, 4, 20).with_sinks(),
    ] {
        let whole = Seq::random(&mut random, &shape, 150, 170);
        let device = Device::new(&mut random, shape, std::slice::from_ref(&whole));
        let all = device.prefill(&device.tiles(), Arg::Null);
        let row = shape.heads * shape.head_dim;
        let mut done = 20;
        for rows in [1, 63, 30, 7, 49] {
            done += rows;
            let chunk = whole.chunk(&shape, rows, done);
            // Between others.
            let other = Seq::random(&mut random, &shape, 5, 9);
            let batch = [other.clone(), chunk, other];
            let device = Device::new(&mut random, shape, &batch);
            let out = device.prefill(&device.tiles(), Arg::Null);
            let got = &out[5 * row..(5 + rows) * row];
            let first = done - rows - 20;
            assert_eq!(bits(got), bits(&all[first * row..(first + rows) * row]), "up to {done}");
        }
        assert_eq!(done, 170);
    }
}

#[test]
fn decode_attention_matches_softmax_in_f64() {
    let mut random = Random(33);
    for (shape, contexts, max_splits) in [
        (shape(4, 1, 64, 4, 0), vec![1, 15, 16, 17, 200], 4),
        (shape(2, 2, 128, 4, 0), vec![300, 64, 65], 64),
        // As many parts as there can be.
        (shape(2, 1, 64, 4, 0), vec![8190], 128),
        (shape(8, 1, 128, 5, 0), vec![90], 1),
        (shape(6, 2, 96, 3, 0), vec![130, 2], 3),
        (shape(20, 1, 32, 2, 16), vec![40, 7, 17], 8),
        (shape(4, 2, 16, 0, 0), vec![31, 129], 2),
        (shape(4, 1, 256, 4, 0), vec![1, 63, 330], 64),
        (shape(40, 2, 256, 3, 100), vec![230, 17], 2),
        (shape(3, 3, 64, 6, 70), vec![230, 69, 70, 71], 2),
        (shape(16, 1, 64, 4, 1), vec![80, 1], 2),
        (shape(8, 1, 64, 4, 0).with_sinks(), vec![1, 15, 17, 200, 333], 4),
        (shape(20, 1, 32, 2, 16).with_sinks(), vec![40, 7, 17], 8),
        (shape(6, 2, 96, 3, 0).with_sinks(), vec![130, 2], 3),
        (shape(40, 2, 256, 3, 100).with_sinks(), vec![230, 17], 2),
        (shape(4, 2, 256, 4, 0).capped(2.0), vec![1, 150], 64),
        (shape(8, 2, 64, 4, 16).with_sinks().capped(0.5), vec![15, 99], 2),
        (shape(4, 1, 64, 4, 0).in_fp8(), vec![1, 15, 16, 17, 200], 4),
        (shape(6, 2, 96, 3, 0).with_sinks().in_fp8(), vec![130, 2], 3),
        (shape(2, 2, 128, 4, 70).in_fp8(), vec![300, 64, 65], 64),
        (shape(8, 2, 256, 4, 0).capped(2.0).in_fp8(), vec![63, 150], 64),
    ] {
        let sizes: Vec<(usize, usize)> = contexts.iter().map(|&context| (1, context)).collect();
        let seqs = seqs(&mut random, &shape, &sizes);
        let device = Device::new(&mut random, shape, &seqs);
        let mut items: Vec<u32> = (0..seqs.len() as u32).collect();
        items.reverse();
        // Many blocks, then fewer, which take several parts in turn.
        let out = device.decode(&items, rule(max_splits), 9, None);
        device.check(&out, ROUNDED, |_| true);
        assert_eq!(bits(&device.decode(&items, rule(max_splits), 2, None)), bits(&out));
        if items.len() > 1 {
            let out = device.decode(&items, rule(max_splits), 3, Some(1));
            device.check(&out, ROUNDED, |index| index == seqs.len() - 1);
        }
    }
}

/// Lengths at which a sequence gets one more part, and at which parts get longer; beside rows that
/// are not live.
#[test]
fn sequences_at_the_ends_of_parts_are_decoded_whole() {
    let mut random = Random(37);
    let shape = shape(4, 2, 16, 4, 0);
    let sizes = [63, 64, 65, 4096, 4097].map(|context| (1, context));
    let seqs = seqs(&mut random, &shape, &sizes);
    let device = Device::new(&mut random, shape, &seqs);
    let out = device.decode(&[4, 1, 0, 3, 2], rule(64), 40, None);
    device.check(&out, ROUNDED, |_| true);
    // Items that are not live still refer to sequences: nothing may be written for those.
    let out = device.decode(&[2, 1, 0, 0, 0], rule(64), 1, Some(2));
    device.check(&out, ROUNDED, |index| index == 1 || index == 2);
    // Now 65 and 4096 tokens take one part and 32 parts.
    let longer = Rule { max_splits: 64, least: 128 };
    let out = device.decode(&[2, 3], longer, 5, None);
    device.check(&out, ROUNDED, |index| index == 2 || index == 3);
    assert_eq!(device.parts(&[2, 3], longer).len(), 33);
    assert_eq!(device.parts(&[3, 4], rule(64)).len(), 64 + 52);
    // Nothing to do.
    let out = device.decode(&[0, 1], rule(64), 2, Some(0));
    device.check(&out, ROUNDED, |_| false);
}

#[test]
fn a_sequence_decodes_to_the_same_bits_alone_and_among_others() {
    let mut random = Random(34);
    for shape in [
        shape(8, 2, 64, 4, 0),
        shape(2, 1, 256, 4, 0),
        shape(4, 1, 64, 4, 0).with_sinks(),
        shape(2, 1, 96, 4, 0).in_fp8(),
        shape(2, 1, 256, 4, 0).in_fp8(),
    ] {
        let seqs = seqs(&mut random, &shape, &[(1, 90), (1, 333), (1, 1), (1, 128)]);
        let device = Device::new(&mut random, shape, &seqs);
        let row = shape.heads * shape.head_dim;
        // 333 tokens in at most 5 splits: 80 tokens each.
        let items = [0, 1, 2, 3];
        let all = device.decode(&items, rule(5), 5, None);
        // In any order of parts.
        let mut parts = device.parts(&items, rule(5));
        parts.reverse();
        for across in [1, 2, 30] {
            let out = device.decode_parts((&items, None), rule(5), &parts, across);
            assert_eq!(bits(&out), bits(&all), "{across} blocks");
            parts.swap(0, 5);
        }
        for (i, seq) in seqs.iter().enumerate() {
            let alone = Device::new(&mut random, shape, std::slice::from_ref(seq));
            for across in [1, 9] {
                let out = alone.decode(&[0], rule(5), across, None);
                assert_eq!(bits(&out), bits(&all[i * row..][..row]), "{} tokens", seq.context);
            }
        }
    }
}

/// NaN in FP8 is a byte like any other: kernels must not take it for a number, of K or of V.
#[test]
fn nan_in_fp8_reaches_the_output() {
    let mut random = Random(38);
    for head_dim in [64, 96, 128, 256] {
        let shape = shape(4, 2, head_dim, 4, 0).in_fp8();
        // Two parts: the second one is finite.
        let sound = Seq::random(&mut random, &shape, 1, 70);
        let width = shape.kv_heads * head_dim;
        // A token in the middle; the first KV head, so the first two of four heads.
        let at = 37 * width + 11;
        for in_values in [false, true] {
            let mut broken = sound.clone();
            let all = if in_values { &mut broken.values } else { &mut broken.keys };
            all[at] = f32::NAN;
            let device = Device::new(&mut random, shape, &[sound.clone(), broken]);
            let outs = [
                device.decode(&[0, 1], rule(4), 3, None),
                device.prefill(&device.tiles(), Arg::Null),
                device.any(),
            ];
            for (which, out) in outs.iter().enumerate() {
                let broken = &out[4 * head_dim..6 * head_dim];
                let others = out[..4 * head_dim].iter().chain(&out[6 * head_dim..]);
                // V has it in one dimension.
                let is_found = if in_values { broken[11].is_nan() } else { broken[0].is_nan() };
                assert!(is_found, "{head_dim}, kernel {which}, values {in_values}: {broken:?}");
                assert!(others.clone().all(|x| x.is_finite()), "{head_dim}, kernel {which}");
            }
        }
    }
}

#[test]
fn constant_values_come_out_exact() {
    let mut random = Random(35);
    let wide = shape(4, 2, 256, 4, 0);
    let in_fp8 = [shape(2, 1, 96, 4, 0).in_fp8(), shape(2, 1, 256, 4, 0).in_fp8()];
    for shape in [shape(4, 2, 64, 4, 0), wide].into_iter().chain(in_fp8) {
        let mut seq = Seq::random(&mut random, &shape, 1, 150);
        // A number that the cache's type has.
        let value = if shape.fp8 { 0.8125 } else { 0.734_375 };
        seq.values.fill(value);
        let device = Device::new(&mut random, shape, &[seq]);
        let decoded = device.decode(&[0], rule(4), 4, None);
        // As a single part, whose result is the row's final one.
        let whole = device.decode(&[0], Rule { max_splits: 4, least: 192 }, 4, None);
        let prefilled = device.prefill(&device.tiles(), Arg::Null);
        let mut all = decoded.iter().chain(&whole).chain(&prefilled);
        assert!(all.all(|&x| x == value), "{decoded:?}");
    }
}

#[test]
fn attention_for_any_head_dimension_matches_softmax_in_f64() {
    let mut random = Random(36);
    for (shape, sizes) in [
        (shape(5, 1, 24, 1, 0), vec![(3, 9), (1, 1), (4, 4)]),
        (shape(4, 4, 256, 4, 5), vec![(2, 30)]),
        (shape(4, 2, 6, 3, 0), vec![(1, 17), (9, 20)]),
        (shape(5, 1, 24, 1, 4).with_sinks(), vec![(3, 9), (1, 1), (4, 4)]),
        (shape(4, 2, 6, 3, 0).capped(1.5), vec![(1, 17), (9, 20)]),
        (shape(5, 1, 24, 1, 4).with_sinks().in_fp8(), vec![(3, 9), (1, 1), (4, 4)]),
    ] {
        let seqs = seqs(&mut random, &shape, &sizes);
        let device = Device::new(&mut random, shape, &seqs);
        device.check(&device.any(), 1e-5, |_| true);
    }
}

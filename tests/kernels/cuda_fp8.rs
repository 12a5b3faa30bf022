//! Emulated kernels for products with weights in FP8, compared with sums in f64 and with each
//! other: a row's bits must depend neither on the other rows nor on the variant.
use crate::cuda_emulation::{
    Arg, bf16s, f32s, launch, poison_bf16, poison_f32, read_bf16, read_f32, rounded, rounded_all,
    some_f32s, u32s,
};
use crate::support::{ACTIVATIONS, Random, assert_close, assert_gated, bits, fp8_value};

/// Weights in the kernels' layout.
pub(crate) struct Fp8 {
    k: usize,
    stride: usize,
    pub(crate) shift: u32,
    bytes: Vec<u8>,
    scales: Vec<f32>,
    /// The contents of the padding after rows.
    padding: u8,
}

impl Fp8 {
    pub(crate) fn random(random: &mut Random, rows: usize, k: usize, shift: u32) -> Self {
        let byte = |random: &mut Random| loop {
            // All but NaN, with some more of the subnormal ones.
            let most = if random.below(8) == 0 { 8 } else { 256 };
            let byte = random.below(most) as u8;
            if byte & 0x7f != 0x7f {
                return byte;
            }
        };
        let bytes = (0..rows * k).map(|_| byte(random)).collect();
        let groups = rows * k.div_ceil(1 << shift);
        let scales = (0..groups).map(|_| (0.01 + random.f32().abs()) / 64.0).collect();
        let stride = k.next_multiple_of(16) + 16 * random.below(2);
        Self { k, stride, shift, bytes, scales, padding: random.below(256) as u8 }
    }

    fn weight(&self, row: usize, k: usize) -> f64 {
        let group = row * self.k.div_ceil(1 << self.shift) + (k >> self.shift);
        fp8_value(self.bytes[row * self.k + k]) * f64::from(self.scales[group])
    }

    /// The weights, their scales, and their stride.
    pub(crate) fn args(&self) -> (Arg, Arg, Arg) {
        let mut bytes = Vec::new();
        for row in self.bytes.chunks(self.k) {
            bytes.extend(row);
            bytes.resize(bytes.len() + self.stride - self.k, self.padding);
        }
        (Arg::Buffer(bytes), f32s(&self.scales), Arg::U32(self.stride as u32))
    }

    /// The product of one row, and the sum of its absolute terms.
    pub(crate) fn dot(&self, x: &[f32], row: usize) -> (f64, f64) {
        let terms = x.iter().enumerate().map(|(k, &x)| f64::from(x) * self.weight(row, k));
        terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()))
    }
}

/// Rows of x, each padded with NaN that must not be used, and their stride.
fn padded(x: &[f32], k: usize) -> (Arg, Arg) {
    let stride = k.next_multiple_of(8) + 8;
    let rows = x.chunks(k).flat_map(|row| [row, &vec![f32::NAN; stride - k]].concat());
    (bf16s(&rows.collect::<Vec<_>>()), Arg::U32(stride as u32))
}

struct Product {
    rows: usize,
    n: usize,
    k: usize,
    x: Vec<f32>,
    w: Fp8,
    bias: Option<Vec<f32>>,
}

impl Product {
    fn random(random: &mut Random, sizes: (usize, usize, usize), shift: u32, biased: bool) -> Self {
        let (rows, n, k) = sizes;
        let x = rounded_all(&random.vec(rows * k));
        let bias = biased.then(|| random.vec(n));
        Self { rows, n, k, x, w: Fp8::random(random, n, k, shift), bias }
    }

    fn want(&self, row: usize, feature: usize) -> (f64, f64) {
        let (sum, size) = self.w.dot(&self.x[row * self.k..][..self.k], feature);
        let bias = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[feature]));
        (sum + bias, size + bias.abs())
    }

    fn run(&self, number: usize, index: Option<&[u32]>, live: Arg) -> Vec<f32> {
        let rows = index.map_or(self.rows, <[u32]>::len);
        let features = if number <= 16 { 16 } else { 32 };
        let name = format!("tutti_skinny_fp8_{number}");
        let grid = [self.n.div_ceil(features), rows.div_ceil(number), 1];
        let ((x, x_stride), (w, scales, w_stride)) = (padded(&self.x, self.k), self.w.args());
        let args = [
            x,
            w,
            scales,
            some_f32s(self.bias.as_deref()),
            poison_f32(rows * (self.n + 3)),
            index.map_or(Arg::Null, u32s),
            Arg::U32(rows as u32),
            Arg::U32(self.n as u32),
            Arg::U32(self.k as u32),
            x_stride,
            w_stride,
            Arg::U32(self.n as u32 + 3),
            Arg::U32(self.w.shift),
            live,
        ];
        let at = if self.bias.is_some() { 4 } else { 3 };
        let out = read_f32(&launch(&name, grid, 256).run(&args)[at]);
        let rows = out.chunks(self.n + 3);
        assert!(rows.clone().all(|row| row[self.n..].iter().all(|x| x.is_nan())));
        rows.flat_map(|row| row[..self.n].to_vec()).collect()
    }

    fn check(&self, out: &[f32], rows: usize) {
        for (row, out) in out.chunks(self.n).take(rows).enumerate() {
            for (feature, got) in out.iter().enumerate() {
                let (want, size) = self.want(row, feature);
                let what = (self.rows, self.n, self.k, self.w.shift, row, feature);
                assert_close(*got, want, size * 1e-6 + 1e-12, format!("{what:?}"));
            }
        }
    }
}

#[test]
fn products_match_sums_in_f64() {
    let mut random = Random(101);
    for (number, rows, n, k, shift, biased) in [
        (8, 1, 16, 1024, 7, false),
        (8, 8, 33, 130, 6, true),
        (8, 3, 1, 1, 31, true),
        (8, 5, 17, 4100, 6, false),
        (16, 16, 16, 7, 6, true),
        (16, 9, 40, 264, 7, false),
        (32, 17, 50, 1031, 8, true),
        (32, 33, 31, 300, 31, false),
        (32, 47, 32, 2057, 7, false),
    ] {
        let product = Product::random(&mut random, (rows, n, k), shift, biased);
        product.check(&product.run(number, None, Arg::Null), rows);
    }
}

#[test]
fn a_rows_product_has_the_same_bits_in_every_variant_and_place() {
    let mut random = Random(102);
    for (shift, k) in [(6, 1100), (31, 300)] {
        let product = Product::random(&mut random, (70, 48, k), shift, true);
        let all = product.run(32, None, Arg::Null);
        product.check(&all, 70);
        for number in [8, 16] {
            assert_eq!(bits(&product.run(number, None, Arg::Null)), bits(&all), "{number}");
        }
        let index = [69u32, 3, 3, 20, 0, 64, 11, 1, 7, 40];
        let gathered = product.run(16, Some(&index), Arg::Null);
        for (i, &row) in index.iter().enumerate() {
            let of = &all[row as usize * 48..][..48];
            assert_eq!(bits(&gathered[i * 48..][..48]), bits(of), "row {row} at {i}");
        }
        let out = product.run(32, None, u32s(&[11]));
        product.check(&out, 11);
        assert!(out[11 * 48..].iter().all(|x| x.is_nan()), "not live");
    }
}

#[test]
fn gate_and_up_are_multiplied_in_one() {
    let mut first: [Option<Vec<u32>>; 2] = [None, None];
    for (number, gelu) in [8, 16, 32].into_iter().flat_map(|number| [(number, 0), (number, 1)]) {
        let (rows, inner, k) = (11, 24, 1100);
        let product = Product::random(&mut Random(103), (rows, 2 * inner, k), 7, true);
        let ((x, x_stride), (w, scales, w_stride)) = (padded(&product.x, k), product.w.args());
        let args = [
            x,
            w,
            scales,
            some_f32s(product.bias.as_deref()),
            poison_bf16(rows * (inner + 1)),
            Arg::U32(rows as u32),
            Arg::U32(inner as u32),
            Arg::U32(k as u32),
            x_stride,
            w_stride,
            Arg::U32(inner as u32 + 1),
            Arg::U32(gelu as u32),
            Arg::U32(product.w.shift),
            u32s(&[rows as u32 - 1]),
        ];
        let name = format!("tutti_skinny_gate_up_fp8_{number}");
        let grid = [inner.div_ceil(16), rows.div_ceil(number), 1];
        let out = read_bf16(&launch(&name, grid, 256).run(&args)[4]);
        let want = |row, feature| product.want(row, feature);
        assert_gated(&out, (rows, inner), ACTIVATIONS[gelu], want, number);
        let out = bits(&out);
        assert_eq!(*first[gelu].get_or_insert_with(|| out.clone()), out, "variant {number}");
    }
}

#[test]
fn weights_are_widened_and_rounded_once() {
    let mut random = Random(104);
    for (k, shift) in [(128, 7), (300, 6), (4200, 7), (77, 31)] {
        let rows = 3;
        let w = Fp8::random(&mut random, rows, k, shift);
        let (bytes, scales, stride) = w.args();
        let args = [
            bytes,
            scales,
            poison_bf16(rows * w.stride),
            stride,
            Arg::U32(k as u32),
            Arg::U32(shift),
        ];
        let grid = [rows, w.stride.div_ceil(4096), 1];
        let out = read_bf16(&launch("tutti_widen_fp8", grid, 256).run(&args)[2]);
        for (row, out) in out.chunks(w.stride).enumerate() {
            for (at, got) in out[..k].iter().enumerate() {
                // In f32 first, as everywhere.
                assert_eq!(*got, rounded(w.weight(row, at) as f32), "{k} {row} {at}");
            }
        }
    }
}

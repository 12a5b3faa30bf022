//! Emulated kernels for products with int8 weights, compared with sums in f64 and with each other:
//! a row's bits must depend neither on the other rows nor on the variant.
use crate::cuda_emulation::{
    Arg, bf16s, f32s, launch, poison_bf16, poison_f32, read_bf16, read_f32, rounded_all, some_f32s,
    u32s,
};
use crate::support::{ACTIVATIONS, Random, assert_close, assert_gated, bits};

/// Weights in the kernels' layout: rows of bytes with 128 added, and a scale per row.
pub(crate) struct Int8 {
    k: usize,
    stride: usize,
    values: Vec<i8>,
    scales: Vec<f32>,
    /// The contents of the padding after rows.
    padding: u8,
}

impl Int8 {
    pub(crate) fn random(random: &mut Random, rows: usize, k: usize) -> Self {
        let values = (0..rows * k).map(|_| (random.below(256) as u8).cast_signed()).collect();
        let scales = (0..rows).map(|_| 0.01 + random.f32().abs() * 0.02).collect();
        let stride = k.next_multiple_of(16) + 16 * random.below(2);
        Self { k, stride, values, scales, padding: random.below(256) as u8 }
    }

    /// The weights, their scales, and their stride.
    pub(crate) fn args(&self) -> (Arg, Arg, Arg) {
        let mut bytes = Vec::new();
        for row in self.values.chunks(self.k) {
            bytes.extend(row.iter().map(|value| (i16::from(*value) + 128) as u8));
            bytes.resize(bytes.len() + self.stride - self.k, self.padding);
        }
        (Arg::Buffer(bytes), f32s(&self.scales), Arg::U32(self.stride as u32))
    }

    /// The product of one row, and the sum of its absolute terms.
    pub(crate) fn dot(&self, x: &[f32], row: usize) -> (f64, f64) {
        let values = &self.values[row * self.k..][..self.k];
        let terms = x.iter().zip(values).map(|(&x, &w)| f64::from(x) * f64::from(w));
        let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
        let scale = f64::from(self.scales[row]);
        (sum * scale, size * scale)
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
    w: Int8,
    bias: Option<Vec<f32>>,
}

impl Product {
    fn random(random: &mut Random, rows: usize, n: usize, k: usize, with_bias: bool) -> Self {
        let x = rounded_all(&random.vec(rows * k));
        let bias = with_bias.then(|| random.vec(n));
        Self { rows, n, k, x, w: Int8::random(random, n, k), bias }
    }

    fn want(&self, row: usize, feature: usize) -> (f64, f64) {
        let (sum, size) = self.w.dot(&self.x[row * self.k..][..self.k], feature);
        let bias = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[feature]));
        (sum + bias, size + bias.abs())
    }

    fn run(&self, number: usize, index: Option<&[u32]>, live: Arg) -> Vec<f32> {
        let rows = index.map_or(self.rows, <[u32]>::len);
        let features = if number <= 16 { 16 } else { 32 };
        let name = format!("tutti_skinny_int8_{number}");
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
                let what = (self.rows, self.n, self.k, row, feature);
                assert_close(*got, want, size * 1e-6 + 1e-12, format!("{what:?}"));
            }
        }
    }
}

#[test]
fn products_match_sums_in_f64() {
    let mut random = Random(81);
    for (number, rows, n, k, with_bias) in [
        (8, 1, 16, 1024, false),
        (8, 8, 33, 130, true),
        (8, 3, 1, 1, true),
        (8, 5, 17, 4100, false),
        (16, 16, 16, 7, true),
        (16, 9, 40, 264, false),
        (32, 17, 50, 1031, true),
        (64, 33, 31, 300, false),
        (64, 64, 65, 96, true),
        (64, 47, 32, 2057, false),
    ] {
        let product = Product::random(&mut random, rows, n, k, with_bias);
        product.check(&product.run(number, None, Arg::Null), rows);
    }
}

#[test]
fn a_rows_product_has_the_same_bits_in_every_variant_and_place() {
    let mut random = Random(82);
    let product = Product::random(&mut random, 70, 48, 1300, true);
    let all = product.run(64, None, Arg::Null);
    product.check(&all, 70);
    for number in [8, 16, 32] {
        assert_eq!(bits(&product.run(number, None, Arg::Null)), bits(&all), "variant {number}");
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

#[test]
fn gate_and_up_are_multiplied_in_one() {
    let mut first: [Option<Vec<u32>>; 2] = [None, None];
    for (number, gelu) in [8, 16, 32, 64].into_iter().flat_map(|number| [(number, 0), (number, 1)])
    {
        let (rows, inner, k) = (11, 24, 1100);
        let product = Product::random(&mut Random(83), rows, 2 * inner, k, true);
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
            u32s(&[rows as u32 - 1]),
        ];
        let name = format!("tutti_skinny_gate_up_int8_{number}");
        let grid = [inner.div_ceil(16), rows.div_ceil(number), 1];
        let out = read_bf16(&launch(&name, grid, 256).run(&args)[4]);
        let want = |row, feature| product.want(row, feature);
        assert_gated(&out, (rows, inner), ACTIVATIONS[gelu], want, number);
        let out = bits(&out);
        assert_eq!(*first[gelu].get_or_insert_with(|| out.clone()), out, "variant {number}");
    }
}

#[test]
fn every_byte_is_widened_exactly() {
    let (rows, stride) = (3, 4096 + 256);
    let bytes: Vec<u8> = (0..rows * stride).map(|i| (i * 7 + i / 256) as u8).collect();
    let args = [Arg::Buffer(bytes.clone()), poison_bf16(rows * stride), Arg::U32(stride as u32)];
    let out = read_bf16(&launch("tutti_widen_int8", [rows, 2, 1], 256).run(&args)[1]);
    for (byte, got) in bytes.iter().zip(out) {
        assert_eq!(got, f32::from(*byte) - 128.0);
    }
}

#[test]
fn sums_are_scaled_then_biased() {
    let mut random = Random(84);
    for (width, with_bias) in [(5, true), (1030, false), (1032, true)] {
        let (data, scales) = (random.vec(2 * width), random.vec(width));
        let bias = with_bias.then(|| random.vec(width));
        let args = [
            f32s(&data),
            f32s(&scales),
            some_f32s(bias.as_deref()),
            Arg::U32(width as u32),
            u32s(&[1]),
        ];
        let grid = [2, width.div_ceil(1024), 1];
        let out = read_f32(&launch("tutti_scale_add_bias", grid, 256).run(&args)[0]);
        for i in 0..width {
            let bias = bias.as_ref().map_or(0.0, |bias| bias[i]);
            assert_eq!(out[i].to_bits(), (data[i] * scales[i] + bias).to_bits(), "{width} {i}");
            assert_eq!(out[width + i].to_bits(), data[width + i].to_bits(), "not live");
        }
    }
}

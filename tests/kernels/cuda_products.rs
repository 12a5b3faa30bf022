//! Emulated kernels for products with few rows, compared with sums in f64 and with each other: a
//! row's bits must depend neither on the other rows nor on the variant.
use crate::cuda_emulation::{
    Arg, Launch, bf16s, f32s, launch, poison_bf16, poison_f32, read_bf16, read_f32, rounded_all,
    some_f32s, u32s,
};
use crate::support::{ACTIVATIONS, Random, assert_close, assert_gated, bits};

/// One product.
struct Product {
    rows: usize,
    n: usize,
    k: usize,
    /// Padding elements after each row of x and W: NaN, which must not be used.
    padding: usize,
    x: Vec<f32>,
    w: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Product {
    fn random(random: &mut Random, rows: usize, n: usize, k: usize, with_bias: bool) -> Self {
        let padding = k.next_multiple_of(8) - k + 8 * random.below(2);
        let x = rounded_all(&random.vec(rows * k));
        let w = rounded_all(&random.vec(n * k));
        let bias = with_bias.then(|| random.vec(n));
        Self { rows, n, k, padding, x, w, bias }
    }

    fn stride(&self) -> usize {
        self.k + self.padding
    }

    fn padded(&self, values: &[f32]) -> Arg {
        let rows = values.chunks(self.k);
        bf16s(
            &rows.flat_map(|row| [row, &vec![f32::NAN; self.padding]].concat()).collect::<Vec<_>>(),
        )
    }

    /// `out[row, feature]`, and the sum of its absolute terms.
    fn want(&self, row: usize, feature: usize) -> (f64, f64) {
        let x = &self.x[row * self.k..][..self.k];
        let w = &self.w[feature * self.k..][..self.k];
        let bias = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[feature]));
        let terms = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
        terms.fold((bias, bias.abs()), |(sum, size), term| (sum + term, size + term.abs()))
    }

    /// Multiplies some rows of x with the variant for `number` rows.
    fn run(&self, number: usize, index: Option<&[u32]>, live: Arg) -> Vec<f32> {
        let rows = index.map_or(self.rows, <[u32]>::len);
        let features = if number <= 16 { 16 } else { 32 };
        let name = format!("tutti_skinny_{number}");
        let grid = [self.n.div_ceil(features), rows.div_ceil(number), 1];
        let args = [
            self.padded(&self.x),
            self.padded(&self.w),
            some_f32s(self.bias.as_deref()),
            poison_f32(rows * (self.n + 3)),
            index.map_or(Arg::Null, u32s),
            Arg::U32(rows as u32),
            Arg::U32(self.n as u32),
            Arg::U32(self.k as u32),
            Arg::U32(self.stride() as u32),
            Arg::U32(self.stride() as u32),
            Arg::U32(self.n as u32 + 3),
            live,
        ];
        let launch = Launch { kernel: &name, grid, threads: 256, shared: 0 };
        let at = if self.bias.is_some() { 3 } else { 2 };
        let out = read_f32(&launch.run(&args)[at]);
        let rows = out.chunks(self.n + 3);
        assert!(rows.clone().all(|row| row[self.n..].iter().all(|x| x.is_nan())));
        rows.flat_map(|row| row[..self.n].to_vec()).collect()
    }

    fn check(&self, out: &[f32], rows: usize) {
        for row in 0..rows {
            for feature in 0..self.n {
                let (want, size) = self.want(row, feature);
                let what = (self.rows, self.n, self.k, row, feature);
                assert_close(out[row * self.n + feature], want, size * 1e-6, format!("{what:?}"));
            }
        }
    }
}

#[test]
fn skinny_products_match_sums_in_f64() {
    let mut random = Random(21);
    for (number, rows, n, k, with_bias) in [
        (8, 1, 16, 1024, false),
        (8, 8, 33, 130, true),
        (8, 3, 1, 1, true),
        (8, 5, 17, 4100, false),
        (16, 9, 40, 264, false),
        (16, 16, 16, 7, true),
        (32, 17, 50, 1031, true),
        (32, 32, 64, 128, false),
        (64, 33, 31, 300, false),
        (64, 64, 65, 96, true),
        (64, 47, 32, 2049, false),
    ] {
        let product = Product::random(&mut random, rows, n, k, with_bias);
        product.check(&product.run(number, None, Arg::Null), rows);
    }
}

#[test]
fn a_rows_product_has_the_same_bits_in_every_variant_and_place() {
    let mut random = Random(22);
    let product = Product::random(&mut random, 70, 48, 1300, true);
    let all = product.run(64, None, Arg::Null);
    product.check(&all, 70);
    for number in [8, 16, 32] {
        assert_eq!(bits(&product.run(number, None, Arg::Null)), bits(&all), "variant {number}");
    }
    // Alone, and gathered in a different order among others.
    let of = |row: u32| &all[row as usize * 48..][..48];
    for row in [0u32, 9, 69] {
        let alone = product.run(8, Some(&[row]), Arg::Null);
        assert_eq!(bits(&alone), bits(of(row)), "row {row}");
    }
    let index = [69u32, 3, 3, 20, 0, 64, 11, 1, 7, 40];
    let gathered = product.run(16, Some(&index), Arg::Null);
    for (i, &row) in index.iter().enumerate() {
        assert_eq!(bits(&gathered[i * 48..][..48]), bits(of(row)), "row {row} at {i}");
    }
}

#[test]
fn rows_that_are_not_live_are_left_alone() {
    let product = Product::random(&mut Random(23), 20, 20, 40, false);
    for (number, live) in [(8, 11), (32, 11), (16, 0), (8, 30)] {
        let out = product.run(number, None, u32s(&[live]));
        let live = (live as usize).min(20);
        product.check(&out, live);
        assert!(out[live * 20..].iter().all(|x| x.is_nan()), "{number}, {live}");
    }
}

#[test]
fn gate_and_up_are_multiplied_in_one() {
    let mut random = Random(24);
    let mut first: [Option<Vec<f32>>; 2] = [None, None];
    for number in [8, 16, 32, 64] {
        for (rows, inner, k, gelu) in
            [(7, 24, 520, 0), (7, 24, 520, 1), (number + 3, 17, 1100, 0), (9, 17, 1100, 1)]
        {
            // The first shape's numbers are the same for every variant.
            let mut fixed = Random(25);
            let with_bias = rows == 7;
            let source = if rows == 7 { &mut fixed } else { &mut random };
            let product = Product::random(source, rows, 2 * inner, k, with_bias);
            let name = format!("tutti_skinny_gate_up_{number}");
            let args = [
                product.padded(&product.x),
                product.padded(&product.w),
                some_f32s(product.bias.as_deref()),
                poison_bf16(rows * (inner + 1)),
                Arg::U32(rows as u32),
                Arg::U32(inner as u32),
                Arg::U32(k as u32),
                Arg::U32(product.stride() as u32),
                Arg::U32(product.stride() as u32),
                Arg::U32(inner as u32 + 1),
                Arg::U32(gelu as u32),
                u32s(&[rows as u32 - 1]),
            ];
            let grid = [inner.div_ceil(16), rows.div_ceil(number), 1];
            let results = launch(&name, grid, 256).run(&args);
            let out = read_bf16(&results[if with_bias { 3 } else { 2 }]);
            let want = |row, feature| product.want(row, feature);
            assert_gated(&out, (rows, inner), ACTIVATIONS[gelu], want, number);
            if rows == 7 {
                let same = first[gelu].get_or_insert_with(|| out.clone());
                assert_eq!(bits(same), bits(&out), "variant {number}");
            }
        }
    }
}

#[test]
fn a_matrix_whose_rows_are_not_aligned_is_noticed() {
    let args = [
        bf16s(&[1.0; 16]),
        Arg::Same(0, 2),
        Arg::Null,
        f32s(&[0.0; 1]),
        Arg::Null,
        Arg::U32(1),
        Arg::U32(1),
        Arg::U32(8),
        Arg::U32(8),
        Arg::U32(8),
        Arg::U32(1),
        Arg::Null,
    ];
    let said = launch("tutti_skinny_8", [1, 1, 1], 256).failure(&args);
    assert!(said.contains("misaligned"), "{said}");
}

//! Law 7: a row's result has the same bits alone, in a batch, and with any number of threads.
use kernels::backend::prelude::*;

use crate::attention::{Case, Rows, shape, shuffled};
use crate::support::{
    Random, Weight, assert_same_in_batches, backend_in, bits, buffer, poisoned, variants,
};

#[test]
fn products_of_a_row_do_not_depend_on_the_batch_or_the_threads() {
    let mut random = Random(41);
    for (isa, precision) in variants() {
        // The second shape is split into blocks of inputs when there are several tiles of rows.
        let shapes = [(67, 190), (2306, 384)].into_iter();
        for ((cols, rows), is_int8) in shapes.flat_map(|it| [(it, false), (it, true)]) {
            let weight = Weight::random(&mut random, rows, cols);
            let weight = if is_int8 { weight.quantised() } else { weight };
            assert_same_in_batches(
                (isa, precision),
                &mut random,
                [rows, cols],
                &[1, 2, 3, 5, 7, 12, 16, 33, 67],
                |backend| weight.load(backend),
                format!("{is_int8} {cols}x{rows}"),
            );
        }
    }
}

/// A row that has no numbers in some places gives none in the same places, alone and among others.
#[test]
fn what_is_no_number_shows_in_any_batch() {
    let mut random = Random(43);
    for (isa, precision) in variants() {
        let (cols, rows) = (67, 190);
        for weight in [false, true] {
            let plain = Weight::random(&mut random, rows, cols);
            let weight = if weight { plain.quantised() } else { plain };
            for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = random.vec(7 * cols);
                x[3 * cols + 20] = wrong;
                let mut backend = backend_in(isa, precision, 1);
                let packed = weight.load(&mut backend);
                let mut products = |x: &[f32]| {
                    let input = buffer(&mut backend, x, cols);
                    let mut out = poisoned(&mut backend, x.len() / cols, rows);
                    backend.linear(&input, &packed, None, &mut out).unwrap();
                    let is_number: Vec<bool> = out.values().iter().map(|y| y.is_finite()).collect();
                    is_number
                };
                let together = products(&x);
                let alone: Vec<bool> = x.chunks(cols).flat_map(&mut products).collect();
                assert_eq!(together, alone, "{isa} {precision} {wrong}");
                let wrong_rows = together.chunks(rows).map(|row| row.iter().any(|it| !it));
                assert!(wrong_rows.eq((0..7).map(|row| row == 3)), "{isa} {precision} {wrong}");
            }
        }
    }
}

#[test]
fn attention_of_a_sequence_does_not_depend_on_the_batch_or_the_threads() {
    let mut random = Random(42);
    for (isa, precision) in variants() {
        // Heads of 64 and 128 use other tiles than heads of 32, with several queries at once.
        let shapes = [(6, 32), (8, 64), (2, 128)].into_iter();
        for ((heads, dim), window) in shapes.flat_map(|it| [(it, None), (it, Some(9))]) {
            let case = Case::random(&mut random, shape(heads, 2, dim, window), 16, true);
            let lens = [40, 1, 23, 17, 33];
            let inputs: Vec<Vec<f32>> =
                lens.iter().map(|len| random.vec((len + 1) * case.hidden)).collect();
            let mut free = shuffled(&mut random, 15);
            let tables: Vec<Vec<u32>> =
                lens.iter().map(|_| free.split_off(free.len() - 3)).collect();
            let rows = |i: usize, decode: bool| {
                let split = lens[i] * case.hidden;
                let (x, start) =
                    if decode { (&inputs[i][split..], lens[i]) } else { (&inputs[i][..split], 0) };
                Rows { x, start, blocks: &tables[i] }
            };
            let mut alone: Option<[Vec<u32>; 2]> = None;
            for threads in [1, 2, 3] {
                let mut backend = backend_in(isa, precision, threads);
                let mut loaded = case.load(&mut backend, 15);
                let separate = [false, true].map(|decode| {
                    let each = (0..lens.len())
                        .flat_map(|i| case.step(&mut backend, &mut loaded, &[rows(i, decode)]).1);
                    bits(&each.collect::<Vec<f32>>())
                });
                let mut loaded = case.load(&mut backend, 15);
                let together = [false, true].map(|decode| {
                    let seqs: Vec<_> = (0..lens.len()).map(|i| rows(i, decode)).collect();
                    bits(&case.step(&mut backend, &mut loaded, &seqs).1)
                });
                assert!(separate == together, "{isa} {precision} {threads} threads {window:?}");
                assert!(
                    *alone.get_or_insert(separate) == together,
                    "{isa} {precision} {threads} {window:?}"
                );
            }
        }
    }
}

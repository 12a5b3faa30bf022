//! Measures how long a CPU takes to sample one row, with and without masks:
//! `cargo run --release -p kernels --example sample_bench`. It asserts nothing.
#![allow(clippy::print_stdout, reason = "a tool that prints")]
use std::time::Instant;

use kernels::cpu::sample::Sampler;
use kernels::sampling::{SampleParams, SampleRow};

/// Number of runs, of which the best counts.
const RUNS: u32 = 200;

fn main() {
    let greedy = SampleParams { temperature: 0.0, ..SampleParams::default() };
    let params = [
        ("greedy", greedy.clone()),
        ("greedy, logprobs 0", SampleParams { logprobs: Some(0), ..greedy.clone() }),
        ("greedy, penalty", SampleParams { presence_penalty: 0.5, ..greedy }),
        ("temperature 1", SampleParams::default()),
        ("top_p 0.9", SampleParams { top_p: 0.9, ..SampleParams::default() }),
    ];
    println!("microseconds of one row; masks: 5 tokens, half of all at random, all but 200, all");
    println!(
        "{:8} {:20}{:>8}{:>8}{:>8}{:>8}{:>8}",
        "vocab", "", "none", "few", "half", "most", "all"
    );
    for vocab in [128_256usize, 151_936] {
        let mut random = 1u64;
        let mut next = move || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            random >> 33
        };
        // A bell curve like a model's: sums of four random numbers.
        let logits: Vec<f32> = (0..vocab)
            .map(|_| (0..4).map(|_| (next() % 1000) as f32 / 100.0).sum::<f32>() - 20.0)
            .collect();
        let words = vocab.div_ceil(32);
        let mut few = vec![0u32; words];
        let mut most = vec![u32::MAX; words];
        for i in 0..200 {
            let token = next() as usize % vocab;
            most[token / 32] &= !(1 << (token % 32));
            if i < 5 {
                few[token / 32] |= 1 << (token % 32);
            }
        }
        let half: Vec<u32> = (0..words).map(|_| (next() ^ next() << 16) as u32).collect();
        let all = vec![u32::MAX; words];
        let masks = [None, Some(&few), Some(&half), Some(&most), Some(&all)];
        for (name, params) in &params {
            let mut sampler = Sampler::new();
            let times = masks.map(|mask| {
                let allowed = mask.map(Vec::as_slice);
                let row = SampleRow { params, prompt: &[1, 2], output: &[3, 4], allowed };
                let mut best = f64::INFINITY;
                for _ in 0..RUNS {
                    let began = Instant::now();
                    std::hint::black_box(sampler.sample(std::hint::black_box(&logits), &row));
                    best = best.min(began.elapsed().as_secs_f64() * 1e6);
                }
                best
            });
            print!("{vocab:<8} {name:20}");
            times.iter().for_each(|time| print!("{time:>8.0}"));
            println!();
        }
    }
}

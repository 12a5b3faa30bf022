//! Checks values at the sizes of real models: other tests compare small ones, and speed
//! measurements do not notice a wrong sum.
use shared::sampling::SamplingParams;

use crate::driver::{Driver, Plans};
use crate::speed::{BLOCK_SIZE, Sizes};
use crate::{Options, Table, graphs_made};

/// Number of decoded tokens, and of prompt tokens before them.
const TOKENS: u32 = 32;
const PROMPT: u32 = 100;
/// Up to this many rows a step computes the same sums however it is launched. With more, cuBLASLt
/// may choose another algorithm for a graph's number of rows than for the actual number.
const SAME: u32 = 32;

/// Rows of products. cuBLASLt's algorithm is chosen at a bucket's first count and used for the
/// whole bucket. So some buckets start with their largest count, and one with a smaller count.
const ROWS: [usize; 15] = [1, 8, 16, 32, 40, 33, 64, 128, 65, 130, 192, 256, 200, 1024, 777];

/// Ways to launch a step: whether as a graph, and whether kernels may begin before the preceding
/// ones are complete.
const WAYS: [(&str, bool, bool); 3] = [
    ("graphs and overlap", true, true),
    ("graphs", true, false),
    ("calls one after the other", false, false),
];

/// A token, and the bits of its log-probability, which depend on all logits.
type Drawn = (u32, Option<u32>);

/// How tokens are chosen: greedily, which often repeats a token; or drawn.
fn choices() -> [(&'static str, SamplingParams); 2] {
    let drawn = SamplingParams { seed: 7, logprobs: Some(0), ..SamplingParams::default() };
    [("greedy", SamplingParams::greedy()), ("drawn", drawn)]
}

/// Tokens of `rows` sequences, step after step.
fn tokens(
    driver: &mut Driver<'_>,
    rows: u32,
    sampling: &SamplingParams,
    sizes: &Sizes,
) -> Result<Vec<Drawn>, String> {
    let prompt = PROMPT.min(sizes.context);
    let blocks = (prompt + TOKENS + 1).div_ceil(BLOCK_SIZE);
    let together = (sizes.prefill / prompt).max(1);
    let seqs = driver.prefill(rows, (prompt, blocks), together, sampling)?;
    let plans = (prompt..prompt + TOKENS).map(|at| driver.decode_plan(&seqs, at)).collect();
    let mut tokens = Vec::new();
    driver.run_each(Plans(plans), |outputs| {
        tokens.extend(outputs.iter().filter_map(|output| {
            let logprob = output.logprobs.as_ref().map(|found| found.logprob.to_bits());
            Some((output.token?, logprob))
        }));
    })?;
    driver.forget(seqs)?;
    if tokens.len() != (rows * TOKENS) as usize {
        return Err(format!("{} tokens of {rows} rows in {TOKENS} steps", tokens.len()));
    }
    Ok(tokens)
}

/// Checks that decode steps yield the same tokens in all ways.
pub(crate) fn decodes_alike(
    name: &str,
    driver: &mut Driver<'_>,
    sizes: &Sizes,
    table: &mut Table,
) -> Result<(), String> {
    let mut batches = [1, 8, 64].map(|rows: u32| rows.min(sizes.rows())).to_vec();
    batches.dedup();
    for rows in batches {
        for (how, sampling) in choices() {
            let mut all = Vec::new();
            for (way, graphs, overlap) in WAYS {
                driver.engine.backend().set_modes(graphs, overlap);
                let mut drawn = tokens(driver, rows, &sampling, sizes);
                if graphs {
                    let made = graphs_made(driver.engine.backend());
                    drawn = drawn.and_then(|drawn| made.map(|_| drawn));
                }
                all.push((way, drawn));
            }
            driver.engine.backend().set_modes(true, true);
            let mut found = Vec::new();
            for (way, tokens) in all {
                found.push((way, tokens.map_err(|error| format!("{way}: {error}"))?));
            }
            let what = format!("{name} {how} tokens, {rows} rows, {} ways", WAYS.len());
            table.add(what, same(rows, &found));
        }
    }
    Ok(())
}

/// Checks that all found tokens equal the first ones.
fn same(rows: u32, found: &[(&str, Vec<Drawn>)]) -> Result<String, String> {
    let Some(((_, first), others)) = found.split_first() else {
        return Err("no tokens".to_owned());
    };
    let mut kinds: Vec<u32> = first.iter().map(|(token, _)| *token).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let mut words = vec![format!("{} different tokens of {}", kinds.len(), first.len())];
    let mut all_well = true;
    for (way, tokens) in others {
        if let Some(at) = tokens.iter().zip(first).position(|(token, first)| token != first) {
            all_well &= rows > SAME;
            words.push(format!("{way}: another from step {} on", at as u32 / rows));
        }
    }
    if all_well { Ok(words.join("; ")) } else { Err(words.join("; ")) }
}

/// Checks that products are right, whichever kernel computes them.
pub(crate) fn products_agree(
    options: &Options,
    ordinal: u32,
    name: &str,
    matrices: &[(&str, usize, usize)],
    table: &mut Table,
) {
    let all: &[usize] = if options.quick { &[1, 9] } else { &ROWS };
    let mut backend = match options.backend(ordinal, true) {
        Ok(backend) => backend,
        Err(error) => return table.add("values of products", Err(error.to_string())),
    };
    for (what, n, k) in matrices {
        for &rows in all {
            let found = backend.compare_products((rows, *n, *k));
            let words = match found {
                Ok(found) if found.is_right() => Ok(found.to_string()),
                Ok(found) => Err(found.to_string()),
                Err(error) => Err(error.to_string()),
            };
            table.add(format!("{name} {what} {n} x {k} values, {rows} rows"), words);
        }
    }
}

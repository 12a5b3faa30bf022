//! Sampling queued behind sampling on a stand-in for a GPU, compared with the reference sampler:
//! rows with edited logits among others, lists of likely tokens, and rows whose last token the host
//! does not have yet.
use kernels::ReferenceBackend;
use kernels::backend::prelude::*;
use kernels::backend::{
    AttentionShape, Batch, DType, HostMatrix, NOT_FED, SeqRows, StepInputs, Tensors,
};
use kernels::collective::single_rank;
use kernels::cuda::CudaBackend;
use kernels::sampling::{SampleParams, SampleRow, Sampled};

use crate::rig::fake_cuda_backend;

const VOCAB: usize = 200;

/// Coarse logits, so that edits matter.
fn logits(step: usize, rows: usize) -> Vec<f32> {
    let mut state = 77 + step as u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 24) as f32 - 128.0) / 16.0
    };
    (0..rows * VOCAB).map(|_| next()).collect()
}

struct Sequence {
    params: SampleParams,
    prompt: Vec<u32>,
    output: Vec<u32>,
}

/// Of every six sequences, three have edited logits, two of them depending on their tokens.
fn sequence(index: u32) -> Sequence {
    let mut params = SampleParams {
        temperature: if index.is_multiple_of(4) { 0.0 } else { 0.8 },
        seed: u64::from(index),
        logprobs: [None, Some(0), Some(3), Some(7)][index as usize % 4],
        ..SampleParams::default()
    };
    match index % 6 {
        1 => params.logit_bias = vec![(9, 30.0), (7, -4.0)],
        2 => params.presence_penalty = 15.0,
        3 => {
            params.repetition_penalty = 1.9;
            params.frequency_penalty = 3.0;
        }
        5 => {
            params.suppress_until_min = (0..150).collect();
            params.min_tokens = 3;
        }
        _ => {}
    }
    Sequence { params, prompt: vec![index % 5, 3], output: Vec::new() }
}

/// The rows' tokens according to the reference sampler.
fn oracle(logits: &[f32], rows: &[SampleRow<'_>]) -> Vec<Sampled> {
    let mut backend = ReferenceBackend::new(single_rank());
    let bytes: Vec<u8> = logits.iter().flat_map(|x| x.to_le_bytes()).collect();
    let table = HostMatrix {
        data: &bytes,
        dtype: DType::F32,
        rows: rows.len(),
        cols: VOCAB,
        col_start: 0,
        row_stride: VOCAB,
        scales: None,
    };
    let table = backend.load_matrix(&[table]).unwrap();
    let mut buffer = backend.new_buffer(rows.len(), VOCAB).unwrap();
    let all: Vec<u32> = (0..rows.len() as u32).collect();
    backend.embed(&table, &all, 0, 1.0, &mut buffer).unwrap();
    let mut sampled = Vec::new();
    backend.sample(&buffer, VOCAB, 0, rows, &mut sampled).unwrap();
    sampled
}

/// Begins a decode step of sequences that are all at their first token.
pub(crate) fn begin(backend: &mut CudaBackend, sampling: &[SampleRow<'_>], feed: &[u32]) {
    let rows = sampling.len() as u32;
    let all: Vec<u32> = (0..rows).collect();
    let seq = |row: u32| SeqRows {
        row_start: row,
        num_rows: 1,
        context_len: 1,
        table_start: row,
        table_len: 1,
    };
    let seqs: Vec<SeqRows> = all.iter().copied().map(seq).collect();
    let positions = vec![0; rows as usize];
    let batch = Batch { positions: &positions, slots: &positions, seqs: &seqs, block_tables: &all };
    let attention = AttentionShape {
        num_heads: 1,
        num_kv_heads: 1,
        head_dim: 16,
        norm_eps: 1e-6,
        sliding_window: None,
        softcap: None,
        latent: None,
    };
    let inputs = StepInputs {
        ids: &all,
        batch,
        attention: &attention,
        windows: &[None],
        sample_rows: &all,
        sampling,
        feed,
        states: &[],
        adapters: &[],
        masked: false,
        is_plain: true,
    };
    backend.begin_step(&inputs).unwrap();
}

/// Queues a step with one row per sequence.
fn queue(
    backend: &mut CudaBackend,
    logits: &<CudaBackend as Tensors>::Buffer,
    sampling: &[SampleRow<'_>],
    feed: &[u32],
) {
    begin(backend, sampling, feed);
    backend.queue_sample(logits, VOCAB, sampling).unwrap();
    backend.end_step().unwrap();
}

fn take(backend: &mut CudaBackend) -> Vec<Sampled> {
    let mut sampled = Vec::new();
    backend.take_sampled(&mut sampled).unwrap();
    sampled
}

fn compare(found: &[Sampled], expected: &[Sampled], at: &str) {
    assert_eq!(found.len(), expected.len());
    for (row, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.token, expected.token, "{at}, row {row}");
        assert_eq!((found.rank, found.corrupted), (expected.rank, false), "{at}, row {row}");
        assert!((found.logprob - expected.logprob).abs() < 1e-4, "{at}, row {row}");
        let ids = |sampled: &Sampled| sampled.top.iter().map(|it| it.0).collect::<Vec<_>>();
        assert_eq!(ids(found), ids(expected), "{at}, row {row}");
    }
}

/// Steps of `counts` sequences, each begun before the previous step's tokens are fetched. Sequences
/// change rows, and some take part only in every other step.
fn behind_each_other(counts: &[usize]) {
    let most = counts.iter().copied().max().unwrap();
    let mut backend = fake_cuda_backend(true, single_rank());
    let mut all: Vec<Sequence> = (0..most as u32).map(sequence).collect();
    let orders: Vec<Vec<usize>> = counts
        .iter()
        .enumerate()
        .map(|(step, count)| {
            let mut order: Vec<usize> = (0..*count).collect();
            order.rotate_left(step % count);
            order.retain(|index| index % 9 != 8 || step % 2 == 0);
            order
        })
        .collect();
    // The reference, one step after another.
    let mut expected = Vec::new();
    for (step, order) in orders.iter().enumerate() {
        let rows: Vec<SampleRow<'_>> = order
            .iter()
            .map(|index| {
                let Sequence { params, prompt, output } = &all[*index];
                SampleRow { params, prompt, output, allowed: None }
            })
            .collect();
        let tokens = oracle(&logits(step, order.len()), &rows);
        for (index, sampled) in order.iter().zip(&tokens) {
            all[*index].output.push(sampled.token);
        }
        expected.push(tokens);
    }
    let buffers: Vec<_> = orders
        .iter()
        .enumerate()
        .map(|(step, order)| {
            let mut buffer = backend.new_buffer(order.len(), VOCAB).unwrap();
            backend.write_buffer(&mut buffer, &logits(step, order.len())).unwrap();
            buffer
        })
        .collect();
    let mut lengths = vec![0; most];
    for (step, order) in orders.iter().enumerate() {
        let before = step.checked_sub(1).map_or(&[][..], |before| &orders[before]);
        let feed: Vec<u32> = order
            .iter()
            .map(|index| before.iter().position(|it| it == index).map_or(NOT_FED, |at| at as u32))
            .collect();
        let outputs: Vec<Vec<u32>> = order
            .iter()
            .zip(&feed)
            .map(|(index, fed)| {
                let mut output = all[*index].output[..lengths[*index]].to_vec();
                if *fed != NOT_FED {
                    // The host does not have this token.
                    *output.last_mut().unwrap() = 0;
                }
                output
            })
            .collect();
        let rows: Vec<SampleRow<'_>> = order
            .iter()
            .zip(&outputs)
            .map(|(index, output)| {
                let Sequence { params, prompt, .. } = &all[*index];
                SampleRow { params, prompt, output, allowed: None }
            })
            .collect();
        order.iter().for_each(|index| lengths[*index] += 1);
        let feed = if step == 0 { &[][..] } else { &feed };
        queue(&mut backend, &buffers[step], &rows, feed);
        if let Some(before) = step.checked_sub(1) {
            compare(&take(&mut backend), &expected[before], &format!("step {before}"));
        }
    }
    let last = counts.len() - 1;
    compare(&take(&mut backend), &expected[last], "the last step");
    assert!(backend.is_sampled().unwrap());
}

#[test]
fn edits_and_lists_are_queued_and_depend_on_tokens_that_are_fed() {
    behind_each_other(&[7, 7, 6, 7, 7, 1, 7]);
    behind_each_other(&[70, 70, 64, 70]);
}

/// Memory for results is allocated while those of another step are in flight.
#[test]
fn a_step_of_more_rows_than_ever_is_queued_behind_another() {
    behind_each_other(&[20, 600, 30]);
}

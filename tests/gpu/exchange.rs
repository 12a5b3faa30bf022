//! What ranks exchange within a step, each in equal steps that are launched directly, captured and
//! replayed: sums, gathered logits, and the best of their own parts of a vocabulary.
use std::time::{Duration, Instant};

use kernels::KernelError;
use kernels::backend::prelude::*;
use kernels::backend::{AttentionShape, Batch, SeqRows, StepInputs};
use kernels::collective::single_rank;
use kernels::cuda::CudaBackend;
use kernels::reference::ReferenceBackend;
use kernels::sampling::{SampleParams, SampleRow};

use crate::operations::{Random, wide};
use crate::ranks::{check_sum, not_given_up, term};

/// Equal steps: one of each kind.
const STEPS: usize = 3;
/// Rows of a step.
const ROWS: usize = 3;
/// Tokens in each rank's part of the vocabulary.
const PART: usize = 1001;

/// Runs a step of one row each for three sequences, which all sample with `params`.
fn step<R>(
    backend: &mut CudaBackend,
    params: &SampleParams,
    compute: impl FnOnce(&mut CudaBackend, &[SampleRow<'_>]) -> Result<R, KernelError>,
) -> Result<R, KernelError> {
    let ids = [0, 1, 2];
    let seqs: Vec<SeqRows> = (0..3)
        .map(|row| SeqRows {
            row_start: row,
            num_rows: 1,
            context_len: 1,
            table_start: row,
            table_len: 1,
        })
        .collect();
    let sampling = [SampleRow { params, prompt: &[], output: &[], allowed: None }; ROWS];
    let shape = AttentionShape {
        num_heads: 1,
        num_kv_heads: 1,
        head_dim: 64,
        norm_eps: 1e-5,
        sliding_window: None,
        softcap: None,
        latent: None,
    };
    backend.begin_step(&StepInputs {
        ids: &ids,
        batch: Batch { positions: &ids, slots: &ids, seqs: &seqs, block_tables: &ids },
        attention: &shape,
        windows: &[None],
        sample_rows: &ids,
        sampling: &sampling,
        feed: &[],
        states: &[],
        adapters: &[],
        masked: false,
        is_plain: true,
    })?;
    let computed = compute(backend, &sampling)?;
    backend.end_step()?;
    Ok(computed)
}

fn wrong(message: String) -> KernelError {
    KernelError::Shape { op: "exchange", message }
}

/// Sums and gathers logits.
pub(crate) fn exchange(backend: &mut CudaBackend) -> Result<String, KernelError> {
    let width = 1000;
    let (rank, ranks) = (backend.rank() as usize, backend.world_size() as usize);
    let mut data = backend.new_buffer(4, width)?;
    let mut local = backend.new_buffer(4, 5)?;
    let mut full = backend.new_buffer(4, 5 * ranks)?;
    let own: Vec<f32> = (0..ROWS * width).map(|i| term(rank, i)).collect();
    let logits: Vec<f32> = (0..ROWS * 5).map(|i| (100 * rank + i) as f32).collect();
    let params = SampleParams { temperature: 0.7, ..SampleParams::default() };
    for _ in 0..STEPS {
        backend.write_buffer(&mut data, &own)?;
        backend.write_buffer(&mut local, &logits)?;
        step(backend, &params, |backend, _| {
            backend.all_reduce(&mut data)?;
            backend.gather_logits(&local, &mut full)
        })?;
        let (sums, rows_of_all) = (backend.read_buffer(&data)?, backend.read_buffer(&full)?);
        check_sum(&sums, ranks).map_err(wrong)?;
        for (i, found) in rows_of_all.iter().enumerate() {
            let (row, column) = (i / (5 * ranks), i % (5 * ranks));
            let expected = (100 * (column / 5) + row * 5 + column % 5) as f32;
            if *found != expected {
                return Err(wrong(format!("logit {i} is {found}, not {expected}")));
            }
        }
    }
    not_given_up(backend).map_err(wrong)?;
    Ok(format!("{} graphs", backend.num_graphs()))
}

/// Chooses tokens, each rank knowing the logits of its own part of the vocabulary: those that the
/// float32 reference chooses from whole rows. Where exchanges are timed, a time is reported. Only
/// ranks that exchange data `directly` between GPUs do that: others gather logits.
pub(crate) fn choose(backend: &mut CudaBackend, directly: bool) -> Result<(), KernelError> {
    let (rank, ranks) = (backend.rank() as usize, backend.world_size() as usize);
    let vocab = ranks * PART;
    let mut random = Random(23);
    let logits: Vec<f32> = random.vec(ROWS * vocab).iter().map(|x| x * 6.0).collect();
    let own: Vec<f32> =
        logits.chunks(vocab).flat_map(|row| &row[rank * PART..][..PART]).copied().collect();
    let mut local = backend.new_buffer(4, PART)?;
    let first_id = (rank * PART) as u32;
    let greedy = SampleParams { temperature: 0.0, ..SampleParams::default() };
    let few = SampleParams { temperature: 0.9, top_k: 20, seed: 4, ..greedy.clone() };
    let more = SampleParams { top_k: 100, top_p: 0.9, min_p: 0.01, seed: 9, ..few.clone() };
    let mut reference = ReferenceBackend::new(single_rank());
    let whole = wide(&mut reference, &logits, vocab)?;
    for params in [greedy, few, more] {
        let rows = [SampleRow { params: &params, prompt: &[], output: &[], allowed: None }; ROWS];
        let (mut expected, mut found) = (Vec::new(), Vec::new());
        reference.sample(&whole, vocab, 0, &rows, &mut expected)?;
        for _ in 0..STEPS {
            backend.write_buffer(&mut local, &own)?;
            let apart = step(backend, &params, |backend, rows| {
                let apart = backend.keeps_logits_apart(first_id, PART, vocab);
                if apart {
                    backend.sample(&local, vocab, 0, rows, &mut found)?;
                }
                Ok(apart)
            })?;
            let top_k = params.top_k;
            if apart != directly {
                let how = if apart { "kept apart" } else { "gathered" };
                return Err(wrong(format!("with top-k {top_k}, logits would be {how}")));
            }
            if apart && found != expected {
                let message = format!("with top-k {top_k}, chosen {found:?}, not {expected:?}");
                return Err(wrong(message));
            }
        }
    }
    let began = Instant::now();
    while backend.times_collectives() && backend.take_collective_time() == Duration::ZERO {
        if began.elapsed() > Duration::from_secs(5) {
            return Err(wrong("no time of exchanges is reported".to_owned()));
        }
    }
    not_given_up(backend).map_err(wrong)
}

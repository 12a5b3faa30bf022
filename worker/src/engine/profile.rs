//! Warm-up steps on made-up tokens. First the largest steps that the limits allow, once:
//! afterwards, everything that a device allocates or chooses at first use is there, and the memory
//! that is left can be measured. Then decode steps of every size, before the first request, so that
//! what a device prepares per kind of step is there, too.
use std::time::{Duration, Instant};

use kernels::backend::{Batch, SeqRows, StepInputs};
use kernels::sampling::{SampleParams, SampleRow};
use kernels::{Backend, KernelError};

use shared::protocol::EngineConfig;

use super::Engine;
use crate::model::decoder::Decoder;

/// How a step's rows are sampled.
#[derive(Clone, Copy, Debug)]
enum Choice {
    Greedy,
    TopK,
    TopP,
}

impl Choice {
    fn params(self) -> SampleParams {
        let (temperature, top_k) = match self {
            Self::Greedy => (0.0, 0),
            Self::TopK => (1.0, 50),
            Self::TopP => (1.0, 0),
        };
        SampleParams { temperature, top_k, top_p: 0.9, ..SampleParams::default() }
    }
}

/// Kind of a step, besides its tokens.
#[derive(Clone, Copy, Debug)]
struct Kind {
    choice: Choice,
    masks: bool,
    adapters: bool,
}

/// Result of [`Engine::warm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarmUp {
    /// Number of kinds of steps that are ready.
    pub kinds: usize,
    /// Number of all kinds.
    pub of: usize,
}

impl<B: Backend> Engine<B> {
    /// Runs the largest steps. Needs memory for one block of cache; every rank of a replica must
    /// call it.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn profile(&mut self) -> Result<(), KernelError> {
        self.release();
        let shape = self.decoder.kv_shape(&self.config, 1);
        let mut cache = self.backend.new_kv_cache(shape)?;
        let longest = self.config.max_model_len.max(1);
        // Every row has a mask, to make room for all of them.
        let kind =
            Kind { choice: Choice::TopP, masks: true, adapters: self.decoder.num_adapters() > 0 };
        for steps in largest(&self.config, longest) {
            self.dummy_step(&mut cache, &steps, kind)?;
        }
        self.profile_draft()
    }

    /// Does the same for the draft model: prompts that it has missed, then drafts.
    fn profile_draft(&mut self) -> Result<(), KernelError> {
        let Self { backend, draft: Some(draft), config, .. } = self else { return Ok(()) };
        let longest = draft.positions().max(1);
        let (backend, decoder) = draft.parts(backend);
        let shape = decoder.kv_shape(config, 1);
        let mut cache = backend.new_kv_cache(shape)?;
        let kind = Kind { choice: Choice::TopP, masks: false, adapters: false };
        for steps in largest(config, longest) {
            let steps = DummyStep { seqs: &steps, kind, block_size: config.block_size };
            steps.run(backend, decoder, &mut cache, true)?;
        }
        Ok(())
    }

    /// Runs decode steps of each number of rows, of every kind that plain requests have, twice:
    /// devices that record steps record the second one. Begins no more of them after rank 0's
    /// `patience`. Every rank of a replica must call it after [`Engine::start`], with the same
    /// rows. Nobody reads what it writes to the cache.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn warm(&mut self, rows: &[u32], patience: Duration) -> Result<WarmUp, KernelError> {
        let began = Instant::now();
        // Ranks in a group exchange one logit, a few or all of them, and each is another graph.
        let choices = match self.backend.samples_everywhere() {
            true => &[Choice::Greedy, Choice::TopK, Choice::TopP][..],
            false => &[Choice::TopP],
        };
        let adapters = if self.decoder.num_adapters() > 0 { &[false, true][..] } else { &[false] };
        let kinds = |rows: u32| {
            choices.iter().flat_map(move |&choice| {
                let kind = move |&adapters| (rows, Kind { choice, masks: false, adapters });
                adapters.iter().map(kind)
            })
        };
        let all: Vec<(u32, Kind)> = rows.iter().copied().flat_map(kinds).collect();
        let Some(mut cache) = self.cache.take() else {
            return Err(KernelError::Shape { op: "warm", message: "no cache yet".to_owned() });
        };
        let mut warmed = WarmUp { kinds: 0, of: all.len() };
        let mut result = Ok(());
        for (rows, kind) in all {
            // Rank 0 decides whether there is time left: the others would measure it differently.
            let mut goes_on = [u32::from(began.elapsed() < patience)];
            let steps = vec![(1, 1); rows as usize];
            result = self.backend.broadcast_tokens(&mut goes_on);
            if result.is_err() || goes_on[0] == 0 {
                break;
            }
            for _ in 0..2 {
                result = result.and_then(|()| self.dummy_step(&mut cache, &steps, kind));
            }
            if result.is_err() {
                break;
            }
            warmed.kinds += 1;
        }
        self.cache = Some(cache);
        result?;
        self.warm_draft(rows, began, patience)?;
        // What these steps waited for other ranks belongs to no request's.
        let _ = self.backend.take_collective_time();
        Ok(warmed)
    }

    /// Does the same for the draft model if it has a backend of its own that records steps. Only
    /// rank 0 has it, and the other ranks do not wait for this.
    fn warm_draft(
        &mut self,
        rows: &[u32],
        began: Instant,
        patience: Duration,
    ) -> Result<(), KernelError> {
        let Some(draft) = &mut self.draft else { return Ok(()) };
        let kind = Kind { choice: Choice::TopP, masks: false, adapters: false };
        let Some((backend, decoder, cache)) = draft.own_parts() else { return Ok(()) };
        for &rows in rows {
            let seqs = vec![(1, 1); rows as usize];
            let steps = DummyStep { seqs: &seqs, kind, block_size: self.config.block_size };
            for _ in 0..2 {
                if began.elapsed() >= patience {
                    return Ok(());
                }
                match steps.run(backend, decoder, cache, true) {
                    // The next step of this kind launches its kernels one by one.
                    Err(KernelError::Again(reason)) => {
                        tracing::warn!(reason, "a draft model's steps are not captured");
                    }
                    result => result?,
                }
            }
        }
        Ok(())
    }

    /// Computes sequences of (rows, tokens in the cache), all in the same block.
    fn dummy_step(
        &mut self,
        cache: &mut B::KvCache,
        seqs: &[(u32, u32)],
        kind: Kind,
    ) -> Result<(), KernelError> {
        let samples = self.samples();
        let Self { backend, decoder, config, .. } = self;
        let steps = DummyStep { seqs, kind, block_size: config.block_size };
        steps.run(backend, decoder, cache, samples)
    }
}

/// The largest steps with sequences of up to `longest` tokens: prompts of the greatest length, then
/// decode at the greatest length. Per sequence: its rows, and its tokens in the cache.
fn largest(config: &EngineConfig, longest: u32) -> [Vec<(u32, u32)>; 2] {
    let (tokens, seqs) = (config.max_num_batched_tokens, config.max_num_seqs);
    let mut prompts = Vec::new();
    let mut left = tokens;
    while left > 0 && prompts.len() < seqs as usize {
        let rows = left.min(longest);
        prompts.push((rows, rows));
        left -= rows;
    }
    [prompts, vec![(1, longest); seqs.min(tokens) as usize]]
}

/// A step on made-up tokens.
struct DummyStep<'a> {
    /// Rows and tokens in the cache of each sequence, all in the same block.
    seqs: &'a [(u32, u32)],
    kind: Kind,
    block_size: u32,
}

impl DummyStep<'_> {
    fn run<B: Backend>(
        &self,
        backend: &mut B,
        decoder: &mut Decoder<B>,
        cache: &mut B::KvCache,
        samples: bool,
    ) -> Result<(), KernelError> {
        let Self { seqs, kind, block_size } = *self;
        let (mut positions, mut entries, mut sample_rows) = (Vec::new(), Vec::new(), Vec::new());
        let mut tables = 0;
        for &(num_rows, context_len) in seqs {
            let row_start = positions.len() as u32;
            positions.extend(context_len - num_rows..context_len);
            let table_len = context_len.div_ceil(block_size);
            let table_start = tables;
            tables += table_len;
            entries.push(SeqRows { row_start, num_rows, context_len, table_start, table_len });
            sample_rows.push(row_start + num_rows - 1);
        }
        let ids = vec![0; positions.len()];
        let slots: Vec<u32> = positions.iter().map(|position| position % block_size).collect();
        let block_tables = vec![0; tables as usize];
        let params = kind.choice.params();
        let vocab = decoder.config().vocab_size;
        let mask = vec![u32::MAX; vocab.div_ceil(32)];
        let allowed = kind.masks.then_some(mask.as_slice());
        let row = SampleRow { params: &params, prompt: &[], output: &[], allowed: None };
        let sampling = vec![row; sample_rows.len()];
        let masked = vec![SampleRow { allowed, ..row }; sample_rows.len()];
        let batch = Batch {
            positions: &positions,
            slots: &slots,
            seqs: &entries,
            block_tables: &block_tables,
        };
        let rows = if kind.adapters { ids.len() } else { 0 };
        let states: Vec<u32> = (0..entries.len() as u32).collect();
        // Whatever is in the first place.
        let adapters = vec![0; rows];
        backend.begin_step(&StepInputs {
            ids: &ids,
            batch,
            attention: decoder.attention(),
            windows: decoder.windows(),
            sample_rows: &sample_rows,
            sampling: &sampling,
            feed: &[],
            states: &states,
            adapters: &adapters,
            masked: kind.masks,
            is_plain: true,
        })?;
        decoder.forward(backend, cache, &ids, &batch, &states, &adapters)?;
        let logits = decoder.logits(backend, &sample_rows)?;
        if samples {
            let rows = if kind.masks { &masked } else { &sampling };
            if kind.masks {
                backend.launch_step()?;
            }
            backend.sample(logits, vocab, 0, rows, &mut Vec::new())?;
        }
        backend.end_step()
    }
}

//! The largest steps that the sizes allow, run once on made-up tokens: whatever a device allocates
//! or chooses at first use is there afterwards, and what memory is left can be measured.
use kernels::backend::{Batch, SeqRows, StepInputs};
use kernels::sampling::{SampleParams, SampleRow};
use kernels::{Backend, KernelError};

use super::Engine;
use crate::model::lora;

impl<B: Backend> Engine<B> {
    /// Runs them. Needs memory for one block of cache; every rank of a replica calls it.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn profile(&mut self) -> Result<(), KernelError> {
        self.release();
        let shape = self.decoder.kv_shape(self.config.block_size as usize, 1);
        let mut cache = self.backend.new_kv_cache(shape)?;
        let (tokens, seqs) = (self.config.max_num_batched_tokens, self.config.max_num_seqs);
        let longest = self.config.max_model_len.max(1);
        // Prompts of the greatest length, then decode at the greatest length.
        let mut prompts = Vec::new();
        let mut left = tokens;
        while left > 0 && prompts.len() < seqs as usize {
            let rows = left.min(longest);
            prompts.push((rows, rows));
            left -= rows;
        }
        let decode = vec![(1, longest); seqs.min(tokens) as usize];
        for steps in [prompts, decode] {
            self.pretend(&mut cache, &steps)?;
        }
        Ok(())
    }

    /// Computes sequences of (rows, tokens in the cache), all in one block.
    fn pretend(&mut self, cache: &mut B::KvCache, seqs: &[(u32, u32)]) -> Result<(), KernelError> {
        let block_size = self.config.block_size;
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
        let params = SampleParams { top_p: 0.9, top_k: 50, ..SampleParams::default() };
        // Every row has a mask: there is room for all of them from now on, on ranks that do not
        // sample yet too. Room that is made later would cost some ranks their graphs and others not.
        let vocab = self.decoder.config().vocab_size;
        let mask = vec![u32::MAX; vocab.div_ceil(32)];
        let row = SampleRow { params: &params, prompt: &[], output: &[], allowed: Some(&mask) };
        let samples = self.backend.rank() == 0 || self.backend.samples_everywhere();
        let sampling = vec![row; sample_rows.len()];
        let batch = Batch {
            positions: &positions,
            slots: &slots,
            seqs: &entries,
            block_tables: &block_tables,
        };
        let Self { backend, decoder, .. } = self;
        let rows = if decoder.num_adapters() > 0 { ids.len() } else { 0 };
        let adapters = vec![lora::row_of(1); rows];
        backend.begin_step(&StepInputs {
            ids: &ids,
            batch,
            attention: decoder.attention(),
            sample_rows: &sample_rows,
            sampling: &sampling,
            feed: &[],
            adapters: &adapters,
            is_plain: true,
        })?;
        decoder.forward(backend, cache, &ids, &batch, &adapters)?;
        let logits = decoder.logits(backend, &sample_rows)?;
        if samples {
            backend.sample(logits, vocab, 0, &sampling, &mut Vec::new())?;
        }
        backend.end_step()
    }
}

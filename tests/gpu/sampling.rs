//! Sampled tokens, and log-probabilities of given tokens.
use kernels::KernelError;
use kernels::sampling::{SampleParams, SampleRow, Sampled};

use crate::operations::{Case, Random, Writable, wide};

/// Compares sampled tokens. The logits are far apart, so that the choice is clear.
pub(crate) struct Sample {
    pub(crate) vocab: usize,
}

impl Case for Sample {
    fn name(&self) -> String {
        format!("sample and logprobs, vocabulary {}", self.vocab)
    }

    fn tolerance(&self) -> (f32, f32) {
        (1e-4, 1e-4)
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let mut random = Random(7);
        let values: Vec<f32> = random.vec(40 * self.vocab).iter().map(|x| x * 20.0).collect();
        let logits = wide(backend, &values, self.vocab)?;
        let plain = SampleParams {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 11,
            choice: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            suppress_until_min: Vec::new(),
            min_tokens: 0,
            logprobs: Some(5),
        };
        let random_top = SampleParams { temperature: 0.8, top_k: 5, ..plain.clone() };
        let random_p = SampleParams { temperature: 1.0, top_p: 0.7, seed: 5, ..plain.clone() };
        let edited = SampleParams {
            logit_bias: vec![(3, 50.0)],
            frequency_penalty: 1.0,
            repetition_penalty: 1.3,
            logprobs: None,
            ..plain.clone()
        };
        let all = [&plain, &random_top, &random_p, &edited];
        // The mask of the second half of the rows allows only every third token.
        let mut mask = vec![0u32; self.vocab.div_ceil(32)];
        for token in (1..self.vocab).step_by(3) {
            mask[token / 32] |= 1 << (token % 32);
        }
        let rows: Vec<SampleRow<'_>> = (0..40)
            .map(|i| SampleRow {
                params: all[i % 4],
                prompt: &[1, 2, 3],
                output: &[3, 4, 3],
                allowed: (i >= 20).then_some(mask.as_slice()),
            })
            .collect();
        let mut sampled = Vec::new();
        backend.sample(&logits, self.vocab, 0, &rows, &mut sampled)?;
        let mut seen: Vec<f32> = sampled.iter().flat_map(flatten).collect();
        let targets: Vec<u32> = (0..38).map(|i| i * 7 % self.vocab as u32).collect();
        backend.logprobs(&logits, self.vocab, 2, &targets, 3, &mut sampled)?;
        seen.extend(sampled.iter().flat_map(flatten));
        Ok(seen)
    }
}

fn flatten(sampled: &Sampled) -> Vec<f32> {
    let mut all = vec![
        sampled.token as f32,
        f32::from(u8::from(sampled.corrupted)),
        sampled.logprob,
        sampled.rank as f32,
        sampled.top.len() as f32,
    ];
    all.extend(sampled.top.iter().flat_map(|(token, logprob)| [*token as f32, *logprob]));
    all
}

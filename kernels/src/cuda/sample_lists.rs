//! PURE: the inputs of sampling, in the layout of the kernels.
use crate::error::KernelError;
use crate::sampling::SampleRow;

/// Words of `TuttiSampleParams`.
pub(crate) const PARAMS: usize = 22;
/// `TUTTI_NO_LOGPROBS`
pub(crate) const NO_LOGPROBS: u32 = u32::MAX;
/// `TUTTI_NO_MASK`
pub(crate) const NO_MASK: u32 = u32::MAX;
/// `TUTTI_BIAS_MAX`
pub(crate) const BIAS_MAX: usize = 1024;
/// `TUTTI_TOP_MAX`
pub(crate) const TOP_MAX: u32 = 128;

/// Word offsets within a row's parameters. A list has two words: its start and its length.
pub(super) mod word {
    /// Two words, the low half first.
    pub(super) const SEED: usize = 0;
    pub(super) const TEMPERATURE: usize = 2;
    pub(super) const TOP_P: usize = 3;
    pub(super) const MIN_P: usize = 4;
    pub(super) const TOP_K: usize = 5;
    pub(super) const CHOICE: usize = 6;
    pub(super) const POSITION: usize = 7;
    pub(super) const PRESENCE: usize = 8;
    pub(super) const FREQUENCY: usize = 9;
    pub(super) const REPETITION: usize = 10;
    /// A list.
    pub(super) const BIASES: usize = 11;
    /// A list.
    pub(super) const SUPPRESSED: usize = 13;
    /// A list.
    pub(super) const PROMPT: usize = 15;
    /// A list.
    pub(in crate::cuda) const OUTPUT: usize = 17;
    pub(super) const LOGPROBS: usize = 19;
    pub(super) const MASK: usize = 20;
}

/// Sampling parameters of all rows, and the lists that they refer to.
#[derive(Debug, Default)]
pub struct SampleLists {
    /// TuttiSampleParams, as words.
    pub params: Vec<u32>,
    /// TuttiIdValue, as words.
    pub biases: Vec<u32>,
    /// Suppressed, prompt and output tokens.
    pub ids: Vec<u32>,
    /// Masks of the rows that have one.
    pub masks: Vec<u32>,
    /// Length of the longest requested list of most likely tokens.
    pub top: u32,
    /// Whether each row's logits are edited before sampling, other than by a mask.
    pub edited: Vec<bool>,
    /// Whether any row's logits are edited.
    pub edits: bool,
    /// Whether only the largest allowed logit of every row matters.
    pub greedy: bool,
}

impl SampleLists {
    /// Packs `rows`, replacing earlier contents.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for more than `BIAS_MAX` biases or `TOP_MAX` most likely tokens.
    pub fn pack(&mut self, rows: &[SampleRow<'_>]) -> Result<(), KernelError> {
        self.params.clear();
        self.biases.clear();
        self.ids.clear();
        self.masks.clear();
        self.top = 0;
        self.edited.clear();
        for row in rows {
            self.row(row)?;
        }
        self.edits = self.edited.contains(&true);
        let greedy =
            |row: &SampleRow<'_>| row.params.temperature <= 0.0 && row.params.logprobs.is_none();
        self.greedy = !self.edits && !rows.is_empty() && rows.iter().all(greedy);
        Ok(())
    }

    fn row(&mut self, row: &SampleRow<'_>) -> Result<(), KernelError> {
        let params = row.params;
        let too_many = |what: &str, count: usize, most: usize| KernelError::Shape {
            op: "sample",
            message: format!("{count} {what}, at most {most}"),
        };
        if params.logit_bias.len() > BIAS_MAX {
            return Err(too_many("logit biases", params.logit_bias.len(), BIAS_MAX));
        }
        let top_n = params.logprobs.unwrap_or(0);
        if top_n > TOP_MAX {
            return Err(too_many("most likely tokens", top_n as usize, TOP_MAX as usize));
        }
        self.top = self.top.max(top_n);
        let bias_start = (self.biases.len() / 2) as u32;
        for (token, bias) in &params.logit_bias {
            self.biases.extend([*token, bias.to_bits()]);
        }
        let mut list = |wanted: bool, tokens: &[u32]| {
            let start = self.ids.len() as u32;
            self.ids.extend_from_slice(if wanted { tokens } else { &[] });
            [start, self.ids.len() as u32 - start]
        };
        let early = row.output.len() < params.min_tokens as usize;
        let repeats = params.repetition_penalty != 1.0;
        let counts = params.frequency_penalty != 0.0 || params.presence_penalty != 0.0;
        let suppress = list(early, &params.suppress_until_min);
        let prompt = list(repeats, row.prompt);
        let output = list(repeats || counts, row.output);
        let edits = !params.logit_bias.is_empty() || suppress[1] > 0 || repeats || counts;
        self.edited.push(edits);
        let mask_start = row.allowed.map_or(NO_MASK, |_| self.masks.len() as u32);
        let mask = row.allowed.unwrap_or_default();
        self.masks.extend_from_slice(mask);
        let mut words = [0; PARAMS];
        let mut set = |at: usize, values: &[u32]| {
            words[at..][..values.len()].copy_from_slice(values);
        };
        set(word::SEED, &[params.seed as u32, (params.seed >> 32) as u32]);
        set(word::TEMPERATURE, &[params.temperature.to_bits()]);
        set(word::TOP_P, &[params.top_p.to_bits()]);
        set(word::MIN_P, &[params.min_p.to_bits()]);
        set(word::TOP_K, &[params.top_k]);
        set(word::CHOICE, &[params.choice]);
        set(word::POSITION, &[row.output.len() as u32]);
        set(word::PRESENCE, &[params.presence_penalty.to_bits()]);
        set(word::FREQUENCY, &[params.frequency_penalty.to_bits()]);
        set(word::REPETITION, &[params.repetition_penalty.to_bits()]);
        set(word::BIASES, &[bias_start, params.logit_bias.len() as u32]);
        set(word::SUPPRESSED, &suppress);
        set(word::PROMPT, &prompt);
        set(word::OUTPUT, &output);
        set(word::LOGPROBS, &[params.logprobs.unwrap_or(NO_LOGPROBS)]);
        set(word::MASK, &[mask_start]);
        self.params.extend(words);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::SampleParams;

    fn params() -> SampleParams {
        SampleParams {
            temperature: 0.7,
            top_p: 0.9,
            top_k: 40,
            min_p: 0.1,
            seed: 0x1122_3344_5566_7788,
            choice: 3,
            suppress_until_min: vec![5, 6],
            ..SampleParams::default()
        }
    }

    #[test]
    fn parameters_are_packed_as_the_kernel_reads_them() {
        let plain = params();
        let full = SampleParams {
            logit_bias: vec![(9, -1.0)],
            min_tokens: 3,
            repetition_penalty: 1.5,
            logprobs: Some(2),
            ..params()
        };
        let rows = [
            SampleRow { params: &plain, prompt: &[1, 2], output: &[3], allowed: None },
            SampleRow { params: &full, prompt: &[10, 11, 12], output: &[13, 14], allowed: None },
        ];
        let mut lists = SampleLists::default();
        lists.pack(&rows[..1]).unwrap();
        assert!(!lists.edits && lists.ids.is_empty() && lists.top == 0);
        lists.pack(&rows).unwrap();
        assert!(lists.edits);
        assert_eq!(lists.params.len() * 4, 2 * 88);
        assert_eq!(lists.params[..2], [0x5566_7788, 0x1122_3344]);
        assert_eq!(lists.params[6..8], [3, 1]);
        assert_eq!(lists.params[19], NO_LOGPROBS);
        let second = &lists.params[PARAMS..];
        // Bias 0..1, suppressed 0..2, prompt 2..5, output 5..7, two most likely.
        assert_eq!(second[11..20], [0, 1, 0, 2, 2, 3, 5, 2, 2]);
        assert_eq!(lists.ids, [5, 6, 10, 11, 12, 13, 14]);
        assert_eq!(lists.biases, [9, (-1.0f32).to_bits()]);
        assert_eq!(lists.top, 2);
    }

    #[test]
    fn what_the_kernel_has_no_room_for_is_an_error() {
        let many = SampleParams { logit_bias: vec![(0, 0.0); BIAS_MAX + 1], ..params() };
        let top = SampleParams { logprobs: Some(TOP_MAX + 1), ..params() };
        for params in [&many, &top] {
            let row = SampleRow { params, prompt: &[], output: &[], allowed: None };
            assert!(SampleLists::default().pack(&[row]).is_err());
        }
    }
}

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

/// Most order keys that `tutti_draw_best` takes for a row: those of all ranks.
const KEYS_MAX: usize = 2048;
/// Numbers of order keys that each rank finds for a row, of which a step takes the smallest that
/// holds its rows' top-k. Few, because each has graphs of its own.
const KEYS: [u32; 2] = [64, TOP_MAX];

/// Which of each rank's own logits the choice of a step's tokens depends on, if every rank has only
/// a part of the vocabulary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Candidates {
    /// All of them.
    #[default]
    All,
    /// The best.
    Best,
    /// This many of the best.
    Few(u32),
}

impl Candidates {
    /// Those of rows of which none is edited. Masks make no difference.
    fn of(rows: &[SampleRow<'_>]) -> Self {
        let top_k = |row: &SampleRow<'_>| match row.params {
            params if params.logprobs.is_some() => None,
            // As the kernels see it: a temperature that is NaN draws.
            params if params.temperature <= 0.0 => Some(0),
            params => (1..=TOP_MAX).contains(&params.top_k).then_some(params.top_k),
        };
        // Of no rows, and of rows one of which needs more, all.
        match rows.iter().map(top_k).try_fold(None, |most, own| Some(most.max(Some(own?)))) {
            Some(Some(0)) => Self::Best,
            Some(Some(most)) => {
                KEYS.into_iter().find(|keys| *keys >= most).map_or(Self::All, Self::Few)
            }
            Some(None) | None => Self::All,
        }
    }

    /// Whether ranks can exchange just these, with so many tokens in the whole vocabulary. A top-k
    /// of all tokens cuts nothing, so that draws go by id. That is ruled out by the number of keys,
    /// not by each step's own top-k, because steps with the same graph exchange the same.
    #[must_use]
    pub fn are_enough(self, vocab: usize, ranks: usize) -> bool {
        match self {
            Self::All => false,
            Self::Best => true,
            Self::Few(keys) => (keys as usize) < vocab && ranks * keys as usize <= KEYS_MAX,
        }
    }
}

/// Bytes for the candidates of each of `rows` rows: this rank's, and every rank's.
pub(super) fn candidate_bytes(candidates: Candidates, ranks: usize, rows: usize) -> usize {
    (1 + ranks) * rows * row_bytes(candidates)
}

/// Bytes that a rank sends for a row.
pub(super) fn row_bytes(candidates: Candidates) -> usize {
    match candidates {
        Candidates::All => 0,
        Candidates::Best => 8,
        Candidates::Few(keys) => keys as usize * 8,
    }
}

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
    /// What the rows' tokens depend on.
    pub candidates: Candidates,
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
        self.candidates = if self.edits { Candidates::All } else { Candidates::of(rows) };
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
    fn candidates_are_what_the_choice_depends_on() {
        let of = |all: &[SampleParams]| {
            let rows = all.iter().map(|params| SampleRow {
                params,
                prompt: &[1],
                output: &[2],
                allowed: Some(&[7]),
            });
            let mut lists = SampleLists::default();
            lists.pack(&rows.collect::<Vec<_>>()).unwrap();
            lists.candidates
        };
        let top_k = |top_k| SampleParams { top_k, min_tokens: 0, ..params() };
        let greedy = || SampleParams { temperature: 0.0, ..top_k(0) };
        assert_eq!(of(&[]), Candidates::All);
        assert_eq!(of(&[greedy(), greedy()]), Candidates::Best);
        assert_eq!(of(&[SampleParams { temperature: 0.0, ..top_k(500) }]), Candidates::Best);
        for (most, keys) in [(1, 64), (40, 64), (64, 64), (65, 128), (128, 128)] {
            assert_eq!(of(&[top_k(1), top_k(most), greedy()]), Candidates::Few(keys), "{most}");
        }
        let unlike = [
            top_k(0),
            top_k(129),
            top_k(u32::MAX),
            SampleParams { temperature: f32::NAN, ..top_k(0) },
            SampleParams { logprobs: Some(0), ..greedy() },
            SampleParams { logprobs: Some(0), ..top_k(20) },
            SampleParams { logit_bias: vec![(1, 1.0)], ..top_k(20) },
            SampleParams { presence_penalty: 0.5, ..top_k(20) },
            SampleParams { frequency_penalty: 0.5, ..greedy() },
            SampleParams { repetition_penalty: 1.1, ..top_k(20) },
            SampleParams { min_tokens: 2, ..top_k(20) },
        ];
        for params in unlike {
            assert_eq!(of(&[top_k(20), params.clone(), greedy()]), Candidates::All, "{params:?}");
        }
    }

    #[test]
    fn candidates_are_enough_of_more_tokens_than_those() {
        assert!(!Candidates::All.are_enough(1 << 17, 2));
        assert!(Candidates::Best.are_enough(1, 64));
        // A top-k of the whole vocabulary cuts nothing, and is at most 64 here.
        assert!(!Candidates::Few(64).are_enough(64, 2));
        assert!(Candidates::Few(64).are_enough(65, 2));
        assert!(Candidates::Few(128).are_enough(384, 16));
        assert!(!Candidates::Few(128).are_enough(384, 17));
        let of = |candidates| candidate_bytes(candidates, 8, 10);
        let sizes = [of(Candidates::All), of(Candidates::Best), of(Candidates::Few(64))];
        assert_eq!(sizes, [0, 720, 46_080]);
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

//! PURE: rows whose logits are edited before sampling, mixed with others: which rows one launch
//! samples, and which tokens of their lists only the device knows.
use super::sample_lists::{PARAMS, word::OUTPUT};
use crate::backend::NOT_FED;

/// Bytes of scratch for edited logits and for counts of their tokens.
const SCRATCH: usize = 64 << 20;
/// Minimum and maximum number of rows that are edited at a time.
const ROWS: (usize, usize) = (32, 512);

/// Rows that one launch samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SampleLaunch {
    pub(super) first: usize,
    pub(super) count: usize,
    /// Whether some of them are edited; each then needs scratch.
    pub(super) edited: bool,
}

/// Number of rows of `vocab` tokens that are edited at a time.
pub(super) fn rows_at_once(vocab: usize) -> usize {
    (SCRATCH / (vocab.max(1) * 8)).clamp(ROWS.0, ROWS.1)
}

/// Splits rows into launches: each begins with an edited row and extends to the last edited one of
/// at most `rows_at_once` rows, or consists of the unedited rows in between.
pub(super) fn sample_launches(edited: &[bool], rows_at_once: usize) -> Vec<SampleLaunch> {
    let (mut all, mut first) = (Vec::new(), 0);
    while first < edited.len() {
        let rest = &edited[first..];
        let is_edited = rest[0];
        let count = if is_edited {
            let near = &rest[..rows_at_once.clamp(1, rest.len())];
            near.iter().rposition(|edited| *edited).map_or(1, |last| last + 1)
        } else {
            rest.iter().position(|edited| *edited).unwrap_or(rest.len())
        };
        all.push(SampleLaunch { first, count, edited: is_edited });
        first += count;
    }
    all
}

/// Tokens in lists that the previous step sampled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FedTokens {
    /// Index of the first of them in the lists.
    pub(super) first: usize,
    /// For it and the tokens after it, the row of the previous step; `NOT_FED` if the list has the
    /// token.
    pub(super) rows: Vec<u32>,
}

/// Finds the tokens of packed lists that are fed: for each row that is fed, the last token of its
/// output.
pub(super) fn fed_tokens(params: &[u32], fed: &[u32]) -> Option<FedTokens> {
    let places: Vec<(usize, u32)> = params
        .chunks_exact(PARAMS)
        .zip(fed)
        .filter(|(params, row)| params[OUTPUT + 1] > 0 && **row != NOT_FED)
        .map(|(params, row)| ((params[OUTPUT] + params[OUTPUT + 1] - 1) as usize, *row))
        .collect();
    // Lists are packed in the order of rows.
    let (first, last) = (places.first()?.0, places.last()?.0);
    let mut rows = vec![NOT_FED; last + 1 - first];
    for (place, row) in places {
        rows[place - first] = row;
    }
    Some(FedTokens { first, rows })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::sample_lists::SampleLists;
    use crate::sampling::{SampleParams, SampleRow};

    fn parts(edited: &str, rows_at_once: usize) -> Vec<(usize, usize, bool)> {
        let edited: Vec<bool> = edited.chars().map(|row| row == 'e').collect();
        let all = sample_launches(&edited, rows_at_once);
        all.iter().map(|it| (it.first, it.count, it.edited)).collect()
    }

    #[test]
    fn rows_without_edits_are_sampled_apart_from_those_with() {
        assert_eq!(parts("", 4), []);
        assert_eq!(parts("----", 2), [(0, 4, false)]);
        assert_eq!(parts("--e---", 4), [(0, 2, false), (2, 1, true), (3, 3, false)]);
        assert_eq!(parts("e-e-ee-", 4), [(0, 3, true), (3, 1, false), (4, 2, true), (6, 1, false)]);
        assert_eq!(parts("eeeee", 2), [(0, 2, true), (2, 2, true), (4, 1, true)]);
        assert_eq!(parts("e-", 0), [(0, 1, true), (1, 1, false)]);
    }

    #[test]
    fn edited_rows_keep_to_their_scratch() {
        assert_eq!((rows_at_once(0), rows_at_once(32_000), rows_at_once(128_256)), (512, 262, 65));
        assert_eq!((rows_at_once(384), rows_at_once(1 << 20)), (512, 32));
    }

    #[test]
    fn the_last_token_of_a_fed_rows_output_is_fed() {
        let counting = SampleParams { presence_penalty: 1.0, ..SampleParams::default() };
        let repeating = SampleParams { repetition_penalty: 1.5, ..SampleParams::default() };
        let plain = SampleParams::default();
        let row = |params, output| SampleRow { params, prompt: &[1, 2], output, allowed: None };
        let rows = [
            row(&counting, &[3, 4, 0][..]),
            row(&plain, &[5, 0]),
            row(&repeating, &[6]),
            row(&repeating, &[0]),
            row(&counting, &[]),
        ];
        let mut lists = SampleLists::default();
        lists.pack(&rows).unwrap();
        assert_eq!(lists.ids, [3, 4, 0, 1, 2, 6, 1, 2, 0]);
        assert_eq!(lists.edited, [true, false, true, true, true]);
        let none = NOT_FED;
        let fed = fed_tokens(&lists.params, &[7, 1, none, 2, 5]);
        let rows = vec![7, none, none, none, none, none, 2];
        assert_eq!(fed, Some(FedTokens { first: 2, rows }));
        assert_eq!(fed_tokens(&lists.params, &[none; 5]), None);
        assert_eq!(fed_tokens(&lists.params, &[]), None);
    }
}

//! PURE: whether sequences draft tokens, how, and how many.
use super::config::ConfigError;
use super::speculate::NgramConfig;

/// Maximum length of a draft, in tokens.
pub(super) const TOKENS_MAX: u32 = 64;
/// Minimum of `disable_by_batch_size`, as in vLLM.
const BATCH_SIZE_MIN: u32 = 2;

/// How drafts are made. Names as in vLLM's `--speculative-config`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speculation {
    /// Maximum length of a draft, in tokens: 1 to 64.
    pub num_speculative_tokens: u32,
    /// Where they come from.
    pub method: Method,
    /// Nothing is drafted while more sequences than this are admitted; at least 2.
    pub disable_by_batch_size: Option<u32>,
}

/// Where drafts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The sequence's own n-grams, looked up here.
    Ngram(NgramConfig),
    /// A small model on rank 0 of each replica.
    DraftModel,
}

impl Speculation {
    /// Checks the bounds; a draft is verified in one step, which has at most `max_num_seqs` rows.
    ///
    /// # Errors
    /// One sentence naming the field, its value and its bound.
    pub fn validate(&self, max_num_seqs: u32) -> Result<(), ConfigError> {
        let tokens = self.num_speculative_tokens;
        within("num_speculative_tokens", tokens, 1, TOKENS_MAX)?;
        if let Method::Ngram(lookup) = &self.method {
            lookup.validate()?;
        }
        if let Some(size) = self.disable_by_batch_size {
            within("disable_by_batch_size", size, BATCH_SIZE_MIN, u32::MAX)?;
        }
        if tokens >= max_num_seqs {
            return Err(ConfigError(format!(
                "num_speculative_tokens ({tokens}) needs a max_num_seqs of at least {}, which is \
                 {max_num_seqs}: a step samples at most that many rows, including those of drafts",
                tokens + 1
            )));
        }
        Ok(())
    }
}

/// Checks one field's bounds.
pub(super) fn within(name: &str, value: u32, least: u32, most: u32) -> Result<(), ConfigError> {
    let is_within = (least..=most).contains(&value);
    let error = format!("{name} is {value}, it must be {least} to {most}");
    is_within.then_some(()).ok_or(ConfigError(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_named_with_field_and_value() {
        let with = |min, max| Speculation {
            num_speculative_tokens: 5,
            method: Method::Ngram(NgramConfig { prompt_lookup_max: max, prompt_lookup_min: min }),
            disable_by_batch_size: None,
        };
        let model = Speculation { method: Method::DraftModel, ..with(1, 1) };
        let error = |config: Speculation| config.validate(8).unwrap_err().to_string();
        assert!(with(1, 16).validate(8).is_ok() && model.validate(8).is_ok());
        for config in [with(1, 1), model] {
            let bad = error(Speculation { num_speculative_tokens: 65, ..config });
            assert_eq!(bad, "num_speculative_tokens is 65, it must be 1 to 64");
            let bad = error(Speculation { num_speculative_tokens: 8, ..config });
            assert!(bad.contains("num_speculative_tokens (8) needs a max_num_seqs of at least 9"));
            assert!(bad.contains("which is 8"), "{bad}");
            let bad = error(Speculation { disable_by_batch_size: Some(1), ..config });
            assert!(bad.starts_with("disable_by_batch_size is 1, it must be 2 to"), "{bad}");
        }
        assert_eq!(error(with(0, 3)), "prompt_lookup_min is 0, it must be 1 to 16");
        assert_eq!(error(with(3, 17)), "prompt_lookup_max is 17, it must be 1 to 16");
        assert_eq!(error(with(4, 3)), "prompt_lookup_min (4) is above prompt_lookup_max (3)");
    }
}

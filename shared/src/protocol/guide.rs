//! Structured output (guided decoding) as a front end describes it to the engine: text that the
//! coordinator compiles to a grammar. Workers only get masks over tokens.
use serde::{Deserialize, Serialize};

/// Maximum length of a JSON schema, in bytes.
pub const SCHEMA_BYTES_MAX: usize = 256 << 10;
/// Maximum length of a grammar, and of all strings of [`GuideSpec::Choice`] together, in bytes.
pub const GRAMMAR_BYTES_MAX: usize = 64 << 10;
/// Maximum length of [`GuideSpec::Made`], in bytes: schema, tools and the grammar around them.
pub const MADE_BYTES_MAX: usize = 2 * SCHEMA_BYTES_MAX;
/// Maximum length of a regular expression, in bytes.
pub const REGEX_BYTES_MAX: usize = 16 << 10;
/// Maximum number of alternatives of [`GuideSpec::Choice`], and of tokens of [`GuideSpec::Tokens`].
pub const GUIDE_ITEMS_MAX: usize = 4096;

/// What the whole output must match.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GuideSpec {
    /// JSON that a schema describes (JSON Schema).
    Json {
        /// The schema, as JSON.
        schema: String,
        /// Whitespace allowed between the parts of the JSON.
        whitespace: Whitespace,
    },
    /// Text that this regular expression matches as a whole.
    Regex(String),
    /// One of these strings.
    Choice(Vec<String>),
    /// Text derived by this grammar, in Lark's notation.
    Lark(String),
    /// Same as `Lark`, for a grammar that a front end built around the client's request.
    Made(String),
    /// Any sequence of these tokens.
    Tokens(Vec<u32>),
}

/// Whitespace allowed between the parts of JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Whitespace {
    /// A space, or a line break with its indentation: at most once in each place, so that no model
    /// writes whitespace for ever.
    #[default]
    Usual,
    /// Nothing.
    None,
    /// Text matched by this regular expression, once in each place.
    Pattern(String),
}

impl GuideSpec {
    /// Returns the length of its text, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Json { schema, whitespace: Whitespace::Pattern(pattern) } => {
                schema.len() + pattern.len()
            }
            Self::Json { schema: text, .. }
            | Self::Regex(text)
            | Self::Lark(text)
            | Self::Made(text) => text.len(),
            Self::Choice(strings) => strings.iter().map(String::len).sum(),
            Self::Tokens(_) => 0,
        }
    }

    /// Checks the bounds.
    ///
    /// # Errors
    /// One sentence naming the bound that is exceeded.
    pub fn check(&self) -> Result<(), String> {
        let items = match self {
            Self::Choice(strings) => strings.len(),
            Self::Tokens(tokens) => tokens.len(),
            Self::Json { .. } | Self::Regex(_) | Self::Lark(_) | Self::Made(_) => 1,
        };
        let bytes = self.bytes();
        if !(1..=GUIDE_ITEMS_MAX).contains(&items) {
            return Err(format!("has {items} entries, it must have 1 to {GUIDE_ITEMS_MAX}"));
        }
        let most = match self {
            Self::Json { .. } => SCHEMA_BYTES_MAX,
            Self::Regex(_) => REGEX_BYTES_MAX,
            Self::Made(_) => MADE_BYTES_MAX,
            Self::Choice(_) | Self::Lark(_) | Self::Tokens(_) => GRAMMAR_BYTES_MAX,
        };
        if bytes > most {
            return Err(format!("has {bytes} bytes, the limit is {most}"));
        }
        if let Self::Json { whitespace: Whitespace::Pattern(pattern), .. } = self
            && pattern.len() > REGEX_BYTES_MAX
        {
            let bytes = pattern.len();
            return Err(format!(
                "has a whitespace pattern of {bytes} bytes, the limit is {REGEX_BYTES_MAX}"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_over_a_bound_is_said() {
        let (long, grammar) = ("a".repeat(SCHEMA_BYTES_MAX), "a".repeat(GRAMMAR_BYTES_MAX));
        assert_eq!(GuideSpec::Lark(grammar.clone()).check(), Ok(()));
        let pattern = |bytes: usize| Whitespace::Pattern("b".repeat(bytes));
        for (spec, what) in [
            (GuideSpec::Lark(grammar.clone() + "b"), "has 65537 bytes"),
            (GuideSpec::Regex(grammar.clone()), "has 65536 bytes, the limit is 16384"),
            (GuideSpec::Json { schema: long, whitespace: pattern(1) }, "has 262145 bytes"),
            (GuideSpec::Json { schema: String::new(), whitespace: pattern(16385) }, "16385 bytes"),
            (GuideSpec::Choice(vec![grammar, "b".to_owned()]), "has 65537 bytes"),
            (GuideSpec::Choice(vec![]), "has 0 entries"),
            (GuideSpec::Tokens(vec![0; GUIDE_ITEMS_MAX + 1]), "has 4097 entries"),
        ] {
            let said = spec.check().unwrap_err();
            assert!(said.contains(what), "{said}");
        }
    }
}

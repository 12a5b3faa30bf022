//! What a request's output shall look like, as it travels from a front end to the engine: text that
//! the coordinator makes a grammar of. Workers get masks over tokens.
use serde::{Deserialize, Serialize};

/// Most bytes of a specification's text.
pub const GUIDE_BYTES_MAX: usize = 256 << 10;
/// Most alternatives of [`GuideSpec::Choice`], and tokens of [`GuideSpec::Tokens`].
pub const GUIDE_ITEMS_MAX: usize = 4096;

/// What the whole output must be.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GuideSpec {
    /// JSON that a schema describes.
    Json {
        /// The schema, JSON itself.
        schema: String,
        /// What may stand between the JSON's parts.
        whitespace: Whitespace,
    },
    /// What a regular expression matches as a whole.
    Regex(String),
    /// One of these strings.
    Choice(Vec<String>),
    /// What a grammar in Lark's notation derives.
    Lark(String),
    /// Any sequence of these tokens.
    Tokens(Vec<u32>),
}

/// What may stand between the parts of JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Whitespace {
    /// A space, or a line break with its indentation: once in each place, so that no model writes
    /// nothing else for ever.
    #[default]
    Usual,
    /// Nothing.
    None,
    /// What a regular expression matches, once in each place.
    Pattern(String),
}

impl GuideSpec {
    /// Bytes of its text.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Json { schema, whitespace: Whitespace::Pattern(pattern) } => {
                schema.len() + pattern.len()
            }
            Self::Json { schema: text, .. } | Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(strings) => strings.iter().map(String::len).sum(),
            Self::Tokens(_) => 0,
        }
    }

    /// Whether it is within the bounds.
    ///
    /// # Errors
    /// One sentence that says which bound it is over.
    pub fn check(&self) -> Result<(), String> {
        let items = match self {
            Self::Choice(strings) => strings.len(),
            Self::Tokens(tokens) => tokens.len(),
            Self::Json { .. } | Self::Regex(_) | Self::Lark(_) => 1,
        };
        let bytes = self.bytes();
        if !(1..=GUIDE_ITEMS_MAX).contains(&items) {
            return Err(format!("has {items} entries, it must have 1 to {GUIDE_ITEMS_MAX}"));
        }
        if bytes > GUIDE_BYTES_MAX {
            return Err(format!("has {bytes} bytes, the bound is {GUIDE_BYTES_MAX}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_over_a_bound_is_said() {
        let long = "a".repeat(GUIDE_BYTES_MAX);
        assert_eq!(GuideSpec::Regex(long.clone()).check(), Ok(()));
        let pattern = Whitespace::Pattern("b".to_owned());
        for (spec, what) in [
            (GuideSpec::Lark(long.clone() + "b"), "has 262145 bytes"),
            (GuideSpec::Json { schema: long.clone(), whitespace: pattern }, "has 262145 bytes"),
            (GuideSpec::Choice(vec![long, "b".to_owned()]), "has 262145 bytes"),
            (GuideSpec::Choice(vec![]), "has 0 entries"),
            (GuideSpec::Tokens(vec![0; GUIDE_ITEMS_MAX + 1]), "has 4097 entries"),
        ] {
            let said = spec.check().unwrap_err();
            assert!(said.contains(what), "{said}");
        }
    }
}

//! The result of matching the beginning of a text that may go on.

/// The result of matching the beginning of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Prefix<T> {
    /// A match, and its length in bytes.
    Match(T, usize),
    /// More text is needed.
    Unknown,
    /// No match.
    NoMatch,
}

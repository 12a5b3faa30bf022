//! A call that is read character by character: a JSON object, or a call of Python.
use super::json::{CallObject, Progress};
use super::python::PythonCall;

/// A call being read.
#[derive(Clone, Debug)]
pub(super) enum Call {
    Object(CallObject),
    Python(PythonCall),
}

impl Call {
    /// Whether this is certainly a call.
    pub(super) fn is_begun(&self) -> bool {
        match self {
            Self::Object(call) => call.is_begun(),
            Self::Python(call) => call.is_begun(),
        }
    }

    /// The function's name, once known.
    pub(super) fn name(&self) -> Option<&str> {
        match self {
            Self::Object(call) => call.name(),
            Self::Python(call) => call.name(),
        }
    }

    /// The text read while this was not certain to be a call.
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Object(call) => call.text(),
            Self::Python(call) => call.text(),
        }
    }

    /// Reads the part of `text` that belongs to the call, and returns its length in bytes,
    /// excluding the character that no call can contain. Appends new text of the arguments to
    /// `arguments`.
    pub(super) fn push(&mut self, text: &str, arguments: &mut String) -> (Progress, usize) {
        match self {
            Self::Object(call) => call.push(text, arguments),
            Self::Python(call) => call.push(text, arguments),
        }
    }
}

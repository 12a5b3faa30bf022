//! Reading one JSON object key by key, with errors that name file, key, value and bound.
use std::borrow::Cow;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::ModelError;

/// A configuration file is refused beyond this; real ones have a few kilobytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The keys of a JSON object. A key with the value null counts as absent, as in transformers.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    path: PathBuf,
    /// `rope_scaling.` within that object, empty at the top.
    prefix: String,
    object: Cow<'a, Map<String, Value>>,
}

impl Fields<'_> {
    /// Reads a file whose whole content is one object.
    pub(super) fn read(path: &Path) -> Result<Fields<'static>, ModelError> {
        let io = |source| ModelError::Io { path: path.to_owned(), source };
        let bytes = std::fs::metadata(path).map_err(io)?.len();
        if bytes > FILE_BYTES_MAX {
            let problem = format!("has {bytes} bytes, the bound is {FILE_BYTES_MAX}");
            return Err(ModelError::File { path: path.to_owned(), problem });
        }
        let bytes = std::fs::read(path).map_err(io)?;
        let text = std::str::from_utf8(&bytes).map_err(|error| ModelError::File {
            path: path.to_owned(),
            problem: format!("is not UTF-8: {error}"),
        })?;
        Fields::parse(path, text)
    }

    /// Parses text as one object.
    pub(super) fn parse(path: &Path, text: &str) -> Result<Fields<'static>, ModelError> {
        let object = serde_json::from_str(text).map_err(|error| ModelError::File {
            path: path.to_owned(),
            problem: format!("is not a JSON object: {error}"),
        })?;
        Ok(Fields { path: path.to_owned(), prefix: String::new(), object: Cow::Owned(object) })
    }

    /// An object within this one.
    pub(super) fn nested<'a>(&self, key: &str, object: &'a Map<String, Value>) -> Fields<'a> {
        Fields {
            path: self.path.clone(),
            prefix: format!("{}{key}.", self.prefix),
            object: Cow::Borrowed(object),
        }
    }

    /// The value of `key`, unless absent or null.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// An error about `key`.
    pub(super) fn error(&self, key: &str, problem: String) -> ModelError {
        ModelError::Config {
            path: self.path.clone(),
            key: format!("{}{key}", self.prefix),
            problem,
        }
    }

    /// An integer in `1..=max` that must be there.
    pub(super) fn size(&self, key: &str, max: u64) -> Result<usize, ModelError> {
        self.integer(key, 1, max)?.ok_or_else(|| self.error(key, "is missing".to_owned()))
    }

    /// An integer in `1..=max`.
    pub(super) fn size_or(&self, key: &str, max: u64, or: u64) -> Result<usize, ModelError> {
        Ok(self.integer(key, 1, max)?.unwrap_or(or as usize))
    }

    /// An integer in `0..=max`.
    pub(super) fn count_or(&self, key: &str, max: u64, or: u64) -> Result<usize, ModelError> {
        Ok(self.integer(key, 0, max)?.unwrap_or(or as usize))
    }

    fn integer(&self, key: &str, min: u64, max: u64) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().filter(|number| (min..=max).contains(number)) {
            Some(number) => Ok(Some(number as usize)),
            None => {
                let problem = format!("is {value}, it must be an integer in {min}..={max}");
                Err(self.error(key, problem))
            }
        }
    }

    /// A number in `min..=max` that must be there.
    pub(super) fn number(&self, key: &str, min: f64, max: f64) -> Result<f64, ModelError> {
        if self.get(key).is_none() {
            return Err(self.error(key, "is missing".to_owned()));
        }
        self.number_or(key, min, max, min)
    }

    /// A number in `min..=max`.
    pub(super) fn number_or(
        &self,
        key: &str,
        min: f64,
        max: f64,
        or: f64,
    ) -> Result<f64, ModelError> {
        let Some(value) = self.get(key) else { return Ok(or) };
        value.as_f64().filter(|number| (min..=max).contains(number)).ok_or_else(|| {
            self.error(key, format!("is {value}, it must be a number in {min}..={max}"))
        })
    }

    /// True or false.
    pub(super) fn flag_or(&self, key: &str, or: bool) -> Result<bool, ModelError> {
        let Some(value) = self.get(key) else { return Ok(or) };
        value
            .as_bool()
            .ok_or_else(|| self.error(key, format!("is {value}, it must be true or false")))
    }
}

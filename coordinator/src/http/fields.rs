//! Reads the fields of a request body one by one, so that errors name the field and its bound.
//!
//! `null` counts as absent. Like in vLLM, a number may be written as a string, and an integer with
//! a zero fraction.
use std::fmt::{self, Write as _};

use serde_json::{Map, Value};

use super::access::Tally;
use super::error::ApiError;
use super::not_json;
use super::params::Limits;
use super::room::Share;
use super::terms::Terms;

/// Maximum number of characters of a wrong value that an error shows.
pub(super) const SHOWN_MAX: usize = 60;

/// Keeps the first characters written to it, then fails, which ends the writing: values may be as
/// large as a body.
#[derive(Debug)]
struct Beginning {
    text: String,
    /// Number of characters that still fit.
    left: usize,
}

impl fmt::Write for Beginning {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        for char in piece.chars() {
            if self.left == 0 {
                return Err(fmt::Error);
            }
            self.left -= 1;
            self.text.push(char);
        }
        Ok(())
    }
}

/// The first `most` characters of what a client sent, with `...` if there are more.
pub(super) fn beginning(value: impl fmt::Display, most: usize) -> String {
    let mut found = Beginning { text: String::new(), left: most };
    // Fails early if there is more than is shown.
    if write!(found, "{value}").is_err() {
        found.text.push_str("...");
    }
    found.text
}

/// A body's fields.
#[derive(Clone, Debug)]
pub struct Fields {
    map: Map<String, Value>,
    /// The request's id, if its body has none.
    request_id: String,
    /// Size of the body in bytes.
    bytes: usize,
    /// Counts the request's tokens.
    tally: Tally,
    /// What applies to it besides the body.
    terms: Terms,
    /// Its share of the room for bodies.
    share: Share,
}

impl Fields {
    /// Parses a body.
    ///
    /// # Errors
    /// 400 if it is not a JSON object within the bounds.
    pub fn parse(body: &[u8], limits: &Limits) -> Result<Self, ApiError> {
        let (depth, values) = extent(body);
        if values > limits.json_values {
            let max = limits.json_values;
            return Err(ApiError::body(format!(
                "The JSON has {values} values, the limit is {max}"
            )));
        }
        if depth > limits.json_depth {
            let max = limits.json_depth;
            return Err(ApiError::body(format!("The JSON is nested deeper than {max} levels")));
        }
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Self {
                map,
                request_id: String::new(),
                bytes: body.len(),
                tally: Tally::default(),
                terms: Terms::default(),
                share: Share::default(),
            }),
            Ok(other) => {
                let found = match other {
                    Value::Array(_) => "a list",
                    Value::String(_) => "a string",
                    Value::Number(_) => "a number",
                    _ => "a single word",
                };
                Err(ApiError::body(format!("The body must be a JSON object, not {found}")))
            }
            Err(error) => Err(ApiError::body(not_json::describe(body, &error))),
        }
    }

    /// Sets the id that the request has unless its body gives another.
    #[must_use]
    pub fn of_request(self, request_id: &str) -> Self {
        Self { request_id: request_id.to_owned(), ..self }
    }

    /// The id that the request has unless its body says another.
    #[must_use]
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// Sets its share of the room for bodies.
    #[must_use]
    pub fn in_room(self, share: Share) -> Self {
        Self { share, ..self }
    }

    /// Returns the body's share of the memory for bodies. Keep it as long as any of the fields.
    #[must_use]
    pub fn share(&self) -> Share {
        self.share.clone()
    }

    /// Sets the counter of the request's tokens.
    #[must_use]
    pub fn counted_in(self, tally: Tally) -> Self {
        Self { tally, ..self }
    }

    /// The same request in other fields.
    #[must_use]
    pub fn said_as(&self, map: Map<String, Value>) -> Self {
        let Self { map: _, request_id, bytes, tally, terms, share } = self;
        let (request_id, tally, share) = (request_id.clone(), tally.clone(), share.clone());
        Self { map, request_id, bytes: *bytes, tally, terms: terms.clone(), share }
    }

    /// Counter of the request's tokens.
    #[must_use]
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Sets what applies to the request besides the body.
    #[must_use]
    pub fn on_terms(self, terms: Terms) -> Self {
        Self { terms, ..self }
    }

    /// What applies to the request besides the body.
    #[must_use]
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Returns the response's id: the request's, after a prefix that tells the kind of object.
    ///
    /// # Errors
    /// 400 if the body's `request_id` is not valid.
    pub fn response_id(&self, prefix: &str, limits: &Limits) -> Result<String, ApiError> {
        let name = "request_id";
        let id = match self.get(name) {
            None => &self.request_id,
            Some(Value::String(id)) if is_request_id(id, limits) => id,
            Some(other) => {
                let max = limits.request_id_bytes;
                let expected = format!("a string of 1 to {max} letters, digits and -_.:/+=@~");
                return Err(Self::wrong(name, other, &expected));
            }
        };
        Ok(format!("{prefix}{id}"))
    }

    /// Size of the body in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Rejects a field that is present.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn refuse(&self, name: &str) -> Result<(), ApiError> {
        match self.get(name) {
            Some(_) => Err(ApiError::field(name, format!("`{name}` is not supported"))),
            None => Ok(()),
        }
    }

    /// Returns a field that is present and not null.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn wrong(name: &str, value: &Value, expected: &str) -> ApiError {
        let found = beginning(value, SHOWN_MAX);
        ApiError::field(name, format!("`{name}` must be {expected}, not {found}"))
    }

    /// Reads a boolean.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn boolean(&self, name: &str, default: bool) -> Result<bool, ApiError> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(other) => Err(Self::wrong(name, other, "true or false")),
        }
    }

    /// Reads an integer in `min..=max`.
    ///
    /// # Errors
    /// 400 naming the field and the bounds.
    pub fn integer(&self, name: &str, min: i64, max: i64) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match whole(value).filter(|number| (min..=max).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(Self::wrong(name, value, &format!("an integer from {min} to {max}"))),
        }
    }

    /// Like [`Fields::integer`], for counts.
    ///
    /// # Errors
    /// Like [`Fields::integer`].
    pub fn count(&self, name: &str, min: u32, max: u32) -> Result<Option<u32>, ApiError> {
        let number = self.integer(name, i64::from(min), i64::from(max))?;
        Ok(number.and_then(|number| u32::try_from(number).ok()))
    }

    /// Reads a finite number in a range, its ends included.
    ///
    /// # Errors
    /// 400 naming the field and the bounds.
    pub fn number(&self, name: &str, range: (f64, f64)) -> Result<Option<f32>, ApiError> {
        let (min, max) = range;
        let Some(value) = self.get(name) else { return Ok(None) };
        match any_number(value).filter(|number| *number >= min && *number <= max) {
            // A number above 0 stays above it, however small.
            Some(number) if number > 0.0 => Ok(Some((number as f32).max(f32::MIN_POSITIVE))),
            Some(number) => Ok(Some(number as f32)),
            None => Err(Self::wrong(name, value, &format!("a number from {min} to {max}"))),
        }
    }

    /// Reads a string of at most `max` bytes.
    ///
    /// # Errors
    /// 400 naming the field and the bound.
    pub fn string(&self, name: &str, max: usize) -> Result<Option<&str>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) if text.len() <= max => Ok(Some(text)),
            Some(other) => {
                Err(Self::wrong(name, other, &format!("a string of at most {max} bytes")))
            }
        }
    }
}

/// Whether a client's request id can be shown in headers and logs.
#[must_use]
pub fn is_request_id(id: &str, limits: &Limits) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.:/+=@~".contains(&b);
    (1..=limits.request_id_bytes).contains(&id.len()) && id.bytes().all(plain)
}

/// Reads an integer, which may also be written as a string or with a zero fraction.
fn whole(value: &Value) -> Option<i64> {
    match value {
        Value::String(text) => text.trim().parse().ok(),
        other => whole_number(other),
    }
}

/// Reads a number, which may also be written as a string.
pub(super) fn any_number(value: &Value) -> Option<f64> {
    match value {
        Value::String(text) => text.trim().parse().ok(),
        other => other.as_f64(),
    }
}

/// Returns the integer that a number is, also with a fraction of zero.
pub(super) fn whole_number(value: &Value) -> Option<i64> {
    let Value::Number(number) = value else { return None };
    number.as_i64().or_else(|| {
        // Integers beyond 2^53 are ambiguous in this form.
        let exact = |it: &f64| it.fract() == 0.0 && it.abs() <= (1u64 << 53) as f64;
        number.as_f64().filter(exact).map(|it| it as i64)
    })
}

/// Returns the greatest nesting of arrays and objects, and at least the number of values. Each
/// value takes many times the two bytes in which it may be written.
pub(super) fn extent(json: &[u8]) -> (usize, usize) {
    let (mut depth, mut deepest, mut values) = (0usize, 0usize, 1);
    let (mut in_string, mut escaped) = (false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b',' if !in_string => values += 1,
            b'[' | b'{' if !in_string => {
                values += 1;
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    (deepest, values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_shows_the_beginning_of_a_value_and_reads_no_more_of_it() {
        let shown = |value: &Value| Fields::wrong("f", value, "small").to_string();
        assert_eq!(shown(&Value::from("é")), "`f` must be small, not \"é\"");
        // With its quotes it has exactly as many characters as are shown.
        let long = "é".repeat(SHOWN_MAX - 2);
        assert_eq!(shown(&Value::from(&*long)), format!("`f` must be small, not \"{long}\""));
        let (longer, cut) = (format!("{long}é"), format!("{long}é..."));
        assert_eq!(shown(&Value::from(longer)), format!("`f` must be small, not \"{cut}"));
        let values = vec![Value::from(7); 1 << 20];
        let shown = beginning(Value::from(values), SHOWN_MAX);
        assert_eq!((shown.len(), shown.capacity() < 1024), (SHOWN_MAX + "...".len(), true));
    }
}

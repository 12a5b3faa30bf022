//! The requests of a batch: a file of JSON lines in the format of OpenAI's Batch API.
use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Lines};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::super::CliError;

/// Most characters of a `custom_id`.
const ID_MAX: usize = 512;

/// A request as its line has it.
#[derive(Debug)]
pub(super) struct Request {
    /// What the batch's author calls it; once in a batch.
    pub(super) custom_id: String,
    /// Its path, which begins with `/v1/`.
    pub(super) url: String,
    /// The body, as JSON.
    pub(super) body: String,
}

impl Request {
    /// Reads a line.
    ///
    /// # Errors
    /// Names the field, its value's problem and the bound.
    fn parse(line: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Raw {
            custom_id: Option<Value>,
            method: Option<Value>,
            url: Option<Value>,
            body: Option<Map<String, Value>>,
        }
        let raw: Raw =
            serde_json::from_str(line).map_err(|error| format!("not a request: {error}"))?;
        let text = |name: &str, value: Option<Value>| match value {
            Some(Value::String(text)) => Ok(text),
            None | Some(Value::Null) => Err(format!("`{name}` is missing")),
            Some(other) => Err(format!("`{name}` is {other}: it must be a string")),
        };
        let custom_id = text("custom_id", raw.custom_id)?;
        if custom_id.is_empty() || custom_id.chars().count() > ID_MAX {
            return Err(format!("`custom_id` must have from 1 to {ID_MAX} characters"));
        }
        if raw.method.is_some_and(|method| method != "POST") {
            return Err("`method` must be \"POST\"".to_owned());
        }
        let url = text("url", raw.url)?;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/_-.".contains(&byte);
        if !url.starts_with("/v1/") || !url.bytes().all(plain) {
            return Err(format!(
                "`url` is {url:?}: it must be a path such as /v1/chat/completions"
            ));
        }
        let body = raw.body.ok_or("`body` is missing")?;
        if body.get("stream").is_some_and(|stream| *stream != false && !stream.is_null()) {
            return Err("`body.stream` must be false: an answer is written as a whole".to_owned());
        }
        Ok(Self { custom_id, url, body: Value::Object(body).to_string() })
    }
}

/// The lines of a file that has been checked.
#[derive(Debug)]
pub(super) struct Requests {
    lines: Lines<BufReader<File>>,
    /// Those that are answered already.
    answered: HashSet<String>,
}

impl Requests {
    /// Reads the whole file once, so that nothing is computed for a batch with a mistake. Returns
    /// the ids of its requests.
    ///
    /// # Errors
    /// The file, the line and what is wrong with it.
    pub(super) fn check(file: &Path) -> Result<HashSet<String>, CliError> {
        let mut ids = HashSet::new();
        for (index, line) in open(file)?.enumerate() {
            let wrong = |problem| {
                let at = format!("{}, line {}", file.display(), index + 1);
                CliError::Usage(format!("{at}: {problem}"))
            };
            let line = line.map_err(|error| wrong(error.to_string()))?;
            if line.trim().is_empty() {
                continue;
            }
            let request = Request::parse(&line).map_err(wrong)?;
            if let Some(id) = ids.replace(request.custom_id) {
                return Err(wrong(format!("`custom_id` is {id:?}, as in an earlier line")));
            }
        }
        Ok(ids)
    }

    /// Reads them again, without those that are `answered`.
    ///
    /// # Errors
    /// The file, and why it cannot be read.
    pub(super) fn open(file: &Path, answered: HashSet<String>) -> Result<Self, CliError> {
        Ok(Self { lines: open(file)?, answered })
    }
}

impl Iterator for Requests {
    type Item = Result<Request, String>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let line = match self.lines.next()? {
                Ok(line) if line.trim().is_empty() => continue,
                Ok(line) => line,
                Err(error) => return Some(Err(error.to_string())),
            };
            match Request::parse(&line) {
                Ok(request) if self.answered.contains(&request.custom_id) => {}
                other => return Some(other),
            }
        }
    }
}

fn open(file: &Path) -> Result<Lines<BufReader<File>>, CliError> {
    let opened = File::open(file);
    opened
        .map(|file| BufReader::new(file).lines())
        .map_err(|error| CliError::Usage(format!("--input-file {}: {error}", file.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_with_a_mistake_is_refused_by_line_and_field() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("batch.jsonl");
        let good = r#"{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}"#;
        let line = |change: &str, to: &str| good.replace(change, to);
        for (second, words) in [
            ("{".to_owned(), "not a request"),
            ("[]".to_owned(), "not a request"),
            (good.to_owned(), "`custom_id` is \"a\", as in an earlier line"),
            (line("\"a\"", "7"), "`custom_id` is 7"),
            (line("\"a\"", "null"), "`custom_id` is missing"),
            (line("\"a\"", "\"\""), "from 1 to 512"),
            (line("\"a\"", &format!("\"{}\"", "é".repeat(513))), "from 1 to 512"),
            (line("\"a\"", "\"b\"").replace("POST", "GET"), "`method` must be"),
            (line("\"a\"", "\"b\"").replace("/v1/c", "http://h/c"), "`url` is \"http://h/c"),
            (line("\"a\"", "\"b\"").replace("completions", "a?b"), "`url` is \"/v1/a?b\""),
            (line("\"a\"", "\"b\"").replace("{}", "[]"), "not a request"),
            (line("\"a\"", "\"b\"").replace(", \"body\": {}", ""), "`body` is missing"),
            (line("\"a\"", "\"b\"").replace("{}", "{\"stream\": true}"), "`body.stream`"),
        ] {
            std::fs::write(&file, format!("{good}\n\n{second}\n")).unwrap();
            let error = Requests::check(&file).unwrap_err();
            assert!(matches!(error, CliError::Usage(_)), "{error}");
            let error = error.to_string();
            assert!(error.contains("line 3") && error.contains(words), "{second}: {error}");
        }
        let error = Requests::check(&folder.path().join("none")).unwrap_err().to_string();
        assert!(error.contains("--input-file") && error.contains("none"), "{error}");
    }

    #[test]
    fn what_is_answered_is_not_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("batch.jsonl");
        let line = |id: &str| {
            let body = r#"{"b": 1, "a": 1e-9, "stream": false}"#;
            format!(r#"{{"custom_id": "{id}", "url": "/v1/embeddings", "body": {body}}}"#)
        };
        std::fs::write(&file, format!("{}\n \n{}\n{}", line("a"), line("b"), line("c"))).unwrap();
        assert_eq!(Requests::check(&file).unwrap().len(), 3);
        let left = Requests::open(&file, HashSet::from(["b".to_owned()])).unwrap();
        let left: Vec<Request> = left.map(Result::unwrap).collect();
        let ids: Vec<&str> = left.iter().map(|it| &*it.custom_id).collect();
        assert_eq!(ids, ["a", "c"]);
        assert_eq!(left[0].url, "/v1/embeddings");
        assert_eq!(left[0].body, r#"{"b":1,"a":1e-9,"stream":false}"#, "keys stay in order");
    }
}

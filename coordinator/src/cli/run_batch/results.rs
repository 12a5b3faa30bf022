//! The answers of a batch: a file of JSON lines in the format of OpenAI's Batch API, in the order
//! in which they come.
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, BufWriter, Write as _};
use std::path::Path;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::super::CliError;

/// What became of a request.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The server answered, be it with an error.
    Answered {
        /// HTTP status.
        status: u16,
        /// The server's id of the request.
        request_id: String,
        /// The body as it came.
        body: String,
    },
    /// There was no answer.
    Failed {
        /// A word for programs.
        code: &'static str,
        /// A sentence.
        message: String,
    },
}

impl Outcome {
    /// Number of tokens that were generated, if the answer tells.
    pub(super) fn completion_tokens(&self) -> u64 {
        #[derive(Deserialize)]
        struct Usage {
            #[serde(alias = "output_tokens")]
            completion_tokens: Option<u64>,
        }
        #[derive(Deserialize)]
        struct Body {
            usage: Option<Usage>,
        }
        let Self::Answered { status: 200..=299, body, .. } = self else { return 0 };
        let body = serde_json::from_str::<Body>(body).ok();
        body.and_then(|body| body.usage?.completion_tokens).unwrap_or_default()
    }

    /// Formats the line, without its end. Bodies are written as they came.
    pub(super) fn line(&self, custom_id: &str) -> String {
        let own = json!(custom_id);
        match self {
            Self::Answered { status, request_id, body } => {
                let is_json = serde_json::from_str::<IgnoredAny>(body).is_ok();
                let body = match is_json && !body.contains(['\n', '\r']) {
                    true => body.trim().to_owned(),
                    // Its line breaks are between tokens, or it is text.
                    false if is_json => serde_json::from_str::<Value>(body)
                        .map_or_else(|_| json!(body).to_string(), |value| value.to_string()),
                    false => json!(body).to_string(),
                };
                let request = json!(request_id);
                format!(
                    "{{\"id\":{request},\"custom_id\":{own},\"response\":{{\"status_code\":\
                     {status},\"request_id\":{request},\"body\":{body}}},\"error\":null}}"
                )
            }
            Self::Failed { code, message } => format!(
                "{{\"id\":null,\"custom_id\":{own},\"response\":null,\"error\":{}}}",
                json!({"code": code, "message": message})
            ),
        }
    }
}

/// Whether a request that was answered with `status` may be answered otherwise another time.
pub(super) fn may_pass(status: u16) -> bool {
    matches!(status, 408 | 429 | 500..)
}

/// Opens the file for new lines. With `resume`, lines of an earlier run stay, and their ids are
/// returned: but not those of requests that are worth another try, nor one that was cut off.
///
/// # Errors
/// That there is such a file already, that it has the answers of another batch, or why it cannot be
/// written.
pub(super) fn open(
    file: &Path,
    resume: bool,
    ids: &HashSet<String>,
) -> Result<(File, HashSet<String>), CliError> {
    let failed = |error: io::Error| failed(file, &error);
    let mut answered = HashSet::new();
    let earlier = match File::open(file) {
        Ok(earlier) if earlier.metadata().map_err(failed)?.len() > 0 => Some(earlier),
        Ok(_) => None,
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(failed(error)),
    };
    if let Some(earlier) = earlier {
        if !resume {
            return Err(CliError::Usage(format!(
                "--output-file {} exists: give --resume to go on with it, or another name",
                file.display()
            )));
        }
        // Beside it, so that an end in between loses nothing.
        let beside = file.with_extension("resuming");
        let kept = keep(file, earlier, &beside, ids)
            .and_then(|kept| std::fs::rename(&beside, file).map_err(failed).map(|()| kept));
        if kept.is_err() {
            let _ = std::fs::remove_file(&beside);
        }
        answered = kept?;
    }
    let out = OpenOptions::new().create(true).append(true).open(file).map_err(failed)?;
    Ok((out, answered))
}

fn failed(file: &Path, error: &io::Error) -> CliError {
    CliError::Usage(format!("--output-file {}: {error}", file.display()))
}

/// Writes the lines that stay to `beside`; returns their ids.
fn keep(
    file: &Path,
    earlier: File,
    beside: &Path,
    ids: &HashSet<String>,
) -> Result<HashSet<String>, CliError> {
    let failed = |error: io::Error| failed(file, &error);
    let mut kept = BufWriter::new(File::create(beside).map_err(failed)?);
    let mut reader = BufReader::new(earlier);
    let (mut answered, mut line, mut number) = (HashSet::new(), String::new(), 0);
    while reader.read_line(&mut line).map_err(failed)? > 0 {
        number += 1;
        // One without its end was being written when the run ended.
        if line.ends_with('\n') {
            let found = Earlier::parse(&line).filter(|it| ids.contains(&it.custom_id));
            let Some(Earlier { custom_id, is_final }) = found else {
                return Err(CliError::Usage(format!(
                    "--output-file {}, line {number}: no answer to a request of --input-file",
                    file.display()
                )));
            };
            if is_final && answered.insert(custom_id) {
                kept.write_all(line.as_bytes()).map_err(failed)?;
            }
        }
        line.clear();
    }
    let kept = kept.into_inner().map_err(|error| failed(error.into_error()))?;
    kept.sync_all().map_err(failed)?;
    Ok(answered)
}

/// A line of an earlier run.
#[derive(Debug)]
struct Earlier {
    custom_id: String,
    /// Whether another try would say the same.
    is_final: bool,
}

impl Earlier {
    /// None for what is no line of answers.
    fn parse(line: &str) -> Option<Self> {
        #[derive(Deserialize)]
        struct Response {
            status_code: u16,
        }
        #[derive(Deserialize)]
        struct Line {
            custom_id: String,
            response: Option<Response>,
            error: Option<IgnoredAny>,
        }
        let Line { custom_id, response, error } = serde_json::from_str(line).ok()?;
        let is_final = response.as_ref().is_some_and(|it| !may_pass(it.status_code));
        (response.is_some() || error.is_some()).then_some(Self { custom_id, is_final })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(status: u16, body: &str) -> Outcome {
        Outcome::Answered { status, request_id: "cmpl-1".to_owned(), body: body.to_owned() }
    }

    #[test]
    fn a_line_has_the_body_as_it_came_and_is_one_line() {
        let body = r#"{"b":[1e-9,0.1],"a":"x\ny"}"#;
        assert_eq!(
            answered(200, body).line("q\"1"),
            format!(
                r#"{{"id":"cmpl-1","custom_id":"q\"1","response":{{"status_code":200,"request_id":"cmpl-1","body":{body}}},"error":null}}"#
            )
        );
        for (body, expected) in
            [("{\"a\":\n 1}\n", json!({"a": 1})), ("bad\ngateway", json!("bad\ngateway"))]
        {
            let line = answered(502, body).line("a");
            assert!(!line.contains('\n'), "{line}");
            let line: Value = serde_json::from_str(&line).unwrap();
            assert_eq!(line["response"]["body"], expected);
        }
        let failed = Outcome::Failed { code: "unreachable", message: "refused".to_owned() };
        let line: Value = serde_json::from_str(&failed.line("a")).unwrap();
        assert_eq!(line["response"], Value::Null);
        assert_eq!(line["error"], json!({"code": "unreachable", "message": "refused"}));
    }

    #[test]
    fn an_earlier_run_is_gone_on_with_but_for_what_may_pass_and_what_was_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("answers.jsonl");
        let ids: HashSet<String> = ["a", "b", "c", "d", "e"].map(str::to_owned).into();
        let (mut out, done) = open(&file, false, &ids).unwrap();
        assert!(done.is_empty());
        let failed = Outcome::Failed { code: "unreachable", message: String::new() };
        let lines = [
            answered(200, "{}").line("a"),
            answered(400, "{}").line("b"),
            answered(503, "{}").line("c"),
            failed.line("d"),
            answered(200, "{}").line("e"),
        ];
        let all = lines.join("\n");
        out.write_all(all.as_bytes()).unwrap();
        let error = open(&file, false, &ids).unwrap_err().to_string();
        assert!(error.contains("--resume"), "{error}");
        // The last line lacks its end: nobody knows whether it is whole.
        let (mut out, done) = open(&file, true, &ids).unwrap();
        assert_eq!(done, HashSet::from(["a".to_owned(), "b".to_owned()]));
        out.write_all(format!("{}\n", lines[4]).as_bytes()).unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        assert_eq!(text, format!("{}\n{}\n{}\n", lines[0], lines[1], lines[4]));
        let error = open(&file, true, &HashSet::from(["b".to_owned()])).unwrap_err().to_string();
        assert!(error.contains("line 1: no answer to a request of --input-file"), "{error}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), text, "nothing is lost by an error");
        // The input itself.
        let own = r#"{"custom_id": "a", "url": "/v1/completions", "body": {}}"#;
        std::fs::write(&file, format!("{own}\n")).unwrap();
        assert!(open(&file, true, &ids).is_err());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), format!("{own}\n"));
        let missing = folder.path().join("none").join("answers.jsonl");
        let error = open(&missing, true, &ids).unwrap_err().to_string();
        assert!(error.contains("--output-file"), "{error}");
    }
}

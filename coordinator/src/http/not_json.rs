//! PURE: what is wrong with a body that is not JSON, and where, in words that need no knowledge of
//! the parser.
use serde_json::Error;

/// How the parser begins to say what it found, and how it is said here.
const WORDS: [(&str, &str); 8] = [
    ("EOF while parsing an object", "it ends within an object,"),
    ("EOF while parsing a list", "it ends within a list,"),
    ("EOF while parsing a string", "it ends within a string,"),
    ("EOF while parsing a value", "it ends where a value must be,"),
    ("expected value", "expected a value"),
    ("expected ident", "expected true, false or null"),
    ("key must be a string", "expected a name in double quotes"),
    ("trailing characters", "something follows its end,"),
];

/// Returns the message of a body that the parser refused.
pub(super) fn describe(body: &[u8], error: &Error) -> String {
    let wrong = if body.iter().all(u8::is_ascii_whitespace) {
        return "The body is empty; it must be a JSON object".to_owned();
    } else if let Err(no_text) = std::str::from_utf8(body) {
        let (line, column) = place(body.get(..no_text.valid_up_to()).unwrap_or_default());
        format!("it is not UTF-8 at line {line} column {column}")
    } else {
        let said = error.to_string();
        let known = WORDS.iter().find_map(|(theirs, ours)| {
            said.strip_prefix(theirs).map(|place| format!("{ours}{place}"))
        });
        known.unwrap_or(said)
    };
    format!("The body is not valid JSON: {wrong}")
}

/// Returns line and column, from 1, of what follows this text.
fn place(before: &[u8]) -> (usize, usize) {
    let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
    let column = before.iter().rev().take_while(|byte| **byte != b'\n').count() + 1;
    (line, column)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn it_is_said_in_plain_words_and_with_its_place() {
        let cases: [(&[u8], &str); 14] = [
            (b"{\"a\": 1", "it ends within an object, at line 1 column 7"),
            (b"{\"a\": [1", "it ends within a list, at line 1 column 8"),
            (b"{\"a\":\n\"x", "it ends within a string, at line 2 column 2"),
            (b"{\"a\": ", "it ends where a value must be, at line 1 column 6"),
            (b"{\"a\": 1,\n \"b\" 2}", "expected `:` at line 2 column 6"),
            (b"{\"a\": 1 \"b\": 2}", "expected `,` or `}` at line 1 column 9"),
            (b"{\"a\": 1,}", "trailing comma at line 1 column 9"),
            (b"{\"a\": NaN}", "expected a value at line 1 column 7"),
            (b"{\"a\": nil}", "expected true, false or null at line 1 column 8"),
            (b"{'a': 1}", "expected a name in double quotes at line 1 column 2"),
            (b"{} {}", "something follows its end, at line 1 column 4"),
            (b"{\"a\": 1e400}", "number out of range at line 1 column 11"),
            (b"{\"a\":\n \"\xff\"}", "it is not UTF-8 at line 2 column 3"),
            (b"\xff\xfe{\0}\0", "it is not UTF-8 at line 1 column 1"),
        ];
        let describe = |body: &[u8]| {
            let error = serde_json::from_slice::<Value>(body).unwrap_err();
            describe(body, &error)
        };
        for (body, expected) in cases {
            assert_eq!(describe(body), format!("The body is not valid JSON: {expected}"));
        }
        for body in [&b""[..], b" \n"] {
            assert_eq!(describe(body), "The body is empty; it must be a JSON object");
        }
    }
}

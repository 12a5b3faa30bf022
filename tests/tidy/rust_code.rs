//! Splits Rust source into code and comments, and finds its imports.
//!
//! A lexer, not a parser: enough to know that a word is in code, not in a comment or a string.

/// Source split into two texts with the lines and columns of the original.
#[derive(Debug)]
pub(crate) struct RustCode {
    /// Code; comments and the contents of literals are blank.
    pub(crate) code: String,
    /// Comments with their slashes; everything else is blank.
    pub(crate) comments: String,
}

#[derive(Clone, Copy)]
enum State {
    Code,
    LineComment,
    BlockComment { depth: usize },
    Text { escaped: bool, quote: char },
    RawText { hashes: usize },
}

/// Splits `text` into code and comments.
pub(crate) fn split(text: &str) -> RustCode {
    let chars: Vec<char> = text.chars().collect();
    let mut out = RustCode { code: String::new(), comments: String::new() };
    let mut state = State::Code;
    let mut i = 0;
    while i < chars.len() {
        let next = chars.get(i + 1).copied();
        let mut taken = 1;
        let mut is_code = false;
        let mut is_comment = false;
        match state {
            State::Code => match (chars[i], next) {
                ('/', Some('/')) => (state, is_comment) = (State::LineComment, true),
                ('/', Some('*')) => {
                    (state, is_comment, taken) = (State::BlockComment { depth: 1 }, true, 2);
                }
                ('"', _) => {
                    (state, is_code) = (State::Text { escaped: false, quote: '"' }, true);
                }
                ('\'', Some(c)) if c == '\\' || chars.get(i + 2) == Some(&'\'') => {
                    (state, is_code) = (State::Text { escaped: false, quote: '\'' }, true);
                }
                ('r', _) if raw_start(&chars, i).is_some() => {
                    let hashes = raw_start(&chars, i).unwrap_or(0);
                    (state, is_code, taken) = (State::RawText { hashes }, true, hashes + 2);
                }
                _ => is_code = true,
            },
            State::LineComment => {
                is_comment = true;
                if chars[i] == '\n' {
                    state = State::Code;
                }
            }
            State::BlockComment { depth } => {
                is_comment = true;
                match (chars[i], next) {
                    ('/', Some('*')) => {
                        (state, taken) = (State::BlockComment { depth: depth + 1 }, 2);
                    }
                    ('*', Some('/')) => {
                        taken = 2;
                        state = if depth == 1 {
                            State::Code
                        } else {
                            State::BlockComment { depth: depth - 1 }
                        };
                    }
                    _ => {}
                }
            }
            State::Text { escaped, quote } => {
                if !escaped && chars[i] == quote {
                    (state, is_code) = (State::Code, true);
                } else {
                    let escaped = !escaped && chars[i] == '\\';
                    state = State::Text { escaped, quote };
                }
            }
            State::RawText { hashes } => {
                let closed = chars[i] == '"'
                    && chars[i + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes;
                if closed {
                    (state, is_code, taken) = (State::Code, true, hashes + 1);
                }
            }
        }
        for &c in &chars[i..(i + taken).min(chars.len())] {
            let blank = if c == '\n' { '\n' } else { ' ' };
            out.code.push(if is_code { c } else { blank });
            out.comments.push(if is_comment { c } else { blank });
        }
        i += taken;
    }
    out
}

/// Number of hashes of the raw string that begins with the `r` at `i`, if there is one.
fn raw_start(chars: &[char], i: usize) -> Option<usize> {
    let before = i.checked_sub(1).map_or(' ', |j| chars[j]);
    let prefixed =
        matches!(before, 'b' | 'c') && !i.checked_sub(2).is_some_and(|j| is_word_char(chars[j]));
    if is_word_char(before) && !prefixed {
        return None;
    }
    let hashes = chars[i + 1..].iter().take_while(|c| **c == '#').count();
    (chars.get(i + 1 + hashes) == Some(&'"')).then_some(hashes)
}

fn is_word_char(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Byte offsets of `word` as a whole word in `text`.
pub(crate) fn word_offsets(text: &str, word: &str) -> Vec<usize> {
    text.match_indices(word)
        .map(|(at, _)| at)
        .filter(|at| {
            !text[..*at].ends_with(is_word_char)
                && !text[at + word.len()..].starts_with(is_word_char)
        })
        .collect()
}

/// The 1-based line of byte offset `at`.
pub(crate) fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

/// Every path that `code` imports, one per leaf of its `use` trees, with its line; and the code
/// without these statements.
pub(crate) fn imports(code: &str) -> (Vec<(usize, String)>, String) {
    let mut paths = Vec::new();
    let mut rest = code.to_owned();
    for at in word_offsets(code, "use") {
        let statement = &code[at + 3..];
        // `impl Trait + use<'a>` is no import.
        if statement.trim_start().starts_with('<') {
            continue;
        }
        let Some(end) = statement.find(';') else { continue };
        let mut leaves = Vec::new();
        expand("", &statement[..end], &mut leaves);
        paths.extend(leaves.into_iter().map(|leaf| (line_of(code, at), leaf)));
        let range = at..at + 3 + end;
        let blank: String =
            code[range.clone()].chars().map(|c| if c == '\n' { '\n' } else { ' ' }).collect();
        // The lengths are equal only for ASCII, as all identifiers here are.
        if blank.len() == range.len() {
            rest.replace_range(range, &blank);
        }
    }
    (paths, rest)
}

/// Expands one `use` tree: `a::{b, c::d as e}` to `a::b` and `a::c::d`.
fn expand(prefix: &str, tree: &str, leaves: &mut Vec<String>) {
    let tree = tree.trim();
    if tree.is_empty() {
        return;
    }
    let Some(open) = tree.find('{') else {
        let path = tree.split_whitespace().next().unwrap_or("");
        leaves.push(format!("{prefix}{path}"));
        return;
    };
    let prefix = format!("{prefix}{}", tree[..open].trim());
    let inner = balanced(&tree[open + 1..]).unwrap_or(&tree[open + 1..]);
    let (mut depth, mut start) = (0_usize, 0);
    for (at, c) in inner.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                expand(&prefix, &inner[start..at], leaves);
                start = at + 1;
            }
            _ => {}
        }
    }
    expand(&prefix, &inner[start..], leaves);
}

/// The part of `text` before its closing brace.
fn balanced(text: &str) -> Option<&str> {
    let mut depth = 0_usize;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => return Some(&text[..at]),
            '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Lines on which code (from [`split`]) names the crate `name`, in an import or a path.
///
/// A path that begins with a module of that name, declared in the same file, does not count.
pub(crate) fn crate_mentions(code: &str, name: &str) -> Vec<usize> {
    let (paths, rest) = imports(code);
    let own_module = word_offsets(&rest, name)
        .iter()
        .any(|at| rest[..*at].trim_end().ends_with("mod") && !rest[..*at].ends_with("mod"));
    let first = |path: &str| path.split("::").find(|part| !part.is_empty()) == Some(name);
    let mut lines: Vec<usize> = paths
        .iter()
        .filter(|(_, path)| first(path) && (path.starts_with("::") || !own_module))
        .map(|(line, _)| *line)
        .collect();
    for at in word_offsets(&rest, name) {
        let before = rest[..at].trim_end();
        let after = rest[at + name.len()..].trim_start();
        let by_extern = before.ends_with("extern crate");
        let absolute = before.ends_with("::")
            && !before.trim_end_matches(':').ends_with(|c| is_word_char(c) || c == '>');
        let relative = !before.ends_with([':', '.']) && !own_module;
        if by_extern || (after.starts_with("::") && (absolute || relative)) {
            lines.push(line_of(&rest, at));
        }
    }
    lines.sort_unstable();
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_not_code() {
        let text = "let a = \"unsafe // \\\" x\"; // unsafe\n/* /* unsafe */ y */ b('\"', r#\"unsafe \"q\"#, 'u');";
        let split = split(text);
        assert!(word_offsets(&split.code, "unsafe").is_empty(), "{}", split.code);
        assert_eq!(word_offsets(&split.comments, "unsafe").len(), 2);
        assert_eq!(split.code.matches('\n').count(), 1);
        assert!(split.code.contains("b('"), "{}", split.code);
    }

    #[test]
    fn lifetimes_do_not_open_a_literal() {
        let split = split("fn f<'a>(x: &'a str) -> &'static str { unsafe { g(x) } }");
        assert_eq!(word_offsets(&split.code, "unsafe").len(), 1);
    }

    #[test]
    fn words_have_borders() {
        assert_eq!(word_offsets("unsafe_code unsafe x_unsafe", "unsafe"), [12]);
    }

    #[test]
    fn use_trees_are_expanded() {
        let code = "use std::{net::{TcpStream, SocketAddr as A}, time::Instant};\nuse a::b;\nf();";
        let (paths, rest) = imports(code);
        let leaves: Vec<&str> = paths.iter().map(|(_, path)| path.as_str()).collect();
        let expected =
            ["std::net::TcpStream", "std::net::SocketAddr", "std::time::Instant", "a::b"];
        assert_eq!(leaves, expected);
        assert_eq!(paths.last().map(|(line, _)| *line), Some(2));
        assert!(rest.contains("f()") && !rest.contains("Instant"));
    }

    #[test]
    fn a_crate_is_told_from_a_module_and_a_variable() {
        let lines = |code: &str| crate_mentions(code, "worker");
        assert_eq!(lines("use worker::Options;\nlet x = worker::run();"), [1, 2]);
        assert_eq!(lines("use {worker as w, shared::x};"), [1]);
        assert_eq!(lines("let worker = 1; self.worker.id(); crate::worker::f();"), [0_usize; 0]);
        assert_eq!(lines("mod worker;\nuse worker::Row;\nuse self::worker::A;"), [0_usize; 0]);
        assert_eq!(lines("mod worker;\nlet x = ::worker::run();"), [2]);
        assert_eq!(lines("use shared::{worker::A, b};"), [0_usize; 0]);
    }
}

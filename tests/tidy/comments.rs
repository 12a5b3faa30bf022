//! Rules for comments: headers that list a module's children, and the width of lines.

use crate::rust_code;
use crate::tree::{self, File};

/// From this many children on, a module's header must name them all.
const CHILDREN: usize = 4;
/// Same as rustfmt's `max_width`; rustfmt leaves comments alone.
const COLUMNS: usize = 100;

/// Finds modules whose header does not name all of their children.
fn maps(files: &[File]) -> Vec<String> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| !file.path.starts_with("tests/")) {
        let children: Vec<&str> = file.text.lines().filter_map(child).collect();
        if children.len() < CHILDREN {
            continue;
        }
        let header: String =
            file.text.lines().filter(|line| line.starts_with("//!")).collect::<Vec<_>>().join("\n");
        for name in children {
            let ends = |before: &str| header.contains(&format!("{before}{name}`"));
            if !["`", "::", "mod@"].iter().any(|before| ends(before)) {
                findings.push(format!("{}: its header does not name module `{name}`", file.path));
            }
        }
    }
    findings
}

/// The name in `mod name;`, except for a module's tests.
fn child(line: &str) -> Option<&str> {
    let line =
        line.strip_prefix("pub ").or_else(|| line.strip_prefix("pub(crate) ")).unwrap_or(line);
    let name = line.strip_prefix("mod ")?.strip_suffix(';')?;
    (name != "tests").then_some(name)
}

/// Finds comment lines that are too wide, except those with one long word, such as an address.
fn wide(files: &[File]) -> Vec<String> {
    let mut findings = Vec::new();
    for file in files {
        let comments = rust_code::split(&file.text).comments;
        for (number, (line, comment)) in file.text.lines().zip(comments.lines()).enumerate() {
            let width = line.chars().count();
            let words = comment.split_whitespace().filter(|word| !word.starts_with("//")).count();
            if width > COLUMNS && words > 1 {
                findings.push(format!("{}:{}: {width} columns", file.path, number + 1));
            }
        }
    }
    findings
}

#[test]
fn modules_with_many_children_have_a_map() {
    crate::assert_kept("maps of modules", &maps(&tree::rust_files()));
}

#[test]
fn comments_are_as_narrow_as_code() {
    crate::assert_kept("width of comments", &wide(&tree::rust_files()));
}

#[test]
fn the_rules_of_comments_can_fail() {
    let file = |text: &str| [File::sample("worker/src/x.rs", text)];
    let four = "mod a;\npub mod b;\npub(crate) mod c;\nmod d;\n";
    assert_eq!(maps(&file(&format!("//! `a`, `b` and `c`.\n{four}"))).len(), 1);
    assert_eq!(maps(&file(&format!("//! `a`, `x::b`, [`mod@c`] and [`d`].\n{four}"))).len(), 0);
    assert_eq!(maps(&file("mod a;\nmod b;\nmod c;\nmod tests;\n")).len(), 0);
    let words = "word ".repeat(20);
    assert_eq!(wide(&file(&format!("// {words}\n"))).len(), 1);
    assert_eq!(wide(&file(&format!("// {}\n", words.trim_end()))).len(), 1);
    assert_eq!(wide(&file(&format!("// {}\n", &words[..95]))).len(), 0);
    assert_eq!(wide(&file(&format!("// https://{}\n", "x".repeat(100)))).len(), 0);
    assert_eq!(wide(&file(&format!("let x = \"// {words}\";\n"))).len(), 0);
}

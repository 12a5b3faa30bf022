//! Rules for single source files (header, size, unsafe code, unfinished code), and for the top
//! folder of the repository.
use crate::rust_code::{RustCode, line_of, split, word_offsets};
use crate::tree::{self, File};

const LINES_MAX: usize = 800;
const LINES_WARN: usize = 500;

/// Sources that people write; data and generated files have no limit.
const SOURCE_EXTENSIONS: [&str; 5] = ["rs", "cu", "cuh", "py", "sh"];

/// The entries of the top folder. Tools look for their own files there; all others belong below.
const TOP_LEVEL: &[&str] = &[
    ".cargo", // where etcd-client finds protoc
    ".ci",
    ".gitattributes",
    ".gitignore",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "cluster-configs",
    "clippy.toml",
    "coordinator",
    "deny.toml",
    "docs",
    "kernels",
    "models",
    "rustfmt.toml",
    "shared",
    "tests",
    "worker",
];

/// Entries that tools create in the top folder and git does not track.
const UNTRACKED: &[&str] = &[".git", ".venv", "target"];

/// Finds Rust files that do not begin with a `//!` header.
fn headers(sources: &[File]) -> Vec<String> {
    sources
        .iter()
        .filter(|file| !file.text.starts_with("//! "))
        .map(|file| format!("{}:1: begin with `//!`: what this file owns, what not", file.path))
        .collect()
}

/// Finds files of more than `limit` lines.
fn longer_than(sources: &[File], limit: usize) -> Vec<String> {
    sources
        .iter()
        .map(|file| (file, file.text.lines().count()))
        .filter(|(_, lines)| *lines > limit)
        .map(|(file, lines)| format!("{}: {lines} lines, limit {limit}", file.path))
        .collect()
}

/// Finds `todo!` and `unimplemented!` in code.
fn unfinished(sources: &[File]) -> Vec<String> {
    let mut findings = Vec::new();
    for file in sources {
        let code = split(&file.text).code;
        for name in ["todo", "unimplemented"] {
            for at in word_offsets(&code, name) {
                if code[at + name.len()..].starts_with('!') {
                    findings.push(format!("{}:{}: {name}!", file.path, line_of(&code, at)));
                }
            }
        }
    }
    findings
}

/// Finds `unsafe` outside `kernels`, and `unsafe` in `kernels` without a reason why it is sound.
fn unsafe_code(sources: &[File]) -> Vec<String> {
    let mut findings = Vec::new();
    for file in sources {
        let source = split(&file.text);
        for at in word_offsets(&source.code, "unsafe") {
            let line = line_of(&source.code, at);
            if !file.path.starts_with("kernels/") {
                findings.push(format!("{}:{line}: unsafe belongs in kernels", file.path));
            } else if needs_reason(&source.code[at..]) && !has_reason(&source, line) {
                findings.push(format!("{}:{line}: unsafe without a SAFETY comment", file.path));
            }
        }
    }
    findings
}

/// Whether the `unsafe` at the start of `code` needs a reason: blocks, items and implementations
/// do, function pointer types and attributes do not.
fn needs_reason(code: &str) -> bool {
    let rest = code["unsafe".len()..].trim_start();
    if rest.starts_with('(') {
        return false;
    }
    let rest = rest.strip_prefix("extern").map_or(rest, |abi| {
        abi.trim_start().trim_start_matches(['"', ' ']).trim_start_matches('C')
    });
    !rest.trim_start().strip_prefix("fn").is_some_and(|after| after.trim_start().starts_with('('))
}

/// Whether the statement or item on line `line` (1-based) has `SAFETY:` or `# Safety` in a comment
/// on it or right above it.
fn has_reason(source: &RustCode, line: usize) -> bool {
    let code: Vec<&str> = source.code.lines().collect();
    let comments: Vec<&str> = source.comments.lines().collect();
    let says = |i: usize| comments[i].contains("SAFETY:") || comments[i].contains("# Safety");
    let mut i = line - 1;
    // A reason may also be the first thing inside the block.
    if says(i) || (i + 1 < comments.len() && code[i + 1].trim().is_empty() && says(i + 1)) {
        return true;
    }
    while i > 0 {
        i -= 1;
        let text = code[i].trim();
        let attribute = text.starts_with("#[") || text.ends_with(']') && text.starts_with(')');
        let ends_before = text.ends_with([';', '{', '}']) && !attribute;
        if ends_before {
            return false;
        }
        if says(i) {
            return true;
        }
        if text.is_empty() && comments[i].trim().is_empty() {
            return false;
        }
    }
    false
}

/// Finds entries of the top folder that do not belong there.
fn top_level(names: &[String]) -> Vec<String> {
    names
        .iter()
        .filter(|name| !TOP_LEVEL.contains(&name.as_str()) && !UNTRACKED.contains(&name.as_str()))
        .map(|name| format!("{name}: does not belong at the top of the repository"))
        .collect()
}

#[test]
fn every_source_says_what_it_owns() {
    crate::assert_kept("headers", &headers(&tree::rust_files()));
}

#[test]
fn files_hold_one_idea() {
    let sources = tree::files(&SOURCE_EXTENSIONS);
    for warning in longer_than(&sources, LINES_WARN) {
        crate::notice(&format!("warning: {warning}: does it hold more than one idea?"));
    }
    crate::assert_kept("file sizes", &longer_than(&sources, LINES_MAX));
}

#[test]
fn nothing_is_left_unfinished() {
    crate::assert_kept("unfinished code", &unfinished(&tree::rust_files()));
}

#[test]
fn unsafe_code_is_in_kernels_and_gives_its_reason() {
    crate::assert_kept("unsafe code", &unsafe_code(&tree::rust_files()));
}

#[test]
fn the_top_level_holds_what_the_layout_names() {
    crate::assert_kept("top level", &top_level(&tree::entries("")));
}

#[test]
fn the_header_size_and_unfinished_rules_can_fail() {
    let file = |text: &str| [File::sample("worker/src/x.rs", text)];
    assert_eq!(headers(&file("use std::fmt;\n")).len(), 1);
    assert_eq!(headers(&file("//! Owns x.\n")).len(), 0);
    assert_eq!(longer_than(&file(&"\n".repeat(801)), LINES_MAX).len(), 1);
    assert_eq!(longer_than(&file(&"\n".repeat(800)), LINES_MAX).len(), 0);
    assert_eq!(unfinished(&file("fn f() { todo!(\"x\") }")).len(), 1);
    assert_eq!(unfinished(&file("fn f() { unimplemented!() }")).len(), 1);
    assert_eq!(unfinished(&file("// todo!()\nfn todo() {}")).len(), 0);
    assert_eq!(top_level(&["bench".to_owned(), "docs".to_owned()]).len(), 1);
}

#[test]
fn the_unsafe_rule_can_fail() {
    let rule = |path: &str, text: &str| unsafe_code(&[File::sample(path, text)]).len();
    let kernel = |text: &str| rule("kernels/src/x.rs", text);
    assert_eq!(rule("worker/src/x.rs", "// SAFETY: no\nlet a = unsafe { b() };"), 1);
    assert_eq!(rule("worker/src/x.rs", "#![forbid(unsafe_code)] // unsafe\n"), 0);
    assert_eq!(kernel("let a = unsafe { b() };"), 1);
    assert_eq!(kernel("// SAFETY: b is pure.\nlet a = unsafe { b() };"), 0);
    assert_eq!(kernel("// SAFETY: b is pure.\nlet a =\n    unsafe { b() };"), 0);
    assert_eq!(
        kernel("// SAFETY: b is pure.\nlet a = unsafe { b() };\nlet c = unsafe { b() };"),
        1
    );
    assert_eq!(kernel("unsafe impl Send for X {}"), 1);
    assert_eq!(
        kernel("/// # Safety\n/// p is valid.\n#[inline]\npub unsafe fn f(p: *const u8) {}"),
        0
    );
    assert_eq!(kernel("pub unsafe fn f(p: *const u8) {}"), 1);
    assert_eq!(kernel("type F = unsafe extern \"C\" fn(i32) -> i32;\ntype G = unsafe fn();"), 0);
    assert_eq!(kernel("unsafe {\n    // SAFETY: b is pure.\n    b();\n}"), 0);
}

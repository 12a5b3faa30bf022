//! Documents match the repository: links resolve, the options in commands exist, the architecture
//! names every module, the README's two commands are the real ones, and what `tutti --version`
//! prints is shown with the present protocol.
use shared::protocol::PROTOCOL_VERSION;

use crate::program;
use crate::tree::{self, File};

const ARCHITECTURE: &str = "docs/architecture.md";
const CRATES: [&str; 4] = ["coordinator", "worker", "shared", "kernels"];
const COMMANDS_HEADING: &str = "## Two commands";
const TEST_COMMAND: &str = "tests/run";

/// Lines of a document with their 1-based numbers, and whether they are inside fenced blocks.
fn lines(text: &str) -> Vec<(usize, bool, &str)> {
    let mut fenced = false;
    let mut out = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else {
            out.push((index + 1, fenced, line));
        }
    }
    out
}

/// The targets of inline links and images in a line of Markdown.
fn link_targets(line: &str) -> Vec<&str> {
    line.match_indices("](")
        .filter_map(|(at, _)| line[at + 2..].split_once(')'))
        .map(|(target, _)| target.split_whitespace().next().unwrap_or(""))
        .collect()
}

/// A heading's anchor, as GitHub makes it.
fn anchor(heading: &str) -> String {
    heading
        .trim_start_matches('#')
        .trim()
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

/// Resolves `path` relative to the folder of `from`; `None` outside the repository.
fn resolve(from: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Finds links to missing files and headings. `read` returns a file's text, `exists` also knows
/// folders.
fn broken_links(
    documents: &[File],
    exists: impl Fn(&str) -> bool,
    read: impl Fn(&str) -> Option<File>,
) -> Vec<String> {
    let mut findings = Vec::new();
    for file in documents {
        for (number, fenced, line) in lines(&file.text) {
            if fenced {
                continue;
            }
            for target in link_targets(line) {
                if ["http://", "https://", "mailto:"].iter().any(|p| target.starts_with(p)) {
                    continue;
                }
                let (path, fragment) = target.split_once('#').unwrap_or((target, ""));
                let resolved = if path.is_empty() {
                    Some(file.path.clone())
                } else {
                    resolve(&file.path, path)
                };
                let there = resolved.as_deref().is_some_and(|path| {
                    let is_document = |text: &str| {
                        lines(text).iter().any(|(_, fenced, line)| {
                            !fenced && line.starts_with('#') && anchor(line) == fragment
                        })
                    };
                    if fragment.is_empty() || !path.ends_with(".md") {
                        exists(path)
                    } else if *path == file.path {
                        is_document(&file.text)
                    } else {
                        read(path).is_some_and(|document| is_document(&document.text))
                    }
                });
                if !there {
                    findings.push(format!("{}:{number}: broken link {target}", file.path));
                }
            }
        }
    }
    findings
}

/// Lines of fenced blocks that run `tutti`, continued lines joined.
fn tutti_commands(text: &str) -> Vec<(usize, String)> {
    let mut commands: Vec<(usize, String)> = Vec::new();
    let mut open = false;
    for (number, fenced, line) in lines(text) {
        let line = line.trim().trim_start_matches("$ ");
        let comment = line.find(" #").unwrap_or(line.len());
        let content = line[..comment].trim_end();
        if open && let Some((_, command)) = commands.last_mut() {
            command.push(' ');
            command.push_str(content.trim_end_matches('\\'));
        } else if fenced && content.starts_with("tutti ") {
            commands.push((number, content.trim_end_matches('\\').to_owned()));
        } else {
            continue;
        }
        open = fenced && content.ends_with('\\');
    }
    commands
}

/// Paths below the crates that a document names, with 1-based lines: in full as
/// `shared/src/wire/frame.rs`, or as `src/wire/frame.rs` below a line that begins with the crate.
fn named_paths(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut section = None;
    for (index, line) in text.lines().enumerate() {
        let begin = line.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
        let first = begin.split(|c: char| !c.is_ascii_alphanumeric()).next();
        section = CRATES.into_iter().find(|name| Some(*name) == first).or(section);
        let words = line.split(|c: char| !(c.is_ascii_alphanumeric() || "_-./".contains(c)));
        for word in words {
            let path = word.trim_matches('.').trim_end_matches('/');
            let below = CRATES.iter().any(|name| path.starts_with(&format!("{name}/src/")));
            if below || path.starts_with("tests/") {
                found.push((index + 1, path.to_owned()));
            } else if let (true, Some(section)) = (path.starts_with("src/"), section) {
                found.push((index + 1, format!("{section}/{path}")));
            }
        }
    }
    found
}

/// Finds paths in the architecture that do not exist, and top-level modules that it does not name.
fn architecture_gaps(
    document: &File,
    modules: &[String],
    exists: impl Fn(&str) -> bool,
) -> Vec<String> {
    let named = named_paths(&document.text);
    let mut findings: Vec<String> = named
        .iter()
        .filter(|(_, path)| !exists(path) && !exists(&format!("{path}.rs")))
        .map(|(line, path)| format!("{}:{line}: {path} does not exist", document.path))
        .collect();
    for module in modules {
        let is_named = named.iter().any(|(_, path)| {
            path.strip_prefix(module.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '/']))
        });
        if !is_named {
            findings.push(format!("{}: does not name module `{module}`", document.path));
        }
    }
    findings
}

/// Top-level modules of the crates as paths without `.rs`: `coordinator/src/http`.
fn top_level_modules() -> Vec<String> {
    let mut modules = Vec::new();
    for name in CRATES {
        for entry in tree::entries(&format!("{name}/src")) {
            let module = entry.trim_end_matches(".rs");
            let path = format!("{name}/src/{module}");
            if !["lib", "main"].contains(&module) && !modules.contains(&path) {
                modules.push(path);
            }
        }
    }
    modules
}

/// Finds problems of the README's section with the two commands: one to run, one to test.
fn two_commands(readme: &str) -> Vec<String> {
    let Some((_, section)) = readme.split_once(&format!("{COMMANDS_HEADING}\n")) else {
        return vec![format!("README.md: no section '{COMMANDS_HEADING}'")];
    };
    let section = section.split("\n## ").next().unwrap_or(section);
    let commands: Vec<&str> = lines(section)
        .into_iter()
        .filter(|(_, fenced, line)| *fenced && !line.trim().is_empty())
        .map(|(_, _, line)| line)
        .collect();
    match commands[..] {
        [run, TEST_COMMAND] if run.starts_with("cargo run ") => Vec::new(),
        _ => vec![format!("README.md: expected `cargo run ..` and `{TEST_COMMAND}`: {commands:?}")],
    }
}

/// Finds versions of the protocol, as `tutti --version` prints them, other than the `present` one.
fn other_protocols(documents: &[File], present: u16) -> Vec<String> {
    const SHOWN: &str = "(protocol ";
    let mut findings = Vec::new();
    for file in documents {
        for (index, line) in file.text.lines().enumerate() {
            for (at, _) in line.match_indices(SHOWN) {
                let version = line[at + SHOWN.len()..].split(')').next().unwrap_or("");
                if version != present.to_string() {
                    let path = &file.path;
                    findings.push(format!("{path}:{}: (protocol {version})", index + 1));
                }
            }
        }
    }
    findings
}

fn documents() -> Vec<File> {
    tree::files(&["md"])
}

#[test]
fn links_lead_somewhere() {
    let findings = broken_links(&documents(), tree::exists, tree::read);
    crate::assert_kept("links", &findings);
}

#[test]
fn documents_show_commands_that_exist() {
    let mut findings = Vec::new();
    for file in documents() {
        for (line, command) in tutti_commands(&file.text) {
            for problem in program::command_line_problems(&command) {
                findings.push(format!("{}:{line}: {problem}", file.path));
            }
        }
    }
    crate::assert_kept("commands in documents", &findings);
}

#[test]
fn the_architecture_names_every_module() {
    let document = tree::read(ARCHITECTURE).expect("it exists");
    let modules = top_level_modules();
    assert!(modules.len() >= 10, "{modules:?}");
    crate::assert_kept("architecture", &architecture_gaps(&document, &modules, tree::exists));
}

#[test]
fn the_readme_has_two_commands_and_ci_runs_the_second() {
    let readme = tree::read("README.md").unwrap();
    crate::assert_kept("two commands", &two_commands(&readme.text));
    let ci = tree::read(".ci/run").unwrap().text;
    assert!(ci.contains(TEST_COMMAND), ".ci/run does not run {TEST_COMMAND}");
}

#[test]
fn the_protocol_is_the_present_one() {
    let documents = documents();
    assert!(documents.iter().any(|file| file.text.contains("(protocol ")), "nothing shows it");
    crate::assert_kept("protocol", &other_protocols(&documents, PROTOCOL_VERSION));
}

#[test]
fn the_protocol_rule_can_fail() {
    let rule = |text: &str| other_protocols(&[File::sample("docs/a.md", text)], 7).len();
    assert_eq!(rule("it prints `tutti 0.1.0 (protocol 7)`"), 0);
    assert_eq!(rule("\n(protocol 6) and (protocol 77)"), 2);
}

#[test]
fn the_link_rule_can_fail() {
    let document = |text: &str| [File::sample("docs/a.md", text)];
    let exists = |path: &str| ["docs/a.md", "docs/b.md", "LICENSE"].contains(&path);
    let read = |path: &str| exists(path).then(|| File::sample(path, "# Big `news`, now\n"));
    let rule = |text: &str| broken_links(&document(text), exists, read).len();
    assert_eq!(rule("[x](missing.md) ![y](../no.png)"), 2);
    assert_eq!(rule("[x](b.md) [y](../LICENSE) [z](https://example.org)"), 0);
    assert_eq!(rule("[x](b.md#big-news-now)"), 0);
    assert_eq!(rule("[x](b.md#old-news)"), 1);
    assert_eq!(rule("# Here\n[x](#here)"), 0);
    assert_eq!(rule("[x](#there)"), 1);
    assert_eq!(rule("[x](../../outside)"), 1);
    assert_eq!(rule("```\n[x](missing.md)\n```"), 0);
}

#[test]
fn commands_are_found_with_their_continuations() {
    let text = "```console\n$ tutti up \\\n  --workers 2  # two\ncurl x\n```\ntutti is a word";
    assert_eq!(tutti_commands(text), [(2, "tutti up  --workers 2".to_owned())]);
}

#[test]
fn the_architecture_rule_can_fail() {
    let exists = |path: &str| path == "shared/src/ids.rs" || path == "worker/src/link";
    let modules = ["shared/src/ids".to_owned()];
    let rule =
        |text: &str| architecture_gaps(&File::sample(ARCHITECTURE, text), &modules, exists).len();
    assert_eq!(rule("- `shared/src/ids.rs`: names\n- `worker/src/link/`: links."), 0);
    assert_eq!(rule("- `shared/src/ids`: names"), 0);
    assert_eq!(rule("## `shared/`\n- `src/ids.rs`: names"), 0);
    assert_eq!(rule("## `worker/`\n- `src/ids.rs`: names"), 2);
    assert_eq!(rule("nothing"), 1);
    assert_eq!(rule("- `shared/src/ids.rs` `shared/src/gone.rs`"), 1);
    assert_eq!(rule("- `shared/src/ids_old.rs`"), 2);
}

#[test]
fn the_two_commands_rule_can_fail() {
    let section = |a: &str, b: &str| {
        format!(
            "# T\n{COMMANDS_HEADING}\nRun:\n```console\n{a}\n```\nTest:\n```console\n{b}\n```\n## Next\n```\nx\n```\n"
        )
    };
    assert_eq!(two_commands(&section("cargo run --release -- up", "tests/run")).len(), 0);
    assert_eq!(two_commands(&section("cargo run", "cargo test")).len(), 1);
    assert_eq!(two_commands(&section("cargo run -- up\nmore", "tests/run")).len(), 1);
    assert_eq!(two_commands("# T\n").len(), 1);
}

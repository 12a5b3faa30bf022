//! The repository's text files, read once per test.
//!
//! Walks the disk instead of asking git, so that the rules also work in an unpacked archive.
use std::path::{Path, PathBuf};

/// One text file.
#[derive(Clone, Debug)]
pub(crate) struct File {
    /// Path from the repository root, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
}

impl File {
    /// A made-up file, for testing a rule.
    pub(crate) fn sample(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned() }
    }

    pub(crate) fn extension(&self) -> &str {
        Path::new(&self.path).extension().and_then(|e| e.to_str()).unwrap_or("")
    }

    /// Whether the file is module `path` (without `.rs`), or below it.
    pub(crate) fn in_module(&self, path: &str) -> bool {
        self.path.strip_prefix(path).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
    }
}

/// The repository root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// Files of the repository with one of `extensions`, sorted by path.
pub(crate) fn files(extensions: &[&str]) -> Vec<File> {
    all_paths()
        .into_iter()
        .filter(|path| {
            Path::new(path)
                .extension()
                .and_then(|e| e.to_str())
                .is_some_and(|extension| extensions.contains(&extension))
        })
        .map(|path| read(&path).unwrap_or_else(|| panic!("{path} is not readable UTF-8")))
        .collect()
}

/// All Rust sources.
pub(crate) fn rust_files() -> Vec<File> {
    files(&["rs"])
}

/// One file, if it exists.
pub(crate) fn read(path: &str) -> Option<File> {
    let text = std::fs::read_to_string(root().join(path)).ok()?;
    Some(File { path: path.to_owned(), text })
}

/// Whether `path` names a file or folder of the repository.
pub(crate) fn exists(path: &str) -> bool {
    root().join(path).exists()
}

/// Names in folder `path`, sorted; empty if there is no such folder.
pub(crate) fn entries(path: &str) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(root().join(path)) else { return Vec::new() };
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().expect("file names are UTF-8"))
        .collect();
    names.sort_unstable();
    names
}

/// Every path of the repository, except build outputs and model weights.
pub(crate) fn all_paths() -> Vec<String> {
    let mut paths = Vec::new();
    walk("", &mut paths);
    paths
}

fn walk(folder: &str, paths: &mut Vec<String>) {
    for name in entries(folder) {
        let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        let kind = std::fs::symlink_metadata(root().join(&path)).unwrap().file_type();
        if kind.is_dir() {
            let hidden = name.starts_with('.') && name != ".ci";
            if !(hidden || path == "target" || name == "__pycache__") {
                walk(&path, paths);
            }
        } else if kind.is_file() {
            paths.push(path);
        }
    }
}

#[test]
fn the_walk_finds_this_file_and_no_build_output() {
    let paths = all_paths();
    assert!(paths.iter().any(|path| path == "tests/tidy/tree.rs"));
    assert!(!paths.iter().any(|path| path.starts_with("target/") || path.starts_with(".git/")));
    assert!(rust_files().len() > 20);
}

#[test]
fn a_module_is_its_file_and_its_folder() {
    let in_cli = |path| File::sample(path, "").in_module("coordinator/src/cli");
    assert!(in_cli("coordinator/src/cli.rs") && in_cli("coordinator/src/cli/up.rs"));
    assert!(!in_cli("coordinator/src/client.rs"));
}

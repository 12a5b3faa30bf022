//! PURE: names of models on the hub, their revisions and commits, as users and processes write
//! them.
use std::fmt;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

/// Longest part of a name: organisation or model.
const PART_MAX: usize = 96;
/// Longest revision.
const REVISION_MAX: usize = 255;
/// What a model of the hub begins with where a path could stand as well.
const SCHEME: &str = "hf://";
/// The revision where none is given.
pub const DEFAULT_REVISION: &str = "main";

/// What a user gave as a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelArgument {
    /// A folder of this host.
    Folder(PathBuf),
    /// `ORG/NAME`.
    Hub(String),
}

impl ModelArgument {
    /// What `given` means. It is a folder if it looks like a path or is there.
    ///
    /// # Errors
    /// Why it is neither, in words that go behind the option's name.
    pub fn read(given: &Path, is_there: impl FnOnce(&Path) -> bool) -> Result<Self, String> {
        let folder = || Ok(Self::Folder(given.to_owned()));
        let Some(text) = given.to_str() else { return folder() };
        let is_path = ["/", "./", "../", "~"].iter().any(|it| text.starts_with(it));
        if is_path || matches!(text, "." | "..") || is_there(given) {
            return folder();
        }
        check_name(text).map_err(|why| {
            format!(
                "{text} is neither a folder (there is none of that name here) nor a model's name on \
                 Hugging Face's hub ({why})"
            )
        })?;
        Ok(Self::Hub(text.to_owned()))
    }
}

/// Checks a name, `ORG/NAME`, by the hub's own rules.
///
/// # Errors
/// Which rule is broken.
pub fn check_name(name: &str) -> Result<(), String> {
    let Some((organisation, model)) = name.split_once('/') else {
        return Err("that has the form ORG/NAME".to_owned());
    };
    if model.contains('/') {
        return Err("that has the form ORG/NAME, with one slash".to_owned());
    }
    for part in [organisation, model] {
        let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_');
        let edges = edge(part.chars().next()) && edge(part.chars().next_back());
        if part.len() > PART_MAX || !part.chars().all(good) || !edges {
            return Err(format!(
                "ORG and NAME have 1 to {PART_MAX} letters, digits, - _ and . and begin and end \
                 with a letter, digit or _"
            ));
        }
    }
    if name.contains("--") || name.contains("..") {
        return Err("no name there has -- or .. in it".to_owned());
    }
    if name.ends_with(".git") {
        return Err("no name there ends in .git".to_owned());
    }
    Ok(())
}

/// Checks a revision: a branch, a tag or a commit.
///
/// # Errors
/// What it must be.
pub fn check_revision(revision: &str) -> Result<(), String> {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_./+".contains(c);
    let part = |part: &str| !part.is_empty() && !part.starts_with('.');
    let fine = (1..=REVISION_MAX).contains(&revision.len())
        && revision.chars().all(good)
        && revision.split('/').all(part);
    if fine {
        return Ok(());
    }
    Err(format!(
        "a revision is a branch, a tag or a commit: 1 to {REVISION_MAX} letters, digits, - _ . + and \
         /, and no part of it begins with a dot"
    ))
}

/// Whether this is a whole commit hash.
#[must_use]
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|it| matches!(it, b'0'..=b'9' | b'a'..=b'f'))
}

/// A model as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestedModel {
    /// `ORG/NAME`.
    pub name: String,
    /// A branch, a tag or a commit.
    pub revision: String,
}

/// One state of a model on the hub: always the same files.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HubModel {
    /// `ORG/NAME`.
    pub name: String,
    /// The commit's whole hash.
    pub commit: String,
}

impl HubModel {
    /// Reads what [`fmt::Display`] writes; `None` for what does not begin like it, which is a
    /// path.
    ///
    /// # Errors
    /// What is wrong with one that does.
    pub fn parse(text: &str) -> Option<Result<Self, String>> {
        let rest = text.strip_prefix(SCHEME)?;
        let Some((name, commit)) = rest.split_once('@') else {
            return Some(Err(format!("{text} names no commit")));
        };
        let read = check_name(name).and_then(|()| match is_commit(commit) {
            true => Ok(Self { name: name.to_owned(), commit: commit.to_owned() }),
            false => Err(format!("{commit} is no commit's whole hash")),
        });
        Some(read.map_err(|why| format!("{text}: {why}")))
    }

    /// The same with its commit as its revision.
    #[must_use]
    pub fn wanted(&self) -> RequestedModel {
        RequestedModel { name: self.name.clone(), revision: self.commit.clone() }
    }
}

impl fmt::Display for HubModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}@{}", self.name, self.commit)
    }
}

/// A number that tells lists of models apart; never 0 but for an empty one.
#[must_use]
pub fn fingerprint(models: &[String]) -> u64 {
    if models.is_empty() {
        return 0;
    }
    let mut hash = Sha256::new();
    for model in models {
        hash.update((model.len() as u64).to_le_bytes());
        hash.update(model.as_bytes());
    }
    let first = hash.finalize().iter().take(8).fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    first.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn names_are_those_that_the_hub_has() {
        for name in ["Qwen/Qwen3-0.6B", "a/b", "_x/_", "org-1.x/Model_2.5-b", "meta-llama/L.1"] {
            assert_eq!(check_name(name), Ok(()), "{name}");
        }
        let long = format!("a/{}", "b".repeat(97));
        for name in [
            "gpt2", "a/b/c", "/b", "a/", "a//b", "a/b--c", "a/b..c", "a/.b", "a/b.", "-a/b",
            "a/b-", "a/b.git", "a/b c", "a/\u{e9}", "a/b\n", "a/..", "../b", &long,
        ] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn what_looks_like_a_path_or_is_there_is_a_folder() {
        let read = |text: &str, there| ModelArgument::read(Path::new(text), |_| there);
        for path in ["/models/m", "./org/name", "../org/name", "~/models/m", "~m/x", ".", ".."] {
            assert_eq!(read(path, false), Ok(ModelArgument::Folder(path.into())), "{path}");
        }
        assert_eq!(read("org/name", true), Ok(ModelArgument::Folder("org/name".into())));
        assert_eq!(read("demo", true), Ok(ModelArgument::Folder("demo".into())));
        assert_eq!(read("org/name", false), Ok(ModelArgument::Hub("org/name".into())));
        for neither in ["demo", "a/b/c", "a b/c", ""] {
            let error = read(neither, false).unwrap_err();
            assert!(error.contains("folder") && error.contains("hub"), "{error}");
        }
    }

    #[test]
    fn revisions_leave_no_folder() {
        for revision in ["main", "v1.0", "refs/pr/7", "feature/x+y", COMMIT] {
            assert_eq!(check_revision(revision), Ok(()), "{revision}");
        }
        let long = "r".repeat(256);
        for revision in ["", "..", "a/../b", "/a", "a/", "a//b", ".x", "a b", "a\\b", "a?b", &long]
        {
            assert!(check_revision(revision).is_err(), "{revision}");
        }
    }

    #[test]
    fn a_state_is_written_and_read_alike() {
        let model = HubModel { name: "org/name".to_owned(), commit: COMMIT.to_owned() };
        assert_eq!(model.to_string(), format!("hf://org/name@{COMMIT}"));
        assert_eq!(HubModel::parse(&model.to_string()), Some(Ok(model)));
        assert_eq!(HubModel::parse("/models/m"), None);
        for wrong in ["hf://org/name", "hf://org/name@main", "hf://org/../x@", "hf://x@"] {
            assert!(HubModel::parse(wrong).unwrap().is_err(), "{wrong}");
        }
        let upper = format!("hf://org/name@{}", COMMIT.to_uppercase());
        assert!(HubModel::parse(&upper).unwrap().is_err());
    }

    #[test]
    fn lists_are_told_apart_by_what_is_in_them() {
        let list = |names: &[&str]| names.iter().map(|&it| it.to_owned()).collect::<Vec<_>>();
        let all = [list(&[]), list(&["ab"]), list(&["a", "b"]), list(&["b", "a"]), list(&["a"])];
        let mut numbers: Vec<u64> = all.iter().map(|it| fingerprint(it)).collect();
        assert_eq!((numbers[0], fingerprint(&all[1])), (0, numbers[1]));
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), all.len());
    }
}

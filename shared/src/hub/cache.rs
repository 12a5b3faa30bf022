//! The cache's folders, as the hub's own libraries lay them out, and what is in them.
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::files::{self, ADAPTER, CONFIG, INDEX, ModelPart, TOKENIZER};
use super::name::{HubModel, is_commit};

/// One model in the cache.
#[derive(Clone, Debug)]
pub struct ModelCache {
    root: PathBuf,
    locks: PathBuf,
}

impl ModelCache {
    /// That of the model `name`, which has been checked, in `cache`.
    #[must_use]
    pub fn new(cache: &Path, name: &str) -> Self {
        let folder = format!("models--{}", name.replace('/', "--"));
        Self { locks: cache.join(".locks").join(&folder), root: cache.join(folder) }
    }

    /// The commit that `revision` was when it was last asked for.
    #[must_use]
    pub fn commit_of(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let commit = fs::read_to_string(self.root.join("refs").join(revision)).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// Remembers which commit a revision is.
    ///
    /// # Errors
    /// The operating system's.
    pub(super) fn remember(&self, revision: &str, commit: &str) -> io::Result<()> {
        if revision == commit || self.commit_of(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        let file = self.root.join("refs").join(revision);
        put(&file, |new| fs::write(new, commit))
    }

    /// The folder of a commit's files.
    #[must_use]
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// Where the content named `etag` is.
    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.root.join("blobs").join(etag)
    }

    /// The part of it that has come.
    pub(super) fn incomplete(&self, etag: &str) -> PathBuf {
        self.root.join("blobs").join(format!("{etag}.incomplete"))
    }

    /// The lock of whoever downloads it, the one that the hub's own libraries take.
    ///
    /// # Errors
    /// The operating system's.
    pub(super) fn lock(&self, etag: &str) -> io::Result<File> {
        fs::create_dir_all(&self.locks)?;
        let file = self.locks.join(format!("{etag}.lock"));
        File::options().create(true).append(true).open(file)
    }

    /// Makes the folders that downloads need.
    ///
    /// # Errors
    /// The operating system's, with the folder's name.
    pub(super) fn make(&self) -> Result<(), String> {
        let blobs = self.root.join("blobs");
        fs::create_dir_all(&blobs).map_err(|error| format!("{}: {error}", blobs.display()))
    }

    /// The folder that has everything in it.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Puts a link to a blob in a commit's folder, under a name that has been checked.
    ///
    /// # Errors
    /// The operating system's.
    pub(super) fn link(&self, commit: &str, name: &str, etag: &str) -> io::Result<()> {
        let pointer = self.snapshot(commit).join(name);
        let up = "../".repeat(2 + name.matches('/').count());
        let target = format!("{up}blobs/{etag}");
        put(&pointer, |new| std::os::unix::fs::symlink(&target, new))
    }

    /// Which files of `part` a commit's folder lacks, as far as those that are there tell.
    ///
    /// # Errors
    /// What is wrong with the index of weights.
    pub fn lacks(&self, commit: &str, part: ModelPart) -> Result<Option<String>, String> {
        let folder = self.snapshot(commit);
        let mut needed: BTreeSet<String> = BTreeSet::new();
        if part == ModelPart::Adapter {
            needed.extend(ADAPTER.map(str::to_owned));
        } else {
            needed.insert(CONFIG.to_owned());
        }
        if part.has_text() {
            needed.insert(TOKENIZER.to_owned());
        }
        if part.has_weights() {
            let config = fs::read(folder.join(CONFIG)).unwrap_or_default();
            if files::names_tokens(&config) {
                needed.insert(TOKENIZER.to_owned());
            }
            let index = fs::read(folder.join(INDEX)).ok();
            needed.extend(files::weights(index.as_deref())?);
        }
        Ok(needed.into_iter().find(|name| !folder.join(name).is_file()))
    }

    /// Whether all of `part` is there.
    #[must_use]
    pub fn has(&self, commit: &str, part: ModelPart) -> bool {
        matches!(self.lacks(commit, part), Ok(None))
    }
}

/// Where the files of `text` are, which is a path or a model of the hub in `cache`.
///
/// # Errors
/// What is wrong with the model's name.
pub fn located(cache: &Path, text: &str) -> Result<PathBuf, String> {
    match HubModel::parse(text) {
        None => Ok(PathBuf::from(text)),
        Some(model) => {
            let HubModel { name, commit } = model?;
            Ok(ModelCache::new(cache, &name).snapshot(&commit))
        }
    }
}

/// Makes a file under another name and puts it in its place at once: nobody sees half of it.
fn put(file: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let new = folder.join(format!(".tutti-{:016x}", u64::from_le_bytes(random)));
    make(&new).and_then(|()| fs::rename(&new, file)).inspect_err(|_| {
        let _ = fs::remove_file(&new);
    })
}

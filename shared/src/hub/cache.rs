//! The cache's folders, as the hub's own libraries lay them out, and what is in them.
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::files::{self, ADAPTER, CONFIG, INDEX, ModelPart, TOKENIZER, USUAL};
use super::name::{HubModel, is_commit};

/// Which files of text a commit has: this project's own notes, which other programs do not read.
const NOTES: &str = ".tutti";
/// The notes of other programs: the names of files that a commit does not have.
const ABSENT: &str = ".no_exist";
/// What a name ends with that stands for a part of a content.
const INCOMPLETE: &str = ".incomplete";
/// Nobody brings any more what has not grown for so long: no answer takes as long.
const ABANDONED: Duration = Duration::from_secs(600);

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
        self.root.join("blobs").join(format!("{etag}{INCOMPLETE}"))
    }

    /// The same where no lock keeps others from it: a file of nobody else. What others have left
    /// becomes it.
    ///
    /// # Errors
    /// The operating system's.
    pub(super) fn incomplete_of_own(&self, etag: &str) -> io::Result<PathBuf> {
        let (process, random) = (std::process::id(), random()?);
        let blobs = self.root.join("blobs");
        let own = blobs.join(format!("{etag}.{process}-{random:016x}{INCOMPLETE}"));
        for entry in fs::read_dir(&blobs)?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let whose = name.strip_prefix(etag).and_then(|rest| rest.strip_suffix(INCOMPLETE));
            let is_left = match whose {
                // Nobody writes to it without a lock.
                Some("") => true,
                Some(whose) if whose.starts_with('.') => {
                    let changed = entry.metadata().and_then(|it| it.modified()).ok();
                    let age = changed.and_then(|changed| changed.elapsed().ok());
                    age.is_some_and(|age| age > ABANDONED)
                }
                _ => false,
            };
            // Of several that want it one gets it, and says so.
            if is_left && fs::rename(entry.path(), &own).is_ok() {
                let taken = File::options().append(true).open(&own);
                let _ = taken.and_then(|file| file.set_modified(SystemTime::now()));
                break;
            }
        }
        Ok(own)
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

    /// Notes which of the files that a commit has, which are `listed`, are those of its text: some
    /// models have more of them than others, and later nobody may be there to say which.
    ///
    /// # Errors
    /// The operating system's.
    pub(super) fn note<'a>(
        &self,
        commit: &str,
        listed: impl IntoIterator<Item = &'a str>,
    ) -> io::Result<()> {
        let names = files::first(ModelPart::Text, listed);
        if self.noted(commit).as_ref() == Some(&names) {
            return Ok(());
        }
        let text: String = names.iter().map(|name| format!("{name}\n")).collect();
        put(&self.root.join(NOTES).join(commit), |new| fs::write(new, text))
    }

    /// The files of text that a commit has, if that was noted.
    fn noted(&self, commit: &str) -> Option<BTreeSet<String>> {
        let text = fs::read_to_string(self.root.join(NOTES).join(commit)).ok()?;
        Some(files::first(ModelPart::Text, text.lines()))
    }

    /// The files that most models have and this commit's folder lacks, where nothing tells whether
    /// the model has them: another program, or an old version of this one, has filled it.
    #[must_use]
    pub fn unknown(&self, commit: &str) -> Vec<&'static str> {
        if self.noted(commit).is_some() {
            return Vec::new();
        }
        let (folder, absent) = (self.snapshot(commit), self.root.join(ABSENT).join(commit));
        let is_unknown = |name: &&str| !folder.join(name).is_file() && !absent.join(name).is_file();
        USUAL.into_iter().filter(is_unknown).collect()
    }

    /// Which files of `part` a commit's folder lacks, as far as those that are there and what was
    /// noted tell.
    ///
    /// # Errors
    /// What is wrong with the index of weights.
    pub fn lacks(&self, commit: &str, part: ModelPart) -> Result<Vec<String>, String> {
        let folder = self.snapshot(commit);
        let mut needed: BTreeSet<String> = BTreeSet::new();
        if part == ModelPart::Adapter {
            needed.extend(ADAPTER.map(str::to_owned));
        } else {
            needed.insert(CONFIG.to_owned());
        }
        if part.has_text() {
            needed.insert(TOKENIZER.to_owned());
            needed.extend(self.noted(commit).unwrap_or_default());
        }
        if part.has_weights() {
            let config = fs::read(folder.join(CONFIG)).unwrap_or_default();
            if files::names_tokens(&config) {
                needed.insert(TOKENIZER.to_owned());
            }
            let index = fs::read(folder.join(INDEX)).ok();
            needed.extend(files::weights(index.as_deref())?);
        }
        Ok(needed.into_iter().filter(|name| !folder.join(name).is_file()).collect())
    }

    /// Whether all of `part` is there.
    #[must_use]
    pub fn has(&self, commit: &str, part: ModelPart) -> bool {
        self.lacks(commit, part).is_ok_and(|lacking| lacking.is_empty())
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
    let new = folder.join(format!(".tutti-{:016x}", random()?));
    make(&new).and_then(|()| fs::rename(&new, file)).inspect_err(|_| {
        let _ = fs::remove_file(&new);
    })
}

/// A number that no other process has.
fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An empty cache of its own for a test, which ends with it.
    struct Folder(PathBuf);

    impl Folder {
        fn new() -> (Self, ModelCache) {
            let name = format!("tutti-cache-{:016x}", random().unwrap());
            let folder = std::env::temp_dir().join(name);
            let cache = ModelCache::new(&folder, "org/model");
            cache.make().unwrap();
            (Self(folder), cache)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn parts_without_a_lock_are_each_one_s_own() {
        let (_folder, cache) = Folder::new();
        let (first, second) =
            (cache.incomplete_of_own("abc").unwrap(), cache.incomplete_of_own("abc").unwrap());
        assert_ne!(first, second);
        assert_ne!(first, cache.incomplete("abc"));
        fs::write(&first, "first").unwrap();
        // Another one's that grows stays, and so do parts of other contents.
        fs::write(cache.incomplete("abcd"), "other").unwrap();
        assert!(!cache.incomplete_of_own("abc").unwrap().exists());
        assert!(first.exists() && cache.incomplete("abcd").exists());
        // What was left is gone on with.
        fs::write(cache.incomplete("abc"), "left").unwrap();
        let third = cache.incomplete_of_own("abc").unwrap();
        assert_eq!(fs::read_to_string(&third).unwrap(), "left");
        assert!(!cache.incomplete("abc").exists() && first.exists());
        let long_ago = SystemTime::now() - 2 * ABANDONED;
        File::options().append(true).open(&first).unwrap().set_modified(long_ago).unwrap();
        let fourth = cache.incomplete_of_own("abc").unwrap();
        assert_eq!(fs::read_to_string(&fourth).unwrap(), "first");
        assert!(!first.exists() && third.exists());
    }

    #[test]
    fn what_a_model_has_of_text_is_noted() {
        let (_folder, cache) = Folder::new();
        let commit = "0123456789".repeat(4);
        let folder = cache.snapshot(&commit);
        fs::create_dir_all(&folder).unwrap();
        for name in [CONFIG, TOKENIZER] {
            fs::write(folder.join(name), "{}").unwrap();
        }
        assert!(cache.has(&commit, ModelPart::Text));
        assert_eq!(cache.unknown(&commit), USUAL);
        // The hub's own libraries note what is not there.
        let absent = cache.root().join(ABSENT).join(&commit);
        fs::create_dir_all(&absent).unwrap();
        fs::write(absent.join(USUAL[1]), "").unwrap();
        assert_eq!(cache.unknown(&commit), USUAL[..1]);
        cache.note(&commit, [CONFIG, TOKENIZER, "../../x", "model.safetensors"]).unwrap();
        assert!(cache.has(&commit, ModelPart::Text) && cache.unknown(&commit).is_empty());
        cache.note(&commit, [CONFIG, TOKENIZER, USUAL[0]]).unwrap();
        assert_eq!(cache.lacks(&commit, ModelPart::Text).unwrap(), USUAL[..1]);
        assert!(cache.unknown(&commit).is_empty());
    }
}

//! One file of a model: downloaded into the cache, from where an earlier attempt ended, verified,
//! and put in its place whole.
use std::fs::{self, File, TryLockError};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use super::HubError;
use super::cache::ModelCache;
use super::checksum::Verifier;
use super::client::{Client, FileInfo, RequestError};
use super::fetch::Download;
use super::name::HubModel;
use crate::clock::jittered;

/// Attempts in a row that bring nothing.
const ATTEMPTS: u32 = 6;
/// Before the second of them; doubles with each.
const PAUSE_MIN: Duration = Duration::from_millis(500);
/// An attempt that brings so much is none that failed: the next one goes on from there.
const PROGRESS: u64 = 64 << 10;
/// Between two looks at a lock that another process has.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Read at a time.
const CHUNK: usize = 256 << 10;

/// A file that is not in the cache.
#[derive(Clone, Debug)]
pub(super) struct MissingFile {
    pub(super) name: String,
    pub(super) listed: FileInfo,
}

/// Has attempts made until one succeeds, brings no more, or is called off. Each says how much it
/// has brought.
pub(super) fn retry<T>(
    run: &Download,
    attempts: u32,
    mut attempt: impl FnMut() -> (u64, Result<T, RequestError>),
) -> Result<T, HubError> {
    let mut failed = 0;
    loop {
        if run.is_over() {
            return Err(HubError::Cancelled);
        }
        let (brought, outcome) = attempt();
        let RequestError { error, wait } = match outcome {
            Ok(done) => return Ok(done),
            Err(failure) => failure,
        };
        failed = if brought >= PROGRESS { 0 } else { failed + 1 };
        if !error.is_transient() || failed >= attempts {
            return Err(error);
        }
        let pause = PAUSE_MIN * 2u32.pow(failed.min(6));
        let pause =
            wait.unwrap_or_else(|| pause / 2 + jittered(pause / 2, run.seed, failed.into()));
        tracing::warn!(%error, "the download is interrupted; going on in {:.1} s", pause.as_secs_f32());
        run.sleep(pause)?;
    }
}

/// Brings one file. Of several processes of this host one does, and the others wait for it.
pub(super) fn download(
    client: &Client,
    cache: &ModelCache,
    model: &HubModel,
    missing: &MissingFile,
    run: &Download,
) -> Result<(), HubError> {
    let MissingFile { name, listed } = missing;
    let blob = cache.blob(&listed.etag);
    let lock = if blob.is_file() { None } else { locked(cache, missing, run)? };
    if blob.is_file() {
        // Another process has brought it meanwhile, or another revision has the same file.
        run.handle.add(listed.size);
    } else {
        bring(cache, &listed.etag, lock.is_some(), |file| {
            transfer(client, model, missing, file, run)
        })?;
    }
    cache.link(&model.commit, name, &listed.etag).map_err(|error| failed(cache.root(), &error))?;
    drop(lock);
    Ok(())
}

/// Has a content written to a file of its own, and puts it in its place. Without a lock others may
/// do the same at the same time.
fn bring(
    cache: &ModelCache,
    etag: &str,
    is_locked: bool,
    write: impl FnOnce(&Path) -> Result<(), HubError>,
) -> Result<(), HubError> {
    let (blob, shared) = (cache.blob(etag), cache.incomplete(etag));
    let file = match is_locked {
        true => shared.clone(),
        false => cache.incomplete_of_own(etag).map_err(|error| failed(cache.root(), &error))?,
    };
    if let Err(error) = write(&file) {
        if !is_locked {
            // For whoever goes on with it.
            let _ = fs::rename(&file, &shared);
        }
        return Err(error);
    }
    // Where locks reach no other host, another one may have moved it there already.
    match fs::rename(&file, &blob) {
        Err(error) if !blob.is_file() => Err(failed(&blob, &error)),
        _ => Ok(()),
    }
}

/// The lock of whoever downloads a file; none on file systems that have no locks, or when the file
/// has come meanwhile.
fn locked(
    cache: &ModelCache,
    missing: &MissingFile,
    run: &Download,
) -> Result<Option<File>, HubError> {
    let (blob, mut said) = (cache.blob(&missing.listed.etag), false);
    loop {
        let file =
            cache.lock(&missing.listed.etag).map_err(|error| failed(cache.root(), &error))?;
        match file.try_lock() {
            Ok(()) => {
                // Others delete it when they are done: then it is another file's name by now.
                let own = file.metadata().map(|it| (it.dev(), it.ino())).ok();
                let there = cache.lock(&missing.listed.etag).and_then(|file| file.metadata());
                if own.is_some() && own == there.map(|it| (it.dev(), it.ino())).ok() {
                    return Ok(Some(file));
                }
            }
            Err(TryLockError::WouldBlock) => {
                if !said {
                    let file = missing.name.as_str();
                    tracing::info!(file, "another process downloads this file; waiting for it");
                    said = true;
                }
                run.sleep(LOOK_EVERY)?;
                if blob.is_file() {
                    return Ok(None);
                }
            }
            // Without one two may bring the same, each to a file of its own.
            Err(TryLockError::Error(_)) => return Ok(None),
        }
        if run.is_over() {
            return Err(HubError::Cancelled);
        }
    }
}

/// A file that is being written.
struct PartialFile<'a> {
    file: File,
    path: &'a Path,
    listed: &'a FileInfo,
    have: u64,
    verifier: Option<Verifier>,
    run: &'a Download,
}

impl PartialFile<'_> {
    fn failed(&self, error: &std::io::Error) -> RequestError {
        RequestError { error: failed(self.path, error), wait: None }
    }

    /// Takes what is there of the file from an earlier attempt.
    fn resume(&mut self) -> Result<(), RequestError> {
        let there = self.file.metadata().map_err(|error| self.failed(&error))?.len();
        if there > self.listed.size {
            return self.restart();
        }
        // Nothing would tell whether the beginning of a file without a checksum is right.
        let Some(verifier) = &mut self.verifier else { return self.restart() };
        let mut chunk = vec![0; CHUNK];
        loop {
            let read = self.file.read(&mut chunk);
            let read = match read {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(error) => return Err(self.failed(&error)),
            };
            verifier.update(&chunk[..read]);
            self.have += read as u64;
            self.run.handle.add(read as u64);
            if self.run.is_over() {
                return Err(RequestError { error: HubError::Cancelled, wait: None });
            }
        }
    }

    fn restart(&mut self) -> Result<(), RequestError> {
        let anew = self.file.set_len(0).and_then(|()| self.file.rewind());
        anew.map_err(|error| self.failed(&error))?;
        self.run.handle.take_back(self.have);
        self.have = 0;
        self.verifier = Verifier::new(&self.listed.etag, self.listed.size);
        Ok(())
    }

    fn add(&mut self, bytes: &[u8]) -> Result<(), RequestError> {
        self.file.write_all(bytes).map_err(|error| self.failed(&error))?;
        if let Some(verifier) = &mut self.verifier {
            verifier.update(bytes);
        }
        self.have += bytes.len() as u64;
        self.run.handle.add(bytes.len() as u64);
        Ok(())
    }
}

/// Brings a file's whole content to `path`.
fn transfer(
    client: &Client,
    model: &HubModel,
    missing: &MissingFile,
    path: &Path,
    run: &Download,
) -> Result<(), HubError> {
    let MissingFile { name, listed } = missing;
    let mut options = File::options();
    let file = options.read(true).write(true).create(true).truncate(false).open(path);
    let file = file.map_err(|error| failed(path, &error))?;
    let verifier = Verifier::new(&listed.etag, listed.size);
    let mut writing = PartialFile { file, path, listed, have: 0, verifier, run };
    writing.resume().map_err(|failure| failure.error)?;
    for last in [false, true] {
        retry(run, ATTEMPTS, || {
            let before = writing.have;
            let outcome = receive(client, model, missing, &mut writing);
            (writing.have.saturating_sub(before), outcome)
        })?;
        if writing.verifier.take().is_none_or(Verifier::agrees) {
            writing.file.sync_data().map_err(|error| failed(path, &error))?;
            return Ok(());
        }
        tracing::warn!(file = name, "its checksum is not the hub's; bringing it anew");
        writing.restart().map_err(|failure| failure.error)?;
        if last {
            break;
        }
    }
    let _ = fs::remove_file(path);
    Err(HubError::Permanent(format!(
        "{name} of {}: twice its checksum was not the one that the hub says: something changes it \
         on the way",
        model.name
    )))
}

/// One attempt to bring the rest of a file.
fn receive(
    client: &Client,
    model: &HubModel,
    missing: &MissingFile,
    writing: &mut PartialFile<'_>,
) -> Result<(), RequestError> {
    let MissingFile { name, listed } = missing;
    if writing.have == listed.size {
        return Ok(());
    }
    let mut content = client.content(model, name, writing.have)?;
    if content.from != writing.have {
        writing.restart()?;
    }
    let mut chunk = vec![0; CHUNK];
    while writing.have < listed.size {
        if writing.run.is_over() {
            return Err(RequestError { error: HubError::Cancelled, wait: None });
        }
        let read = content.body.read(&mut chunk);
        let (have, size) = (writing.have, listed.size);
        let read = match read {
            Ok(0) => {
                return Err(RequestError::transient(format!(
                    "{name}: it ended after {have} of {size} bytes"
                )));
            }
            Ok(read) => read,
            Err(error) => {
                let why = format!("{name}: after {have} of {size} bytes: {error}");
                return Err(RequestError::transient(why));
            }
        };
        if have + read as u64 > size {
            writing.restart()?;
            return Err(RequestError::transient(format!(
                "{name}: more came than its {size} bytes"
            )));
        }
        writing.add(&chunk[..read])?;
    }
    Ok(())
}

/// What the operating system says of the cache.
pub(super) fn failed(path: &Path, error: &std::io::Error) -> HubError {
    HubError::Permanent(format!(
        "{}: {error}: models are kept there, or where HF_HOME or --download-dir says",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn downloads_without_locks_do_not_disturb_each_other() {
        let folder = std::env::temp_dir().join(format!("tutti-bring-{}", std::process::id()));
        let cache = ModelCache::new(&folder, "org/model");
        cache.make().unwrap();
        let written = |file: &Path, text: &str| fs::write(file, text).map_err(|e| failed(file, &e));
        // One begins, another one does all of it, and the first one goes on.
        bring(&cache, "abc", false, |file| {
            written(file, "who")?;
            bring(&cache, "abc", false, |other| {
                assert_ne!(other, file);
                written(other, "whole")
            })?;
            assert_eq!(fs::read_to_string(file).unwrap(), "who");
            written(file, "whole")
        })
        .unwrap();
        assert_eq!(fs::read_to_string(cache.blob("abc")).unwrap(), "whole");
        // What ends early is gone on with, with a lock or without.
        for is_locked in [false, true] {
            let ended = bring(&cache, "abd", false, |file| {
                written(file, "begun")?;
                Err(HubError::Cancelled)
            });
            assert_eq!(ended, Err(HubError::Cancelled));
            bring(&cache, "abd", is_locked, |file| {
                assert_eq!(fs::read_to_string(file).unwrap(), "begun");
                written(file, "whole")
            })
            .unwrap();
        }
        assert_eq!(fs::read_dir(cache.root().join("blobs")).unwrap().count(), 2);
        let _ = fs::remove_dir_all(folder);
    }
}

//! A whole model: found in the cache, or downloaded into it.
use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::cache::ModelCache;
use super::client::{Client, FileInfo, Listing};
use super::download::{MissingFile, download, failed, retry};
use super::files::{self, CONFIG, INDEX, ModelPart, SMALL_MAX};
use super::name::{HubModel, RequestedModel};
use super::{HubError, HubSettings};

/// Files that come at a time.
const AT_A_TIME: usize = 4;
/// Attempts to ask what files there are: without the cache's own copy, and with it.
const LIST_ATTEMPTS: u32 = 4;
/// Between two lines of the log.
const SAY_EVERY: Duration = Duration::from_secs(10);
/// Between two looks at whether it is called off.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Files that are named as missing, at most.
const NAMED_MAX: usize = 8;

/// How far a download is, for whoever shows it; and how it is called off.
#[derive(Debug, Default)]
pub struct DownloadHandle {
    done: AtomicU64,
    total: AtomicU64,
    off: AtomicBool,
}

impl DownloadHandle {
    /// Bytes that are there, and in all; both grow.
    #[must_use]
    pub fn progress(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }

    /// It ends soon, wherever it is; what has come stays for the next time.
    pub fn cancel(&self) {
        self.off.store(true, Ordering::Relaxed);
    }

    pub(super) fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn take_back(&self, bytes: u64) {
        self.done.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// One download, which several threads work at.
#[derive(Debug)]
pub(super) struct Download {
    pub(super) handle: Arc<DownloadHandle>,
    /// One of its files has failed.
    failed: AtomicBool,
    /// Tells its waits from those of other processes.
    pub(super) seed: u64,
}

impl Download {
    pub(super) fn is_over(&self) -> bool {
        self.handle.off.load(Ordering::Relaxed) || self.failed.load(Ordering::Relaxed)
    }

    pub(super) fn sleep(&self, pause: Duration) -> Result<(), HubError> {
        let end = Instant::now() + pause;
        while Instant::now() < end {
            if self.is_over() {
                return Err(HubError::Cancelled);
            }
            std::thread::sleep(LOOK_EVERY.min(pause));
        }
        Ok(())
    }
}

/// A model that is here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchedModel {
    /// Which state of it.
    pub model: HubModel,
    /// Its folder.
    pub folder: PathBuf,
}

/// The hub, and the cache of what comes from it.
#[derive(Clone, Debug)]
pub struct Hub {
    settings: HubSettings,
}

impl Hub {
    /// The hub as `settings` say.
    #[must_use]
    pub fn new(settings: HubSettings) -> Self {
        Self { settings }
    }

    /// What it goes by.
    #[must_use]
    pub fn settings(&self) -> &HubSettings {
        &self.settings
    }

    /// Whether all of `part` of a state of a model is in the cache.
    #[must_use]
    pub fn has(&self, model: &HubModel, part: ModelPart) -> bool {
        self.cache(&model.name).has(&model.commit, part)
    }

    /// Which state of a model is wanted, without its files. Blocks.
    ///
    /// # Errors
    /// [`HubError`].
    pub fn resolve(
        &self,
        wanted: &RequestedModel,
        handle: &Arc<DownloadHandle>,
    ) -> Result<HubModel, HubError> {
        let known = || self.cache(&wanted.name).commit_of(&wanted.revision);
        if super::name::is_commit(&wanted.revision) {
            let commit = wanted.revision.clone();
            return Ok(HubModel { name: wanted.name.clone(), commit });
        }
        let cached = known().map(|commit| HubModel { name: wanted.name.clone(), commit });
        match self.list(wanted, cached.is_some(), handle) {
            Ok((listing, ..)) => Ok(listing.model),
            Err(error) => cached.filter(|_| error != HubError::Cancelled).ok_or(error),
        }
    }

    /// Finds `part` of a model in the cache, or downloads what is missing of it. Blocks; ends soon
    /// when it is called off by `handle`.
    ///
    /// # Errors
    /// [`HubError`].
    pub fn fetch(
        &self,
        wanted: &RequestedModel,
        part: ModelPart,
        handle: &Arc<DownloadHandle>,
    ) -> Result<FetchedModel, HubError> {
        let cache = self.cache(&wanted.name);
        let commit = cache.commit_of(&wanted.revision);
        let lacking = commit.as_ref().map(|commit| cache.lacks(commit, part));
        let is_whole = lacking.as_ref().is_some_and(|it| it.as_ref().is_ok_and(Vec::is_empty));
        let cached = commit.filter(|_| is_whole).map(|commit| FetchedModel {
            folder: cache.snapshot(&commit),
            model: HubModel { name: wanted.name.clone(), commit },
        });
        match &cached {
            Some(fetched) if self.settings.offline => {
                warn_of_unknown(&cache, fetched, part);
                return Ok(fetched.clone());
            }
            Some(fetched) if fetched.model.commit == wanted.revision && !part.has_text() => {
                return Ok(fetched.clone());
            }
            None if self.settings.offline => return Err(self.not_here(wanted, lacking)),
            _ => {}
        }
        let (listing, client, run) = match (self.list(wanted, cached.is_some(), handle), cached) {
            (Ok(listed), _) => listed,
            (Err(HubError::Cancelled), _) => return Err(HubError::Cancelled),
            (Err(error), Some(fetched)) => {
                let commit = fetched.model.commit.as_str();
                tracing::warn!(%error, model = wanted.name, commit, "the model is taken as it is in the cache");
                warn_of_unknown(&cache, &fetched, part);
                return Ok(fetched);
            }
            (Err(error), None) => return Err(error),
        };
        let model = listing.model.clone();
        self.download_model(Arc::new(client), Arc::new(run), &cache, listing, part)?;
        if let Err(error) = cache.remember(&wanted.revision, &model.commit) {
            // The files are there, if nobody may write.
            tracing::debug!(%error, "the cache takes no note of the revision");
        }
        Ok(FetchedModel { folder: cache.snapshot(&model.commit), model })
    }

    fn cache(&self, name: &str) -> ModelCache {
        ModelCache::new(&self.settings.cache, name)
    }

    /// Asks what files there are.
    fn list(
        &self,
        wanted: &RequestedModel,
        cached: bool,
        handle: &Arc<DownloadHandle>,
    ) -> Result<(Listing, Client, Download), HubError> {
        if self.settings.offline {
            return Err(self.not_here(wanted, None));
        }
        let client = Client::new(&self.settings)?;
        let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), &wanted.name);
        let run = Download { handle: handle.clone(), failed: AtomicBool::new(false), seed };
        let attempts = if cached { 1 } else { LIST_ATTEMPTS };
        let listing = retry(&run, attempts, || (0, client.list(wanted)))?;
        Ok((listing, client, run))
    }

    /// Why a model cannot be had that may not be asked for; `lacking` is what the cache lacks of
    /// it, if it knows it at all.
    fn not_here(
        &self,
        wanted: &RequestedModel,
        lacking: Option<Result<Vec<String>, String>>,
    ) -> HubError {
        let (RequestedModel { name, revision }, cache) = (wanted, self.settings.cache.display());
        let what = match lacking {
            None => format!("is not in {cache}"),
            Some(Ok(files)) => {
                let more = files.len().saturating_sub(NAMED_MAX);
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                let some = files[..files.len().min(NAMED_MAX)].join(", ");
                format!("is not whole in {cache}: {some}{more} are not there")
            }
            Some(Err(why)) => format!("is not whole in {cache}: {why}"),
        };
        HubError::Permanent(format!(
            "{name} at the revision {revision} {what}; HF_HUB_OFFLINE forbids to ask for it"
        ))
    }

    /// Downloads what is missing: first what is small, which says what there is of weights.
    fn download_model(
        &self,
        client: Arc<Client>,
        run: Arc<Download>,
        cache: &ModelCache,
        listing: Listing,
        part: ModelPart,
    ) -> Result<(), HubError> {
        let names = || listing.files.keys().map(String::as_str);
        let commit = &listing.model.commit;
        let mut first = files::first(part, names());
        if part != ModelPart::Adapter && !first.contains(CONFIG) {
            return Err(self.unusable(&listing, &format!("it has no {CONFIG}")));
        }
        if part.has_weights() && !listing.files.contains_key(INDEX) {
            first.extend(files::weights(None).unwrap_or_default());
        }
        let began = Instant::now();
        let mut brought = self.download_files(&client, &run, cache, &listing, first)?;
        if part != ModelPart::Adapter
            && let Err(error) = cache.note(commit, names())
        {
            // The files are there, if nobody may write.
            tracing::debug!(%error, "the cache takes no note of the files of text");
        }
        if part.has_weights() && listing.files.contains_key(INDEX) {
            let file = cache.snapshot(commit).join(INDEX);
            let index = fs::read(&file).map_err(|error| failed(&file, &error))?;
            let shards =
                files::weights(Some(&index)).map_err(|why| self.unusable(&listing, &why))?;
            brought += self.download_files(&client, &run, cache, &listing, shards)?;
        }
        if let Ok(lacking) = cache.lacks(commit, part)
            && let Some(file) = lacking.first()
        {
            let why = if file == files::SINGLE {
                files::no_weights(names())
            } else {
                format!("it has no {file}")
            };
            return Err(self.unusable(&listing, &why));
        }
        if brought > 0 {
            let (model, size) = (listing.model.name.as_str(), size(brought));
            tracing::info!(
                model,
                commit,
                size,
                "downloaded in {:.1} s",
                began.elapsed().as_secs_f32()
            );
        }
        Ok(())
    }

    /// Downloads those of `names` that are not there; returns their size.
    fn download_files(
        &self,
        client: &Arc<Client>,
        run: &Arc<Download>,
        cache: &ModelCache,
        listing: &Listing,
        names: BTreeSet<String>,
    ) -> Result<u64, HubError> {
        let model = &listing.model;
        let folder = cache.snapshot(&model.commit);
        let mut missing = Vec::new();
        for name in names {
            if folder.join(&name).is_file() {
                continue;
            }
            let listed = match listing.files.get(&name) {
                Some(listed) if listed.etag.is_empty() => {
                    retry(run, LIST_ATTEMPTS, || (0, client.describe(model, &name)))?
                }
                Some(listed) => listed.clone(),
                None if name == files::SINGLE => continue,
                None => {
                    return Err(self.unusable(
                        listing,
                        &format!("{INDEX} names {name}, which it does not have"),
                    ));
                }
            };
            if listed.size > SMALL_MAX && !name.ends_with(".safetensors") {
                let why = format!("{name} has {} bytes, it may have {SMALL_MAX}", listed.size);
                return Err(self.unusable(listing, &why));
            }
            missing.push(MissingFile { name, listed });
        }
        if missing.is_empty() {
            return Ok(0);
        }
        cache.make().map_err(HubError::Permanent)?;
        let needed: u64 = missing
            .iter()
            .fold(0, |sum: u64, it| sum.saturating_add(self.still_needed(cache, &it.listed)));
        let free = free_space(cache.root()).map_err(|error| failed(cache.root(), &error))?;
        if needed > free {
            return Err(HubError::Permanent(format!(
                "{} needs {} in {}, which has {} free: make room, or choose another folder by \
                 HF_HOME or --download-dir",
                model.name,
                size(needed),
                self.settings.cache.display(),
                size(free)
            )));
        }
        let bytes: u64 = missing.iter().fold(0, |sum: u64, it| sum.saturating_add(it.listed.size));
        run.handle.total.fetch_add(bytes, Ordering::Relaxed);
        let (name, files) = (model.name.as_str(), missing.len());
        let into = cache.root().display().to_string();
        tracing::info!(model = name, files, size = size(needed), into, "downloading");
        // The largest first: the last to end are small.
        missing.sort_by_key(|it| std::cmp::Reverse(it.listed.size));
        side_by_side(client, run, cache, model, missing)?;
        Ok(bytes)
    }

    /// Bytes of a file that are not on this host.
    fn still_needed(&self, cache: &ModelCache, listed: &FileInfo) -> u64 {
        let there = |path: PathBuf| fs::metadata(path).map_or(0, |it| it.len());
        if cache.blob(&listed.etag).is_file() {
            return 0;
        }
        listed.size.saturating_sub(there(cache.incomplete(&listed.etag)))
    }

    fn unusable(&self, listing: &Listing, why: &str) -> HubError {
        let HubModel { name, commit } = &listing.model;
        HubError::Permanent(format!("{name} (commit {commit}) cannot be served: {why}"))
    }
}

/// Says which files of text are not in the cache though the model may have them: without its chat
/// template, or with other tokens that end an answer, it is another model.
fn warn_of_unknown(cache: &ModelCache, fetched: &FetchedModel, part: ModelPart) {
    let HubModel { name, commit } = &fetched.model;
    let files = if part.has_text() { cache.unknown(commit) } else { Vec::new() };
    if !files.is_empty() {
        let (model, files) = (name.as_str(), files.join(", "));
        tracing::warn!(
            model,
            commit,
            files,
            "these files are not in the cache; if the model has them, serve it once with the hub \
             to ask, or download it whole"
        );
    }
}

/// Downloads files, some at a time, and says now and then how far it is.
fn side_by_side(
    client: &Arc<Client>,
    run: &Arc<Download>,
    cache: &ModelCache,
    model: &HubModel,
    missing: Vec<MissingFile>,
) -> Result<(), HubError> {
    let count = missing.len();
    let queue = Arc::new(Mutex::new(VecDeque::from(missing)));
    let (done, ended) = mpsc::channel();
    for _ in 0..count.min(AT_A_TIME) {
        let (client, run, cache) = (client.clone(), run.clone(), cache.clone());
        let (model, queue, done) = (model.clone(), queue.clone(), done.clone());
        // Nobody waits for their ends: one may wait for bytes that do not come.
        let thread = std::thread::Builder::new().name("download".to_owned()).spawn(move || {
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                let Some(missing) = next else { return };
                let outcome = download(&client, &cache, &model, &missing, &run);
                if done.send(outcome).is_err() {
                    return;
                }
            }
        });
        thread
            .map_err(|error| HubError::Transient(format!("no thread to download with: {error}")))?;
    }
    drop(done);
    let (mut left, mut pace) = (count, ProgressLog::new(&run.handle));
    while left > 0 {
        match ended.recv_timeout(LOOK_EVERY) {
            Ok(Ok(())) => left -= 1,
            Ok(Err(error)) => {
                run.failed.store(true, Ordering::Relaxed);
                return Err(error);
            }
            Err(RecvTimeoutError::Timeout) if run.is_over() => return Err(HubError::Cancelled),
            Err(RecvTimeoutError::Timeout) => pace.log_progress(&run.handle, &model.name, left),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(HubError::Transient("a thread that downloads has ended".to_owned()));
            }
        }
    }
    Ok(())
}

/// How fast it goes.
struct ProgressLog {
    said: Instant,
    done: u64,
}

impl ProgressLog {
    fn new(handle: &DownloadHandle) -> Self {
        Self { said: Instant::now(), done: handle.progress().0 }
    }

    fn log_progress(&mut self, handle: &DownloadHandle, model: &str, files_left: usize) {
        let lasts = self.said.elapsed();
        if lasts < SAY_EVERY {
            return;
        }
        let (done, total) = handle.progress();
        let rate = done.saturating_sub(self.done) as f64 / lasts.as_secs_f64();
        let rest = total.saturating_sub(done) as f64 / rate;
        let rest = if rest.is_finite() { format!("{rest:.0} s") } else { "unknown".to_owned() };
        tracing::info!(
            model,
            done = size(done),
            total = size(total),
            rate = format!("{}/s", size(rate as u64)),
            rest,
            files_left,
            "downloading"
        );
        *self = Self { said: Instant::now(), done };
    }
}

/// Bytes that this process may still write into a folder.
fn free_space(folder: &Path) -> std::io::Result<u64> {
    let system = rustix::fs::statvfs(folder)?;
    Ok(system.f_bavail.saturating_mul(system.f_frsize))
}

/// A number of bytes for people.
fn size(bytes: u64) -> String {
    let units = [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} bytes"),
    }
}

//! Models on the command line: folders, or names on the hub, whose files are fetched.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use shared::hub::cache::ModelCache;
use shared::hub::name::{DEFAULT_REVISION, check_revision};
use shared::hub::{
    DownloadHandle, Hub, HubError, HubModel, HubSettings, ModelArgument, ModelPart, RequestedModel,
};
use shared::membership::PinnedRevision;
use shared::protocol::{Adapter, Lora};
use tokio::sync::oneshot;

use super::CliError;
use super::signals::Signals;

/// Where models of the hub are kept.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct CacheArgs {
    /// Folder for models from Hugging Face's hub, each host's own; in the hub's own layout, shared
    /// with other programs [default: HF_HUB_CACHE, or `hub` in HF_HOME, or
    /// ~/.cache/huggingface/hub]
    #[arg(long, value_name = "DIR")]
    pub(crate) download_dir: Option<PathBuf>,
}

impl CacheArgs {
    /// The hub, or why there is none.
    pub(crate) fn hub(&self) -> Result<Hub, String> {
        HubSettings::from_environment(self.download_dir.as_deref()).map(Hub::new)
    }
}

/// Which state of a model of the hub is meant, and where it is kept.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct HubArgs {
    /// Branch, tag or commit of a --model of the hub [default: main]
    #[arg(long, value_name = "REVISION", value_parser = parse_revision)]
    pub(crate) revision: Option<String>,
    #[command(flatten)]
    pub(crate) cache: CacheArgs,
}

fn parse_revision(text: &str) -> Result<String, String> {
    check_revision(text).map(|()| text.to_owned())
}

/// A model that an option named, and where it was found.
#[derive(Clone, Debug)]
pub(crate) struct LocatedModel {
    /// Its folder on this host.
    pub(crate) folder: PathBuf,
    /// Where other processes find it: its folder, or its name on the hub.
    pub(crate) source: String,
    /// Which state of a model of the hub it is, if it is one.
    pub(crate) pinned: Option<PinnedRevision>,
}

impl LocatedModel {
    pub(crate) fn folder(folder: &Path) -> Self {
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        Self { source: folder.to_string_lossy().into_owned(), folder, pinned: None }
    }
}

/// What `option` gives: a folder, or a name on the hub.
pub(crate) fn read(option: &str, given: &Path) -> Result<ModelArgument, CliError> {
    ModelArgument::read(given, Path::exists)
        .map_err(|why| CliError::Usage(format!("{option}: {why}")))
}

/// What is asked of the hub for `--model`: a name and a revision; or the folder that it is.
fn requested(
    given: &Path,
    args: &HubArgs,
) -> Result<Result<RequestedModel, LocatedModel>, CliError> {
    let name = match read("--model", given)? {
        ModelArgument::Hub(name) => name,
        ModelArgument::Folder(folder) => {
            return match &args.revision {
                Some(revision) => Err(CliError::Usage(format!(
                    "--revision {revision} is for models of the hub, and --model {} is a folder",
                    folder.display()
                ))),
                None => Ok(Err(LocatedModel::folder(&folder))),
            };
        }
    };
    let revision = args.revision.clone().unwrap_or_else(|| DEFAULT_REVISION.to_owned());
    Ok(Ok(RequestedModel { name, revision }))
}

/// Finds the model of `--model`; fetches `part` of one of the hub, of the state that a cluster is
/// `pinned` to.
pub(crate) fn find(
    given: &Path,
    args: &HubArgs,
    part: ModelPart,
    pinned: Option<PinnedRevision>,
) -> Result<LocatedModel, CliError> {
    let RequestedModel { name, revision } = match requested(given, args)? {
        Ok(wanted) => wanted,
        Err(found) => return Ok(found),
    };
    let pinned = pinned.filter(|it| it.name == name && it.revision == revision);
    let requested = match pinned {
        Some(PinnedRevision { commit, .. }) => {
            tracing::info!(model = name, revision, commit, "the state that the cluster serves");
            commit
        }
        None => revision.clone(),
    };
    let wanted = RequestedModel { name, revision: requested };
    let hub = args.cache.hub().map_err(CliError::Usage)?;
    let fetched = run_until_signalled(move |handle| hub.fetch(&wanted, part, handle))?;
    let HubModel { name, commit } = fetched.model.clone();
    Ok(LocatedModel {
        folder: fetched.folder,
        source: fetched.model.to_string(),
        pinned: Some(PinnedRevision { name, revision, commit }),
    })
}

/// The same for a command that leaves signals alone: only the folder.
pub(crate) fn folder(given: &Path, args: &HubArgs, part: ModelPart) -> Result<PathBuf, CliError> {
    let wanted = match requested(given, args)? {
        Ok(wanted) => wanted,
        Err(found) => return Ok(found.folder),
    };
    let hub = args.cache.hub().map_err(CliError::Usage)?;
    let fetched = hub.fetch(&wanted, part, &Arc::default());
    fetched.map(|it| it.folder).map_err(|error| CliError::Failed(error.to_string()))
}

/// What workers are told of a draft model; it is fetched for those of this host where they are
/// `here`.
pub(crate) fn find_draft(given: &Path, args: &HubArgs, here: bool) -> Result<String, CliError> {
    let name = match read("--speculative-config", given)? {
        ModelArgument::Folder(folder) => return Ok(LocatedModel::folder(&folder).source),
        ModelArgument::Hub(name) => name,
    };
    let wanted = RequestedModel { name, revision: DEFAULT_REVISION.to_owned() };
    let hub = args.cache.hub().map_err(CliError::Usage)?;
    let model = run_until_signalled(move |handle| match here {
        true => hub.fetch(&wanted, ModelPart::Weights, handle).map(|it| it.model),
        false => hub.resolve(&wanted, handle),
    })?;
    Ok(model.to_string())
}

/// The adapters with their folders on this host, and as workers are told of them.
pub(crate) fn find_adapters(lora: &Lora, args: &HubArgs) -> Result<(Lora, Lora), CliError> {
    let (mut here, mut sources) = (lora.clone(), lora.clone());
    for (here, sources) in here.adapters.iter_mut().zip(&mut sources.adapters) {
        let Adapter { path, .. } = here.clone();
        let found = match read("--lora-modules", Path::new(&path))? {
            ModelArgument::Folder(folder) => LocatedModel::folder(&folder),
            ModelArgument::Hub(name) => {
                let wanted = RequestedModel { name, revision: DEFAULT_REVISION.to_owned() };
                let hub = args.cache.hub().map_err(CliError::Usage)?;
                let fetched = run_until_signalled(move |handle| {
                    hub.fetch(&wanted, ModelPart::Adapter, handle)
                })?;
                LocatedModel {
                    folder: fetched.folder,
                    source: fetched.model.to_string(),
                    pinned: None,
                }
            }
        };
        here.path = found.folder.to_string_lossy().into_owned();
        sources.path = found.source;
    }
    Ok((here, sources))
}

/// The folder of what `option` gives, without asking the hub: a folder, or what the cache has.
///
/// # Errors
/// That it is not there yet, or what is wrong with it.
pub(crate) fn cached(
    option: &str,
    given: &Path,
    args: &HubArgs,
    part: ModelPart,
) -> Result<PathBuf, String> {
    let name = match read(option, given).map_err(|error| error.to_string())? {
        ModelArgument::Folder(folder) => return Ok(LocatedModel::folder(&folder).folder),
        ModelArgument::Hub(name) => name,
    };
    let revision = args.revision.as_deref().filter(|_| option == "--model");
    let settings = args.cache.hub()?.settings().clone();
    let cache = ModelCache::new(&settings.cache, &name);
    let commit = cache.commit_of(revision.unwrap_or(DEFAULT_REVISION));
    let commit = commit.filter(|commit| cache.has(commit, part)).ok_or_else(|| {
        let cache = settings.cache.display();
        format!("{name} is not in {cache} yet: it is downloaded when it is served first")
    })?;
    Ok(cache.snapshot(&commit))
}

/// Does what blocks, until it is done or this process is told to end: also as the first process of
/// a container, which signals do not end by themselves. From then on it has to listen to them.
fn run_until_signalled<T: Send + 'static>(
    work: impl FnOnce(&Arc<DownloadHandle>) -> Result<T, HubError> + Send + 'static,
) -> Result<T, CliError> {
    let failed = |error: std::io::Error| CliError::Failed(format!("cannot download: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(failed)?.block_on(async {
        let mut signals = Signals::listen()?;
        let handle = Arc::new(DownloadHandle::default());
        let (done, ended) = oneshot::channel();
        let watched = handle.clone();
        // Not one of the runtime's threads, for whose ends it waits.
        let thread = std::thread::Builder::new().name("fetch".to_owned());
        thread.spawn(move || drop(done.send(work(&watched)))).map_err(failed)?;
        let outcome = tokio::select! {
            outcome = ended => outcome,
            () = signals.next() => {
                handle.cancel();
                return Err(CliError::Ended);
            }
        };
        signals.keep();
        match outcome {
            Ok(outcome) => outcome.map_err(|error| CliError::Failed(error.to_string())),
            Err(_) => Err(CliError::Failed("the thread that downloads has ended".to_owned())),
        }
    })
}

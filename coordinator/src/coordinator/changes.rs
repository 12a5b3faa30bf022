//! Carries out commands about LoRA adapters: finds what is on the hub, asks the cluster, and waits
//! until the next leader would know.
use std::path::Path;
use std::sync::Arc;

use actix::Addr;
use shared::hub::name::DEFAULT_REVISION;
use shared::hub::{DownloadHandle, Hub, ModelArgument, ModelPart, RequestedModel};
use shared::membership::View;
use shared::protocol::{AdapterCommand, AdapterError};
use tokio::sync::{Semaphore, mpsc, watch};

use crate::adapters::AdapterAsk;
use crate::cluster::actor::{ChangeAdapters, ClusterActor};
use crate::http::admin::are_stored;

/// How many commands are carried out at the same time; the others wait in their channel.
const AT_ONCE_MAX: usize = 8;

/// What carries out commands.
#[derive(Clone, Debug)]
pub(super) struct Changes {
    pub(super) cluster: Addr<ClusterActor>,
    /// Where adapters of the hub come from, or why there is none.
    pub(super) hub: Result<Hub, String>,
    /// The cluster as etcd has it, if there is etcd.
    pub(super) view: Option<watch::Receiver<View>>,
    /// This process run.
    pub(super) run: u64,
}

impl Changes {
    /// Carries out all commands.
    pub(super) async fn run(self, mut asks: mpsc::Receiver<AdapterAsk>) {
        let turns = Arc::new(Semaphore::new(AT_ONCE_MAX));
        while let Some(AdapterAsk { command, answer }) = asks.recv().await {
            let Ok(turn) = turns.clone().acquire_owned().await else { return };
            let changes = self.clone();
            actix::spawn(async move {
                let _ = answer.send(changes.change(command).await);
                drop(turn);
            });
        }
    }

    async fn change(self, command: AdapterCommand) -> Result<(), AdapterError> {
        let command = match command {
            AdapterCommand::Load { name, path, replace } => {
                let path = self.find(path).await?;
                AdapterCommand::Load { name, path, replace }
            }
            unload @ AdapterCommand::Unload { .. } => unload,
        };
        let gone = |_| AdapterError::NotNow("the cluster does not answer".to_owned());
        let commands = self.cluster.send(ChangeAdapters(command)).await.map_err(gone)??;
        let stored = are_stored(self.view, self.run, commands).await;
        stored.map_err(|why| AdapterError::NotNow(why.to_owned()))
    }

    /// What `found` says, from a thread that may wait: also to see whether a folder is there, since
    /// its file system may be remote.
    async fn find(&self, path: String) -> Result<String, AdapterError> {
        let hub = self.hub.clone();
        let found = tokio::task::spawn_blocking(move || found(&path, hub)).await;
        found.map_err(|error| AdapterError::NotNow(error.to_string()))?
    }
}

/// A folder as it is, or which state of an adapter of the hub it is; that is fetched here first, so
/// that what is not there fails early.
fn found(path: &str, hub: Result<Hub, String>) -> Result<String, AdapterError> {
    let read = ModelArgument::read(Path::new(path), Path::exists);
    let name = match read.map_err(AdapterError::Wrong)? {
        ModelArgument::Folder(folder) => {
            let folder = std::path::absolute(&folder).unwrap_or(folder);
            return Ok(folder.to_string_lossy().into_owned());
        }
        ModelArgument::Hub(name) => name,
    };
    let hub = hub.map_err(AdapterError::Wrong)?;
    let wanted = RequestedModel { name, revision: DEFAULT_REVISION.to_owned() };
    let watch = Arc::new(DownloadHandle::default());
    let fetched = hub.fetch(&wanted, ModelPart::Adapter, &watch);
    let fetched = fetched.map_err(|error| AdapterError::Wrong(error.to_string()))?;
    Ok(fetched.model.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_a_folder_and_anything_else_a_name() {
        let find = |path: &str| found(path, Err("no hub".to_owned()));
        let here = std::env::current_dir().unwrap().join("src");
        let here = here.to_string_lossy().into_owned();
        for (given, folder) in [("/a/b", "/a/b"), ("src", here.as_str())] {
            assert_eq!(find(given), Ok(folder.to_owned()));
        }
        assert!(matches!(find("org/name"), Err(AdapterError::Wrong(why)) if why == "no hub"));
        let neither = find("no-such-folder");
        assert!(matches!(&neither, Err(AdapterError::Wrong(why)) if why.contains("neither")));
    }
}

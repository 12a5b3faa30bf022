//! What this project and the hub's own Python package make of each other's caches.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use shared::hub::{DownloadHandle, Hub, HubSettings, ModelPart, RequestedModel};
use testkit::fake_hub::FakeHub;
use testkit::models::{repository, variant};

const NAME: &str = "org/sharded";
/// What this project takes of it.
const FILES: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "model.safetensors.index.json",
    "model-0000*.safetensors",
];

/// What the package says.
struct Oracle {
    python: PathBuf,
    endpoint: String,
}

impl Oracle {
    /// `None` where nobody has said which Python has it.
    fn new(hub: &FakeHub) -> Option<Self> {
        let Some(python) = std::env::var_os("TUTTI_TEST_PYTHON") else {
            assert!(
                std::env::var_os("CI").is_none(),
                "CI must set TUTTI_TEST_PYTHON; run tests/run"
            );
            return None;
        };
        Some(Self { python: python.into(), endpoint: hub.url() })
    }

    fn run(&self, what: &str, revision: &str, cache: &Path) -> Result<PathBuf, String> {
        let output = Command::new(&self.python)
            .arg(repository().join("tests/hub/oracle.py"))
            .args([what, NAME, revision, cache.to_str().unwrap()])
            .args(FILES)
            .env("HF_ENDPOINT", &self.endpoint)
            .env("HF_HOME", cache.join("home"))
            .env("HF_HUB_DISABLE_XET", "1")
            .env("HF_HUB_DISABLE_TELEMETRY", "1")
            .env("NO_PROXY", "127.0.0.1")
            .env_remove("HF_TOKEN")
            .output()
            .unwrap();
        let (out, err) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let folder = out.lines().last().map(PathBuf::from);
        if output.status.success() {
            folder.ok_or_else(|| err.into_owned())
        } else {
            Err(err.into_owned())
        }
    }
}

fn settings(hub: &FakeHub, cache: &Path, offline: bool) -> HubSettings {
    HubSettings { cache: cache.to_owned(), endpoint: hub.url(), token: None, offline }
}

fn fetch(settings: HubSettings, revision: &str) -> PathBuf {
    let wanted = RequestedModel { name: NAME.to_owned(), revision: revision.to_owned() };
    let fetched =
        Hub::new(settings).fetch(&wanted, ModelPart::All, &Arc::new(DownloadHandle::default()));
    fetched.unwrap().folder
}

/// A model's cache: contents, and where links lead.
fn tree(cache: &Path) -> BTreeMap<String, String> {
    let root = cache.join("models--org--sharded");
    let mut found = BTreeMap::new();
    let mut folders = vec![root.join("blobs"), root.join("refs"), root.join("snapshots")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            let path = entry.path();
            let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
            if path.is_symlink() {
                found.insert(name, format!("-> {}", path.read_link().unwrap().display()));
            } else if path.is_dir() {
                folders.push(path);
            } else {
                found.insert(name, format!("{:?}", std::fs::read(path).unwrap()));
            }
        }
    }
    found
}

#[test]
fn both_make_the_same_cache_and_find_each_other_s() {
    let hub = FakeHub::start();
    let commit = hub.put(NAME, "main", &variant("llama-gqa-sharded"));
    let Some(oracle) = Oracle::new(&hub) else { return };
    let (ours, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    assert!(oracle.run("find", "main", ours.path()).is_err(), "it can fail");

    let folder = fetch(settings(&hub, ours.path(), false), "main");
    let downloaded = oracle.run("download", "main", theirs.path()).unwrap();
    assert_eq!(downloaded.strip_prefix(theirs.path()), folder.strip_prefix(ours.path()));
    let (own, its) = (tree(ours.path()), tree(theirs.path()));
    assert!(own.len() > 15 && own.contains_key("refs/main"), "{:?}", own.keys());
    assert_eq!(own.keys().collect::<Vec<_>>(), its.keys().collect::<Vec<_>>());
    assert!(own == its);

    let _ = hub.asked();
    for revision in ["main", &commit] {
        assert_eq!(oracle.run("find", revision, ours.path()).unwrap(), folder);
        assert_eq!(fetch(settings(&hub, theirs.path(), true), revision), downloaded);
    }
    assert!(hub.asked().is_empty(), "all of it was there");
    // What one has begun the other completes.
    for (path, by_us) in [(ours.path(), true), (theirs.path(), false)] {
        std::fs::remove_file(
            path.join("models--org--sharded/snapshots").join(&commit).join("tokenizer.json"),
        )
        .unwrap();
        match by_us {
            true => drop(oracle.run("download", "main", path).unwrap()),
            false => drop(fetch(settings(&hub, path, false), "main")),
        }
    }
    assert!(tree(ours.path()) == its && tree(theirs.path()) == its);
}

//! What is downloaded, how it goes on after faults, and what is refused.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shared::hub::cache::ModelCache;
use shared::hub::{
    DownloadHandle, FetchedModel, Hub, HubError, HubSettings, ModelPart, RequestedModel,
};
use tempfile::TempDir;
use testkit::fake_hub::FakeHub;
use testkit::models::{demo, variant};

const NAME: &str = "org/demo";
const WEIGHTS: &str = "model.safetensors";

/// A hub with the demo model, and an empty cache.
struct Rig {
    hub: FakeHub,
    folder: TempDir,
    commit: String,
}

impl Rig {
    fn new() -> Self {
        let hub = FakeHub::start();
        let commit = hub.put(NAME, "main", &demo());
        Self { hub, folder: tempfile::tempdir().unwrap(), commit }
    }

    fn settings(&self) -> HubSettings {
        let cache = self.folder.path().to_owned();
        HubSettings { cache, endpoint: self.hub.url(), token: None, offline: false }
    }

    fn fetch(&self, part: ModelPart) -> Result<FetchedModel, HubError> {
        fetch(self.settings(), NAME, "main", part)
    }

    /// What must go wrong for good.
    fn error(&self, part: ModelPart) -> String {
        match self.fetch(part) {
            Err(HubError::Permanent(message)) => message,
            other => panic!("{other:?}"),
        }
    }

    fn blobs(&self) -> PathBuf {
        self.folder.path().join("models--org--demo/blobs")
    }
}

fn fetch(
    settings: HubSettings,
    name: &str,
    revision: &str,
    part: ModelPart,
) -> Result<FetchedModel, HubError> {
    let wanted = RequestedModel { name: name.to_owned(), revision: revision.to_owned() };
    Hub::new(settings).fetch(&wanted, part, &Arc::new(DownloadHandle::default()))
}

/// All files below a folder, by their paths there.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
                found.insert(name, std::fs::read(path).unwrap_or_default());
            }
        }
    }
    found
}

fn same_as_demo(fetched: &FetchedModel, names: &[&str]) {
    let got = files(&fetched.folder);
    assert_eq!(got.keys().map(String::as_str).collect::<Vec<_>>(), names);
    for (name, content) in got {
        assert!(content == std::fs::read(demo().join(&name)).unwrap(), "{name}");
    }
}

const TEXTS: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

#[test]
fn each_part_is_what_its_users_read_and_comes_once() {
    let rig = Rig::new();
    let text = rig.fetch(ModelPart::Text).unwrap();
    same_as_demo(&text, &TEXTS);
    assert_eq!(text.model.commit, rig.commit);
    assert!(rig.hub.asked().iter().all(|asked| !asked.elsewhere), "no weights");
    let all = rig.fetch(ModelPart::All).unwrap();
    assert_eq!(all, text);
    same_as_demo(&all, &[&TEXTS[..2], &[WEIGHTS], &TEXTS[2..]].concat());
    let asked = rig.hub.asked();
    assert_eq!(asked.iter().filter(|asked| asked.path.contains("/resolve/")).count(), 1);
    // All of it is there: the hub is asked for its list alone, and for a commit not even for that.
    rig.fetch(ModelPart::All).unwrap();
    assert_eq!(rig.hub.asked().len(), 1);
    fetch(rig.settings(), NAME, &rig.commit, ModelPart::Weights).unwrap();
    assert_eq!(rig.hub.asked().len(), 0);
    let root = rig.folder.path().join("models--org--demo");
    assert_eq!(std::fs::read_to_string(root.join("refs/main")).unwrap(), rig.commit);
    assert!(all.folder.join(WEIGHTS).is_symlink());
    assert_eq!(files(&root).keys().filter(|name| name.contains("incomplete")).count(), 0);
}

#[test]
fn weights_in_several_files_are_those_of_the_index() {
    let rig = Rig::new();
    let mut all: BTreeMap<String, Arc<Vec<u8>>> = files(&variant("llama-gqa-sharded"))
        .into_iter()
        .map(|(name, content)| (name, Arc::new(content)))
        .collect();
    for other in ["consolidated.safetensors", "model.fp16.safetensors", "pytorch_model.bin"] {
        all.insert(other.to_owned(), Arc::new(vec![0; 100]));
    }
    rig.hub.put_files("org/sharded", "main", all.clone());
    let weights = fetch(rig.settings(), "org/sharded", "main", ModelPart::Weights).unwrap();
    let names: Vec<String> = files(&weights.folder).into_keys().collect();
    assert_eq!(names.len(), 7, "{names:?}");
    assert!(names.iter().all(|it| it.starts_with("model-0") || it.ends_with(".json")), "{names:?}");
    all.remove("model-00003-of-00004.safetensors");
    rig.hub.put_files("org/sharded", "main", all);
    let error = fetch(rig.settings(), "org/sharded", "main", ModelPart::Weights).unwrap_err();
    assert!(error.to_string().contains("model-00003-of-00004.safetensors"), "{error}");
}

#[test]
fn connections_that_break_are_gone_on_with_where_they_ended() {
    let rig = Rig::new();
    let cuts = vec![1 << 20, 70_000, 2 << 20];
    rig.hub.fail(|faults| drop(faults.ends_after.insert(WEIGHTS.to_owned(), cuts)));
    rig.hub.fail(|faults| drop(faults.ends_after.insert("tokenizer.json".to_owned(), vec![0, 9])));
    let all = rig.fetch(ModelPart::All).unwrap();
    same_as_demo(&all, &[&TEXTS[..2], &[WEIGHTS], &TEXTS[2..]].concat());
    let asked = rig.hub.asked();
    let ranges = |of: &str| {
        let of = asked.iter().filter(|asked| asked.path.ends_with(of));
        of.filter_map(|asked| asked.range.clone()).collect::<Vec<_>>()
    };
    // Each is asked for at the hub, which says where it is, and there.
    let mut starts = [1 << 20, (1 << 20) + 70_000, (3 << 20) + 70_000].into_iter();
    for twice in ranges(WEIGHTS).chunks(2) {
        let range = format!("bytes={}-", starts.next().unwrap());
        assert_eq!(twice, [range.clone(), range]);
    }
    assert_eq!(starts.next(), None);
    assert_eq!(ranges("tokenizer.json"), ["bytes=9-"; 2]);
}

#[test]
fn what_an_earlier_process_left_is_gone_on_with_and_verified() {
    let rig = Rig::new();
    let whole = std::fs::read(demo().join(WEIGHTS)).unwrap();
    rig.fetch(ModelPart::All).unwrap();
    let blob = std::fs::read_dir(rig.blobs()).unwrap().flatten().map(|it| it.path());
    let blob = blob.max_by_key(|path| path.metadata().unwrap().len()).unwrap();
    let incomplete =
        blob.with_file_name(format!("{}.incomplete", blob.file_name().unwrap().to_str().unwrap()));
    let again = |left: &[u8]| {
        std::fs::remove_file(&blob).unwrap();
        std::fs::write(&incomplete, left).unwrap();
        let _ = rig.hub.asked();
        let all = rig.fetch(ModelPart::All).unwrap();
        assert!(std::fs::read(all.folder.join(WEIGHTS)).unwrap() == whole);
        assert!(!incomplete.exists());
        let asked = rig.hub.asked().into_iter().filter(|asked| asked.elsewhere);
        asked.map(|asked| asked.range.unwrap_or_default()).collect::<Vec<_>>()
    };
    assert_eq!(again(&whole[..1_000_000]), ["bytes=1000000-"]);
    assert!(again(&whole).is_empty(), "only its last step was missing");
    // Something else is found by its checksum; what is too long is no beginning.
    let mut other = whole[..1_000_000].to_vec();
    other[5] ^= 1;
    assert_eq!(again(&other), ["bytes=1000000-", ""]);
    assert_eq!(again(&[&whole[..], b"x"].concat()), [""]);
    rig.hub.fail(|faults| faults.ignores_ranges = true);
    assert_eq!(again(&whole[..1_000_000]).len(), 1);
}

#[test]
fn a_wrong_checksum_is_tried_again_once() {
    let rig = Rig::new();
    rig.hub.fail(|faults| _ = faults.corrupts.insert(WEIGHTS.to_owned(), 1));
    rig.fetch(ModelPart::All).unwrap();
    let rig = Rig::new();
    rig.hub.fail(|faults| _ = faults.corrupts.insert(WEIGHTS.to_owned(), 9));
    let error = rig.error(ModelPart::All);
    assert!(error.contains(WEIGHTS) && error.contains("checksum"), "{error}");
    let kept: Vec<String> = files(&rig.blobs()).into_keys().collect();
    // The weights' names have 64 digits. Other files may have been interrupted, and continue.
    let begun = |name: &str| name.split('.').next().map_or(0, str::len);
    assert!(kept.iter().all(|name| begun(name) == 40), "nothing wrong is left: {kept:?}");
    assert_eq!(rig.hub.asked().iter().filter(|asked| asked.elsewhere).count(), 2);
}

#[test]
fn a_small_file_that_was_changed_on_the_way_is_refused() {
    let config = || "config.json".to_owned();
    let rig = Rig::new();
    rig.hub.fail(|faults| _ = faults.corrupts.insert(config(), 1));
    let text = rig.fetch(ModelPart::Text).unwrap();
    same_as_demo(&text, &TEXTS);
    let blob = text.folder.join(config()).read_link().unwrap();
    let blob = blob.file_name().unwrap().to_str().unwrap().to_owned();
    assert_eq!(blob.len(), 40);
    // Also where its name is said by the file's own address.
    for is_bare in [false, true] {
        let rig = Rig::new();
        rig.hub.fail(|faults| {
            faults.bare_lists = is_bare;
            faults.corrupts.insert(config(), 9);
        });
        let error = rig.error(ModelPart::Text);
        assert!(error.contains("config.json of org/demo") && error.contains("checksum"), "{error}");
        let kept: Vec<String> = files(&rig.blobs()).into_keys().collect();
        assert!(!kept.iter().any(|name| name.starts_with(&blob)), "it is left: {kept:?}");
        let snapshot = rig.folder.path().join("models--org--demo/snapshots").join(&rig.commit);
        assert!(!snapshot.join(config()).exists());
        let asked = rig.hub.asked().into_iter().filter(|asked| asked.method == "GET");
        let of_config = format!("/api/resolve-cache/models/{NAME}/{}/config.json", rig.commit);
        assert_eq!(asked.filter(|asked| asked.path == of_config).count(), 2);
    }
}

#[test]
fn a_content_whose_name_is_no_checksum_is_taken_as_it_comes() {
    let config = || "config.json".to_owned();
    let rig = Rig::new();
    rig.hub.fail(|faults| _ = faults.etags.insert(config(), "v7".to_owned()));
    // Nothing tells whether this is its beginning.
    std::fs::create_dir_all(rig.blobs()).unwrap();
    std::fs::write(rig.blobs().join("v7.incomplete"), "x").unwrap();
    same_as_demo(&rig.fetch(ModelPart::Text).unwrap(), &TEXTS);
    assert!(rig.blobs().join("v7").is_file());
    let rig = Rig::new();
    rig.hub.fail(|faults| {
        faults.etags.insert(config(), "v7".to_owned());
        faults.corrupts.insert(config(), 1);
    });
    let text = rig.fetch(ModelPart::Text).unwrap();
    let read = |folder: &Path| std::fs::read(folder.join(config())).unwrap();
    assert_ne!(read(&text.folder), read(&demo()));
    assert_eq!(read(&text.folder).len(), read(&demo()).len());
}

#[test]
fn a_busy_hub_is_asked_again_and_one_that_stays_so_is_given_up() {
    let rig = Rig::new();
    let busy = (429, "Retry-After: 1\r\n".to_owned());
    rig.hub.fail(|faults| faults.answers = vec![busy, (503, String::new())]);
    let began = Instant::now();
    rig.fetch(ModelPart::Text).unwrap();
    assert!(began.elapsed() >= Duration::from_secs(1), "as long as it said");
    let rig = Rig::new();
    rig.hub.fail(|faults| faults.answers = vec![(500, String::new()); 99]);
    let error = rig.fetch(ModelPart::Text).unwrap_err();
    assert!(error.is_transient() && error.to_string().contains("500"), "{error}");
    assert!(rig.hub.asked().len() < 9);
}

#[test]
fn a_full_disk_is_noticed_before_anything_is_written() {
    let rig = Rig::new();
    let huge = 1 << 60;
    rig.hub.fail(|faults| _ = faults.sizes.insert(WEIGHTS.to_owned(), huge));
    let error = rig.error(ModelPart::Weights);
    assert!(error.contains("1073741824.0 GiB") && error.contains("free"), "{error}");
    assert!(
        error.contains("--download-dir") && error.contains(rig.folder.path().to_str().unwrap())
    );
    assert!(!rig.hub.asked().iter().any(|asked| asked.elsewhere));
    rig.hub.fail(|faults| {
        faults.sizes.clear();
        faults.sizes.insert("tokenizer.json".to_owned(), 1 << 40);
    });
    assert!(rig.error(ModelPart::Text).contains("tokenizer.json"));
}

#[test]
fn names_that_lead_out_of_the_folder_are_never_taken() {
    let rig = Rig::new();
    let outside = rig.folder.path().join("outside");
    let hostile = [
        "../../../outside",
        "/etc/outside",
        "tokenizer/../../../../outside.json",
        "tokenizer\n.json",
        "../tokenizer.json",
        "tokenizer_x/y.json",
        ".tokenizer.json",
    ];
    rig.hub.fail(|faults| faults.lists_too = hostile.map(str::to_owned).to_vec());
    same_as_demo(&rig.fetch(ModelPart::Text).unwrap(), &TEXTS);
    assert!(!outside.exists());
    let index = br#"{"weight_map":{"a":"../../../../outside"}}"#.to_vec();
    let mut all: BTreeMap<String, Arc<Vec<u8>>> = BTreeMap::new();
    for (name, content) in
        [("config.json", b"{}".to_vec()), ("model.safetensors.index.json", index)]
    {
        all.insert(name.to_owned(), Arc::new(content));
    }
    rig.hub.put_files(NAME, "main", all);
    let error = rig.error(ModelPart::Weights);
    assert!(error.contains("plain file name"), "{error}");
    assert!(!outside.exists());
}

#[test]
fn the_token_goes_to_the_hub_alone() {
    let rig = Rig::new();
    rig.hub.restrict(NAME, "hf_right");
    let with = |token: &str| {
        let token = Some(token.to_owned().into()).filter(|_| !token.is_empty());
        let mut settings = rig.settings();
        settings.token = token;
        fetch(settings, NAME, "main", ModelPart::All)
    };
    let error = with("").unwrap_err().to_string();
    assert!(error.contains("HF_TOKEN") && error.contains(&format!("{}/{NAME}", rig.hub.url())));
    let error = with("hf_wrong").unwrap_err().to_string();
    assert!(error.contains("no access") && !error.contains("hf_wrong"), "{error}");
    let _ = rig.hub.asked();
    with("hf_right").unwrap();
    let asked = rig.hub.asked();
    assert!(asked.iter().any(|asked| asked.elsewhere));
    for asked in asked {
        assert_eq!(asked.authorization.is_some(), !asked.elsewhere, "{asked:?}");
    }
    // Nor to a place that it is sent to in the clear, or that is no server.
    for to in ["file:///etc/passwd", "ftp://x/", "//x"] {
        let rig = Rig::new();
        rig.hub.fail(|faults| faults.redirect = Some(to.to_owned()));
        assert!(rig.error(ModelPart::Weights).contains("redirects"), "{to}");
    }
}

#[test]
fn what_is_not_there_is_said_with_what_to_do() {
    let rig = Rig::new();
    let error = |name: &str, revision: &str| {
        fetch(rig.settings(), name, revision, ModelPart::Text).unwrap_err().to_string()
    };
    let absent = error("org/absent", "main");
    assert!(absent.contains("org/absent") && absent.contains("private"), "{absent}");
    let revision = error(NAME, "v9");
    assert!(revision.contains("no revision v9"), "{revision}");
    let gguf = BTreeMap::from([
        ("config.json".to_owned(), Arc::new(b"{}".to_vec())),
        ("model.gguf".to_owned(), Arc::new(b"x".to_vec())),
    ]);
    rig.hub.put_files("org/gguf", "main", gguf);
    let gguf =
        fetch(rig.settings(), "org/gguf", "main", ModelPart::Weights).unwrap_err().to_string();
    assert!(gguf.contains("only files in .gguf") && gguf.contains("safetensors"), "{gguf}");
    let nobody = HubSettings { endpoint: "http://127.0.0.1:9".to_owned(), ..rig.settings() };
    let nobody = fetch(nobody, NAME, "main", ModelPart::Text).unwrap_err();
    assert!(nobody.is_transient() && nobody.to_string().contains("http://127.0.0.1:9"), "{nobody}");
}

#[test]
fn without_a_network_the_cache_is_enough() {
    let rig = Rig::new();
    let offline = || HubSettings { offline: true, ..rig.settings() };
    let error = fetch(offline(), NAME, "main", ModelPart::Text).unwrap_err().to_string();
    assert!(error.contains("HF_HUB_OFFLINE") && error.contains(NAME), "{error}");
    let text = rig.fetch(ModelPart::Text).unwrap();
    let _ = rig.hub.asked();
    assert_eq!(fetch(offline(), NAME, "main", ModelPart::Text).unwrap(), text);
    assert_eq!(fetch(offline(), NAME, &rig.commit, ModelPart::Text).unwrap(), text);
    assert!(
        fetch(offline(), NAME, "main", ModelPart::Weights).is_err(),
        "its weights are not there"
    );
    assert!(rig.hub.asked().is_empty());
    // A hub that is away, or lets nobody in any more, is none worse than that.
    let away = HubSettings { endpoint: "http://127.0.0.1:9".to_owned(), ..rig.settings() };
    assert_eq!(fetch(away, NAME, "main", ModelPart::Text).unwrap(), text);
    rig.hub.restrict(NAME, "hf_new");
    assert_eq!(rig.fetch(ModelPart::Text).unwrap(), text);
}

/// A worker's files are not all that a front end needs; which those are, the hub has said.
#[test]
fn without_a_network_a_cache_that_workers_filled_is_not_whole_for_text() {
    let rig = Rig::new();
    let offline = || HubSettings { offline: true, ..rig.settings() };
    rig.fetch(ModelPart::Weights).unwrap();
    let error = fetch(offline(), NAME, "main", ModelPart::Text).unwrap_err();
    let HubError::Permanent(error) = error else { panic!("{error:?}") };
    for what in ["tokenizer_config.json", "generation_config.json", "HF_HUB_OFFLINE", NAME] {
        assert!(error.contains(what), "{error}");
    }
    fetch(offline(), NAME, "main", ModelPart::Weights).unwrap();
    let text = rig.fetch(ModelPart::Text).unwrap();
    assert_eq!(fetch(offline(), NAME, "main", ModelPart::Text).unwrap(), text);
    // One that other programs have filled is served; what they say is not there is not missed.
    let cache = ModelCache::new(rig.folder.path(), NAME);
    assert!(cache.unknown(&rig.commit).is_empty());
    let root = rig.folder.path().join("models--org--demo");
    std::fs::remove_dir_all(root.join(".tutti")).unwrap();
    assert!(cache.unknown(&rig.commit).is_empty());
    std::fs::remove_file(text.folder.join("tokenizer_config.json")).unwrap();
    assert_eq!(fetch(offline(), NAME, "main", ModelPart::Text).unwrap(), text);
    assert_eq!(cache.unknown(&rig.commit), ["tokenizer_config.json"]);
    let absent = root.join(".no_exist").join(&rig.commit);
    std::fs::create_dir_all(&absent).unwrap();
    std::fs::write(absent.join("tokenizer_config.json"), "").unwrap();
    assert!(cache.unknown(&rig.commit).is_empty());
}

#[test]
fn a_model_without_other_files_of_text_is_whole_without_them() {
    let rig = Rig::new();
    let mut few = files(&demo());
    few.retain(|name, _| ["config.json", "tokenizer.json", WEIGHTS].contains(&name.as_str()));
    let few = few.into_iter().map(|(name, content)| (name, Arc::new(content))).collect();
    let commit = rig.hub.put_files(NAME, "main", few);
    let weights = rig.fetch(ModelPart::Weights).unwrap();
    assert_eq!(weights.model.commit, commit);
    let offline = HubSettings { offline: true, ..rig.settings() };
    assert_eq!(fetch(offline, NAME, "main", ModelPart::Text).unwrap(), weights);
    let cache = ModelCache::new(rig.folder.path(), NAME);
    assert!(cache.unknown(&commit).is_empty());
}

#[test]
fn a_revision_is_what_it_was_or_what_it_is_now() {
    let rig = Rig::new();
    let first = rig.fetch(ModelPart::All).unwrap();
    let mut changed = files(&demo());
    changed.insert("config.json".to_owned(), b"{\"changed\": true}".to_vec());
    let changed = changed.into_iter().map(|(name, content)| (name, Arc::new(content))).collect();
    let commit = rig.hub.put_files(NAME, "main", changed);
    let _ = rig.hub.asked();
    let second = rig.fetch(ModelPart::All).unwrap();
    assert_eq!(second.model.commit, commit);
    assert!(!rig.hub.asked().iter().any(|asked| asked.elsewhere), "the weights are the same");
    let config =
        |fetched: &FetchedModel| std::fs::read(fetched.folder.join("config.json")).unwrap();
    assert_ne!(config(&first), config(&second));
    let old = fetch(rig.settings(), NAME, &rig.commit, ModelPart::All).unwrap();
    assert_eq!(old, first);
    rig.hub.put(NAME, "refs/pr/7", &demo());
    assert_eq!(fetch(rig.settings(), NAME, "refs/pr/7", ModelPart::Text).unwrap(), first);
    assert!(rig.folder.path().join("models--org--demo/refs/refs/pr/7").is_file());
}

#[test]
fn lists_without_sizes_are_made_good_by_asking_for_each_file() {
    let rig = Rig::new();
    rig.hub.fail(|faults| faults.bare_lists = true);
    let all = rig.fetch(ModelPart::All).unwrap();
    same_as_demo(&all, &[&TEXTS[..2], &[WEIGHTS], &TEXTS[2..]].concat());
    assert!(rig.hub.asked().iter().any(|asked| asked.method == "HEAD"));
}

#[test]
fn of_several_at_once_one_downloads_and_all_have_it() {
    let rig = Rig::new();
    rig.hub.fail(|faults| faults.pause = Duration::from_millis(5));
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let settings = rig.settings();
            std::thread::spawn(move || fetch(settings, NAME, "main", ModelPart::All).unwrap())
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap().model.commit, rig.commit);
    }
    assert_eq!(rig.hub.asked().iter().filter(|asked| asked.elsewhere).count(), 1);
}

#[test]
fn a_download_that_is_called_off_ends_at_once_and_keeps_what_has_come() {
    let rig = Rig::new();
    rig.hub.fail(|faults| faults.pause = Duration::from_millis(200));
    let (settings, watch) = (rig.settings(), Arc::new(DownloadHandle::default()));
    let watched = watch.clone();
    let thread = std::thread::spawn(move || {
        let wanted = RequestedModel { name: NAME.to_owned(), revision: "main".to_owned() };
        Hub::new(settings).fetch(&wanted, ModelPart::Weights, &watched)
    });
    while watch.progress().0 < 100_000 {
        std::thread::sleep(Duration::from_millis(10));
    }
    let (done, total) = watch.progress();
    assert!(done < total && total > 5_000_000, "{done} of {total}");
    let began = Instant::now();
    watch.cancel();
    assert_eq!(thread.join().unwrap(), Err(HubError::Cancelled));
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    let kept = files(&rig.blobs());
    assert!(kept.iter().any(|(name, bytes)| name.ends_with(".incomplete") && bytes.len() > 60_000));
}

//! Real processes that serve a model by its name.
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::adapters::AdapterSpec;
use testkit::etcd::Etcd;
use testkit::fake_hub::FakeHub;
use testkit::fleet::free_port;
use testkit::local_cluster::{LocalCluster, tutti_binary};
use testkit::models::{class_goldens, demo, variant};
use testkit::wait::until;

const NAME: &str = "org/demo";

/// A host: its own cache of models.
struct Host {
    home: TempDir,
    hub: String,
}

impl Host {
    fn new(hub: &FakeHub) -> Self {
        Self { home: tempfile::tempdir().unwrap(), hub: hub.url() }
    }

    fn spawn(&self, args: &[&str]) -> LocalCluster {
        let home = self.home.path().to_str().unwrap();
        LocalCluster::spawn_with(&[], args, &[("HF_HOME", home), ("HF_ENDPOINT", &self.hub)])
            .unwrap()
    }

    /// Starts a coordinator of the model, for workers that dial `address`.
    fn coordinator(&self, address: &str, more: &[&str]) -> LocalCluster {
        let args = ["coordinator", "--listen", "127.0.0.1:0", "--cluster-listen", address];
        self.spawn(&[&args[..], &["--model", NAME], more].concat())
    }

    fn cache(&self) -> std::path::PathBuf {
        self.home.path().join("hub")
    }

    fn has(&self, file: &str, commit: &str) -> bool {
        self.cache().join("models--org--demo/snapshots").join(commit).join(file).is_file()
    }

    /// What a program says that ends by itself.
    fn says(&self, args: &[&str]) -> String {
        let output = Command::new(tutti_binary())
            .args(args)
            .env("HF_HOME", self.home.path())
            .env("HF_ENDPOINT", &self.hub)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        format!(
            "{}{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )
    }
}

async fn completion(server: &LocalCluster, model: &str) -> Value {
    let body =
        json!({"model": model, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0});
    let reply = server.client().unwrap().post("/v1/completions", &body).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.body["choices"][0]["text"].clone()
}

/// What the folder itself says.
async fn expected() -> Value {
    let folder = demo();
    let model = folder.to_str().unwrap();
    let args = ["--model", model, "--tensor-parallel", "1", "--workers", "1"];
    let server = LocalCluster::up(&args).await.unwrap();
    completion(&server, "demo").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_is_served_by_its_name_like_its_folder() {
    let (hub, text) = (FakeHub::start(), expected().await);
    let commit = hub.put(NAME, "v1", &demo());
    let host = Host::new(&hub);
    let up = ["up", "--listen", "127.0.0.1:0", "--tensor-parallel", "2", "--workers", "2"];
    let mut server = host.spawn(&[&up[..], &["--model", NAME, "--revision", "v1"]].concat());
    server.wait_ready().await.unwrap();
    assert_eq!(completion(&server, NAME).await, text);
    assert!(host.has("model.safetensors", &commit));
    let models = server.client().unwrap().get("/v1/models").await.unwrap().body;
    assert_eq!(models["data"][0]["id"], NAME);
    assert_eq!(models["data"][0]["root"], format!("hf://{NAME}@{commit}"));
    drop(server);
    // Again, in another place, and then without the hub.
    let other = tempfile::tempdir().unwrap();
    let place = other.path().to_str().unwrap();
    let mut server = host.spawn(
        &[&up[..], &["--model", NAME, "--revision", &commit, "--download-dir", place]].concat(),
    );
    server.wait_ready().await.unwrap();
    assert!(other.path().join("models--org--demo").is_dir());
    drop(server);
    let away = Host { hub: "http://127.0.0.1:9".to_owned(), ..host };
    let mut server = away.spawn(&[&up[..], &["--model", NAME, "--revision", "v1"]].concat());
    server.wait_ready().await.unwrap();
    assert_eq!(completion(&server, NAME).await, text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_host_downloads_what_it_needs() {
    let (hub, text) = (FakeHub::start(), expected().await);
    let commit = hub.put(NAME, "main", &demo());
    let [first, second, third] = [(); 3].map(|()| Host::new(&hub));
    let address = format!("127.0.0.1:{}", free_port());
    let mut coordinator = first.coordinator(&address, &["--tensor-parallel", "2"]);
    coordinator.wait_url().await.unwrap();
    let args = ["worker", "--coordinator", &address, "--threads", "1", "--node"];
    // Two on one host, one of them waits for the other's download.
    hub.fail(|faults| faults.pause = Duration::from_millis(5));
    let _ = hub.asked();
    let workers = ["a", "b"].map(|node| second.spawn(&[&args[..], &[node]].concat()));
    coordinator.wait_ready().await.unwrap();
    assert_eq!(completion(&coordinator, NAME).await, text);
    assert_eq!(hub.asked().iter().filter(|asked| asked.elsewhere).count(), 1);
    assert!(first.has("tokenizer.json", &commit) && !first.has("model.safetensors", &commit));
    assert!(second.has("model.safetensors", &commit) && second.has("tokenizer.json", &commit));
    assert!(!second.has("tokenizer_config.json", &commit));
    // A file for all roles names the model for it as well.
    let config = third.home.path().join("tutti.toml");
    let keys = format!("coordinator = \"{address}\"\nmodel = \"{NAME}\"\nworkers = 2\n");
    std::fs::write(&config, keys).unwrap();
    let config = config.to_str().unwrap();
    let mut frontend = third.spawn(&["frontend", "--config", config, "--listen", "127.0.0.1:0"]);
    frontend.wait_ready().await.unwrap();
    assert_eq!(completion(&frontend, NAME).await, text);
    assert!(third.has("tokenizer.json", &commit) && !third.has("model.safetensors", &commit));
    drop(workers);
}

/// Its classes are tokens, whose numbers its worker needs the tokenizer for: as the configuration
/// says, where a cache from before that was known lacks the file, or as overrides of it say.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_whose_classes_are_tokens_is_served_by_another_host() {
    let goldens = class_goldens(&variant("qwen3"));
    let keys = json!({"architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": goldens.tokens, "is_original_qwen3_reranker": true});
    for is_overridden in [false, true] {
        let (hub, model) = (FakeHub::start(), tempfile::tempdir().unwrap());
        for file in ["config.json", "model.safetensors", "tokenizer.json"] {
            std::fs::copy(variant("qwen3").join(file), model.path().join(file)).unwrap();
        }
        let [first, second] = [(); 2].map(|()| Host::new(&hub));
        let (keys_text, mut more) = (keys.to_string(), vec!["--tensor-parallel", "1"]);
        more.extend(["--dtype", "float32"]);
        if is_overridden {
            more.extend(["--hf-overrides", &keys_text]);
        } else {
            let file = model.path().join("config.json");
            let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
            config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
            std::fs::write(&file, config.to_string()).unwrap();
        }
        let commit = hub.put(NAME, "main", model.path());
        if !is_overridden {
            let snapshot = second.cache().join("models--org--demo/snapshots").join(&commit);
            std::fs::create_dir_all(&snapshot).unwrap();
            for file in ["config.json", "model.safetensors"] {
                std::fs::copy(model.path().join(file), snapshot.join(file)).unwrap();
            }
        }
        let address = format!("127.0.0.1:{}", free_port());
        let mut coordinator = first.coordinator(&address, &more);
        coordinator.wait_url().await.unwrap();
        let _worker = second.spawn(&["worker", "--coordinator", &address, "--threads", "1"]);
        coordinator.wait_ready().await.unwrap();
        let golden = &goldens.prompts[1];
        let body = json!({"input": golden.prompt_ids});
        let reply = coordinator.client().unwrap().post("/classify", &body).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        let found = reply.body["data"][0]["probs"][0].as_f64().unwrap();
        let expected = 1.0 / (1.0 + (-golden.numbers[0]).exp());
        assert!((found - expected).abs() < 1e-3, "{found} {expected}");
        assert!(second.has("tokenizer.json", &commit));
    }
}

/// An adapter that is loaded while the cluster runs: its clients need not wait for a download when
/// a spare takes over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spare_has_an_adapter_before_it_becomes_a_rank() {
    let hub = FakeHub::start();
    hub.put(NAME, "main", &demo());
    let folder = tempfile::tempdir().unwrap();
    AdapterSpec::whole(8, 51).write(&demo(), folder.path()).unwrap();
    let commit = hub.put("org/sql", "main", folder.path());
    let [first, second, third] = [(); 3].map(|()| Host::new(&hub));
    let address = format!("127.0.0.1:{}", free_port());
    let more = ["--tensor-parallel", "1", "--replicas", "1", "--max-loras", "2"];
    let mut coordinator = first.coordinator(&address, &more);
    coordinator.wait_url().await.unwrap();
    let args = ["worker", "--coordinator", &address, "--threads", "1", "--node"];
    let rank = second.spawn(&[&args[..], &["a"]].concat());
    coordinator.wait_ready().await.unwrap();
    let _spare = third.spawn(&[&args[..], &["b"]].concat());
    let client = coordinator.client().unwrap();
    until("the spare is there", async || {
        let nodes = client.get("/admin/status").await.ok()?.body["nodes"].clone();
        nodes.as_array()?.iter().any(|node| node["state"] == "spare").then_some(())
    })
    .await;
    let load = json!({"lora_name": "sql", "lora_path": "org/sql"});
    let loaded = client.post("/v1/load_lora_adapter", &load).await.unwrap();
    assert_eq!(loaded.status, 200, "{}", loaded.body);
    let text = completion(&coordinator, "sql").await;
    let snapshot = third.cache().join("models--org--sql/snapshots").join(commit);
    until("the spare has it, too", async || {
        let files = ["adapter_config.json", "adapter_model.safetensors"];
        files.iter().all(|file| snapshot.join(file).is_file()).then_some(())
    })
    .await;
    // Nobody can download it now.
    hub.restrict("org/sql", "hf_other");
    LocalCluster::signal(rank.pid(), "KILL").unwrap();
    assert_eq!(completion(&coordinator, "sql").await, text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_download_takes_its_time_and_a_worker_without_access_says_so() {
    let hub = FakeHub::start();
    hub.put(NAME, "main", &demo());
    let [first, second] = [(); 2].map(|()| Host::new(&hub));
    let address = format!("127.0.0.1:{}", free_port());
    // Far less than the download takes.
    let more = ["--tensor-parallel", "1", "--form-timeout", "5"];
    let mut coordinator = first.coordinator(&address, &more);
    coordinator.wait_url().await.unwrap();
    hub.restrict(NAME, "hf_other");
    let args = ["worker", "--coordinator", &address, "--threads", "1", "--node"];
    let mut refused = second.spawn(&[&args[..], &["refused"]].concat());
    assert_eq!(refused.wait_end().unwrap().code(), Some(1));
    let log = refused.log();
    assert!(log.contains("HF_TOKEN") && log.contains(NAME), "{log}");
    hub.restrict(NAME, "hf_right");
    hub.fail(|faults| faults.pause = Duration::from_millis(150));
    let home = second.home.path().to_str().unwrap();
    let environment = [("HF_HOME", home), ("HF_ENDPOINT", &*second.hub), ("HF_TOKEN", "hf_right")];
    let began = Instant::now();
    let _worker =
        LocalCluster::spawn_with(&[], &[&args[..], &["b"]].concat(), &environment).unwrap();
    coordinator.wait_ready().await.unwrap();
    assert!(began.elapsed() > Duration::from_secs(6), "{:?}", began.elapsed());
    let log = coordinator.log();
    assert!(!log.contains("nothing was heard"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_ends_a_download_at_once() {
    let hub = FakeHub::start();
    hub.put(NAME, "main", &demo());
    hub.fail(|faults| faults.pause = Duration::from_secs(1));
    let host = Host::new(&hub);
    let mut server = host.spawn(&["up", "--listen", "127.0.0.1:0", "--model", NAME]);
    let began = Instant::now();
    until("it downloads", async || server.log().contains("downloading").then_some(())).await;
    LocalCluster::signal(server.pid(), "TERM").unwrap();
    let told = Instant::now();
    assert_eq!(server.wait_end().unwrap().code(), Some(0), "{}", server.log());
    assert!(told.elapsed() < Duration::from_secs(10), "{:?} {:?}", began.elapsed(), told.elapsed());
}

#[test]
fn what_is_no_model_is_said_in_one_line() {
    let hub = FakeHub::start();
    let host = Host::new(&hub);
    let said = host.says(&["up", "--model", "no-such-folder"]);
    assert!(
        said.contains("exit status: 2") && said.contains("folder") && said.contains("hub"),
        "{said}"
    );
    let said = host.says(&["up", "--model", "org/absent"]);
    assert!(said.contains("exit status: 1") && said.contains("has no model org/absent"), "{said}");
    let said = host.says(&["up", "--model", "./org/absent"]);
    assert!(said.contains("org/absent/config.json"), "{said}");
    let folder = demo();
    let folder = folder.to_str().unwrap();
    let said = host.says(&["up", "--model", folder, "--revision", "v1"]);
    assert!(said.contains("exit status: 2") && said.contains("--revision"), "{said}");
    let said = host.says(&["up", "--model", "a/b", "--revision", "../x"]);
    assert!(said.contains("exit status: 2") && said.contains("a branch, a tag"), "{said}");
    hub.put("org/qwen3", "main", &variant("qwen3"));
    let said = host.says(&[
        "bench",
        "--model",
        "org/qwen3",
        "--prompt-tokens",
        "8",
        "--decode-steps",
        "2",
        "--batches",
        "1",
    ]);
    assert!(said.contains("exit status: 0") && said.contains("decode_b1"), "{said}");
}

/// Puts a folder that differs from `from` in one file as the branch's next commit. Returns the
/// commit.
fn put_changed(hub: &FakeHub, from: &Path) -> String {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let file = folder.path().join("generation_config.json");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(file, format!("{text}\n")).unwrap();
    hub.put(NAME, "main", folder.path())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_leader_serves_the_state_that_the_cluster_has() {
    let folder = tempfile::tempdir().unwrap();
    let Some(etcd) = Etcd::start(folder.path()).await.unwrap() else { return };
    let hub = FakeHub::start();
    let commit = hub.put(NAME, "main", &demo());
    let [first, second, third] = [(); 3].map(|()| Host::new(&hub));
    let endpoint = etcd.endpoint();
    let args = ["--tensor-parallel", "1", "--etcd", &endpoint, "--leader-lease", "2"];
    let mut leader = first.coordinator("127.0.0.1:0", &args);
    let worker = third.spawn(&["worker", "--etcd", &endpoint, "--threads", "1"]);
    leader.wait_ready().await.unwrap();
    // The branch moves on.
    let moved = put_changed(&hub, &demo());
    assert_ne!(moved, commit);
    let mut next = second.coordinator("127.0.0.1:0", &args);
    next.wait_url().await.unwrap();
    assert!(second.has("tokenizer.json", &commit) && !second.has("tokenizer.json", &moved));
    LocalCluster::signal(leader.pid(), "KILL").unwrap();
    drop(leader);
    next.wait_ready().await.unwrap();
    let root = next.client().unwrap().get("/v1/models").await.unwrap().body;
    assert_eq!(root["data"][0]["root"], format!("hf://{NAME}@{commit}"));
    // One that is started when nobody leads goes by what the worker has.
    LocalCluster::signal(next.pid(), "KILL").unwrap();
    drop(next);
    let mut last = second.coordinator("127.0.0.1:0", &args);
    last.wait_ready().await.unwrap();
    let root = last.client().unwrap().get("/v1/models").await.unwrap().body;
    assert_eq!(root["data"][0]["root"], format!("hf://{NAME}@{commit}"));
    drop((worker, last));
}

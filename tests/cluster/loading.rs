//! LoRA adapters loaded and unloaded while a cluster runs: the same answers as by a cluster that
//! was started with them, at every front end, when a worker dies, and under the next leader.
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::adapters::AdapterSpec;
use testkit::client::Client;
use testkit::fleet::Fleet;
use testkit::local_cluster::LocalCluster;
use testkit::models::demo;

use crate::counters::check_invariants;
use crate::etcd::{Meeting, serves, until};
use crate::scaling::operate;
use crate::{STORY, greedy, text, up};

/// Two adapters in a scratch folder.
struct Folders(TempDir);

impl Folders {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let specs =
            [("whole", AdapterSpec::whole(8, 51)), ("heads", AdapterSpec::attention(16, 52))];
        for (name, spec) in specs {
            let path = folder.path().join(name);
            std::fs::create_dir(&path).unwrap();
            spec.write(&demo(), &path).unwrap();
        }
        Self(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn modules(&self) -> [String; 2] {
        ["whole", "heads"].map(|name| format!("{name}={}", self.path(name)))
    }
}

/// Status and body of a command, which is a sentence if it succeeds.
async fn command(client: &Client, path: &str, body: &Value) -> (u16, String) {
    let response = client.open(path, body).await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

async fn load(client: &Client, name: &str, path: &str) -> (u16, String) {
    command(client, "/v1/load_lora_adapter", &json!({"lora_name": name, "lora_path": path})).await
}

async fn unload(client: &Client, name: &str) -> (u16, String) {
    command(client, "/v1/unload_lora_adapter", &json!({"lora_name": name})).await
}

fn ask(model: &str, max_tokens: u32) -> Value {
    let mut body = greedy(STORY, max_tokens);
    body["model"] = json!(model);
    body["ignore_eos"] = json!(true);
    body["logprobs"] = json!(1);
    body
}

async fn answer(client: &Client, model: &str) -> Value {
    let reply = client.post("/v1/completions", &ask(model, 24)).await.unwrap();
    assert_eq!((reply.status, &reply.body["model"]), (200, &json!(model)), "{}", reply.body);
    reply.body["choices"].clone()
}

async fn models(client: &Client) -> Vec<(String, Value)> {
    let list = client.get("/v1/models").await.unwrap().body;
    let cards = list["data"].as_array().unwrap().iter();
    cards.map(|card| (card["id"].as_str().unwrap().to_owned(), card["root"].clone())).collect()
}

async fn names(client: &Client) -> Vec<String> {
    models(client).await.into_iter().map(|(name, _)| name).collect()
}

/// What a cluster started with both adapters answers.
async fn wanted(folders: &Folders, degree: &str) -> [Value; 3] {
    let modules = folders.modules();
    let args = ["--max-loras", "2", "--tensor-parallel", degree, "--lora-modules"];
    let cluster = up(&[&args[..], &[&modules[0], &modules[1]]].concat()).await;
    let client = cluster.client().unwrap();
    let answers = [
        answer(&client, "demo").await,
        answer(&client, "whole").await,
        answer(&client, "heads").await,
    ];
    assert!(answers[0] != answers[1] && answers[1] != answers[2] && answers[0] != answers[2]);
    answers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adapters_come_and_go_while_requests_run() {
    let folders = Folders::new();
    let [base, whole, heads] = wanted(&folders, "2").await;
    let cluster = up(&["--max-loras", "2", "--tensor-parallel", "2"]).await;
    let client = cluster.client().unwrap();
    assert_eq!(names(&client).await, ["demo"]);
    let long = client.post("/v1/completions", &ask("demo", 300)).await.unwrap().body;
    // Requests of the model run beside the load, undisturbed.
    let beside: Vec<_> = (0..4)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                client.post("/v1/completions", &ask("demo", 300)).await.unwrap().body
            })
        })
        .collect();
    let (status, said) = load(&client, "whole", &folders.path("whole")).await;
    assert_eq!((status, &*said), (200, "Success: LoRA adapter 'whole' added successfully."));
    assert_eq!(models(&client).await[1], ("whole".to_owned(), json!(folders.path("whole"))));
    assert_eq!(answer(&client, "whole").await, whole);
    let path = folders.path("heads");
    let (ok, said) = operate(cluster.base(), &["adapters", "load", "heads", &path]);
    assert!(ok && said.contains("heads is served"), "{said}");
    assert_eq!(answer(&client, "heads").await, heads);
    for beside in beside {
        assert_eq!(text(&beside.await.unwrap()), text(&long));
    }

    // What cannot be done is refused, and changes nothing.
    let (status, said) = load(&client, "whole", &path).await;
    assert!(status == 400 && said.contains("'whole' has already been loaded"), "{status} {said}");
    let (status, said) = load(&client, "third", &path).await;
    assert!(status == 400 && said.contains("all 2 places"), "{status} {said}");
    let (status, said) = unload(&client, "third").await;
    assert!(status == 404 && said.contains("'third' cannot be found"), "{status} {said}");
    let (status, said) =
        command(&client, "/v1/load_lora_adapter", &json!({"lora_name": "x"})).await;
    assert!(status == 400 && said.contains("must be provided"), "{status} {said}");
    let (_, table) = operate(cluster.base(), &["status"]);
    assert!(table.contains("2 of 2 places") && table.contains("serving"), "{table}");

    // A request that runs ends with its adapter; new ones find it gone at once.
    let expected = client.post("/v1/completions", &ask("whole", 400)).await.unwrap().body;
    let running = {
        let client = client.clone();
        tokio::spawn(async move {
            client.post("/v1/completions", &ask("whole", 400)).await.unwrap().body
        })
    };
    let runs = |scrape: &testkit::scrape::Scrape| {
        scrape.sum("tutti_lora_requests", &[("adapter", "whole")]) == 1.0
    };
    assert!(runs(&client.scrape_until(Duration::from_secs(20), runs).await.unwrap()));
    let (ok, said) = operate(cluster.base(), &["adapters", "unload", "whole"]);
    assert!(ok && said.contains("whole is served no longer"), "{said}");
    let gone = client.post("/v1/completions", &ask("whole", 4)).await.unwrap();
    assert_eq!((gone.status, &gone.body["error"]["code"]), (404, &json!("model_not_found")));
    assert_eq!(names(&client).await, ["demo", "heads"]);
    // Another one of that name has its own blocks: the prompt's are not taken for its own.
    let early = load(&client, "whole", &path).await;
    let ended = running.await.unwrap();
    assert_eq!((text(&ended), &ended["model"]), (text(&expected), &json!("whole")));
    if early.0 != 200 {
        assert!(early.1.contains("that requests still use"), "{}", early.1);
        until("its place is free", async || {
            (load(&client, "whole", &path).await.0 == 200).then_some(())
        })
        .await;
    }
    assert_eq!(answer(&client, "whole").await, heads);

    // A load that fails leaves nothing.
    assert_eq!(unload(&client, "whole").await.0, 200);
    let wrong = Path::new("/no/such/adapter");
    until("the folder is missing", async || {
        let (status, said) = load(&client, "none", wrong.to_str().unwrap()).await;
        // Until the place is free.
        (status == 400 && said.contains("/no/such/adapter")).then_some(())
    })
    .await;
    assert_eq!(names(&client).await, ["demo", "heads"]);

    // A worker that comes back has what is served.
    LocalCluster::signal(cluster.worker_pids()[1], "KILL").unwrap();
    until("it serves again", async || {
        let reply = client.post("/v1/completions", &ask("heads", 24)).await.ok()?;
        (reply.status == 200).then(|| assert_eq!(reply.body["choices"], heads))
    })
    .await;
    assert_eq!(answer(&client, "demo").await, base);
    assert_eq!(load(&client, "whole", &folders.path("whole")).await.0, 200);
    assert_eq!(answer(&client, "whole").await, whole);
    check_invariants(&client.scrape().await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_front_end_and_every_replica_knows_what_was_loaded() {
    let folders = Folders::new();
    let [_, whole, heads] = wanted(&folders, "1").await;
    let fleet = Fleet::start(&["--tensor-parallel", "1", "--max-loras", "3"], 2, 2).await.unwrap();
    let [first, second] = &fleet.frontend_clients().unwrap()[..] else { panic!("two") };
    assert_eq!(load(first, "whole", &folders.path("whole")).await.0, 200);
    // The one that was asked knows at once.
    assert_eq!(answer(first, "whole").await, whole);
    until("the other knows, too", async || {
        (names(second).await == ["demo", "whole"]).then_some(())
    })
    .await;
    assert_eq!(answer(second, "whole").await, whole);
    // Under the same name: requests get the new one as soon as the coordinator has it.
    let path = folders.path("heads");
    let body = json!({"lora_name": "whole", "lora_path": path, "load_inplace": true});
    assert_eq!(command(second, "/v1/load_lora_adapter", &body).await.0, 200);
    for client in [first, second, &fleet.client().unwrap()] {
        for _ in 0..3 {
            assert_eq!(answer(client, "whole").await, heads);
        }
    }
    assert_eq!(unload(first, "whole").await.0, 200);
    let gone = first.post("/v1/completions", &ask("whole", 4)).await.unwrap();
    assert_eq!(gone.status, 404, "{}", gone.body);
    let late = second.post("/v1/completions", &ask("whole", 4)).await.unwrap();
    assert_eq!((late.status, &late.body["error"]["code"]), (404, &json!("model_not_found")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_leader_serves_what_was_loaded() {
    let Some(meeting) = Meeting::new().await else { return };
    let folders = Folders::new();
    let [_, whole, heads] = wanted(&folders, "1").await;
    let module = format!("heads={}", folders.path("heads"));
    let args = ["--leader-lease", "2", "--max-loras", "3", "--lora-modules", &module];
    let mut first = meeting.coordinator_of("1", &args).await;
    let _worker = meeting.worker(0);
    first.wait_ready().await.unwrap();
    let leader = first.client().unwrap();
    assert_eq!(answer(&leader, "heads").await, heads);
    assert_eq!(load(&leader, "whole", &folders.path("whole")).await.0, 200);
    assert_eq!(unload(&leader, "heads").await.0, 200);
    let second = meeting.coordinator_of("1", &args).await;
    LocalCluster::signal(first.pid(), "KILL").unwrap();
    let leader = second.client().unwrap();
    until("the next leader serves", async || serves(&leader).await.then_some(())).await;
    assert_eq!(names(&leader).await, ["demo", "whole"]);
    assert_eq!(answer(&leader, "whole").await, whole);
    assert_eq!(load(&leader, "heads", &folders.path("heads")).await.0, 200);
    assert_eq!(answer(&leader, "heads").await, heads);
}

/// Loading is an operator's act: a client's key does not suffice, unless the operator says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_operators_load_adapters_unless_clients_may() {
    let folders = Folders::new();
    let path = folders.path("whole");
    let secret = folders.0.path().join("secret");
    std::fs::write(&secret, "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2U=").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&secret, mode).unwrap();
    let secret = ["--cluster-secret-file", secret.to_str().unwrap()];
    let key = ["--api-key", "sesame", "--tensor-parallel", "1"];
    let send = async |cluster: &LocalCluster, key: Option<&str>| {
        let url = format!("{}/v1/load_lora_adapter", cluster.base());
        let body = json!({"lora_name": "whole", "lora_path": path});
        let request = reqwest::Client::new().post(url).json(&body);
        let request = key.iter().fold(request, |request, key| request.bearer_auth(key));
        request.send().await.unwrap().status().as_u16()
    };
    let closed = up(&[&key[..], &secret, &["--max-loras", "1"]].concat()).await;
    for key in [None, Some("sesame"), Some("other")] {
        assert_eq!(send(&closed, key).await, 401, "{key:?}");
    }
    let load = [&["adapters", "load", "whole", &path][..], &secret].concat();
    let (ok, said) = operate(closed.base(), &load);
    assert!(ok, "{said}");
    drop(closed);
    let allowed = ["--max-loras", "1", "--allow-runtime-lora-updating"];
    let open = up(&[&key[..], &secret, &allowed].concat()).await;
    for (key, status) in [(None, 401), (Some("other"), 401), (Some("sesame"), 200)] {
        assert_eq!(send(&open, key).await, status, "{key:?}");
    }
    // Without room, nobody can.
    drop(open);
    let fixed = up(&["--tensor-parallel", "1"]).await;
    let client = fixed.client().unwrap();
    let (status, said) = self::load(&client, "whole", &path).await;
    assert!(status == 400 && said.contains("--max-loras N"), "{status} {said}");
}

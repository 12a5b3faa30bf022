//! LoRA adapters beside the demo model: chosen by name on every endpoint; same results alone and in
//! a batch, also when a worker dies and through separate front ends.
use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::adapters::AdapterSpec;
use testkit::client::Client;
use testkit::fleet::Fleet;
use testkit::local_cluster::LocalCluster;
use testkit::models::demo;

use crate::counters::check_invariants;
use crate::{STORY, greedy, text, up};

/// Two adapters in a scratch folder.
fn adapters() -> (TempDir, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let specs = [("whole", AdapterSpec::whole(8, 51)), ("heads", AdapterSpec::attention(16, 52))];
    let mut modules = Vec::new();
    for (name, spec) in specs {
        let path = folder.path().join(name);
        std::fs::create_dir(&path).unwrap();
        spec.write(&demo(), &path).unwrap();
        modules.push(format!("{name}={}", path.display()));
    }
    (folder, modules)
}

/// A completion by the model or one of its adapters.
fn ask(model: &str, seed: u32, max_tokens: u32) -> Value {
    let mut body = greedy(STORY, max_tokens);
    body["model"] = json!(model);
    body["ignore_eos"] = json!(true);
    body["logprobs"] = json!(1);
    if seed > 0 {
        body["temperature"] = json!(0.8);
        body["seed"] = json!(seed);
    }
    body
}

const MODELS: [&str; 3] = ["demo", "whole", "heads"];

/// The answers of the model and its adapters, one request at a time.
async fn alone(client: &Client) -> BTreeMap<(&'static str, u32), Value> {
    let mut answers = BTreeMap::new();
    for model in MODELS {
        for seed in 0..3 {
            let reply = client.post("/v1/completions", &ask(model, seed, 40)).await.unwrap();
            assert_eq!(reply.status, 200, "{}", reply.body);
            assert_eq!(reply.body["model"], model);
            answers.insert((model, seed), reply.body["choices"].clone());
        }
    }
    answers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adapters_are_models_of_their_own_on_every_endpoint() {
    let (_folder, modules) = adapters();
    let modules: Vec<&str> = modules.iter().map(String::as_str).collect();
    let args = [&["--lora-modules"][..], &modules, &["--tensor-parallel", "2"]].concat();
    let cluster = up(&args).await;
    let client = cluster.client().unwrap();
    let list = client.get("/v1/models").await.unwrap().body;
    let cards = list["data"].as_array().unwrap();
    let ids: Vec<&str> = cards.iter().map(|card| card["id"].as_str().unwrap()).collect();
    assert_eq!(ids, MODELS);
    assert_eq!(cards[0]["parent"], Value::Null);
    assert!(cards[0]["root"].as_str().unwrap().ends_with("models/demo"), "{}", cards[0]);
    for (card, module) in cards[1..].iter().zip(&modules) {
        let (_, path) = module.split_once('=').unwrap();
        assert_eq!((&card["parent"], &card["root"]), (&json!("demo"), &json!(path)));
    }
    assert_eq!(client.get("/v1/models/heads").await.unwrap().body["id"], "heads");
    let wanted = alone(&client).await;
    for seed in 0..3 {
        let texts: Vec<&Value> = MODELS.iter().map(|model| &wanted[&(*model, seed)]).collect();
        assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2]);
    }
    // All at once, each twice: the same answers as alone, even though the prompts are equal.
    let mut running = Vec::new();
    for (model, seed) in wanted.keys().copied().chain(wanted.keys().copied()) {
        let client = client.clone();
        let body = ask(model, seed, 40);
        let asked = async move { client.post("/v1/completions", &body).await.unwrap() };
        running.push((model, seed, tokio::spawn(asked)));
    }
    for (model, seed, asked) in running {
        let reply = asked.await.unwrap();
        assert_eq!(reply.body["choices"], wanted[&(model, seed)], "{model} {seed}");
    }
    let message = json!([{"role": "user", "content": "Tell me a story."}]);
    let mut told = Vec::new();
    for model in MODELS {
        let chat = json!({"model": model, "messages": message, "max_tokens": 12, "temperature": 0});
        let chat = client.post("/v1/chat/completions", &chat).await.unwrap().body;
        let response = json!({
            "model": model, "input": "Tell me a story.", "max_output_tokens": 16, "temperature": 0,
        });
        let response = client.post("/v1/responses", &response).await.unwrap().body;
        let embedding = json!({"model": model, "input": STORY});
        let embedding = client.post("/v1/embeddings", &embedding).await.unwrap().body;
        for body in [&chat, &response, &embedding] {
            assert_eq!(body["model"], model, "{body}");
        }
        let chat = chat["choices"][0]["message"]["content"].clone();
        told.push((chat, response["output"][0]["content"].clone(), embedding["data"].clone()));
    }
    for (a, b) in [(0, 1), (1, 2), (0, 2)] {
        let (a, b) = (&told[a], &told[b]);
        assert!(a.0 != b.0 && a.1 != b.1 && a.2 != b.2, "{a:?} {b:?}");
    }
    let other = client.post("/v1/completions", &ask("other", 0, 4)).await.unwrap();
    let code = other.body["error"]["code"].as_str();
    assert_eq!((other.status, code), (404, Some("model_not_found")));
    let scrape = client.scrape().await.unwrap();
    check_invariants(&scrape);
    for model in &MODELS[1..] {
        // Nothing is running any more, but the series exists.
        let labels = [("adapter", *model)];
        let found = scrape.samples().iter().filter(|sample| {
            sample.name == "tutti_lora_requests"
                && sample.labels.get("adapter").map(String::as_str) == Some(model)
        });
        assert_eq!(found.count(), 1);
        assert_eq!(scrape.sum("tutti_lora_requests", &labels), 0.0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_worker_changes_nothing_of_an_adapters_text() {
    let (_folder, modules) = adapters();
    let modules: Vec<&str> = modules.iter().map(String::as_str).collect();
    let args = [&["--lora-modules"][..], &modules].concat();
    let cluster = up(&args).await;
    let client = cluster.client().unwrap();
    let bodies = MODELS.map(|model| ask(model, 5, 400));
    let mut undisturbed = Vec::new();
    for body in &bodies {
        undisturbed.push(client.post("/v1/completions", body).await.unwrap().body);
    }
    let running = bodies.clone().map(|body| {
        let client = client.clone();
        tokio::spawn(async move { client.post("/v1/completions", &body).await.unwrap() })
    });
    let generated = client.scrape().await.unwrap().sum("tutti_generation_tokens_total", &[]);
    let begun = client
        .scrape_until(Duration::from_secs(30), |scrape| {
            scrape.sum("tutti_generation_tokens_total", &[]) > generated + 60.0
                && scrape.sum("tutti_requests_running", &[]) == 3.0
        })
        .await
        .unwrap();
    assert_eq!(begun.sum("tutti_lora_requests", &[("adapter", "whole")]), 1.0);
    assert_eq!(begun.sum("tutti_lora_requests", &[("adapter", "heads")]), 1.0);
    LocalCluster::signal(cluster.worker_pids()[1], "KILL").unwrap();
    for (running, undisturbed) in running.into_iter().zip(&undisturbed) {
        let reply = running.await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        assert_eq!(text(&reply.body), text(undisturbed));
    }
    check_invariants(&client.scrape().await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn front_ends_of_their_own_know_the_adapters() {
    let (_folder, modules) = adapters();
    let modules: Vec<&str> = modules.iter().map(String::as_str).collect();
    let args = [&["--tensor-parallel", "1", "--lora-modules"][..], &modules].concat();
    let fleet = Fleet::start(&args, 1, 1).await.unwrap();
    let frontend = &fleet.frontend_clients().unwrap()[0];
    let coordinator = fleet.client().unwrap();
    assert_eq!(frontend.get("/v1/models").await.unwrap().body["data"][2]["id"], "heads");
    assert_eq!(alone(frontend).await, alone(&coordinator).await);
}

#[test]
fn an_adapter_that_cannot_be_served_ends_with_one_clear_error() {
    let (_folder, modules) = adapters();
    let fails_with = |args: &[&str], words: &[&str]| {
        let mut cluster =
            LocalCluster::spawn(&[&["up", "--listen", "127.0.0.1:0"][..], args].concat()).unwrap();
        let status = cluster.wait_end().unwrap();
        std::thread::sleep(Duration::from_millis(200));
        let log = cluster.log();
        assert!(!status.success() && !log.contains("panicked"), "{log}");
        assert!(words.iter().all(|word| log.contains(word)), "{words:?} in:\n{log}");
    };
    let heads = modules[1].as_str();
    fails_with(
        &["--lora-modules", heads, "--max-lora-rank", "8"],
        &["error:", "heads/adapter_config.json", "r is 16, it must be 1 to 8 (--max-lora-rank)"],
    );
    fails_with(&["--lora-modules", "a=/no/such/adapter"], &["error:", "/no/such/adapter"]);
    fails_with(
        &["--lora-modules", heads, heads],
        &["error:", "--lora-modules", "the name heads is given twice"],
    );
    fails_with(&["--lora-modules", "heads"], &["expected NAME=DIR"]);
}

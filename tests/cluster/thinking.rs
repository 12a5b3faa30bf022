//! Bounds on reasoning with a real model: it ends at its budget, and nothing else changes.
use serde_json::{Value, json};
use testkit::client::Client;
use testkit::fleet::free_port;
use testkit::local_cluster::LocalCluster;
use testkit::models::demo;

use crate::{disturbed, up};

/// The token that ends reasoning.
const CLOSE: u64 = 0;

/// The demo model, two of whose tokens, which it never generates, are the marks around reasoning.
/// Its chat template opens it.
fn model() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(demo()).unwrap() {
        let (from, name) = entry.map(|entry| (entry.path(), entry.file_name())).unwrap();
        let to = folder.path().join(&name);
        if ["tokenizer", "special_tokens"].iter().any(|it| name.to_str().unwrap().starts_with(it)) {
            let text = std::fs::read_to_string(from).unwrap();
            let text = text.replace("<|pad|>", "</think>").replace("<|system|>", "<think>");
            std::fs::write(to, text).unwrap();
        } else {
            std::fs::copy(from, to).unwrap();
        }
    }
    let template = "{% for it in messages %}<|user|>{{ it.content }}<|end|>{% endfor %}\
                    {{ '<|assistant|><think>' if add_generation_prompt }}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    folder
}

async fn ask(client: &Client, more: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Tell me of a fox."}],
        "max_tokens": 40, "temperature": 1.0, "seed": 5, "ignore_eos": true,
        "return_token_ids": true});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    let reply = client.post("/v1/chat/completions", &body).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.body["choices"].clone()
}

fn tokens(choice: &Value) -> Vec<u64> {
    choice["token_ids"].as_array().unwrap().iter().map(|it| it.as_u64().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reasoning_ends_at_its_budget_also_in_other_processes_and_when_a_worker_dies() {
    let (folder, address) = (model(), format!("127.0.0.1:{}", free_port()));
    let args = ["--model", folder.path().to_str().unwrap(), "--reasoning-parser", "think"];
    let own = ["--workers", "2", "--tensor-parallel", "2", "--cluster-listen", &address];
    let cluster = up(&[&args[..], &own].concat()).await;
    let join = ["frontend", "--coordinator", &address, "--listen", "127.0.0.1:0"];
    let mut front = LocalCluster::spawn(&[&join[..], &args[2..]].concat()).unwrap();
    front.wait_ready().await.unwrap();
    let clients = [cluster.client().unwrap(), front.client().unwrap()];

    let free = ask(&clients[0], &json!({"n": 2})).await;
    assert!(tokens(&free[0]).len() == 40 && free[0]["message"]["content"].is_null(), "{free}");
    for client in &clients {
        for budget in [0, 12] {
            let more = json!({"n": 2, "thinking_token_budget": budget});
            let bound = ask(client, &more).await;
            for choice in 0..2 {
                let (bound, free) = (&bound[choice], tokens(&free[choice]));
                let ids = tokens(bound);
                assert_eq!((&ids[..budget], ids[budget]), (&free[..budget], CLOSE), "{bound}");
                assert!(!bound["message"]["content"].as_str().unwrap().is_empty(), "{bound}");
                let reasoning = bound["message"]["reasoning"].as_str().unwrap_or_default();
                assert_eq!(reasoning.is_empty(), budget == 0, "{bound}");
            }
        }
        let more = json!({"thinking_token_budget": 12, "ignore_eos": false,
            "structured_outputs": {"choice": ["green", "red"]}});
        let answer = &ask(client, &more).await[0];
        assert!(tokens(answer)[12] == CLOSE && answer["finish_reason"] == "stop", "{answer}");
        let content = answer["message"]["content"].as_str().unwrap();
        assert!(["green", "red"].contains(&content), "{answer}");
    }

    let long = json!({"thinking_token_budget": 700, "max_tokens": 800});
    let undisturbed = ask(&clients[1], &long).await;
    assert_eq!(tokens(&undisturbed[0])[700], CLOSE);
    let client = clients[1].clone();
    let (answer, scrape) = disturbed(&cluster, async move { ask(&client, &long).await }).await;
    assert_eq!(answer, undisturbed);
    assert_eq!(scrape.sum("tutti_requests_guided_total", &[("kind", "thinking")]), 6.0);
}

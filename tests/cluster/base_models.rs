//! Embedding models as they are published: saved from the base model, so that names of tensors lack
//! a prefix, and perhaps without an output head.
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::client::Client;
use testkit::models::variant;

use crate::up;

/// The model `qwen3`, saved from its base model.
fn base_model(tied: bool) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(variant("qwen3").join(file), folder.path().join(file)).unwrap();
    }
    let read = |file: &str| std::fs::read(variant("qwen3").join(file)).unwrap();
    let mut config: Value = serde_json::from_slice(&read("config.json")).unwrap();
    config["tie_word_embeddings"] = tied.into();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let weights = read("model.safetensors");
    let (length, rest) = weights.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header = str::from_utf8(header).unwrap().replace("\"model.", "\"");
    let length = (header.len() as u64).to_le_bytes();
    let weights = [&length, header.as_bytes(), data].concat();
    std::fs::write(folder.path().join("model.safetensors"), weights).unwrap();
    folder
}

async fn embeddings(client: &Client) -> Value {
    let body = json!({"input": ["The sky is blue.", "Pip, the fox, was asleep."]});
    let reply = client.post("/v1/embeddings", &body).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.body["data"].clone()
}

async fn completion(client: &Client) -> Value {
    let body = json!({"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0,
        "ignore_eos": true, "logprobs": 1});
    let reply = client.post("/v1/completions", &body).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.body["choices"].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_base_model_embeds_and_writes_like_the_whole_model() {
    let (base, headless) = (base_model(true), base_model(false));
    for degree in ["1", "2"] {
        let start = async |folder: &Path| {
            let model = folder.to_str().unwrap();
            up(&["--model", model, "--tensor-parallel", degree, "--workers", degree]).await
        };
        let whole = start(&variant("qwen3")).await;
        let client = whole.client().unwrap();
        let (vectors, text) = (embeddings(&client).await, completion(&client).await);
        drop(whole);
        let cluster = start(base.path()).await;
        let client = cluster.client().unwrap();
        assert_eq!(embeddings(&client).await, vectors);
        assert_eq!(completion(&client).await, text);
        drop(cluster);
        let cluster = start(headless.path()).await;
        let client = cluster.client().unwrap();
        assert_eq!(embeddings(&client).await, vectors);
        let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
        for (path, body) in
            [("/v1/completions", json!({"prompt": "x"})), ("/v1/chat/completions", chat)]
        {
            let refused = client.post(path, &body).await.unwrap();
            let error = &refused.body["error"];
            assert_eq!((refused.status, &error["param"]), (400, &json!("model")), "{error}");
            let message = error["message"].as_str().unwrap();
            assert!(message.contains("no output head") && message.contains("/v1/embeddings"));
        }
        // It serves on.
        assert_eq!(embeddings(&client).await, vectors);
    }
}

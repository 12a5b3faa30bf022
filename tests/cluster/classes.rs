//! Models that sort texts into classes and judge pairs of them, in real processes, compared with
//! transformers; one with K and V in FP8.
use std::process::Command;

use serde_json::{Value, json};
use testkit::local_cluster::tutti_binary;
use testkit::models::{class_goldens, variant};

use crate::up;

fn sigmoid(number: f64) -> f64 {
    1.0 / (1.0 + (-number).exp())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_ranks_sort_texts_as_transformers_does() {
    let folder = variant("llama-classes");
    let model = folder.to_str().unwrap();
    let args = ["--model", model, "--dtype", "float32", "--workers", "2", "--tensor-parallel", "2"];
    let cluster = up(&args).await;
    let client = cluster.client().unwrap();
    let goldens = class_goldens(&folder).prompts;
    let prompts: Vec<&[u32]> = goldens.iter().map(|golden| &*golden.prompt_ids).collect();
    let reply = client.post("/classify", &json!({"input": prompts})).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    for (entry, golden) in reply.body["data"].as_array().unwrap().iter().zip(&goldens) {
        let powers: Vec<f64> = golden.numbers.iter().map(|number| number.exp()).collect();
        let sum: f64 = powers.iter().sum();
        let probs: Vec<f64> = serde_json::from_value(entry["probs"].clone()).unwrap();
        for (prob, power) in probs.iter().zip(&powers) {
            assert!((prob - power / sum).abs() < 1e-4, "{entry} {:?}", golden.numbers);
        }
        let best = (0..3).max_by(|a, b| probs[*a].total_cmp(&probs[*b])).unwrap();
        assert_eq!(entry["label"], ["good", "bad", "neither"][best]);
    }
    let used: usize = prompts.iter().map(|prompt| prompt.len()).sum();
    assert_eq!(reply.body["usage"]["prompt_tokens"], used);
    let refused = client.post("/v1/completions", &json!({"prompt": "x"})).await.unwrap();
    assert_eq!((refused.status, &refused.body["error"]["param"]), (400, &json!("model")));
    let scrape = client.scrape().await.unwrap();
    let counted = scrape.sum("tutti_embedding_latency_seconds_count", &[]);
    assert_eq!(counted, goldens.len() as f64);
    assert_eq!(scrape.sum("tutti_prompt_tokens_total", &[]), used as f64);
    let status =
        Command::new(tutti_binary()).args(["status", "--server", cluster.base()]).output().unwrap();
    let shown = String::from_utf8_lossy(&status.stdout);
    assert!(shown.contains("llama-classes (sorts texts into 3 classes)"), "{shown}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reranker_judges_pairs_by_its_template_with_a_cache_in_fp8() {
    let folder = variant("qwen3-reranker");
    let template = folder.join("score.jinja");
    let files = [folder.to_str().unwrap(), template.to_str().unwrap()];
    let cache = ["--kv-cache-dtype", "fp8", "--kv-cache-memory", "1MiB"];
    let args = ["--model", files[0], "--chat-template", files[1], "--workers", "1"];
    let cluster = up(&[&args[..], &["--tensor-parallel", "1"], &cache].concat()).await;
    let client = cluster.client().unwrap();
    // A token has 2 layers of 2 heads of 32 elements of K and V: 4 KiB for the 16 tokens of a
    // block, and twice as much without the option.
    let scrape = client.scrape().await.unwrap();
    let sizes = scrape.samples().iter().find(|it| it.name == "tutti_cache_config_info").unwrap();
    assert_eq!((&*sizes.labels["num_blocks"], &*sizes.labels["cache_dtype"]), ("256", "fp8"));
    let pairs = class_goldens(&folder).pairs;
    let documents: Vec<&str> = pairs.iter().map(|pair| &*pair.document).collect();
    let scores = async |documents: &[&str], query: &str| {
        let body = json!({"query": query, "documents": documents});
        let reply = client.post("/rerank", &body).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        let results = reply.body["results"].as_array().unwrap().clone();
        results.iter().map(|it| it["relevance_score"].as_f64().unwrap()).collect::<Vec<_>>()
    };
    for pair in &pairs {
        let score = scores(&[&pair.document], &pair.query).await[0];
        let expected = sigmoid(pair.numbers.templated);
        assert!((score - expected).abs() < 0.1, "{score} {expected}");
    }
    let all = scores(&documents, &pairs[0].query).await;
    assert!(all.is_sorted_by(|one, other| one >= other), "{all:?}");
    let card: Value = client.get("/v1/models").await.unwrap().body["data"][0].clone();
    assert_eq!((&card["task"], &card["num_classes"]), (&json!("classify"), &json!(1)));
}

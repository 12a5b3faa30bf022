//! A model with linear attention: sequences that are preempted, or lost with their rank, or share
//! their steps with others get the tokens that they get alone.
use serde_json::{Value, json};
use testkit::local_cluster::LocalCluster;
use testkit::models::{goldens, variant};

use crate::{STORY, disturbed, greedy, text, up};

fn tokens(body: &Value) -> &Value {
    &body["choices"][0]["token_ids"]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequences_get_the_same_tokens_alone_and_among_others() {
    let model = variant("qwen3_5");
    let model = model.to_str().unwrap();
    // 24 blocks of 16 tokens hold two of the requests of some 170 tokens, three run at a time.
    let cluster = up(&[
        "--model",
        model,
        "--served-model-name",
        "demo",
        "--workers",
        "2",
        "--tensor-parallel",
        "2",
        "--kv-cache-memory",
        "96KiB",
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "3",
        "--dtype",
        "float32",
    ])
    .await;
    let client = cluster.client().unwrap();
    for golden in goldens(&variant("qwen3_5")) {
        let mut body = greedy(golden.prompt_ids.clone(), 32);
        body["ignore_eos"] = json!(true);
        body["return_token_ids"] = json!(true);
        // Twice: the second time from the state that was kept, if the prompt is long enough.
        for _ in 0..2 {
            let reply = client.post("/v1/completions", &body).await.unwrap();
            assert_eq!(*tokens(&reply.body), json!(golden.greedy_ids), "{}", reply.body);
        }
    }
    let body = |i: usize| {
        let mut body = greedy(&STORY[..20 + i], 150);
        body["temperature"] = json!(0.8);
        body["seed"] = json!(i);
        body["ignore_eos"] = json!(true);
        body
    };
    let mut alone = Vec::new();
    for i in 0..6 {
        alone.push(text(&client.post("/v1/completions", &body(i)).await.unwrap().body).to_owned());
    }
    let all = {
        let client = client.clone();
        let alone = alone.clone();
        async move {
            let ask = |i: usize| {
                let client = client.clone();
                tokio::spawn(async move { client.post("/v1/completions", &body(i)).await })
            };
            let tasks: Vec<_> = (0..6).map(ask).collect();
            for (i, task) in tasks.into_iter().enumerate() {
                let reply = task.await.unwrap().unwrap();
                assert_eq!(text(&reply.body), alone[i], "request {i}");
            }
        }
    };
    // A rank is killed meanwhile.
    let ((), scrape) = disturbed(&cluster, all).await;
    assert!(scrape.sum("tutti_preemptions_total", &[]) > 0.0, "the cache must be too small");
    let queries = scrape.sum("tutti_prefix_cache_query_tokens_total", &[]);
    let hits = scrape.sum("tutti_prefix_cache_hit_tokens_total", &[]);
    // One of the goldens has 106 tokens, and is asked for twice.
    assert!(hits >= 96.0 && hits < queries, "{hits} of {queries} tokens");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_state_does_not_allow_is_refused_with_one_line() {
    let model = variant("qwen3_5");
    let model = model.to_str().unwrap();
    let ngram = json!({"method": "ngram", "num_speculative_tokens": 3}).to_string();
    for (option, value) in [("--swap-space", "1"), ("--speculative-config", &ngram)] {
        let args = ["up", "--listen", "127.0.0.1:0", "--model", model, option, value];
        let mut cluster = LocalCluster::spawn(&args).unwrap();
        let status = cluster.wait_end().unwrap();
        let log = cluster.log();
        assert!(!status.success() && !log.contains("panicked"), "{log}");
        let words = format!("{option}: not supported for a model with linear attention");
        assert!(log.contains(&words), "{words} in:\n{log}");
    }
}

//! Common prefixes of prompts are computed once, without any effect on the answers.
use serde_json::{Value, json};
use testkit::client::Client;
use testkit::contract::Contract;
use testkit::scrape::Scrape;

use crate::counters::check_invariants;
use crate::scaling::operate;
use crate::{STORY, greedy, up};

/// Requests whose prompts share about 80 tokens, with everything that may depend on a cache:
/// log-probabilities of the prompt, several choices, seeds.
fn requests() -> Vec<Value> {
    let long = format!(
        "{STORY} {}",
        "He lived in a small house by the river with his friends. ".repeat(6)
    );
    let mut requests = Vec::new();
    for round in 0..3 {
        for tail in ["One day he", "Every night the moon", "His mother said"] {
            let mut body = greedy(format!("{long}{tail}"), 24);
            body["n"] = json!(1 + round);
            body["seed"] = json!(round);
            body["temperature"] = json!([0.0, 0.8, 0.8][round]);
            body["logprobs"] = json!(2);
            body["echo"] = json!(round == 2 && tail == "One day he");
            requests.push(body);
        }
    }
    requests
}

/// Returns the answers, the number of prompt tokens of all choices, and how many of them have to be
/// computed.
async fn answers(client: &Client, salt: Option<&str>) -> (Vec<Value>, f64, f64) {
    let mut answers = Vec::new();
    let (mut prompt_tokens, mut computed) = (0.0, 0.0);
    for mut body in requests() {
        if let Some(salt) = salt {
            body["cache_salt"] = json!(salt);
        }
        let reply = client.post("/v1/completions", &body).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        let n = body["n"].as_f64().unwrap();
        let prompt = reply.body["usage"]["prompt_tokens"].as_f64().unwrap();
        prompt_tokens += n * prompt;
        // The first choice has the log-probabilities of the prompt.
        computed += if body["echo"] == json!(true) { prompt } else { 0.0 };
        answers.push(reply.body["choices"].clone());
    }
    (answers, prompt_tokens, computed)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_known_in_part_is_computed_in_part_and_answered_alike() {
    let without = up(&["--no-enable-prefix-caching"]).await;
    let (expected, prompt_tokens, computed) = answers(&without.client().unwrap(), None).await;
    let scrape = without.client().unwrap().scrape().await.unwrap();
    assert_eq!(scrape.sum("tutti_prompt_tokens_total", &[]), prompt_tokens);
    assert_eq!(scrape.sum("tutti_prefix_cache_query_tokens_total", &[]), 0.0);
    drop(without);

    let with = up(&["--workers", "2", "--tensor-parallel", "2"]).await;
    let client = with.client().unwrap();
    let (first, ..) = answers(&client, None).await;
    assert_eq!(first, expected);
    let scrape = client.scrape().await.unwrap();
    check_invariants(&scrape);
    let cached =
        scrape.sum("tutti_prompt_tokens_by_source_total", &[("source", "local_cache_hit")]);
    assert_eq!(scrape.sum("tutti_prompt_tokens_total", &[]), prompt_tokens);
    // What has to be computed as a whole is not looked up.
    let looked_up = scrape.sum("tutti_prefix_cache_query_tokens_total", &[]);
    assert_eq!(looked_up, prompt_tokens - computed);
    assert_eq!(scrape.sum("tutti_prefix_cache_hit_tokens_total", &[]), cached);
    // All but the first request, and except the one that asks for its prompt's log-probabilities.
    assert!(cached > 0.6 * prompt_tokens, "{cached} of {prompt_tokens}");

    // A different salt shares nothing; the same salt does.
    let hits = |scrape: &Scrape| scrape.sum("tutti_prefix_cache_hit_tokens_total", &[]);
    let (salted, ..) = answers(&client, Some("a")).await;
    assert_eq!(salted, expected);
    let once = hits(&client.scrape().await.unwrap()) - cached;
    assert_eq!(once, cached, "as much as at first, nothing of what others asked");
    let (again, ..) = answers(&client, Some("a")).await;
    assert_eq!(again, expected);
    assert!(hits(&client.scrape().await.unwrap()) > 3.0 * cached);

    // The client is told the number of cached tokens.
    let mut body = greedy(STORY.repeat(8), 4);
    body["cache_salt"] = json!("usage");
    let ask = async |known: bool| {
        let usage = client.post("/v1/completions", &body).await.unwrap().body["usage"].clone();
        let told = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        let prompt = usage["prompt_tokens"].as_u64().unwrap();
        assert_eq!(told, if known { (prompt - 1) / 16 * 16 } else { 0 });
    };
    ask(false).await;
    ask(true).await;

    // An operator empties the cache.
    let contract = Contract::of(&client).await.unwrap();
    // As vLLM's clients write it.
    for (query, status) in
        [("", 200), ("?reset_running_requests=False", 200), ("?reset_external=true", 400)]
    {
        let path = format!("/reset_prefix_cache{query}");
        let reply = client.post(&path, &json!(null)).await.unwrap();
        contract.check("post", &path, None, &reply);
        assert_eq!(reply.status, status, "{}", reply.body);
    }
    assert_eq!(client.get("/reset_prefix_cache").await.unwrap().status, 405);
    ask(false).await;
    ask(true).await;
    let (ok, said) = operate(with.base(), &["reset-prefix-cache"]);
    assert!(ok, "{said}");
    ask(false).await;
}

//! Structured output of a real model: whatever it would write, it writes what the schema allows.
use std::collections::BTreeMap;

use serde_json::{Value, json};
use testkit::client::Client;
use testkit::fleet::Fleet;

use crate::{STORY, disturbed, up};

/// A schema whose texts are long enough to be interrupted, and bounded.
fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 40},
            "mood": {"enum": ["glad", "sad", null]},
            "scores": {"type": "array", "minItems": 30, "maxItems": 40,
                "items": {"type": "integer", "minimum": -50, "maximum": 50}},
            "seen": {"type": "boolean"},
        },
        "required": ["title", "mood", "scores", "seen"],
        "additionalProperties": false,
    })
}

/// Checks the schema's rules independently.
fn assert_valid(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert_eq!(value.as_object().unwrap().len(), 4, "{text}");
    assert!(value["title"].as_str().unwrap().chars().count() <= 40, "{text}");
    assert!([json!("glad"), json!("sad"), json!(null)].contains(&value["mood"]), "{text}");
    let scores = value["scores"].as_array().unwrap();
    assert!((30..=40).contains(&scores.len()), "{text}");
    // -0 is an integer, too.
    let is_score = |x: f64| x.fract() == 0.0 && (-50.0..=50.0).contains(&x);
    assert!(scores.iter().all(|it| it.as_f64().is_some_and(is_score)), "{text}");
    assert!(value["seen"].is_boolean(), "{text}");
}

fn completion(seed: u64) -> Value {
    json!({"prompt": STORY, "max_tokens": 700, "temperature": 1.0, "seed": seed,
        "response_format": {"type": "json_schema",
            "json_schema": {"name": "story", "schema": schema()}}})
}

fn texts(reply: &Value) -> Vec<&str> {
    let choices = reply["choices"].as_array().unwrap();
    assert!(choices.iter().all(|it| it["finish_reason"] == "stop"), "{reply}");
    choices.iter().map(|it| it["text"].as_str().unwrap()).collect()
}

async fn post(client: &Client, body: &Value) -> Value {
    let reply = client.post("/v1/completions", body).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.body
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_is_what_its_schema_says_for_every_seed_and_choice_and_in_streams() {
    let cluster = up(&[]).await;
    let client = cluster.client().unwrap();
    for seed in 0..4 {
        let mut body = completion(seed);
        body["n"] = json!(2);
        let reply = post(&client, &body).await;
        let whole = texts(&reply);
        assert!(whole.len() == 2 && whole[0] != whole[1], "{whole:?}");
        whole.iter().for_each(|text| assert_valid(text));
        // The same as a stream.
        body["stream"] = json!(true);
        let mut streamed = BTreeMap::<u64, String>::new();
        for event in client.stream("/v1/completions", &body).await.unwrap().events {
            for choice in event["choices"].as_array().unwrap() {
                let text = streamed.entry(choice["index"].as_u64().unwrap()).or_default();
                text.push_str(choice["text"].as_str().unwrap());
            }
        }
        assert_eq!(streamed.into_values().collect::<Vec<_>>(), whole);
    }
    // Guided and unguided requests in one batch do not affect each other.
    let alone = post(&client, &completion(9)).await;
    let free = json!({"prompt": STORY, "max_tokens": 200, "seed": 3, "ignore_eos": true});
    let free_alone = post(&client, &free).await;
    let guided = completion(9);
    let (one, two) = tokio::join!(post(&client, &guided), post(&client, &free));
    assert_eq!(one["choices"], alone["choices"]);
    assert_eq!(two["choices"], free_alone["choices"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_choice_a_pattern_and_a_grammar_are_kept_to_in_chats() {
    let cluster = up(&[]).await;
    let client = cluster.client().unwrap();
    let ask = |more: Value| {
        let client = client.clone();
        async move {
            let mut body = json!({"messages": [{"role": "user", "content": "Well?"}],
                "max_tokens": 60, "temperature": 1.2, "seed": 4});
            body[more.as_object().unwrap().keys().next().unwrap()] =
                more.as_object().unwrap().values().next().unwrap().clone();
            let reply = client.post("/v1/chat/completions", &body).await.unwrap();
            assert_eq!(reply.status, 200, "{}", reply.body);
            let choice = &reply.body["choices"][0];
            assert_eq!(choice["finish_reason"], "stop", "{choice}");
            choice["message"]["content"].as_str().unwrap().to_owned()
        }
    };
    let answer = ask(json!({"structured_outputs": {"choice": ["green", "greenish", "red"]}})).await;
    assert!(["green", "greenish", "red"].contains(&answer.as_str()), "{answer}");
    let answer = ask(json!({"guided_regex": "[a-f]{4}-[0-9]{4}"})).await;
    let (letters, digits) = answer.split_once('-').unwrap();
    assert!(letters.len() == 4 && letters.bytes().all(|b| (b'a'..=b'f').contains(&b)), "{answer}");
    assert!(digits.len() == 4 && digits.bytes().all(|b| b.is_ascii_digit()), "{answer}");
    let grammar = "start: N (\"+\" N)~1..3\nN: /[1-9][0-9]?/";
    let answer = ask(json!({"guided_grammar": grammar})).await;
    let numbers: Vec<u32> = answer.split('+').map(|it| it.parse().unwrap()).collect();
    assert!((2..=4).contains(&numbers.len()), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_killed_amid_json_changes_nothing_of_it() {
    let cluster = up(&[]).await;
    let client = cluster.client().unwrap();
    let mut body = completion(5);
    body["n"] = json!(2);
    let undisturbed = post(&client, &body).await;
    let (reply, _) = disturbed(&cluster, async move { post(&client, &body).await }).await;
    assert_eq!(reply["choices"], undisturbed["choices"]);
    texts(&reply).into_iter().for_each(assert_valid);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn front_ends_of_their_own_give_the_same_and_refuse_the_same() {
    let fleet = Fleet::start(&[], 2, 1).await.unwrap();
    let clients = [fleet.coordinator.client().unwrap(), fleet.frontends[0].client().unwrap()];
    let mut bad = completion(1);
    bad["response_format"]["json_schema"]["schema"]["type"] = json!("thing");
    let (mut said, mut refused) = (Vec::new(), Vec::new());
    for client in &clients {
        // Twice: compiled, then taken from the cache.
        for _ in 0..2 {
            let reply = post(client, &completion(6)).await;
            texts(&reply).into_iter().for_each(assert_valid);
            said.push(reply["choices"].clone());
        }
        let reply = client.post("/v1/completions", &bad).await.unwrap();
        assert_eq!(reply.status, 400, "{}", reply.body);
        refused.push(reply.body);
    }
    assert!(said.iter().all(|it| *it == said[0]));
    let scrape = clients[0].scrape().await.unwrap();
    assert_eq!(scrape.sum("tutti_requests_guided_total", &[("kind", "json")]), 4.0);
    assert_eq!(refused[0], refused[1]);
}

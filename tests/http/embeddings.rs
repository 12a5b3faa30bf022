//! `/v1/embeddings`: shapes, bounds, the engine's input.
use coordinator::engine::EngineError;
use coordinator::text::model::TextModel;
use serde_json::{Value, json};
use shared::sampling::Pooling;
use testkit::models::demo;

use crate::rig::{Rig, Script};

const PATH: &str = "/v1/embeddings";

async fn ask(rig: &Rig, body: &Value) -> Value {
    let reply = rig.client.post(PATH, body).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.body
}

/// The embedding that the rig's engine returns for these tokens, normalised to length 1.
fn vector(tokens: &[u32], dimensions: usize) -> Vec<f64> {
    let all = [f64::from(tokens[0]), tokens.len() as f64, 0.0, -1.0];
    let length = all[..dimensions].iter().map(|x| x * x).sum::<f64>().sqrt();
    all[..dimensions].iter().map(|x| x / length).collect()
}

fn is_vector(found: &Value, tokens: &[u32], dimensions: usize) {
    let found: Vec<f64> = serde_json::from_value(found.clone()).unwrap();
    let expected = vector(tokens, dimensions);
    assert_eq!(found.len(), dimensions);
    assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?}");
}

#[tokio::test]
async fn every_form_of_input_is_answered_in_order() {
    let rig = Rig::saying("x");
    let tokens = |text: &str| rig.text.encode(text, true).unwrap();
    for (input, expected) in [
        (json!("Hello there"), vec![tokens("Hello there")]),
        (json!(["a", "b c"]), vec![tokens("a"), tokens("b c")]),
        (json!([7, 8, 9]), vec![vec![7, 8, 9]]),
        (json!([[7, 8], [9]]), vec![vec![7, 8], vec![9]]),
    ] {
        let answer = ask(&rig, &json!({"model": "demo", "input": input, "user": "me"})).await;
        assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("demo")));
        assert!(answer["id"].as_str().unwrap().starts_with("embd-"));
        let total: usize = expected.iter().map(Vec::len).sum();
        assert_eq!(answer["usage"], json!({"prompt_tokens": total, "total_tokens": total}));
        let data = answer["data"].as_array().unwrap();
        assert_eq!(data.len(), expected.len());
        for (index, (entry, tokens)) in data.iter().zip(&expected).enumerate() {
            assert_eq!((&entry["object"], &entry["index"]), (&json!("embedding"), &json!(index)));
            is_vector(&entry["embedding"], tokens, 4);
        }
    }
    let seen = rig.seen.lock().unwrap();
    assert!(seen.requests.iter().all(|request| request.max_tokens == 0
        && request.sampling.len() == 1
        && request.sampling[0].pooling == Some(Pooling::Last)));
}

#[tokio::test]
async fn many_inputs_are_given_to_the_engine_some_at_a_time() {
    let rig = Rig::saying("x");
    let input: Vec<[u32; 2]> = (1..=300).map(|token| [token, 1]).collect();
    let answer = ask(&rig, &json!({"input": input})).await;
    for (entry, tokens) in answer["data"].as_array().unwrap().iter().zip(&input) {
        is_vector(&entry["embedding"], tokens, 4);
    }
    assert_eq!(answer["data"].as_array().unwrap().len(), 300);
}

#[tokio::test]
async fn a_full_queue_refuses_the_first_inputs_and_has_later_ones_wait() {
    let rig = Rig::new(Script { full_behind: Some(64), ..Script::default() });
    let input: Vec<[u32; 2]> = (1..=200).map(|token| [token, 1]).collect();
    let began = rig.seen.lock().unwrap().requests.len();
    let answer = ask(&rig, &json!({"input": input})).await;
    for (entry, tokens) in answer["data"].as_array().unwrap().iter().zip(&input) {
        is_vector(&entry["embedding"], tokens, 4);
    }
    {
        let seen = rig.seen.lock().unwrap();
        assert_eq!(seen.requests.len() - began, 200);
        assert!(seen.asked.1 > 30, "{:?}", seen.asked);
        let arrived: Vec<_> = seen.requests.iter().map(|request| request.arrived).collect();
        assert!(
            arrived.iter().all(|at| *at == arrived[0]),
            "each client waits since its call came"
        );
    }
    let full = [("reason", "queue_full")];
    let refused = async || {
        let scrape = rig.client.scrape().await.unwrap();
        scrape.sum("tutti_requests_rejected_total", &full)
    };
    assert_eq!(refused().await, 0.0, "a client that has its answer was not turned away");
    rig.script(|script| script.full_behind = Some(0));
    let reply = rig.client.post(PATH, &json!({"input": input})).await.unwrap();
    assert_eq!((reply.status, &reply.body["error"]["code"]), (429, &json!("queue_full")));
    assert_eq!(refused().await, 1.0, "one request is one, whatever its inputs");
}

#[tokio::test]
async fn an_answer_of_too_many_numbers_is_refused() {
    let mut text = TextModel::load(&demo()).unwrap();
    text.hidden_size = 8192;
    let rig = Rig::of(Script::default(), text);
    let input = vec![[1]; 1025];
    let reply = rig.client.post(PATH, &json!({"input": input})).await.unwrap();
    let error = &reply.body["error"];
    assert_eq!((reply.status, error["param"].as_str()), (400, Some("input")), "{error}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("1024 entries") && message.contains("8192"), "{message}");
    assert!(rig.seen.lock().unwrap().requests.is_empty(), "nothing runs of a bad request");
    let answer = ask(&rig, &json!({"input": input, "dimensions": 4})).await;
    assert_eq!(answer["data"].as_array().unwrap().len(), 1025);
}

#[tokio::test]
async fn base64_has_the_same_numbers_and_fewer_dimensions_are_the_first() {
    let rig = Rig::saying("x");
    let body = json!({"input": [5, 6], "encoding_format": "base64"});
    let answer = ask(&rig, &body).await;
    let expected: Vec<u8> =
        vector(&[5, 6], 4).iter().flat_map(|value| (*value as f32).to_le_bytes()).collect();
    // Decoded by hand: a library used by both sides would prove nothing.
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in expected.chunks(3) {
        let bits = three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte));
        let bits = bits << (8 * (3 - three.len()));
        for at in 0..4 {
            let digit = digits[(bits >> (18 - 6 * at) & 63) as usize] as char;
            text.push(if at <= three.len() { digit } else { '=' });
        }
    }
    assert_eq!(answer["data"][0]["embedding"], text);
    let answer = ask(&rig, &json!({"input": [5, 6], "dimensions": 2})).await;
    is_vector(&answer["data"][0]["embedding"], &[5, 6], 2);
}

#[tokio::test]
async fn texts_that_are_too_long_are_refused_or_lose_their_end() {
    let rig = Rig::saying("x");
    let long = "long ".repeat(rig.text.max_positions as usize);
    let reply = rig.client.post(PATH, &json!({"input": ["a", long]})).await.unwrap();
    assert_eq!(reply.status, 400);
    assert_eq!(reply.body["error"]["code"], "context_length_exceeded");
    assert!(rig.seen.lock().unwrap().requests.is_empty(), "nothing runs of a bad request");
    let whole = rig.text.encode(&long, true).unwrap();
    for (asked, expected) in [(-1, rig.text.max_positions as usize), (5, 5)] {
        let body = json!({"input": long, "truncate_prompt_tokens": asked});
        assert_eq!(ask(&rig, &body).await["usage"]["prompt_tokens"], expected);
        let seen = rig.seen.lock().unwrap();
        assert_eq!(seen.requests.last().unwrap().prompt, whole[..expected]);
    }
    // The tokenizer adds a token to each text.
    let body = json!({"input": ["a b", ""]});
    assert_eq!(ask(&rig, &body).await["data"].as_array().map(Vec::len), Some(2));
    let body = json!({"input": [[1, 2, 3]], "truncate_prompt_tokens": 2});
    assert_eq!(ask(&rig, &body).await["usage"]["prompt_tokens"], 2);
}

#[tokio::test]
async fn what_is_not_understood_is_refused_by_its_name() {
    let rig = Rig::saying("x");
    let max = rig.text.vocab_size;
    for (body, param, says) in [
        (json!({}), "input", "required"),
        (json!({"input": [[1], []]}), "input", "no list may be empty"),
        (json!({"input": []}), "input", "1 to 2048"),
        (json!({"input": ["a", 5]}), "input", "token ids"),
        (json!({"input": [max]}), "input", "token ids"),
        (json!({"input": vec!["a"; 2049]}), "input", "2048"),
        (json!({"input": {"text": "a"}}), "input", "a string"),
        (json!({"input": "a", "encoding_format": "int8"}), "encoding_format", "base64"),
        (json!({"input": "a", "dimensions": 0}), "dimensions", "1"),
        (json!({"input": "a", "dimensions": 1_000_000}), "dimensions", "1"),
        (json!({"input": "a", "messages": []}), "messages", "not supported"),
        (json!({"input": "a", "normalize": false}), "normalize", "not supported"),
        (json!({"input": "a", "user": "x".repeat(4097)}), "user", "4096"),
    ] {
        let reply = rig.client.post(PATH, &body).await.unwrap();
        let error = &reply.body["error"];
        assert_eq!((reply.status, error["param"].as_str()), (400, Some(param)), "{error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{error}");
    }
    assert!(rig.seen.lock().unwrap().requests.is_empty());
}

#[tokio::test]
async fn failures_are_errors() {
    let rig = Rig::new(Script { fail_after: Some(0), ..Script::default() });
    let reply = rig.client.post(PATH, &json!({"input": ["a", "b"]})).await.unwrap();
    assert_eq!(reply.status, 500);
    rig.script(|script| script.refuse = Some(EngineError::ShuttingDown));
    let reply = rig.client.post(PATH, &json!({"input": ["a", "b"]})).await.unwrap();
    assert_eq!(reply.status, 503);
}

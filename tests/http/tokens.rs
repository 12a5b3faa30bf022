//! `/tokenize`, `/detokenize` and `/tokenizer_info` as vLLM's clients expect them, and texts that
//! cannot fit.
use std::time::{Duration, Instant};

use coordinator::http::keys::ApiKeys;
use coordinator::http::options::ApiOptions;
use coordinator::text::model::{TextModel, TextOptions};
use serde_json::{Value, json};
use testkit::models::demo;

use crate::rig::{Rig, Script, described};

#[tokio::test]
async fn text_becomes_tokens_and_text_again() {
    let rig = Rig::saying("x");
    let tokens = rig.text.encode("Hello fox", true).unwrap();
    let answer = rig
        .client
        .post("/tokenize", &json!({"model": "demo", "prompt": "Hello fox"}))
        .await
        .unwrap();
    let expected = json!({"count": tokens.len(), "max_model_len": rig.text.max_positions, "tokens": tokens, "token_strs": null});
    assert_eq!((answer.status, &answer.body), (200, &expected));
    let request =
        json!({"prompt": "Hello fox", "add_special_tokens": false, "return_token_strs": true});
    let bare = rig.client.post("/tokenize", &request).await.unwrap().body;
    assert_eq!(bare["tokens"], json!(tokens[1..]));
    let strings: String =
        bare["token_strs"].as_array().unwrap().iter().filter_map(|it| it.as_str()).collect();
    assert_eq!(strings, "Hello\u{120}fox", "pieces as the vocabulary writes them");
    let text = rig.client.post("/detokenize", &json!({"tokens": tokens})).await.unwrap().body;
    assert_eq!(text, json!({"prompt": "<|bos|>Hello fox"}), "special tokens are shown");
}

#[tokio::test]
async fn a_conversation_becomes_the_tokens_that_it_would_run_with() {
    let rig = Rig::saying("x");
    let mut request = json!({"messages": [{"role": "user", "content": "Hi"}]});
    rig.client.post("/v1/chat/completions", &request).await.unwrap();
    let answer = rig.client.post("/tokenize", &request).await.unwrap().body;
    assert_eq!(answer["tokens"], json!(rig.seen.lock().unwrap().requests[0].prompt));
    request["add_generation_prompt"] = json!(false);
    request["tools"] = json!([{"type": "function", "function": {"name": "f"}}]);
    let answer = rig.client.post("/tokenize", &request).await.unwrap().body;
    let rendered = rig.text.encode("<|bos|><|user|>\nHi<|end|>\n", false).unwrap();
    assert_eq!(answer["tokens"], json!(rendered), "{answer}");
}

#[tokio::test]
async fn the_tokenizer_is_described_where_the_operator_wants_it() {
    const PATH: &str = "/tokenizer_info";
    let rig = Rig::of(Script::default(), described());
    let answer = rig.client.get(PATH).await.unwrap();
    let file = std::fs::read_to_string(demo().join("tokenizer_config.json")).unwrap();
    let file: Value = serde_json::from_str(&file).unwrap();
    assert_eq!((answer.status, &answer.body), (200, &file));
    assert!(file["tokenizer_class"].is_string() && file["chat_template"].is_string());
    let info = reqwest::get(format!("http://{}{PATH}", rig.address)).await.unwrap();
    assert_eq!(info.headers()["content-type"], "application/json");
    assert_eq!(rig.client.post(PATH, &json!({})).await.unwrap().status, 405);
    // The template is the one in use, and what is asked for does not make other front ends.
    let template = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&template, "{{ messages[0].content }}").unwrap();
    let options = TextOptions {
        chat_template: Some(template.path().to_owned()),
        describes_tokenizer: true,
        ..TextOptions::default()
    };
    let chosen = TextModel::load_with(&demo(), &options).unwrap();
    let rig = Rig::of(Script::default(), chosen);
    let answer = rig.client.get(PATH).await.unwrap().body;
    assert_eq!(answer["chat_template"], "{{ messages[0].content }}");
    assert_eq!(answer["bos_token"], file["bos_token"]);
    assert_eq!(described().fingerprint, TextModel::load(&demo()).unwrap().fingerprint);
    // Otherwise it is a path like any that is unknown.
    let rig = Rig::saying("x");
    let (answer, unknown) =
        (rig.client.get(PATH).await.unwrap(), rig.client.get("/tokenizer_inf").await.unwrap());
    let message = |body: &Value| body["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!((answer.status, unknown.status), (404, 404));
    assert_eq!(message(&answer.body), message(&unknown.body) + "o");
    let document = rig.client.get("/openapi.json").await.unwrap().body;
    assert!(document["paths"].get(PATH).is_none());
    // It needs a key, served or not.
    for text in [described(), TextModel::load(&demo()).unwrap()] {
        let keys = ApiKeys::new(["sesame"]).unwrap();
        let api = ApiOptions { keys, ..ApiOptions::default() };
        let rig = Rig::chosen(Script::default(), text, &api);
        assert_eq!(rig.client.get(PATH).await.unwrap().status, 401);
    }
}

#[tokio::test]
async fn wrong_requests_are_refused_by_field() {
    let rig = Rig::saying("x");
    let cases = [
        ("/tokenize", json!({}), "prompt", 400),
        ("/tokenize", json!({"prompt": ["a"]}), "prompt", 400),
        ("/tokenize", json!({"prompt": "a", "messages": []}), "prompt", 400),
        (
            "/tokenize",
            json!({"messages": [{"role": "user", "content": "x"}], "chat_template": "a"}),
            "chat_template",
            400,
        ),
        ("/tokenize", json!({"prompt": "a", "model": "other"}), "model", 404),
        ("/detokenize", json!({}), "tokens", 400),
        ("/detokenize", json!({"tokens": [2048]}), "tokens", 400),
        ("/detokenize", json!({"tokens": "a"}), "tokens", 400),
    ];
    for (path, request, field, status) in cases {
        let reply = rig.client.post(path, &request).await.unwrap();
        assert_eq!(
            (reply.status, &reply.body["error"]["param"]),
            (status, &json!(field)),
            "{request}"
        );
    }
}

#[tokio::test]
async fn large_texts_are_all_answered_and_hold_up_nobody() {
    let rig = Rig::saying("x");
    let text = "The quick fox jumps. ".repeat(45_000);
    let large: Vec<_> = (0..6)
        .map(|_| {
            let (client, request) = (rig.client.clone(), json!({"prompt": text.clone()}));
            tokio::spawn(async move { client.post("/tokenize", &request).await.unwrap() })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let small = rig.client.post("/v1/completions", &json!({"prompt": "x"})).await.unwrap();
    assert_eq!(small.status, 200, "{}", small.body);
    for reply in large {
        let reply = reply.await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body["error"]);
    }
    // A prompt that cannot fit is refused without being tokenized.
    let longest = rig.text.bytes_per_token.expect("the demo model's tokenizer leaves no byte out");
    assert!(longest * (rig.text.max_positions as usize) < text.len());
    let began = Instant::now();
    let messages = json!([{"role": "user", "content": text}]);
    for (path, field, value) in
        [("/v1/completions", "prompt", json!(text)), ("/v1/chat/completions", "messages", messages)]
    {
        let reply = rig.client.post(path, &json!({field: value})).await.unwrap();
        let error = &reply.body["error"];
        assert_eq!(
            (reply.status, &error["code"], &error["param"]),
            (400, &json!("context_length_exceeded"), &json!(field))
        );
        assert!(error["message"].as_str().unwrap().contains("at least"), "{error}");
    }
    assert!(began.elapsed() < Duration::from_secs(30));
}

#[tokio::test]
async fn many_tokens_are_text_and_tokens_again() {
    let rig = Rig::saying("x");
    let text = " fox".repeat(60_000);
    let request = json!({"prompt": text, "add_special_tokens": false, "return_token_strs": true});
    let answer = rig.client.post("/tokenize", &request).await.unwrap().body;
    let tokens = rig.text.encode(&text, false).unwrap();
    assert_eq!((&answer["count"], &answer["tokens"]), (&json!(tokens.len()), &json!(tokens)));
    assert_eq!(answer["token_strs"].as_array().unwrap().len(), tokens.len());
    let whole = rig.client.post("/detokenize", &json!({"tokens": tokens})).await.unwrap();
    assert_eq!(whole.body, json!({"prompt": text}));
}

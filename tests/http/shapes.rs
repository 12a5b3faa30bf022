//! The JSON of every answer.
use coordinator::text::model::TextModel;
use coordinator::text::template::ChatTemplate;
use serde_json::{Map, Value, json};
use shared::protocol::{Lora, PROTOCOL_VERSION};

use crate::rig::{Rig, Script};

const TEXT: &str = "The owl said: \"Good night!\"";

#[tokio::test]
async fn a_completion_has_openais_shape() {
    let rig = Rig::saying(TEXT);
    let body = json!({"model": "demo", "prompt": "Hello", "max_tokens": 100});
    let reply = rig.client.post("/v1/completions", &body).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    let answer = reply.body;
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(
        (answer["object"].as_str(), answer["model"].as_str()),
        (Some("text_completion"), Some("demo"))
    );
    let choice = json!({"index": 0, "text": TEXT, "logprobs": null, "finish_reason": "length",
        "stop_reason": null});
    assert_eq!(answer["choices"], json!([choice]));
    let prompt = rig.text.encode("Hello", true).unwrap().len();
    let completion = rig.text.encode(TEXT, false).unwrap().len();
    let usage = json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0}});
    assert_eq!(answer["usage"], usage);
}

#[tokio::test]
async fn several_prompts_and_choices_are_indexed_prompt_by_prompt() {
    let rig = Rig::saying(TEXT);
    let body = json!({"prompt": ["a", [10, 11, 12]], "n": 2, "max_tokens": 100, "echo": true});
    let answer = rig.client.post("/v1/completions", &body).await.unwrap().body;
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4, "{answer}");
    let echoed = rig.text.decode(&[10, 11, 12]);
    for (index, choice) in choices.iter().enumerate() {
        let prompt = if index < 2 { "a" } else { echoed.as_str() };
        assert_eq!(choice["index"], index);
        assert_eq!(choice["text"].as_str().unwrap(), format!("{prompt}{TEXT}"));
    }
    let requests = &rig.seen.lock().unwrap().requests;
    let choices: Vec<u32> = requests[0].sampling.iter().map(|sampling| sampling.choice).collect();
    assert_eq!(choices, [0, 1]);
    assert_eq!(requests[1].prompt, [10, 11, 12]);
}

#[tokio::test]
async fn completion_logprobs_line_up_with_the_text() {
    let rig = Rig::saying("Hi é!");
    let body = json!({"prompt": "Hello", "max_tokens": 100, "logprobs": 2, "echo": true});
    let answer = rig.client.post("/v1/completions", &body).await.unwrap().body;
    let logprobs = &answer["choices"][0]["logprobs"];
    let tokens = logprobs["tokens"].as_array().unwrap();
    let prompt = rig.text.encode("Hello", true).unwrap().len();
    let completion = rig.text.encode("Hi é!", false).unwrap().len();
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[list].as_array().unwrap().len(), prompt + completion, "{list}");
    }
    assert_eq!(logprobs["token_logprobs"][0], Value::Null, "nothing comes before the first token");
    assert_eq!(logprobs["token_logprobs"][1], -0.5);
    let top = logprobs["top_logprobs"][prompt].as_object().unwrap();
    assert_eq!(top[tokens[prompt].as_str().unwrap()], -0.5);
    assert_eq!(answer["choices"][0]["text"], "HelloHi é!");
    let text: Vec<char> = "HelloHi é!".chars().collect();
    for (token, offset) in tokens.iter().zip(logprobs["text_offset"].as_array().unwrap()) {
        let (token, offset) = (token.as_str().unwrap(), offset.as_u64().unwrap() as usize);
        // The tokenizer's beginning token has no text, and a token may end within a character.
        if token == "<|bos|>" {
            assert_eq!(offset, 0);
        } else if !token.contains('\u{fffd}') {
            assert!(text[offset..].starts_with(&token.chars().collect::<Vec<_>>()), "{token:?}");
        }
    }
}

#[tokio::test]
async fn an_echo_has_special_tokens_where_they_are_part_of_the_text() {
    let rig = Rig::saying("Hi");
    let tokens = rig.text.encode("<|user|>Hello", false).unwrap();
    for (prompt, skip, echoed, offset) in [
        (json!(tokens), false, "<|user|>Hello", 8),
        (json!(tokens), true, "Hello", 0),
        // The client's own text; the tokenizer puts a token before it.
        (json!("Hello"), false, "Hello", 0),
    ] {
        let body = json!({"prompt": prompt, "echo": true, "logprobs": 1, "max_tokens": 5,
            "skip_special_tokens": skip});
        let choice = rig.ask("/v1/completions", &body).await["choices"][0].clone();
        assert_eq!(choice["text"], format!("{echoed}Hi"), "{body}");
        assert_eq!(choice["logprobs"]["text_offset"][1], offset, "{body}");
    }
}

/// Some tokenizers' decoders drop a leading space, such as those of Llama 2 and Mistral.
#[tokio::test]
async fn a_completion_keeps_the_space_between_prompt_and_text() {
    let rig = Rig::of(Script { text: "and left".to_owned(), ..Script::default() }, stripping());
    let chat = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let ask = async |asked: Value| {
        let mut body = json!({"prompt": "The owl", "max_tokens": 20});
        for (name, value) in asked.as_object().unwrap() {
            body[name] = value.clone();
        }
        let answer = rig.client.post("/v1/completions", &body).await.unwrap().body;
        assert!(answer.get("error").is_none(), "{answer}");
        answer["choices"][0].clone()
    };
    assert_eq!(ask(json!({})).await["text"], " and left");
    let echoed = ask(json!({"echo": true, "logprobs": 1})).await;
    assert_eq!(echoed["text"], "The owl and left");
    let logprobs = &echoed["logprobs"];
    let (tokens, offsets) = (&logprobs["tokens"], &logprobs["text_offset"]);
    assert_eq!(tokens, &json!([" The", " owl", " and", " left"]));
    // Generated text is in the whole text at the reported offset.
    assert_eq!((&offsets[2], &offsets[3]), (&json!(7), &json!(11)));
    let stopped = ask(json!({"stop": " and l"})).await;
    assert_eq!((&stopped["text"], &stopped["finish_reason"]), (&json!(""), &json!("stop")));
    // After other text it may begin with a space, and must if nothing else is allowed.
    assert_eq!(ask(json!({"guided_choice": [" and left"]})).await["text"], " and left");

    let text = "and left".to_owned();
    let mut model = stripping();
    model.template = Some(ChatTemplate::new(chat, String::new(), String::new()).unwrap());
    let rig = Rig::of(Script { text, ..Script::default() }, model);
    let message = |role: &str| json!({"role": role, "content": "The owl"});
    for (fields, expected) in [
        (json!({"messages": [message("user")]}), "and left"),
        (
            json!({"messages": [message("assistant")], "add_generation_prompt": false,
                "continue_final_message": true}),
            " and left",
        ),
    ] {
        let answer = rig.client.post("/v1/chat/completions", &fields).await.unwrap().body;
        assert_eq!(answer["choices"][0]["message"]["content"], expected, "{answer}");
    }
}

/// A model with such a tokenizer and a few words.
fn stripping() -> TextModel {
    let words = ["<s>", "</s>", "\u{2581}The", "\u{2581}owl", "\u{2581}and", "\u{2581}left"];
    let vocabulary: Map<String, Value> =
        words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
    let metaspace = json!({"type": "Metaspace", "replacement": "\u{2581}",
        "prepend_scheme": "first", "split": true});
    let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": metaspace, "post_processor": null, "decoder": metaspace,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<s>"}});
    let config = json!({"vocab_size": 48, "max_position_embeddings": 64, "eos_token_id": 1});
    let folder = tempfile::tempdir().unwrap();
    for (file, content) in [("config.json", config), ("tokenizer.json", tokenizer)] {
        std::fs::write(folder.path().join(file), content.to_string()).unwrap();
    }
    TextModel::load(folder.path()).unwrap()
}

#[tokio::test]
async fn a_chat_completion_has_openais_shape() {
    let rig = Rig::saying(TEXT);
    let body = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "max_completion_tokens": 100, "logprobs": true, "top_logprobs": 2, "n": 2});
    let reply = rig.client.post("/v1/chat/completions", &body).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    let answer = reply.body;
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["choices"].as_array().unwrap().len(), 2);
    for choice in answer["choices"].as_array().unwrap() {
        let message = json!({"role": "assistant", "content": TEXT, "refusal": null,
            "reasoning": null, "reasoning_content": null});
        assert_eq!(choice["message"], message);
        let bytes: Vec<u8> = choice["logprobs"]["content"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|entry| serde_json::from_value::<Vec<u8>>(entry["bytes"].clone()).unwrap())
            .collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), TEXT);
        assert_eq!(choice["logprobs"]["content"][0]["top_logprobs"].as_array().unwrap().len(), 2);
    }
    let rendered = "<|bos|><|user|>\nHi<|end|>\n<|assistant|>\n";
    assert_eq!(
        rig.seen.lock().unwrap().requests[0].prompt,
        rig.text.encode(rendered, false).unwrap()
    );
}

#[tokio::test]
async fn end_tokens_are_counted_and_not_shown() {
    let rig = Rig::saying("Bye.<|end|>never seen");
    let body = json!({"prompt": "x", "max_tokens": 100});
    let answer = rig.client.post("/v1/completions", &body).await.unwrap().body;
    assert_eq!(answer["choices"][0]["text"], "Bye.");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let tokens = rig.text.encode("Bye.<|end|>", false).unwrap().len();
    assert_eq!(answer["usage"]["completion_tokens"], tokens);
}

#[tokio::test]
async fn sampling_fields_reach_the_engine_and_absent_ones_are_the_models_defaults() {
    let rig = Rig::saying("x");
    let body = json!({"prompt": "x", "temperature": 0.25, "top_k": 7, "min_p": 0.125, "seed": -1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5,
        "logit_bias": {"12": -100}, "min_tokens": 3, "stop_token_ids": [9], "ignore_eos": true});
    rig.client.post("/v1/completions", &body).await.unwrap();
    rig.client.post("/v1/completions", &json!({"prompt": "x"})).await.unwrap();
    let seen = rig.seen.lock().unwrap();
    let given = &seen.requests[0].sampling[0];
    assert_eq!((given.temperature, given.top_k, given.min_p), (0.25, 7, 0.125));
    assert_eq!((given.seed, given.min_tokens), (u64::MAX, 3));
    assert_eq!((given.presence_penalty, given.frequency_penalty), (0.5, -0.5));
    assert_eq!((given.repetition_penalty, &given.logit_bias), (1.5, &vec![(12, -100.0)]));
    assert_eq!(seen.requests[0].end_tokens, [9]);
    let default = &seen.requests[1].sampling[0];
    // models/demo/generation_config.json
    assert_eq!((default.temperature, default.top_p), (0.8, 0.95));
    assert_eq!(seen.requests[1].end_tokens, [2, 6]);
    assert_eq!(seen.requests[1].max_tokens, 16);
    assert_ne!(default.seed, given.seed, "a seed is drawn when none is given");
}

#[tokio::test]
async fn models_health_version_and_metrics() {
    let rig = Rig::saying("x");
    let list = rig.client.get("/v1/models").await.unwrap().body;
    assert_eq!(
        (list["object"].as_str(), list["data"][0]["id"].as_str()),
        (Some("list"), Some("demo"))
    );
    let model = rig.client.get("/v1/models/demo").await.unwrap();
    assert_eq!((model.status, model.body["object"].as_str()), (200, Some("model")));
    for other in ["/v1/models/org%2Fother", "/v1/models/org/other"] {
        let other = rig.client.get(other).await.unwrap();
        let code = other.body["error"]["code"].as_str();
        assert_eq!((other.status, code), (404, Some("model_not_found")));
    }
    // As vLLM calls a model in a folder.
    let path = json!({"model": "/models/demo", "prompt": "x"});
    let other = rig.client.post("/v1/completions", &path).await.unwrap();
    let error = &other.body["error"];
    assert_eq!((other.status, &error["param"]), (404, &json!("model")));
    let told = "The model `/models/demo` does not exist; served here: `demo`, `org/demo`";
    assert_eq!(error["message"], told);
    for path in ["/health", "/live", "/ready", "/version"] {
        assert_eq!(rig.client.get(path).await.unwrap().status, 200, "{path}");
    }
    let version = rig.client.get("/version").await.unwrap().body;
    assert_eq!(version["protocol"], json!(PROTOCOL_VERSION), "{version}");
    let scrape = rig.client.scrape().await.unwrap();
    let labels = [("route", "/v1/models/{id}"), ("method", "GET"), ("status", "404")];
    assert_eq!(scrape.sum("tutti_http_requests_total", &labels), 2.0);
}

#[tokio::test]
async fn adapters_are_models_that_requests_name() {
    let adapter = |name: &str| (name.to_owned(), format!("/adapters/{name}"));
    let lora = Lora::fixed([adapter("sql"), adapter("org/chat")], 16);
    let rig = Rig::with_adapters(&lora.adapters);
    let list = rig.client.get("/v1/models").await.unwrap().body;
    let cards: Vec<_> = list["data"].as_array().unwrap().iter().collect();
    let named = |card: &Value| (card["id"].clone(), card["root"].clone(), card["parent"].clone());
    let folder = json!("/models/demo");
    assert_eq!(named(cards[0]), (json!("demo"), folder.clone(), Value::Null));
    assert_eq!(named(cards[1]), (json!("org/demo"), folder, Value::Null));
    assert_eq!(named(cards[2]), (json!("sql"), json!("/adapters/sql"), json!("demo")));
    let other = rig.client.get("/v1/models/org%2Fchat").await.unwrap();
    assert_eq!((other.status, named(&other.body)), (200, named(cards[3])));
    let alias = rig.client.get("/v1/models/org/demo").await.unwrap();
    assert_eq!((alias.status, named(&alias.body)), (200, named(cards[1])));
    let message = json!([{"role": "user", "content": "x"}]);
    for (number, model) in ["demo", "sql", "org/chat"].into_iter().enumerate() {
        for (path, mut body) in [
            ("/v1/completions", json!({"prompt": "x"})),
            ("/v1/chat/completions", json!({"messages": message})),
            ("/v1/responses", json!({"input": "x"})),
            ("/v1/messages", json!({"messages": message, "max_tokens": 9})),
            ("/v1/embeddings", json!({"input": "x"})),
            ("/rerank", json!({"query": "x", "documents": ["x"]})),
            ("/score", json!({"text_1": "x", "text_2": "x"})),
            ("/pooling", json!({"input": "x"})),
        ] {
            body["model"] = json!(model);
            let reply = rig.client.post(path, &body).await.unwrap();
            assert_eq!((reply.status, &reply.body["model"]), (200, &json!(model)), "{path}");
            let seen = rig.seen.lock().unwrap().requests.pop().unwrap();
            assert_eq!(seen.adapter.number() as usize, number, "{path}");
        }
        let body = json!({"model": model, "prompt": "x"});
        assert_eq!(rig.client.post("/tokenize", &body).await.unwrap().status, 200);
    }
    // An alias of the model: answers use the first name.
    let body = json!({"model": "org/demo", "prompt": "x"});
    let reply = rig.client.post("/v1/completions", &body).await.unwrap();
    assert_eq!((reply.status, &reply.body["model"]), (200, &json!("demo")));
    assert_eq!(rig.seen.lock().unwrap().requests.pop().unwrap().adapter.number(), 0);
    // Without a name: the base model.
    rig.client.post("/v1/completions", &json!({"prompt": "x"})).await.unwrap();
    assert_eq!(rig.seen.lock().unwrap().requests.pop().unwrap().adapter.number(), 0);
    let missing = json!({"model": "sq", "prompt": "x"});
    let missing = rig.client.post("/v1/completions", &missing).await.unwrap();
    assert_eq!((missing.status, &missing.body["error"]["code"]), (404, &json!("model_not_found")));
}

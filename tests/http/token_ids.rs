//! vLLM's fields for clients that work with tokens: tokens told by their ids.
use coordinator::http::options::ApiOptions;
use serde_json::{Value, json};

use crate::rig::Rig;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn request(path: &str, more: &Value) -> Value {
    let mut body = json!({"max_tokens": 400});
    match path {
        COMPLETIONS => body["prompt"] = json!("Hello"),
        _ => body["messages"] = json!([{"role": "user", "content": "Hello"}]),
    }
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A choice's log-probabilities: tokens, their alternatives' names, and what does not depend on
/// names.
fn named(choice: &Value) -> (Vec<String>, Vec<Vec<String>>, Value) {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let logprobs = &choice["logprobs"];
    let Some(content) = logprobs["content"].as_array() else {
        let tokens = logprobs["tokens"].as_array().unwrap().iter().map(text).collect();
        let top = logprobs["top_logprobs"].as_array().unwrap().iter();
        let top = top.map(|top| top.as_object().unwrap().keys().cloned().collect()).collect();
        return (tokens, top, json!([logprobs["text_offset"], logprobs["token_logprobs"]]));
    };
    let tokens = content.iter().map(|it| text(&it["token"])).collect();
    let top = content.iter().map(|it| it["top_logprobs"].as_array().unwrap());
    let top = top.map(|top| top.iter().map(|it| text(&it["token"])).collect()).collect();
    (tokens, top, content.iter().map(|it| it["bytes"].clone()).collect())
}

#[tokio::test]
async fn log_probabilities_tell_tokens_by_their_ids_where_that_is_wanted() {
    let rig = Rig::saying("Caf\u{e9} \u{1f98a}");
    let all = rig.text.encode("Caf\u{e9} \u{1f98a}", false).unwrap();
    let by_id: Vec<String> = all.iter().map(|id| format!("token_id:{id}")).collect();
    let tops: Vec<Vec<String>> =
        by_id.iter().map(|name| vec![name.clone(), "token_id:33".to_owned()]).collect();
    let operators = Rig::with_api(&ApiOptions { tokens_by_id: true, ..ApiOptions::default() });
    operators.script(|script| script.text = "Caf\u{e9} \u{1f98a}".to_owned());
    for path in [COMPLETIONS, CHAT] {
        let asked = |by_id: Value| {
            let logprobs = if path == CHAT { json!(true) } else { json!(1) };
            let mut more = json!({"logprobs": logprobs, "return_tokens_as_token_ids": by_id});
            if path == CHAT {
                more["top_logprobs"] = json!(1);
            }
            request(path, &more)
        };
        let plain = named(&rig.ask(path, &asked(json!(false))).await["choices"][0]);
        assert!(plain.0[0].starts_with('C') && plain.0.len() == all.len(), "{plain:?}");
        let expected = (by_id.clone(), tops.clone(), plain.2.clone());
        let chosen = rig.ask(path, &asked(json!(true))).await;
        assert_eq!(named(&chosen["choices"][0]), expected);
        let mut body = asked(json!(true));
        body["stream"] = json!(true);
        let events = rig.client.stream(path, &body).await.unwrap().events;
        let told = events.iter().map(|event| &event["choices"][0]);
        let told: Vec<String> =
            told.filter(|it| !it["logprobs"].is_null()).flat_map(|it| named(it).0).collect();
        assert_eq!(told, by_id);
        // An operator may make it the default.
        let default = operators.ask(path, &asked(Value::Null)).await;
        assert_eq!(named(&default["choices"][0]), expected);
        let against = operators.ask(path, &asked(json!(false))).await;
        assert_eq!(named(&against["choices"][0]), plain);
    }
    // OpenAI's newer API knows nothing of it.
    let body = json!({"input": "x", "include": ["message.output_text.logprobs"]});
    let answer = operators.ask("/v1/responses", &body).await;
    let first = &answer["output"][0]["content"][0]["logprobs"][0]["token"];
    assert!(first.as_str().unwrap().starts_with('C'), "{answer}");
}

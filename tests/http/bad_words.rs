//! Words that must not be generated: `bad_words`.
use coordinator::text::model::TextModel;
use serde_json::{Value, json};
use testkit::models::demo;

use crate::rig::{Rig, Script};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn body(path: &str, words: &Value) -> Value {
    let mut body = match path {
        COMPLETIONS => json!({"prompt": "x"}),
        _ => json!({"messages": [{"role": "user", "content": "x"}]}),
    };
    body["max_tokens"] = json!(9);
    body["bad_words"] = words.clone();
    body
}

fn rig() -> Rig {
    Rig::new(Script { text: "a b".to_owned(), ..Script::default() })
}

#[tokio::test]
async fn the_engine_is_told_the_tokens_of_each_word() {
    let (rig, text) = (rig(), TextModel::load(&demo()).unwrap());
    let tokens = |word: &str| text.encode(word, false).unwrap();
    let (fox, spaced) = (tokens("fox"), tokens(" fox"));
    assert!(fox != spaced && !spaced.ends_with(&fox), "{fox:?} {spaced:?}");
    for path in [COMPLETIONS, CHAT] {
        for (words, expected) in [
            (json!(["fox"]), vec![&fox, &spaced]),
            (json!([" fox", "fox"]), vec![&fox, &spaced]),
            (json!([]), vec![]),
            (json!(null), vec![]),
        ] {
            let mut asked = body(path, &words);
            asked["n"] = json!(2);
            let reply = rig.client.post(path, &asked).await.unwrap();
            assert_eq!(reply.status, 200, "{path} {words}: {}", reply.body);
            let request = rig.seen.lock().unwrap().requests.pop().unwrap();
            let told = request.bad_words.as_deref().map(|it| it.sequences.iter().collect());
            assert_eq!(told, Some(expected).filter(|it: &Vec<_>| !it.is_empty()), "{words}");
            let last = *spaced.last().unwrap();
            let guides = request.guides.iter();
            let first: Vec<bool> =
                guides.map(|guide| guide.allowed().unwrap().allows(last)).collect();
            // Words of one token are forbidden at once.
            let expected = vec![spaced.len() > 1; if told.is_some() { 2 } else { 0 }];
            assert_eq!(first, expected, "{words}");
        }
    }
}

#[tokio::test]
async fn what_is_wrong_is_said() {
    let rig = rig();
    let input = json!({"input": "x", "bad_words": ["fox"]});
    let messages = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 9,
        "bad_words": ["fox"]});
    for (path, body) in
        [("/v1/responses", &input), ("/v1/embeddings", &input), ("/v1/messages", &messages)]
    {
        let reply = rig.client.post(path, body).await.unwrap();
        let message = reply.body["error"]["message"].as_str().unwrap_or_default();
        assert!(reply.status == 400 && message.contains("`bad_words` is not supported"), "{path}");
    }
    for path in [COMPLETIONS, CHAT] {
        for words in [
            json!("fox"),
            json!(["fox", 1]),
            json!(["fox", ""]),
            json!(["x".repeat(257)]),
            json!(vec!["fox"; 257]),
        ] {
            let reply = rig.client.post(path, &body(path, &words)).await.unwrap();
            let message = reply.body["error"]["message"].as_str().unwrap_or_default();
            assert_eq!(reply.status, 400, "{path} {words}: {}", reply.body);
            assert!(message.contains("at most 256 strings, each of 1 to 256 bytes"), "{message}");
            assert_eq!(reply.body["error"]["param"], "bad_words");
        }
        for (more, expected) in [
            (json!({"bad_words": vec!["\u{1}".repeat(255); 1]}), None),
            (
                json!({"bad_words": (1..256).map(|it| "\u{1}".repeat(it)).collect::<Vec<_>>()}),
                Some("tokens together, at most 4096"),
            ),
            (json!({"allowed_token_ids": [3, 5]}), None),
            (json!({"allowed_token_ids": [3, 5], "min_tokens": 1}), Some("`min_tokens` and")),
            (json!({"min_tokens": 1}), None),
        ] {
            let mut asked = body(path, &json!(["fox"]));
            for (name, value) in more.as_object().unwrap() {
                asked[name] = value.clone();
            }
            let reply = rig.client.post(path, &asked).await.unwrap();
            let message = reply.body["error"]["message"].as_str();
            match expected {
                Some(expected) => assert!(message.unwrap().contains(expected), "{message:?}"),
                None => assert_eq!(reply.status, 200, "{more}: {message:?}"),
            }
        }
        let most: Vec<String> = (0..256).map(|it| format!("w{it}")).collect();
        let reply = rig.client.post(path, &body(path, &json!(most))).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
    }
}

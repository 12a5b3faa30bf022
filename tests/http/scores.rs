//! `/rerank` and `/score`: shapes, order, bounds, what the engine is asked for.
use coordinator::engine::EngineError;
use coordinator::text::model::TextModel;
use serde_json::{Value, json};
use shared::sampling::Pooling;
use testkit::models::demo;

use crate::rig::{Rig, Script};

/// The cosine of the vectors that the rig's engine gives for these tokens.
fn cosine(one: &[u32], other: &[u32]) -> f64 {
    let vector = |tokens: &[u32]| [f64::from(tokens[0]), tokens.len() as f64, 0.0, -1.0];
    let dot = |a: [f64; 4], b: [f64; 4]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let (one, other) = (vector(one), vector(other));
    dot(one, other) / (dot(one, one) * dot(other, other)).sqrt()
}

fn is_close(found: &Value, expected: f64) -> bool {
    (found.as_f64().unwrap() - expected).abs() < 1e-5
}

#[tokio::test]
async fn documents_come_in_the_order_of_their_closeness() {
    let rig = Rig::saying("x");
    let tokens = |text: &str| rig.text.encode(text, true).unwrap();
    // The engine's vectors differ by the number of tokens alone.
    let query = "one two three four";
    let documents = ["one", "one two three four five", "a b c", "one two", "a b c"];
    let mut expected: Vec<(usize, f64)> =
        documents.iter().map(|text| cosine(&tokens(query), &tokens(text))).enumerate().collect();
    expected.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    assert!(expected[0].1 > expected[4].1 && expected[0].0 != 0, "{expected:?}");
    for path in ["/rerank", "/v1/rerank", "/v2/rerank"] {
        let body = json!({"model": "demo", "query": query, "documents": documents});
        let answer = rig.ask(path, &body).await;
        assert_eq!(answer["model"], "demo");
        assert!(answer["id"].as_str().unwrap().starts_with("rerank-"), "{answer}");
        let used: usize = documents.iter().map(|text| tokens(text).len()).sum();
        let used = used + tokens(query).len();
        assert_eq!(answer["usage"], json!({"prompt_tokens": used, "total_tokens": used}));
        let results = answer["results"].as_array().unwrap();
        assert_eq!(results.len(), documents.len());
        for (result, (index, score)) in results.iter().zip(&expected) {
            assert_eq!(result["index"], *index, "equal ones in the order given: {answer}");
            assert_eq!(result["document"], json!({"text": documents[*index]}));
            assert!(is_close(&result["relevance_score"], *score), "{result} {score}");
        }
    }
    {
        let seen = rig.seen.lock().unwrap();
        assert_eq!(seen.requests.len(), 3 * (1 + documents.len()));
        assert!(
            seen.requests.iter().all(|request| request.max_tokens == 0
                && request.sampling[0].pooling == Some(Pooling::Last))
        );
    }
    // As Jina's and Cohere's clients write it.
    let body = json!({"query": {"text": query}, "documents": [{"text": "one"}, {"text": query}],
        "top_n": 1, "return_documents": false, "rank_fields": ["text"]});
    let answer = rig.ask("/rerank", &body).await;
    let results = answer["results"].as_array().unwrap();
    assert!(results.len() == 1 && results[0]["index"] == 1, "{answer}");
    assert!(results[0].get("document").is_none());
    assert!(is_close(&results[0]["relevance_score"], 1.0), "{answer}");
    for (asked, count) in [(0, 2), (-1, 2), (1, 1), (2, 2), (9, 2)] {
        let body = json!({"query": "a", "documents": ["b", "c d"], "top_n": asked});
        let answer = rig.ask("/rerank", &body).await;
        assert_eq!(answer["results"].as_array().unwrap().len(), count, "{asked}");
    }
}

#[tokio::test]
async fn one_text_is_scored_with_each_and_many_in_pairs() {
    let rig = Rig::saying("x");
    let tokens = |text: &str| rig.text.encode(text, true).unwrap();
    let (a, b, c) = ("a", "b c d", "e f g h i");
    for (path, left, right) in [
        ("/score", "text_1", "text_2"),
        ("/v1/score", "queries", "documents"),
        ("/score", "queries", "items"),
        ("/score", "data_1", "data_2"),
    ] {
        for (ones, others, pairs) in [
            (json!(a), json!(b), vec![(a, b)]),
            (json!(a), json!([b, c, a]), vec![(a, b), (a, c), (a, a)]),
            (json!([c]), json!([a, b]), vec![(c, a), (c, b)]),
            (json!([a, b]), json!([c, a]), vec![(a, c), (b, a)]),
        ] {
            let answer = rig.ask(path, &json!({left: ones, right: others})).await;
            assert!(answer["id"].as_str().unwrap().starts_with("score-"), "{answer}");
            assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("demo")));
            let data = answer["data"].as_array().unwrap();
            assert_eq!(data.len(), pairs.len(), "{answer}");
            for (index, (entry, (one, other))) in data.iter().zip(pairs).enumerate() {
                assert_eq!((&entry["index"], &entry["object"]), (&json!(index), &json!("score")));
                let expected = cosine(&tokens(one), &tokens(other));
                assert!(is_close(&entry["score"], expected), "{entry} {expected}");
            }
        }
    }
}

#[tokio::test]
async fn the_fields_of_an_invocation_tell_what_it_is() {
    let rig = Rig::saying("x");
    let messages = json!([{"role": "user", "content": "x"}]);
    for (body, object) in [
        (json!({"messages": messages}), json!("chat.completion")),
        (json!({"prompt": "x"}), json!("text_completion")),
        (json!({"input": "x"}), json!("list")),
        (json!({"query": "x", "documents": ["y"]}), Value::Null),
        (json!({"text_1": "x", "text_2": "y"}), json!("list")),
    ] {
        let answer = rig.ask("/invocations", &body).await;
        assert_eq!(answer["object"], object, "{answer}");
    }
    let body = json!({"prompt": "x", "stream": true});
    assert!(rig.client.stream("/invocations", &body).await.unwrap().done);
    let reply = rig.client.post("/invocations", &json!({"model": "demo"})).await.unwrap();
    assert_eq!((reply.status, &reply.body["error"]["param"]), (400, &json!("messages")));
    let reply = rig.client.post("/invocations", &json!({"items": "x"})).await.unwrap();
    assert_eq!((reply.status, &reply.body["error"]["param"]), (400, &json!("queries")));
}

#[tokio::test]
async fn texts_that_are_too_long_are_refused_or_lose_their_end() {
    let rig = Rig::saying("x");
    let long = "long ".repeat(rig.text.max_positions as usize);
    let whole = rig.text.encode(&long, true).unwrap();
    let max = rig.text.max_positions as usize;
    let lengths = async |limits: Value| {
        let mut body = json!({"query": long, "documents": [long]});
        for (name, value) in limits.as_object().unwrap() {
            body[name] = value.clone();
        }
        rig.seen.lock().unwrap().requests.clear();
        let reply = rig.client.post("/rerank", &body).await.unwrap();
        let seen = rig.seen.lock().unwrap();
        let mut lengths: Vec<usize> = Vec::new();
        for request in &seen.requests {
            assert_eq!(request.prompt, whole[..request.prompt.len()], "the beginning is kept");
            lengths.push(request.prompt.len());
        }
        (reply.status, reply.body["error"].clone(), lengths)
    };
    let (status, error, ran) = lengths(json!({})).await;
    assert_eq!((status, &error["code"]), (400, &json!("context_length_exceeded")), "{error}");
    assert!(ran.is_empty() && error["param"] == "query", "{error}");
    let (status, error, ran) = lengths(json!({"max_tokens_per_query": 3})).await;
    assert!(status == 400 && error["param"] == "documents" && ran.is_empty(), "{error}");
    // Special tokens come on top of a text's own.
    let special = rig.text.num_special();
    for (limits, expected) in [
        (json!({"truncate_prompt_tokens": -1}), vec![max, max]),
        (
            json!({"max_tokens_per_query": 3, "max_tokens_per_doc": 5}),
            vec![3 + special, 5 + special],
        ),
        (
            json!({"max_tokens_per_query": 3, "max_tokens_per_doc": 4_000_000}),
            vec![3 + special, max],
        ),
        (json!({"truncate_prompt_tokens": 4, "max_tokens_per_doc": 7}), vec![4, 4]),
        (json!({"truncate_prompt_tokens": 4, "max_tokens_per_doc": 2}), vec![4, 2 + special]),
    ] {
        let (status, error, ran) = lengths(limits.clone()).await;
        assert_eq!((status, ran), (200, expected), "{limits}: {error}");
    }
}

#[tokio::test]
async fn what_is_not_understood_is_refused_by_its_name() {
    let rig = Rig::saying("x");
    let rerank = |more: Value| {
        let mut body = json!({"query": "a", "documents": ["b"]});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        ("/rerank", body)
    };
    let score = |body: Value| ("/score", body);
    for ((path, body), param, says) in [
        (rerank(json!({"query": null})), "query", "required"),
        (rerank(json!({"query": ["a"]})), "query", "a string"),
        (rerank(json!({"query": ["a", "b"]})), "query", "a string"),
        (rerank(json!({"documents": null})), "documents", "required"),
        (rerank(json!({"documents": []})), "documents", "1 to 2048"),
        (rerank(json!({"documents": vec!["a"; 2049]})), "documents", "2048"),
        (rerank(json!({"documents": [5]})), "documents", "strings or objects"),
        (rerank(json!({"documents": [{"image": "a"}]})), "documents", "`text`"),
        (rerank(json!({"top_n": 0.5})), "top_n", "an integer"),
        (rerank(json!({"return_documents": 1})), "return_documents", "true or false"),
        (rerank(json!({"instruction": "a"})), "instruction", "into the query"),
        (rerank(json!({"rank_fields": ["title"]})), "rank_fields", "not supported"),
        (rerank(json!({"model": "other"})), "model", "does not exist"),
        (score(json!({})), "text_1", "`queries` and `documents`"),
        (score(json!({"text_1": "a"})), "text_2", "missing"),
        (score(json!({"items": "a"})), "queries", "missing"),
        (score(json!({"text_1": ["a", "b"], "text_2": "a"})), "text_1", "as many"),
        (score(json!({"text_1": ["a", "b"], "text_2": vec!["a"; 3]})), "text_1", "2 texts"),
        (score(json!({"text_1": "a", "text_2": "b", "queries": "c"})), "queries", "combined"),
        (
            score(json!({"queries": "a", "documents": "b", "items": "c"})),
            "items",
            "cannot be combined",
        ),
    ] {
        let reply = rig.client.post(path, &body).await.unwrap();
        let error = &reply.body["error"];
        let status = if param == "model" { 404 } else { 400 };
        assert_eq!((reply.status, error["param"].as_str()), (status, Some(param)), "{error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{error}");
    }
    assert!(rig.seen.lock().unwrap().requests.is_empty());
}

#[tokio::test]
async fn failures_are_errors_and_too_many_numbers_are_refused() {
    let rig = Rig::new(Script { fail_after: Some(0), ..Script::default() });
    let body = json!({"query": "a", "documents": ["b"]});
    assert_eq!(rig.client.post("/rerank", &body).await.unwrap().status, 500);
    rig.script(|script| script.refuse = Some(EngineError::ShuttingDown));
    assert_eq!(rig.client.post("/rerank", &body).await.unwrap().status, 503);
    let mut text = TextModel::load(&demo()).unwrap();
    text.hidden_size = 8192;
    let rig = Rig::of(Script::default(), text);
    let body = json!({"queries": vec!["a"; 1025], "documents": vec!["b"; 1025]});
    let reply = rig.client.post("/score", &body).await.unwrap();
    let error = &reply.body["error"];
    assert_eq!((reply.status, error["param"].as_str()), (400, Some("queries")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("1025 entries"), "{error}");
    assert!(rig.seen.lock().unwrap().requests.is_empty(), "nothing runs of a bad request");
    // Of documents only the scores are kept, so their vectors may have any size.
    let body = json!({"query": "a", "documents": vec!["b"; 2048], "return_documents": false});
    let answer = rig.ask("/rerank", &body).await;
    assert_eq!(answer["results"].as_array().unwrap().len(), 2048);
}

//! Models that sort texts into classes: `/classify`, `/pooling`, pairs of texts, and what they
//! refuse.
use coordinator::text::model::{TextModel, TextOptions};
use serde_json::{Value, json};
use shared::model_config::{Activation, ClassHeadSource, Classifier};
use testkit::models::{class_goldens, demo, variant};

use crate::rig::{Rig, Script, numbers};

/// A server of a model with so many classes.
pub(crate) fn rig(count: usize) -> Rig {
    Rig::of(Script::default(), classes(count))
}

fn classes(count: usize) -> TextModel {
    let mut text = TextModel::load(&demo()).unwrap();
    let activation = if count > 1 { Activation::Softmax } else { Activation::Sigmoid };
    text.classifier = Some(Classifier {
        names: (0..count).map(|class| format!("class {class}")).collect(),
        head: ClassHeadSource::Own,
        activation,
        separates: true,
    });
    text
}

fn softmax(numbers: &[f32]) -> Vec<f64> {
    let powers: Vec<f64> = numbers.iter().map(|number| f64::from(*number).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}

fn sigmoid(number: f64) -> f64 {
    1.0 / (1.0 + (-number).exp())
}

fn are(found: &Value, expected: &[f64]) {
    let found: Vec<f64> = serde_json::from_value(found.clone()).unwrap();
    let close = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6);
    assert!(close && found.len() == expected.len(), "{found:?} {expected:?}");
}

#[tokio::test]
async fn texts_get_their_likeliest_class_and_all_probabilities() {
    let rig = rig(3);
    let length = |text: &str| rig.text.encode(text, true).unwrap().len();
    for (input, lengths) in [
        (json!("Hello there"), vec![length("Hello there")]),
        (json!(["a", "b c", "d e f g"]), vec![length("a"), length("b c"), length("d e f g")]),
        (json!([7, 8, 9]), vec![3]),
        (json!([[7, 8], [9]]), vec![2, 1]),
    ] {
        let answer = rig.ask("/classify", &json!({"model": "demo", "input": input})).await;
        assert!(answer["id"].as_str().unwrap().starts_with("classify-"), "{answer}");
        assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("demo")));
        let total: usize = lengths.iter().sum();
        assert_eq!(answer["usage"], json!({"prompt_tokens": total, "total_tokens": total}));
        let data = answer["data"].as_array().unwrap();
        assert_eq!(data.len(), lengths.len());
        for (index, (entry, length)) in data.iter().zip(lengths).enumerate() {
            let expected = softmax(&numbers(length, 3));
            are(&entry["probs"], &expected);
            assert_eq!((&entry["index"], &entry["num_classes"]), (&json!(index), &json!(3)));
            let best = (0..3).max_by(|a, b| expected[*a].total_cmp(&expected[*b])).unwrap();
            assert_eq!(entry["label"], format!("class {best}"));
        }
        let body = json!({"input": input, "use_activation": false});
        let raw = rig.ask("/classify", &body).await;
        let first: Vec<f64> = serde_json::from_value(raw["data"][0]["probs"].clone()).unwrap();
        assert!(first.iter().any(|number| *number < 0.0), "as the model makes them: {first:?}");
    }
    let answer = rig.ask("/invocations", &json!({"input": "x"})).await;
    assert_eq!(answer["data"][0]["num_classes"], 3);
    let card = rig.client.get("/v1/models/demo").await.unwrap().body;
    assert_eq!((&card["task"], &card["num_classes"]), (&json!("classify"), &json!(3)));
    let usual = Rig::saying("x").client.get("/v1/models/demo").await.unwrap().body;
    assert!(usual.get("task").is_none(), "{usual}");
}

#[tokio::test]
async fn pooling_gives_what_the_model_makes_of_a_text() {
    let sorting = rig(3);
    let answer = sorting.ask("/pooling", &json!({"input": [7, 8], "task": "classify"})).await;
    assert!(answer["id"].as_str().unwrap().starts_with("pool-"), "{answer}");
    assert_eq!(answer["data"][0]["object"], "pooling");
    are(&answer["data"][0]["data"], &softmax(&numbers(2, 3)));
    let usual = Rig::saying("x");
    let length = (49.0f64 + 4.0 + 1.0).sqrt();
    let vector = [7.0, 2.0, 0.0, -1.0];
    let body = json!({"input": [7, 8], "task": "embed"});
    are(&usual.ask("/pooling", &body).await["data"][0]["data"], &vector.map(|x| x / length));
    let body = json!({"input": [7, 8], "use_activation": false, "dimensions": 3});
    are(&usual.ask("/pooling", &body).await["data"][0]["data"], &vector[..3]);
    // As OpenAI's clients ask for embeddings: the same numbers as bytes.
    let body = json!({"input": [7, 8], "use_activation": false, "encoding_format": "base64"});
    let text = usual.ask("/pooling", &body).await["data"][0]["data"].clone();
    assert_eq!(text, "AADgQAAAAEAAAAAAAACAvw==");
    for (rig, body, param) in [
        (&usual, json!({"input": "x", "task": "classify"}), "task"),
        (&sorting, json!({"input": "x", "task": "embed"}), "task"),
        (&sorting, json!({"input": "x", "dimensions": 2}), "dimensions"),
    ] {
        let reply = rig.client.post("/pooling", &body).await.unwrap();
        assert_eq!((reply.status, &reply.body["error"]["param"]), (400, &json!(param)));
    }
}

#[tokio::test]
async fn what_a_model_cannot_do_is_refused_with_what_it_can() {
    let (several, one, usual) = (rig(3), rig(1), Rig::saying("x"));
    let turn = json!([{"role": "user", "content": "x"}]);
    let pair = json!({"text_1": "x", "text_2": "y"});
    let ranking = json!({"query": "x", "documents": ["y"]});
    for (rig, path, body, says) in [
        (&several, "/v1/completions", json!({"prompt": "x"}), "3 classes, with `/classify`"),
        (&several, "/v1/chat/completions", json!({"messages": turn}), "`/classify`"),
        (&several, "/v1/responses", json!({"input": "x"}), "`/classify`"),
        (&several, "/v1/messages", json!({"messages": turn, "max_tokens": 1}), "`/classify`"),
        (&several, "/v1/embeddings", json!({"input": "x"}), "nor embeddings"),
        (&several, "/score", pair.clone(), "sorts texts into 3 classes"),
        (&several, "/rerank", ranking.clone(), "only a model with one"),
        (&one, "/v1/completions", json!({"prompt": "x"}), "with `/score`, `/rerank`, `/cla"),
        (&one, "/v1/embeddings", json!({"input": "x"}), "judges texts"),
        (&usual, "/classify", json!({"input": "x"}), "ForSequenceClassification"),
    ] {
        let reply = rig.client.post(path, &body).await.unwrap();
        let error = &reply.body["error"];
        assert_eq!(reply.status, 400, "{path}: {error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{path}: {error}");
        assert!(error["param"] == "model" || path == "/v1/messages", "{path}: {error}");
    }
    // Cosines have no other form.
    let mut body = pair;
    body["use_activation"] = json!(false);
    let reply = usual.client.post("/score", &body).await.unwrap();
    assert_eq!((reply.status, &reply.body["error"]["param"]), (400, &json!("use_activation")));
    for rig in [several, one, usual] {
        assert!(rig.seen.lock().unwrap().requests.is_empty());
    }
}

#[tokio::test]
async fn pairs_have_the_tokens_that_transformers_gives_them() {
    let folder = variant("qwen3-reranker");
    let pairs = class_goldens(&folder).pairs;
    let template = folder.join("score.jinja");
    for form in ["joined", "following", "templated"] {
        let chat_template = Some(template.clone()).filter(|_| form == "templated");
        let options = TextOptions { chat_template, ..TextOptions::default() };
        let mut text = TextModel::load_with(&folder, &options).unwrap();
        text.classifier.as_mut().unwrap().separates = form != "following";
        let rig = Rig::of(Script::default(), text);
        for pair in &pairs {
            let ids = match form {
                "joined" => &pair.ids.joined,
                "following" => &pair.ids.following,
                _ => &pair.ids.templated,
            };
            let body = json!({"query": pair.query, "documents": [pair.document]});
            let answer = rig.ask("/rerank", &body).await;
            assert_eq!(rig.seen.lock().unwrap().requests.pop().unwrap().prompt, *ids, "{form}");
            let expected = sigmoid(f64::from(numbers(ids.len(), 1)[0]));
            let result = &answer["results"][0];
            assert!((result["relevance_score"].as_f64().unwrap() - expected).abs() < 1e-6);
            let used = ids.len();
            assert_eq!(answer["usage"], json!({"prompt_tokens": used, "total_tokens": used}));
            let body = json!({"text_1": pair.query, "text_2": pair.document,
                "use_activation": false});
            let score = rig.ask("/score", &body).await["data"][0]["score"].as_f64().unwrap();
            assert_eq!(score, f64::from(numbers(ids.len(), 1)[0]), "as the model makes it");
        }
    }
}

#[tokio::test]
async fn documents_come_in_the_order_of_their_scores() {
    let rig = rig(1);
    let documents = ["a", "b c", "d e f", "g h i j"];
    let of = |document: &str| {
        let pair = rig.text.encode_pair("q", document, true).unwrap();
        sigmoid(f64::from(numbers(pair.len(), 1)[0]))
    };
    let mut expected: Vec<(usize, f64)> = documents.iter().map(|it| of(it)).enumerate().collect();
    expected.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    assert!(expected[0].0 != 0 || expected[1].0 != 1, "{expected:?}");
    let body = json!({"query": "q", "documents": documents, "top_n": 3});
    let answer = rig.ask("/v2/rerank", &body).await;
    let results = answer["results"].as_array().unwrap();
    assert_eq!(results.len(), 3);
    for (result, (index, score)) in results.iter().zip(expected) {
        assert_eq!(result["index"], index);
        assert_eq!(result["document"]["text"], documents[index]);
        assert!((result["relevance_score"].as_f64().unwrap() - score).abs() < 1e-6);
    }
    // Many with many: in pairs.
    rig.seen.lock().unwrap().requests.clear();
    rig.ask("/score", &json!({"queries": ["a", "b"], "documents": ["c", "d e"]})).await;
    let prompts: Vec<_> =
        rig.seen.lock().unwrap().requests.iter().map(|request| request.prompt.clone()).collect();
    let pairs = [("a", "c"), ("b", "d e")];
    assert_eq!(prompts, pairs.map(|(a, b)| rig.text.encode_pair(a, b, true).unwrap()));
}

#[tokio::test]
async fn long_texts_are_refused_or_lose_their_end() {
    let rig = rig(1);
    let max = rig.text.max_positions as usize;
    let long = "long ".repeat(max * 3 / 4);
    let ask = async |more: Value| {
        let mut body = json!({"query": long, "documents": [long]});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        rig.seen.lock().unwrap().requests.clear();
        let reply = rig.client.post("/rerank", &body).await.unwrap();
        let lengths: Vec<usize> =
            rig.seen.lock().unwrap().requests.iter().map(|it| it.prompt.len()).collect();
        (reply.status, reply.body["error"].clone(), lengths)
    };
    let (status, error, ran) = ask(json!({})).await;
    assert_eq!((status, &error["code"]), (400, &json!("context_length_exceeded")), "{error}");
    assert!(ran.is_empty() && error["param"] == "documents", "{error}");
    let special = rig.text.encode_pair("", "", true).unwrap().len();
    let (status, _, ran) = ask(json!({"max_tokens_per_query": 5, "max_tokens_per_doc": 7})).await;
    assert_eq!((status, ran), (200, vec![5 + 7 + special]));
    let (status, _, ran) = ask(json!({"truncate_prompt_tokens": 20})).await;
    assert_eq!((status, ran), (200, vec![20]));
    // What is kept of a pair are its first tokens, also where that ends within a word.
    let words = "Unhappiness \u{1f600} and antidisestablishmentarianism, ".repeat(20);
    let whole = rig.text.encode_pair(&words, "x", true).unwrap();
    for keep in 1..40 {
        let more = json!({"query": words, "documents": ["x"], "truncate_prompt_tokens": keep});
        assert_eq!(ask(more).await.0, 200);
        assert_eq!(rig.seen.lock().unwrap().requests[0].prompt, whole[..keep], "{keep}");
        // A text by itself has no more tokens than asked: less than a character is missing.
        let part = rig.text.beginning(&words, keep).unwrap();
        let tokens = rig.text.encode(part, false).unwrap().len();
        assert!(words.starts_with(part) && (keep.saturating_sub(4)..=keep).contains(&tokens));
    }
    // The query is part of each pair, so that together they are longer than the request.
    let documents = vec!["x"; 2048];
    let (status, error, ran) = ask(json!({"documents": documents})).await;
    assert!(status == 400 && ran.is_empty() && error["param"] == "documents", "{error}");
    assert!(error["message"].as_str().unwrap().contains("tokens in total"), "{error}");
    let (status, ..) = ask(json!({"query": "x", "documents": documents})).await;
    assert_eq!(status, 200);
}

/// Where a text of any size may be a single token, only its bytes bound the work.
#[tokio::test]
async fn pairs_that_are_much_longer_than_the_request_are_refused_before_they_are_read() {
    let mut text = classes(1);
    text.bytes_per_token = None;
    let rig = Rig::of(Script::default(), text);
    // 2,048 times 80 KiB.
    let body = json!({"query": "long ".repeat(16 << 10), "documents": vec!["x"; 2048]});
    let reply = rig.client.post("/rerank", &body).await.unwrap();
    let error = &reply.body["error"];
    assert_eq!((reply.status, &error["param"]), (400, &json!("query")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("bytes in total"), "{error}");
}

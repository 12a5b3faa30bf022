//! Words that must not be generated, with a real model, also in other processes and when a worker
//! dies.
use serde_json::{Value, json};
use testkit::client::Client;
use testkit::fleet::free_port;
use testkit::local_cluster::LocalCluster;

use crate::{disturbed, up};

async fn answer(client: &Client, more: &Value) -> Vec<Value> {
    let mut body = json!({"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    let reply = client.post("/v1/completions", &body).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.body["choices"].as_array().unwrap().clone()
}

/// The text of each choice.
async fn ask(client: &Client, more: &Value) -> Vec<String> {
    let choices = answer(client, more).await;
    choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn words_do_not_come_also_in_other_processes_and_when_a_worker_dies() {
    let address = format!("127.0.0.1:{}", free_port());
    let cluster =
        up(&["--workers", "2", "--tensor-parallel", "2", "--cluster-listen", &address]).await;
    let join = ["frontend", "--coordinator", &address, "--listen", "127.0.0.1:0"];
    let mut front = LocalCluster::spawn(&join).unwrap();
    front.wait_ready().await.unwrap();
    let clients = [cluster.client().unwrap(), front.client().unwrap()];

    let free = ask(&clients[0], &json!({})).await.remove(0);
    let words: Vec<&str> = free.split(|it: char| !it.is_alphabetic()).collect();
    let words: Vec<&str> = words.into_iter().filter(|word| word.len() > 3).take(3).collect();
    assert_eq!(words.len(), 3, "{free:?}");
    let spaced = format!(" {}", words[0]);
    let asked = json!({"prompt": spaced, "add_special_tokens": false});
    let tokens = clients[0].post("/tokenize", &asked).await.unwrap().body["tokens"].clone();
    let [token] = &tokens.as_array().unwrap()[..] else { panic!("{words:?}: {tokens}") };
    for client in &clients {
        for word in &words {
            let other = ask(client, &json!({"bad_words": [word]})).await.remove(0);
            assert!(!other.contains(word), "{word} in {other:?}");
            // Until there the words are no other ones.
            let before = free.split(word).next().unwrap();
            assert!(other.starts_with(before), "{word}: {other:?} is not {free:?}");
        }
        // Sampled, they might be spelled with other tokens.
        let sampled = json!({"bad_words": words, "temperature": 1, "seed": 3, "n": 4,
            "return_token_ids": true});
        for choice in answer(client, &sampled).await {
            let ids = choice["token_ids"].as_array().unwrap();
            assert!(ids.len() > 9 && !ids.contains(token), "{choice}");
        }
        // A constraint lets nothing else come: it is kept.
        let limit = json!({"allowed_token_ids": [token], "bad_words": words, "max_tokens": 3});
        assert_eq!(ask(client, &limit).await, [spaced.repeat(3)]);
    }

    let long = json!({"bad_words": words, "max_tokens": 800, "ignore_eos": true});
    let undisturbed = ask(&clients[1], &long).await;
    let client = clients[1].clone();
    let (answer, scrape) = disturbed(&cluster, async move { ask(&client, &long).await }).await;
    assert_eq!(answer, undisturbed);
    let guided = |kind| scrape.sum("tutti_requests_guided_total", &[("kind", kind)]);
    assert_eq!((guided("bad_words"), guided("tokens")), (10.0, 2.0));
}

//! Keys laid over a model's `config.json` (`--hf-overrides`): every process goes by them as if the
//! file had them.
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::client::Client;
use testkit::fleet::free_port;
use testkit::local_cluster::LocalCluster;
use testkit::models::{class_goldens, goldens, variant};
use testkit::scrape::Scrape;

use crate::secrets::run;
use crate::up;

/// Stretched from 128 to 512 positions.
const MODEL: &str = "qwen3-yarn";

/// What the model's own file says of its rotary embedding, as an option's value.
fn stretching() -> String {
    let config = std::fs::read_to_string(variant(MODEL).join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    json!({"rope_parameters": config["rope_parameters"]}).to_string()
}

/// A copy of the model whose file says nothing of that.
fn unstretched() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(variant(MODEL)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let file = folder.path().join("config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 10000.0});
    std::fs::write(&file, config.to_string()).unwrap();
    folder
}

/// Tokens, text and log-probabilities of greedy answers to the golden prompts.
async fn answers(client: &Client) -> Vec<Value> {
    let mut all = Vec::new();
    for golden in goldens(&variant(MODEL)) {
        let kept = golden.prompt_ids.len().min(60);
        let body = json!({"prompt": golden.prompt_ids[..kept], "max_tokens": 32,
            "temperature": 0, "ignore_eos": true, "logprobs": 2});
        let reply = client.post("/v1/completions", &body).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        all.push(reply.body["choices"].clone());
    }
    assert!(all.len() > 2);
    all
}

async fn max_model_len(client: &Client) -> Value {
    client.get("/v1/models").await.unwrap().body["data"][0]["max_model_len"].clone()
}

fn path(folder: &Path) -> &str {
    folder.to_str().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_answers_as_if_its_file_had_been_edited() {
    let (edited, plain, over) = (variant(MODEL), unstretched(), stretching());
    for degree in ["1", "2"] {
        let ranks = ["--workers", degree, "--tensor-parallel", degree];
        let mut found = Vec::new();
        for (model, more) in [
            (edited.as_path(), &[][..]),
            (plain.path(), &["--hf-overrides", over.as_str()]),
            (plain.path(), &[]),
        ] {
            let cluster = up(&[&["--model", path(model)], &ranks[..], more].concat()).await;
            let client = cluster.client().unwrap();
            found.push((max_model_len(&client).await, answers(&client).await));
        }
        let lengths: Vec<&Value> = found.iter().map(|(length, _)| length).collect();
        assert_eq!(lengths, [512, 512, 128], "tp {degree}");
        assert_eq!(found[1].1, found[0].1, "tp {degree}");
        let differs = found[2].1.iter().zip(&found[0].1).filter(|(one, other)| one != other);
        assert_eq!(differs.count(), found[0].1.len(), "the file alone gives other answers");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn front_ends_need_the_same_and_restarted_workers_get_it_again() {
    let (plain, over) = (unstretched(), stretching());
    let expected = {
        let model = variant(MODEL);
        let cluster = up(&["--model", path(&model), "--workers", "2"]).await;
        answers(&cluster.client().unwrap()).await
    };
    let file = plain.path().join("tutti.toml");
    std::fs::write(&file, format!("hf-overrides = '{over}'\n")).unwrap();
    let address = format!("127.0.0.1:{}", free_port());
    let listen = ["--cluster-listen", &address, "--workers", "2"];
    let model = ["--config", path(&file), "--model", path(plain.path())];
    let cluster = up(&[&listen[..], &model].concat()).await;
    let client = cluster.client().unwrap();
    assert_eq!(answers(&client).await, expected);

    let join = ["frontend", "--coordinator", &address, "--listen", "127.0.0.1:0"];
    let (code, said) = run(&join);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("--hf-overrides"), "{said}");
    // Written in another way, it is the same.
    let pretty: Value = serde_json::from_str(&over).unwrap();
    let pretty = serde_json::to_string_pretty(&pretty).unwrap();
    let args = [&join[..], &["--hf-overrides", &pretty]].concat();
    let mut front = LocalCluster::spawn(&args).unwrap();
    front.wait_ready().await.unwrap();
    assert_eq!(answers(&front.client().unwrap()).await, expected);

    for victim in 0..2 {
        let failed = |scrape: &Scrape| scrape.sum("tutti_failovers_total", &[]);
        let before = failed(&client.scrape().await.unwrap());
        LocalCluster::signal(cluster.worker_pids()[victim], "KILL").unwrap();
        let is_noticed = |scrape: &Scrape| failed(scrape) > before;
        client.scrape_until(Duration::from_secs(20), is_noticed).await.unwrap();
        assert_eq!(answers(&client).await, expected, "killed worker {victim}");
    }
}

/// Qwen3-Reranker is served like this, from the hub.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_generating_model_becomes_a_reranker() {
    let folder = variant("qwen3");
    let goldens = class_goldens(&folder);
    let over = json!({"architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": goldens.tokens, "is_original_qwen3_reranker": true});
    let (over, model) = (over.to_string(), ["--model", path(&folder), "--dtype", "float32"]);
    let cluster = up(&[&model[..], &["--hf-overrides", &over, "--workers", "2"]].concat()).await;
    let client = cluster.client().unwrap();
    for golden in &goldens.prompts {
        let reply = client.post("/classify", &json!({"input": golden.prompt_ids})).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        let prob = reply.body["data"][0]["probs"][0].as_f64().unwrap();
        let expected = 1.0 / (1.0 + (-golden.numbers[0]).exp());
        assert!((prob - expected).abs() < 1e-4, "{prob} for {expected}");
    }
}

#[test]
fn what_cannot_be_laid_over_the_file_is_told_with_its_option() {
    let plain = unstretched();
    let model = ["--model", path(plain.path()), "--listen", "127.0.0.1:0"];
    for (over, code, told) in [
        ("[1]", 2, "not a JSON object"),
        (r#"{"rms_norm_eps": -1}"#, 1, "config.json: with --hf-overrides: rms_norm_eps is -1"),
        (r#"{"vocab_size": 0}"#, 1, "config.json: with --hf-overrides: vocab_size is 0"),
        (r#"{"rope_parameters": {"rope_type": "yarn"}}"#, 1, "rope_theta (10000.0)"),
        (r#"{"num_attention_heads": 8}"#, 1, "q_proj"),
    ] {
        for role in ["up", "coordinator"] {
            let cluster = ["--cluster-listen", "127.0.0.1:0", "--hf-overrides", over];
            let (ended, said) = run(&[&[role][..], &model, &cluster].concat());
            assert_eq!(ended, Some(code), "{role} {over}: {said}");
            assert!(said.contains(told), "{role} {over}: {said}");
        }
    }
}

#[test]
fn a_host_is_checked_and_measured_with_the_same_model() {
    let (plain, over) = (unstretched(), stretching());
    let model = ["--model", path(plain.path()), "--tensor-parallel", "1"];
    let longer = ["--hf-overrides", over.as_str()];
    let check = ["doctor", "--listen", "127.0.0.1:0", "--cluster-listen", "127.0.0.1:0"];
    for (more, told) in [(&[][..], "128 positions"), (&longer, "512 positions")] {
        let (_, said) = run(&[&check[..], &model, more].concat());
        assert!(said.contains(told), "{said}");
    }
    let (_, said) =
        run(&[&check[..], &model, &["--hf-overrides", r#"{"vocab_size": 0}"#]].concat());
    assert!(said.contains("correct --hf-overrides"), "{said}");
    let measure = ["bench", "--prompt-tokens", "200", "--decode-steps", "1", "--batches", "1"];
    let (code, said) = run(&[&measure[..], &model].concat());
    assert!(code == Some(2) && said.contains("the model has 128 positions"), "{said}");
    let (code, said) = run(&[&measure[..], &model, &longer].concat());
    assert!(code == Some(0) && said.contains("prefill200"), "{said}");
}

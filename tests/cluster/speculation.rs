//! Speculative decoding: the same answers in fewer steps, also when a worker dies, counted exactly.
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use testkit::client::Client;
use testkit::local_cluster::LocalCluster;
use testkit::models::{demo, variant};
use testkit::scrape::Scrape;

use crate::counters::check_invariants;
use crate::{STORY, greedy, up};

const CONFIG: &str =
    r#"{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2}"#;

/// Requests with repetitive answers, and others.
fn requests() -> Vec<Value> {
    let again = format!("{} {STORY}", STORY.repeat(4));
    let mut requests = Vec::new();
    for (at, prompt) in [again.as_str(), STORY, "One day", again.as_str()].into_iter().enumerate() {
        let mut body = greedy(prompt, 40 + 20 * at as u32);
        body["ignore_eos"] = json!(at != 2);
        body["logprobs"] = json!(2);
        requests.push(body.clone());
        body["temperature"] = json!(0.7);
        body["seed"] = json!(at);
        body["n"] = json!(2);
        body["frequency_penalty"] = json!(0.2 * at as f32);
        body["min_tokens"] = json!(9);
        requests.push(body.clone());
        body["stop"] = json!([" fox", "."]);
        body["echo"] = json!(true);
        requests.push(body);
    }
    // Drafts end where a word may be completed that must not come.
    for words in [json!(["a little", "liked to", "there was"]), json!(["little", "one day"])] {
        let mut body = greedy(again.as_str(), 100);
        (body["ignore_eos"], body["bad_words"]) = (json!(true), words);
        requests.push(body);
    }
    // In a long text the model repeats itself.
    let mut body = greedy(STORY, 600);
    body["ignore_eos"] = json!(true);
    requests.push(body);
    requests
}

/// All answers, requested one by one or all at once, with their total prompt and completion tokens.
async fn answers(client: &Client, at_once: bool) -> (Vec<Value>, f64, f64) {
    let mut tasks = Vec::new();
    let mut replies = Vec::new();
    for body in requests() {
        let client = client.clone();
        let asked =
            tokio::spawn(async move { client.post("/v1/completions", &body).await.unwrap() });
        if at_once {
            tasks.push(asked);
        } else {
            replies.push(asked.await.unwrap());
        }
    }
    for task in tasks {
        replies.push(task.await.unwrap());
    }
    let (mut prompt, mut completion) = (0.0, 0.0);
    let mut answers = Vec::new();
    for (reply, body) in replies.into_iter().zip(requests()) {
        assert_eq!(reply.status, 200, "{}", reply.body);
        let n = body["n"].as_f64().unwrap_or(1.0);
        prompt += n * reply.body["usage"]["prompt_tokens"].as_f64().unwrap();
        completion += reply.body["usage"]["completion_tokens"].as_f64().unwrap();
        answers.push(reply.body["choices"].clone());
    }
    (answers, prompt, completion)
}

fn check_counts(scrape: &Scrape, prompt: f64, completion: f64) {
    check_invariants(scrape);
    let sum = |name: &str| scrape.sum(&format!("tutti_{name}"), &[]);
    assert_eq!(sum("prompt_tokens_total"), prompt);
    assert_eq!(sum("generation_tokens_total"), completion);
    let cached =
        scrape.sum("tutti_prompt_tokens_by_source_total", &[("source", "local_cache_hit")]);
    assert_eq!(sum("iteration_tokens_sum"), prompt - cached + completion);
    let of = |name: &str| sum(&format!("spec_decode_{name}"));
    let (drafts, drafted) = (of("drafts_total"), of("draft_tokens_total"));
    let (accepted, emitted) = (of("accepted_tokens_total"), of("emitted_tokens_total"));
    assert!(drafts > 0.0 && drafted >= drafts && accepted <= drafted, "{drafts} {drafted}");
    assert!(accepted <= emitted && emitted <= accepted + drafts && emitted <= completion);
    assert_eq!(of("emittable_tokens_total"), drafted + drafts);
    let mut last = f64::INFINITY;
    let mut by_position = 0.0;
    for position in 0..5 {
        let labels = [("position", &*position.to_string())];
        let at = scrape.sum("tutti_spec_decode_accepted_tokens_per_position_total", &labels);
        assert!(at <= last, "no token is accepted behind one that is not");
        (by_position, last) = (by_position + at, at);
    }
    assert_eq!(by_position, accepted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drafts_change_how_many_steps_it_takes_and_nothing_else() {
    let without = up(&["--workers", "1", "--tensor-parallel", "1"]).await;
    let (expected, ..) = answers(&without.client().unwrap(), false).await;
    let plain = without.client().unwrap().scrape().await.unwrap();
    assert_eq!(plain.sum("tutti_spec_decode_drafts_total", &[]), 0.0);
    drop(without);
    for degree in ["1", "2"] {
        let args = ["--tensor-parallel", degree, "--workers", degree];
        let more = ["--metrics-compat", "vllm,aphrodite", "--log-stats-interval", "1"];
        let args = [&args[..], &more, &["--speculative-config", CONFIG]].concat();
        let cluster = up(&args).await;
        let client = cluster.client().unwrap();
        let (one_by_one, prompt, completion) = answers(&client, false).await;
        if degree == "1" {
            assert_eq!(one_by_one, expected);
        }
        let scrape = client.scrape().await.unwrap();
        check_counts(&scrape, prompt, completion);
        let steps = |scrape: &Scrape| scrape.sum("tutti_engine_steps_total", &[]);
        if degree == "1" {
            let (with, without) = (steps(&scrape), steps(&plain));
            assert!(with < 0.9 * without, "{with} steps, without drafts {without}");
        }
        let (at_once, ..) = answers(&client, true).await;
        assert_eq!(at_once, one_by_one, "tp {degree}: together as alone");
        let scrape = client.scrape().await.unwrap();
        check_counts(&scrape, 2.0 * prompt, 2.0 * completion);
        let sum = |name: &str| scrape.sum(name, &[]);
        let drafted = sum("tutti_spec_decode_draft_tokens_total");
        let accepted = sum("tutti_spec_decode_accepted_tokens_total");
        assert_eq!(sum("vllm:spec_decode_num_draft_tokens_total"), drafted);
        assert_eq!(sum("vllm:spec_decode_num_drafts_total"), sum("tutti_spec_decode_drafts_total"));
        assert_eq!(sum("vllm:spec_decode_num_accepted_tokens_per_pos_total"), accepted);
        let rate = sum("aphrodite:spec_decode_draft_acceptance_rate");
        assert!((rate - accepted / drafted).abs() < 1e-9, "{rate}");
        for _ in 0..100 {
            if cluster.log().contains("Speculative metrics: Draft acceptance rate: ") {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(cluster.log().contains("Speculative metrics: "), "{}", cluster.log());
    }
}

/// Drafts by another model, which are mostly wrong, and by the model itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drafts_of_a_model_change_how_many_steps_it_takes_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let other = half_of_the_demo(folder.path());
    for degree in ["1", "2"] {
        let args = ["--tensor-parallel", degree, "--workers", degree];
        let without = up(&args).await;
        let (expected, ..) = answers(&without.client().unwrap(), false).await;
        let plain = without.client().unwrap().scrape().await.unwrap();
        drop(without);
        for (draft, is_itself) in [(demo(), true), (other.clone(), false)] {
            // No method is given: a folder means a draft model.
            let config = json!({"model": draft, "num_speculative_tokens": 5}).to_string();
            let cluster = up(&[&args[..], &["--speculative-config", &config]].concat()).await;
            let client = cluster.client().unwrap();
            let (one_by_one, prompt, completion) = answers(&client, false).await;
            assert_eq!(one_by_one, expected, "tp {degree}, by {}", draft.display());
            let scrape = client.scrape().await.unwrap();
            check_counts(&scrape, prompt, completion);
            let sum = |name: &str| scrape.sum(name, &[]);
            let steps = |scrape: &Scrape| scrape.sum("tutti_engine_steps_total", &[]);
            let drafted = sum("tutti_spec_decode_draft_tokens_total");
            let accepted = sum("tutti_spec_decode_accepted_tokens_total");
            if is_itself {
                assert!(accepted > 0.9 * drafted, "{accepted} of {drafted}");
                let (with, without) = (steps(&scrape), steps(&plain));
                assert!(with < 0.4 * without, "{with} steps, without drafts {without}");
            }
            // Only rank 0 has the draft model.
            let weights = |rank| scrape.sum("tutti_rank_weights_bytes", &[("rank", rank)]);
            let more = weights("0") - plain.sum("tutti_rank_weights_bytes", &[("rank", "0")]);
            assert!(more > 1e6, "{more} bytes");
            assert!(degree == "1" || weights("1") < weights("0"));
            let took = |rank| scrape.sum("tutti_rank_draft_seconds_count", &[("rank", rank)]);
            assert!(took("0") > 0.0 && took("1") == 0.0);
            let (at_once, ..) = answers(&client, true).await;
            assert_eq!(at_once, expected, "tp {degree}: together as alone");
            let scrape = client.scrape().await.unwrap();
            check_counts(&scrape, 2.0 * prompt, 2.0 * completion);
        }
    }
}

/// Copies the demo model's first two layers to a folder: a model with other output.
fn half_of_the_demo(folder: &Path) -> PathBuf {
    for file in std::fs::read_dir(demo()).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.join(file.file_name())).unwrap();
    }
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["num_hidden_layers"] = json!(2);
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    folder.to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rank_0_that_is_killed_while_it_drafts_changes_nothing() {
    let mut body = greedy(STORY, 500);
    body["ignore_eos"] = json!(true);
    body["stream"] = json!(true);
    let text = |events: &[Value]| -> String {
        events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect()
    };
    let without = up(&[]).await;
    let streamed = without.client().unwrap().stream("/v1/completions", &body).await.unwrap();
    let undisturbed = text(&streamed.events);
    drop(without);
    let config = json!({"model": demo(), "num_speculative_tokens": 3}).to_string();
    let cluster = up(&["--speculative-config", &config]).await;
    let client = cluster.client().unwrap();
    for victim in 0..2 {
        let running = {
            let (client, body) = (client.clone(), body.clone());
            tokio::spawn(async move { client.stream("/v1/completions", &body).await.unwrap() })
        };
        let accepted = "tutti_spec_decode_accepted_tokens_total";
        let before = client.scrape().await.unwrap().sum(accepted, &[]);
        let begun = |scrape: &Scrape| scrape.sum(accepted, &[]) > before + 5.0;
        client.scrape_until(Duration::from_secs(10), begun).await.unwrap();
        LocalCluster::signal(cluster.worker_pids()[victim], "KILL").unwrap();
        assert_eq!(text(&running.await.unwrap().events), undisturbed, "killed worker {victim}");
    }
}

#[test]
fn a_draft_model_that_cannot_be_used_ends_with_one_clear_error() {
    let fails_with = |model: &Path, words: &[&str]| {
        let config = json!({"model": model, "num_speculative_tokens": 3}).to_string();
        let args = ["up", "--listen", "127.0.0.1:0", "--speculative-config", &config];
        let mut cluster = LocalCluster::spawn(&args).unwrap();
        let status = cluster.wait_end().unwrap();
        std::thread::sleep(Duration::from_millis(200));
        let log = cluster.log();
        assert!(!status.success() && !log.contains("panicked"), "{log}");
        assert!(words.iter().all(|word| log.contains(word)), "{words:?} in:\n{log}");
    };
    fails_with(Path::new("/no/such/draft"), &["error:", "/no/such/draft"]);
    let words = ["error:", "llama-gqa/config.json", "vocab_size is 384", "drafts for has 2048"];
    fails_with(&variant("llama-gqa"), &words);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_killed_while_drafts_are_verified_changes_nothing() {
    let mut body = greedy(STORY.repeat(3), 600);
    body["ignore_eos"] = json!(true);
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let text = |events: &[Value]| -> String {
        events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect()
    };
    let without = up(&[]).await;
    let streamed = without.client().unwrap().stream("/v1/completions", &body).await.unwrap();
    let undisturbed = text(&streamed.events);
    drop(without);
    let cluster = up(&["--speculative-config", CONFIG]).await;
    let client = cluster.client().unwrap();
    let mut prompt = 0.0;
    for victim in 0..2 {
        let running = {
            let (client, body) = (client.clone(), body.clone());
            tokio::spawn(async move { client.stream("/v1/completions", &body).await.unwrap() })
        };
        let accepted = "tutti_spec_decode_accepted_tokens_total";
        let before = client.scrape().await.unwrap().sum(accepted, &[]);
        let begun = client
            .scrape_until(Duration::from_secs(10), |s| s.sum(accepted, &[]) > before + 5.0)
            .await
            .unwrap();
        assert!(begun.sum("tutti_requests_running", &[]) == 1.0, "it must be running when killed");
        LocalCluster::signal(cluster.worker_pids()[victim], "KILL").unwrap();
        let events = running.await.unwrap().events;
        assert_eq!(text(&events), undisturbed, "killed worker {victim}");
        prompt += events.last().unwrap()["usage"]["prompt_tokens"].as_f64().unwrap();
    }
    let scrape = client.scrape().await.unwrap();
    check_counts(&scrape, prompt, 2.0 * 600.0);
    assert!(scrape.sum("tutti_failovers_total", &[]) >= 2.0);
}

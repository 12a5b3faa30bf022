//! Real processes on loopback: what a user of `tutti up` sees.
//!
//! - [`actors`]: named actors across processes
//! - [`adapters`]: LoRA adapters as models of their own
//! - [`api`]: options of the HTTP API
//! - [`base_models`]: embedding models that were saved without what generates text
//! - [`batches`]: files of requests
//! - [`serving`]: completions and chat against golden values, streaming, concurrency, disconnects
//! - [`commands`]: operators' commands outlive the coordinator that received them
//! - [`counters`]: `/metrics` equals what the client counted
//! - [`created`]: actors that are created by class and come back when their process is killed
//! - [`dead_ranks`]: what remains of dead workers
//! - [`doctor`]: what a host needs to become a node
//! - [`draining`]: processes told to end finish their requests first
//! - [`etcd`]: several coordinators, one of which leads, and discovery through etcd
//! - [`etcd_restarts`]: an etcd that restarts takes the lead from nobody
//! - [`failures`]: killed and frozen workers, bad models, Ctrl-C
//! - [`full_etcd`]: what etcd stores, and what happens when it is full
//! - [`front_ends`]: separate front-end processes
//! - [`hosts`]: all workers of a host, started by one command
//! - `json_logs`: logs for programs
//! - [`loading`]: LoRA adapters loaded and unloaded while requests run
//! - [`misfits`]: standbys with other options or another secret than the leader's
//! - [`overrides`]: keys laid over a model's `config.json`
//! - [`pages`]: `/metrics` of every role of a running cluster
//! - [`placing`]: which workers form a replica
//! - `probes`: what processes answer to probes, also before they serve
//! - [`priorities`]: urgent requests before others
//! - [`prefixes`]: prompts with common prefixes
//! - [`recovery`]: how long clients wait when something breaks; the figures of docs/benchmarks.md
//! - [`resharding`]: the tensor-parallel degree follows the members
//! - [`rotation`]: secrets that change while everything runs
//! - [`scaling`]: scaling, draining, the operator's commands
//! - [`scraping`]: formats, listeners, log lines, metrics of applications
//! - [`secrets`]: who may join
//! - [`speculation`]: drafted tokens change the number of steps and nothing else
//! - [`stalled`]: processes whose output nobody reads
//! - [`streams`]: streams that continue under the next coordinator
//! - [`strangers`]: connections that stay silent
//! - [`structured`]: structured output of a real model, also when a worker dies
//! - [`states`]: a model with linear attention
//! - [`swapping`]: requests swapped to host memory
//! - [`thinking`]: bounds on reasoning, also when a worker dies
//! - [`bad_words`]: words that must not be generated, likewise
//! - [`tls`]: HTTPS, its files, and its clients
//! - [`traces`]: what traces tell of requests
//! - [`unix_sockets`]: HTTP on Unix sockets
//! - [`by_hand`]: a coordinator and workers started one by one
//! - `classes`: models that sort texts into classes, and a reranker with K and V in FP8
//! - [`openai_client`]: the `openai` Python package
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test ends by panicking"
)]

mod actors;
mod adapters;
mod api;
mod bad_words;
mod base_models;
mod batches;
mod by_hand;
mod classes;
mod commands;
mod counters;
mod created;
mod dead_ranks;
mod doctor;
mod draining;
mod etcd;
mod etcd_restarts;
mod failures;
mod front_ends;
mod full_etcd;
mod hosts;
mod json_logs;
mod loading;
mod misfits;
mod openai_client;
mod overrides;
mod pages;
mod placing;
mod prefixes;
mod priorities;
mod probes;
mod recovery;
mod resharding;
mod rotation;
mod scaling;
mod scraping;
mod secrets;
mod serving;
mod speculation;
mod stalled;
mod states;
mod strangers;
mod streams;
mod structured;
mod swapping;
mod thinking;
mod tls;
mod traces;
mod unix_sockets;

use std::time::Duration;

use serde_json::{Value, json};
use testkit::local_cluster::LocalCluster;
use testkit::models::{Golden, demo, goldens};
use testkit::scrape::Scrape;

/// A prompt whose greedy continuation is long and does not end early.
const STORY: &str = "Once upon a time, there was a little fox named Pip.";

/// A cluster of the demo model.
async fn up(args: &[&str]) -> LocalCluster {
    LocalCluster::up(args).await.expect("tutti up becomes ready")
}

/// Kills the first worker while `asked` gets its answer. Returns that, and the page after it.
async fn disturbed<T: Send + 'static>(
    cluster: &LocalCluster,
    asked: impl Future<Output = T> + Send + 'static,
) -> (T, Scrape) {
    let client = cluster.client().unwrap();
    let generated = |scrape: &Scrape| scrape.sum("tutti_generation_tokens_total", &[]);
    let before = generated(&client.scrape().await.unwrap());
    let running = tokio::spawn(asked);
    let patience = Duration::from_secs(20);
    client.scrape_until(patience, |scrape| generated(scrape) > before + 20.0).await.unwrap();
    LocalCluster::signal(cluster.worker_pids()[0], "KILL").unwrap();
    let answer = running.await.unwrap();
    let scrape = client.scrape().await.unwrap();
    assert!(scrape.sum("tutti_failovers_total", &[]) >= 1.0, "it was not disturbed at all");
    (answer, scrape)
}

/// A greedy completion request.
fn greedy(prompt: impl Into<Value>, max_tokens: u32) -> Value {
    json!({"model": "demo", "prompt": prompt.into(), "max_tokens": max_tokens, "temperature": 0})
}

/// The text of a completion reply's first choice.
fn text(body: &Value) -> &str {
    body["choices"][0]["text"].as_str().unwrap_or("<no text>")
}

/// The demo model's goldens with plain text prompts.
fn text_goldens() -> Vec<Golden> {
    goldens(&demo()).into_iter().filter(|golden| golden.text.is_some()).collect()
}

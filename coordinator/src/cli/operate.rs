//! `tutti status`, `tutti scale`, `tutti drain`: the operator's side of a running coordinator.
use std::time::Duration;

use coordinator::cluster::status::Status;
use coordinator::http::admin::{DrainRequest, ScaleRequest, TOKEN_PURPOSE};
use serde_json::Value;
use ureq::Agent;

use super::options::{DrainArgs, OperatorArgs, ScaleArgs, StatusArgs};
use super::output::print_line;
use super::{CliError, secret};

/// How long an answer may take.
const DEADLINE: Duration = Duration::from_secs(10);

pub(crate) fn status(args: &StatusArgs) -> Result<(), CliError> {
    let body = ask(&args.operator, "/admin/status", None)?;
    if args.json {
        print_line(&body.to_string());
        return Ok(());
    }
    let status: Status = serde_json::from_value(body)
        .map_err(|error| CliError::Failed(format!("the answer is no status: {error}")))?;
    for line in if args.dead { dead(&status) } else { table(&status) } {
        print_line(&line);
    }
    Ok(())
}

pub(crate) fn scale(args: &ScaleArgs) -> Result<(), CliError> {
    let request = ScaleRequest { replicas: args.replicas, workers: args.workers };
    let body = serde_json::to_value(request).unwrap_or_default();
    ask(&args.operator, "/admin/scale", Some(body)).map(drop)
}

pub(crate) fn drain(args: &DrainArgs) -> Result<(), CliError> {
    let request = DrainRequest { node: args.node.clone() };
    let body = serde_json::to_value(request).unwrap_or_default();
    ask(&args.operator, "/admin/drain", Some(body)).map(drop)
}

/// Asks the coordinator; POSTs when there is a body.
fn ask(args: &OperatorArgs, path: &str, body: Option<Value>) -> Result<Value, CliError> {
    let agent: Agent = Agent::config_builder()
        .timeout_global(Some(DEADLINE))
        .http_status_as_error(false)
        .build()
        .into();
    let url = format!("{}{path}", args.server.trim_end_matches('/'));
    let failed = |error: ureq::Error| CliError::Failed(format!("{url}: {error}"));
    let token = secret::read_file(args.cluster_secret_file.as_deref())?
        .map(|secret| format!("Bearer {}", secret.token(TOKEN_PURPOSE)));
    let mut response = match body {
        None => {
            let request = agent.get(&url);
            match &token {
                Some(token) => request.header("authorization", token),
                None => request,
            }
            .call()
        }
        Some(body) => {
            let request = agent.post(&url);
            match &token {
                Some(token) => request.header("authorization", token),
                None => request,
            }
            .send_json(body)
        }
    }
    .map_err(failed)?;
    let answer: Value = response.body_mut().read_json().map_err(failed)?;
    if response.status().is_success() {
        return Ok(answer);
    }
    let message = answer["error"]["message"].as_str().map(str::to_owned);
    Err(CliError::Failed(message.unwrap_or_else(|| format!("{url}: {}", response.status()))))
}

fn table(status: &Status) -> Vec<String> {
    let ready = if status.ready { "ready" } else { "not ready" };
    let bound = status.max_replicas.map(|max| format!(", at most {max} replicas"));
    let mut lines = vec![format!(
        "tutti {}: {}, tensor parallel {}{}: {ready} ({})",
        status.version,
        status.model,
        status.tensor_parallel,
        bound.unwrap_or_default(),
        status.message
    )];
    lines.push(format!(
        "\n{:<10} {:<10} {:>6} {:>9}  {:<20} last failure",
        "REPLICA", "STATE", "EPOCH", "REQUESTS", "WORKERS"
    ));
    for replica in &status.replicas {
        let ranks = replica.ranks.iter();
        let ranks = ranks.map(|rank| rank.map_or_else(|| "-".to_owned(), |slot| slot.to_string()));
        lines.push(format!(
            "{:<10} {:<10} {:>6} {:>9}  {:<20} {}",
            replica.id,
            replica.state,
            replica.epoch,
            replica.requests,
            ranks.collect::<Vec<_>>().join(" "),
            replica.last_failure.as_deref().unwrap_or("-")
        ));
    }
    lines.push(format!(
        "\n{:<24} {:<10} {:>5} {:<10} {:>8} {:>5} {:>8}",
        "NODE", "ROLE", "SLOT", "STATE", "REPLICA", "RANK", "PID"
    ));
    let number = |value: Option<u32>| value.map_or_else(|| "-".to_owned(), |n| n.to_string());
    for node in &status.nodes {
        lines.push(format!(
            "{:<24} {:<10} {:>5} {:<10} {:>8} {:>5} {:>8}",
            node.node,
            node.role,
            number(Some(node.slot).filter(|_| node.role != "coordinator")),
            node.state,
            number(node.replica),
            number(node.rank),
            node.pid
        ));
    }
    if !status.dead.is_empty() {
        let count = status.dead.len();
        lines.push(format!("\n{count} ended processes are remembered: tutti status --dead"));
    }
    lines
}

fn dead(status: &Status) -> Vec<String> {
    let mut lines =
        vec![format!("{:<24} {:>5} {:>8} {:>12}  reason", "NODE", "SLOT", "PID", "AT (1970)")];
    lines.extend(status.dead.iter().map(|dead| {
        format!(
            "{:<24} {:>5} {:>8} {:>12}  {}",
            dead.node, dead.slot, dead.pid, dead.at, dead.reason
        )
    }));
    lines
}

//! `tutti status`, `tutti logs`, `tutti scale`, `tutti drain`, `tutti adapters`,
//! `tutti actors`, `tutti reset-prefix-cache`: the operator's commands to a running coordinator.
//!
//! - `ask`: how they ask it
mod ask;

use std::path::Path;
use std::time::Duration;

use coordinator::cluster::status::{Actor, AdapterStatus, NodeLogs, Status};
use coordinator::http::admin::{DrainRequest, KillRequest, RESET, ScaleRequest};
use serde_json::{Value, json};
use shared::clock::since_1970;

use self::ask::{ask, ask_within};
use super::CliError;
use super::options::{
    ActorsArgs, AdapterCommand, AdaptersArgs, DrainArgs, LoadArgs, LogsArgs, ResetPrefixCacheArgs,
    ScaleArgs, StatusArgs, UnloadArgs,
};
use super::output::print_line;

/// Time limit for an adapter to be loaded, which may have to be downloaded first.
const LOAD_DEADLINE: Duration = Duration::from_secs(960);

pub(crate) fn status(args: &StatusArgs) -> Result<(), CliError> {
    let body = ask(&args.operator, "/admin/status", &[], None)?;
    if args.json {
        print_line(&body.to_string());
        return Ok(());
    }
    let status: Status = serde_json::from_value(body)
        .map_err(|error| CliError::Failed(format!("the answer is not a status: {error}")))?;
    for line in if args.dead { dead(&status) } else { table(&status) } {
        print_line(&line);
    }
    Ok(())
}

pub(crate) fn logs(args: &LogsArgs) -> Result<(), CliError> {
    let mut query = vec![
        ("node", args.node.clone()),
        ("lines", args.lines.to_string()),
        ("previous", args.previous.to_string()),
    ];
    query.extend(args.pid.map(|pid| ("pid", pid.to_string())));
    let body = ask(&args.operator, "/admin/logs", &query, None)?;
    if args.json {
        print_line(&body.to_string());
        return Ok(());
    }
    let logs: NodeLogs = serde_json::from_value(body)
        .map_err(|error| CliError::Failed(format!("the answer has no log lines: {error}")))?;
    log_text(&logs).iter().for_each(|line| print_line(line));
    Ok(())
}

/// Formats its log, then what only its stderr had, such as a panic's message, then its end.
fn log_text(logs: &NodeLogs) -> Vec<String> {
    let mut text = Vec::new();
    if logs.missing > 0 {
        text.push(format!(
            "-- {} lines are missing: they were written faster than lines are kept",
            logs.missing
        ));
    }
    text.extend(logs.lines.iter().cloned());
    let more: Vec<&String> = logs.stderr.iter().filter(|line| !logs.lines.contains(line)).collect();
    if !more.is_empty() {
        text.push("-- also on stderr:".to_owned());
        text.extend(more.into_iter().cloned());
    }
    if !logs.alive {
        let exit = logs.exit.as_ref().map(|exit| format!(" ({exit})")).unwrap_or_default();
        let reason = logs.reason.as_deref().unwrap_or("unknown reason");
        text.push(format!("-- process {} ended: {reason}{exit}", logs.pid));
    }
    text
}

pub(crate) fn scale(args: &ScaleArgs) -> Result<(), CliError> {
    let request =
        ScaleRequest { replicas: args.replicas, reset: args.reset, workers: args.workers };
    let body = serde_json::to_value(request).unwrap_or_default();
    ask(&args.operator, "/admin/scale", &[], Some(body))?;
    if let Some(workers) = args.workers {
        print_line(&format!("{workers} local workers will run; see tutti status"));
    }
    if args.reset {
        print_line("back to the number of replicas in the leader's --replicas; see tutti status");
    }
    match args.replicas {
        None => {}
        Some(0) => print_line("as many replicas as the workers allow"),
        Some(replicas) => print_line(&format!("at most {replicas} replicas from now on")),
    }
    Ok(())
}

pub(crate) fn drain(args: &DrainArgs) -> Result<(), CliError> {
    let request = DrainRequest { node: args.node.clone() };
    let body = serde_json::to_value(request).unwrap_or_default();
    ask(&args.operator, "/admin/drain", &[], Some(body))?;
    print_line(&format!("{} is draining and will leave; see tutti status", args.node));
    Ok(())
}

pub(crate) fn reset_prefix_cache(args: &ResetPrefixCacheArgs) -> Result<(), CliError> {
    ask(&args.operator, RESET, &[], Some(Value::Null))?;
    print_line("the prefix caches of all replicas are empty");
    Ok(())
}

pub(crate) fn actors(args: &ActorsArgs) -> Result<(), CliError> {
    if let (Some(_), Some(actor)) = (&args.action, &args.actor) {
        let request = KillRequest { actor: actor.clone(), restart: args.restart };
        let body = serde_json::to_value(request).unwrap_or_default();
        ask(&args.operator, "/admin/actors/kill", &[], Some(body))?;
        print_line(&format!("{actor} is killed; see tutti actors"));
        return Ok(());
    }
    let body = ask(&args.operator, "/admin/status", &[], None)?;
    if args.json {
        print_line(&json!({"actors": body["actors"], "hosts": body["hosts"]}).to_string());
        return Ok(());
    }
    let status: Status = serde_json::from_value(body)
        .map_err(|error| CliError::Failed(format!("the answer is not a status: {error}")))?;
    actors_table(&status).iter().for_each(|line| print_line(line));
    Ok(())
}

/// Formats the actors of applications, then the processes that host their classes.
fn actors_table(status: &Status) -> Vec<String> {
    let mut lines = vec![format!(
        "{:<28} {:<16} {:<20} {:<10} {:>9}  {:<24} reason",
        "ACTOR", "CLASS", "NODE", "STATE", "RESTARTS", "TAKES"
    )];
    // The cluster's own are in tutti status.
    let own = |actor: &&Actor| actor.name.contains('/') || actor.name.starts_with("log:");
    for actor in status.actors.iter().filter(|actor| !own(actor)) {
        lines.push(format!(
            "{:<28} {:<16} {:<20} {:<10} {:>9}  {:<24} {}",
            actor.name,
            actor.kind,
            if actor.node.is_empty() { "-" } else { &actor.node },
            actor.state,
            actor.restarts,
            actor.needs.as_deref().unwrap_or("-"),
            actor.reason.as_deref().unwrap_or("-")
        ));
    }
    lines.push(format!("\n{:<28} {:>6}  {:<32} {:<32} classes", "HOST", "ACTORS", "TAKEN", "FREE"));
    for host in &status.hosts {
        let drains = if host.draining { " (it drains)" } else { "" };
        lines.push(format!(
            "{:<28} {:>6}  {:<32} {:<32} {}{drains}",
            host.node,
            host.actors,
            host.used,
            host.free,
            host.classes.join(", ")
        ));
    }
    lines
}

pub(crate) fn adapters(args: &AdaptersArgs) -> Result<(), CliError> {
    match &args.command {
        AdapterCommand::Load(LoadArgs { operator, name, path, replace }) => {
            // As this command sees it: the server may run in another folder.
            let given = Path::new(path);
            let folder = std::path::absolute(given).ok().filter(|_| given.is_dir());
            let path = folder.map_or(path.clone(), |it| it.to_string_lossy().into_owned());
            let body = json!({"lora_name": name, "lora_path": path, "load_inplace": replace});
            ask_within(LOAD_DEADLINE, operator, "/v1/load_lora_adapter", &[], Some(body))?;
            print_line(&format!("{name} is served; see tutti status"));
        }
        AdapterCommand::Unload(UnloadArgs { operator, name }) => {
            let body = json!({"lora_name": name});
            ask(operator, "/v1/unload_lora_adapter", &[], Some(body))?;
            print_line(&format!("{name} is served no longer; see tutti status"));
        }
    }
    Ok(())
}

fn table(status: &Status) -> Vec<String> {
    let ready = if status.ready { "ready" } else { "not ready" };
    let by = match (status.commands.scaled, status.commands.stored) {
        (false, _) => "",
        (true, Some(false)) => " (by tutti scale; not stored for the next leader yet)",
        (true, _) => " (by tutti scale)",
    };
    let bound = match status.max_replicas {
        Some(max) => format!(", at most {max} replicas{by}"),
        None if status.commands.scaled => format!(", any number of replicas{by}"),
        None => String::new(),
    };
    let classes = match status.classes {
        Some(1) => " (judges texts: one class)".to_owned(),
        Some(count) => format!(" (sorts texts into {count} classes)"),
        None => String::new(),
    };
    let mut lines = vec![format!(
        "tutti {}: {}{classes}, tensor parallel {}{}: {ready} ({})",
        status.version, status.model, status.tensor_parallel, bound, status.message
    )];
    lines.push(format!(
        "\n{:<10} {:<10} {:>6} {:>9}  {:<20} last end",
        "REPLICA", "STATE", "EPOCH", "REQUESTS", "WORKERS"
    ));
    for replica in &status.replicas {
        let ranks = replica.ranks.iter();
        let ranks = ranks.map(|rank| rank.map_or_else(|| "-".to_owned(), |slot| slot.to_string()));
        let held = replica.held_seconds.is_some();
        lines.push(format!(
            "{:<10} {:<10} {:>6} {:>9}  {:<20} {}",
            replica.id,
            if held { "held" } else { &replica.state },
            replica.epoch,
            replica.requests,
            ranks.collect::<Vec<_>>().join(" "),
            replica.last_failure.as_deref().unwrap_or("-")
        ));
    }
    if !status.adapters.is_empty() || status.adapter_places.is_some() {
        let places = status.adapter_places.map_or_else(
            || "fixed".to_owned(),
            |places| format!("{} of {places} places", status.adapters.len()),
        );
        lines.push(format!("\n{:<24} {:<10} path ({places})", "ADAPTER", "STATE"));
        let of = |it: &AdapterStatus| format!("{:<24} {:<10} {}", it.name, it.state, it.path);
        lines.extend(status.adapters.iter().map(of));
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
    lines.push(format!(
        "\n{:<28} {:<10} {:<20} {:<10} {:>6} {:>6} {:>9}  reason",
        "ACTOR", "KIND", "NODE", "STATE", "EPOCH", "LOAD", "RESTARTS"
    ));
    for actor in &status.actors {
        lines.push(format!(
            "{:<28} {:<10} {:<20} {:<10} {:>6} {:>6} {:>9}  {}",
            actor.name,
            actor.kind,
            actor.node,
            actor.state,
            actor.epoch.map_or_else(|| "-".to_owned(), |epoch| epoch.to_string()),
            number(actor.load),
            actor.restarts,
            actor.reason.as_deref().unwrap_or("-")
        ));
    }
    if !status.refused.is_empty() {
        lines.push(format!("\n{:<24} {:>6} {:>9}  reason", "REFUSED", "TIMES", "AGO"));
    }
    for refused in &status.refused {
        lines.push(format!(
            "{:<24} {:>6} {:>9}  {}",
            refused.address,
            refused.times,
            elapsed_text(refused.at),
            refused.reason
        ));
    }
    if !status.dead.is_empty() {
        let count = status.dead.len();
        lines.push(format!("\n{count} processes have ended: see tutti status --dead"));
    }
    lines
}

/// Formats how long ago a time in seconds since 1970 was.
fn elapsed_text(at: u64) -> String {
    let seconds = since_1970().as_secs().saturating_sub(at);
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

fn dead(status: &Status) -> Vec<String> {
    let mut lines = vec![format!(
        "{:<24} {:>5} {:>8} {:>12} {:<22} {:>5}  reason",
        "NODE", "SLOT", "PID", "AGO", "EXIT", "LINES"
    )];
    for dead in &status.dead {
        lines.push(format!(
            "{:<24} {:>5} {:>8} {:>12} {:<22} {:>5}  {}",
            dead.node,
            dead.slot.map_or_else(|| "-".to_owned(), |slot| slot.to_string()),
            dead.pid,
            elapsed_text(dead.at),
            dead.exit.as_deref().unwrap_or("-"),
            dead.lines,
            dead.reason
        ));
        if let Some(last) = &dead.last_line {
            lines.push(format!("    last line: {last}"));
        }
    }
    if !status.dead.is_empty() {
        lines.push("\ntheir logs: tutti logs NODE --pid PID".to_owned());
    }
    lines
}

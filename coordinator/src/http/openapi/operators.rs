//! PURE: the operator's API: its bodies and its answers.
use serde_json::{Value, json};

use super::super::admin;
use super::answers::{count, time};
use super::schema::{
    Properties, answer, any_list, any_object, boolean, bytes, given, integer, only, or_null,
    properties, string,
};

/// Everything, by name.
pub(super) fn all() -> Properties {
    properties(json!({
        "ScaleRequest": scale(),
        "DrainRequest": strict(&["node"], json!({"node": bytes(0, admin::BODY_MAX)}), &[]),
        "KillRequest": strict(&["actor"], json!({"actor": bytes(0, admin::BODY_MAX)}), &["restart"]),
        "Status": status(),
        "Log": log(),
        "Reset": answer(json!({"success": only(true)}), json!({})),
        "Scaled": answer(json!({"scaled": any_object()}), json!({})),
        "Drained": answer(json!({"drained": string()}), json!({})),
        "Killed": answer(json!({"killed": string()}), json!({})),
    }))
}

/// A body, which has no fields that are not known, and no null for a flag.
fn strict(required: &[&str], own: Value, flags: &[&str]) -> Value {
    let mut schema = given(required, properties(own));
    for flag in flags {
        schema["properties"][flag] = boolean();
    }
    schema["additionalProperties"] = false.into();
    schema
}

fn scale() -> Value {
    let own = json!({
        "replicas": integer(0, u32::MAX), "workers": integer(1, admin::LOCAL_WORKERS_MAX),
    });
    strict(&[], own, &["reset"])
}

fn status() -> Value {
    let commands = answer(
        json!({"count": count(), "scaled": boolean(), "stored": or_null(boolean())}),
        json!({}),
    );
    let adapter = answer(json!({"name": string(), "path": string(), "state": string()}), json!({}));
    let host = answer(
        json!({
            "node": string(), "classes": any_list(string()), "actors": count(), "used": string(),
            "free": string(), "draining": boolean(),
        }),
        json!({}),
    );
    let refused = answer(
        json!({"address": string(), "reason": string(), "times": count(), "at": count()}),
        json!({}),
    );
    answer(
        json!({
            "version": string(), "model": string(), "ready": boolean(), "message": string(),
            "tensor_parallel": count(), "max_replicas": or_null(count()), "commands": commands,
            "adapters": any_list(adapter), "adapter_places": or_null(count()),
            "nodes": any_list(node()), "replicas": any_list(replica()),
            "actors": any_list(actor()), "hosts": any_list(host), "dead": any_list(dead()),
            "refused": any_list(refused),
        }),
        json!({"classes": count()}),
    )
}

fn node() -> Value {
    let offer = answer(
        json!({
            "cpus": count(), "gpus": count(), "memory_bytes": count(),
            "custom": {"type": "object", "additionalProperties": count()},
            "labels": {"type": "object", "additionalProperties": string()},
        }),
        json!({}),
    );
    answer(
        json!({
            "node": string(), "role": string(), "slot": count(), "pid": count(), "host": string(),
            "state": string(), "replica": or_null(count()), "rank": or_null(count()),
            "offer": or_null(offer),
        }),
        json!({}),
    )
}

fn replica() -> Value {
    answer(
        json!({
            "id": count(), "state": string(), "epoch": count(),
            "ranks": any_list(or_null(count())), "requests": count(),
            "last_failure": or_null(string()), "held_seconds": or_null(count()),
        }),
        json!({}),
    )
}

fn actor() -> Value {
    answer(
        json!({
            "name": string(), "kind": string(), "node": string(), "state": string(),
            "epoch": or_null(count()), "load": or_null(count()), "restarts": count(),
            "max_restarts": or_null(count()), "reason": or_null(string()),
            "needs": or_null(string()),
        }),
        json!({}),
    )
}

fn dead() -> Value {
    answer(
        json!({
            "node": string(), "slot": or_null(count()), "pid": count(), "reason": string(),
            "exit": or_null(string()), "at": time(), "lines": count(),
            "last_line": or_null(string()),
        }),
        json!({}),
    )
}

fn log() -> Value {
    answer(
        json!({
            "node": string(), "pid": count(), "alive": boolean(), "reason": or_null(string()),
            "exit": or_null(string()), "missing": count(), "lines": any_list(string()),
            "stderr": any_list(string()),
        }),
        json!({}),
    )
}

//! The operator's API: shows the cluster's processes, scales replicas, drains workers, ends
//! actors, empties the prefix cache.
//!
//! With a cluster secret, a request carries a token that only holders of the secret can make.
//! Without one, only this host is answered, but no proxy or browser on it that speaks for others,
//! nor anybody on a Unix socket, where a proxy cannot be told from others.
//!
//! - `reset`: empties the prefix cache
pub(super) mod reset;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use actix::Addr;
use actix_web::error::JsonPayloadError;
use actix_web::http::header::{AUTHORIZATION, HOST, HeaderMap, HeaderName, ORIGIN};
use actix_web::web::{self, Data, Json, JsonConfig, Payload, ServiceConfig};
use actix_web::{Error, FromRequest as _, HttpRequest, HttpResponse};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use shared::actor::{ActorRuntime, CreateError};
use shared::clock::since_1970;
use shared::log::{LogActor, LogQuery, SharedLog};
use shared::membership::{Record, Role, View};
use shared::wire::keyring::Keyring;
use tokio::sync::{mpsc, oneshot, watch};

use super::error::ApiError;
use super::intake::{self, BODY_DEADLINE_S};
use super::routes::{get, resource};
use super::state::AppState;
use crate::adapters::AdapterUse;
use crate::cluster::actor::{ClusterActor, Drain, GetLogs, GetStatus, Scale};
use crate::cluster::records::WhichProcess;
use crate::cluster::status::{Node, NodeLogs};
use crate::frontends::Frontends;
use crate::links::RefusedProcesses;

/// The purpose that an operator's token is made for.
pub const TOKEN_PURPOSE: &str = "admin";

/// What the operator's API works on.
#[derive(Clone, Debug)]
pub struct Admin {
    /// The cluster.
    pub cluster: Addr<ClusterActor>,
    /// The front ends.
    pub frontends: Arc<Frontends>,
    /// The cluster's secrets, if it has any.
    pub secret: Option<Keyring>,
    /// Starts and stops worker processes, if this process does so.
    pub workers: Option<mpsc::Sender<ScaleWorkers>>,
    /// The last lines of this process's log.
    pub log: SharedLog,
    /// The cluster's named actors.
    pub actors: ActorRuntime,
    /// The cluster as etcd has it, if there is etcd.
    pub membership: Option<watch::Receiver<View>>,
    /// This process run, as etcd knows it.
    pub run: u64,
    /// Processes that were not let in of late.
    pub refused: RefusedProcesses,
}

/// Sets the number of worker processes; the answer says why it cannot be done.
#[derive(Debug)]
pub struct ScaleWorkers {
    /// Number of workers.
    pub workers: u32,
    /// Receives the outcome.
    pub answer: oneshot::Sender<Result<(), String>>,
}

/// The body of `POST /admin/scale`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleRequest {
    /// Maximum number of replicas; 0 removes the bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// Restores the number of replicas that the coordinator was started with.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reset: bool,
    /// Number of local workers of `tutti up`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
}

/// The body of `POST /admin/drain`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DrainRequest {
    /// The worker's node name.
    pub node: String,
}

/// The body of `POST /admin/actors/kill`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KillRequest {
    /// The actor's name.
    pub actor: String,
    /// Whether it is started again, if it was created by class and may be.
    #[serde(default)]
    pub restart: bool,
}

/// The node name under which `GET /admin/logs` finds the coordinator's own log.
pub const OWN_NODE: &str = "coordinator";
/// How long a running worker has to report its newest lines.
const FRESH_LOG_DEADLINE: Duration = Duration::from_millis(500);
/// How long an operator waits until a command is in etcd.
const STORED_DEADLINE: Duration = Duration::from_secs(4);
/// How long an operator waits until an actor is told to end.
const KILL_DEADLINE: Duration = Duration::from_secs(2);
/// Maximum bytes of an operator's request body.
pub(super) const BODY_MAX: usize = 64 << 10;
/// Maximum number of nodes that an error names.
const NODES_SAID: usize = 8;

/// Maximum number of lines in an answer of `GET /admin/logs`.
const LOG_LINES_MAX: usize = 1000;

/// Where the prefix cache is emptied, as in vLLM.
pub const RESET: &str = "/reset_prefix_cache";

/// Every path of operators and its methods.
pub(super) const PATHS: [(&str, &str); 6] = [
    ("/admin/status", "GET, HEAD"),
    ("/admin/logs", "GET, HEAD"),
    ("/admin/scale", "POST"),
    ("/admin/drain", "POST"),
    ("/admin/actors/kill", "POST"),
    (RESET, "POST"),
];

/// The query of `GET /admin/logs`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogsQuery {
    /// The worker's node name, or [`OWN_NODE`].
    pub node: String,
    /// Number of lines, at most 1,000; 100 if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lines: Option<usize>,
    /// Whether to show the process that ended last rather than a running one.
    #[serde(default)]
    pub previous: bool,
    /// The process with this id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// Declares the routes.
pub(super) fn routes(config: &mut ServiceConfig) {
    let wrong = |error: JsonPayloadError, request: &HttpRequest| match error {
        JsonPayloadError::ContentType => {
            ApiError::content_type(intake::content_type(request).as_deref()).into()
        }
        error => ApiError::body(format!("The body cannot be read: {error}")).into(),
    };
    config.app_data(JsonConfig::default().limit(BODY_MAX).error_handler(wrong));
    for (path, allow) in PATHS {
        let route = match path {
            "/admin/status" => get().to(status),
            "/admin/logs" => get().to(logs),
            "/admin/scale" => web::post().to(scale),
            "/admin/drain" => web::post().to(drain),
            "/admin/actors/kill" => web::post().to(kill),
            _ => web::post().to(reset::reset),
        };
        config.service(resource(path, allow, route));
    }
}

/// Whether a path is one of these, which the operator's token is for and not an API key.
pub(super) fn is_at(path: &str) -> bool {
    path == RESET || path.starts_with("/admin/")
}

/// Returns the operator's API, if it is served here and the request may use it.
fn allowed<'a>(state: &'a AppState, request: &HttpRequest) -> Result<&'a Admin, ApiError> {
    let Some(admin) = &state.admin else {
        return Err(ApiError::not_here("This is a front end: ask the coordinator"));
    };
    operates(admin.secret.as_ref(), request).map(|()| admin)
}

/// Checks that a request comes from an operator: with a cluster secret, one that holds it,
/// otherwise one on this host.
///
/// # Errors
/// 401 or 403.
pub(super) fn operates(secrets: Option<&Keyring>, request: &HttpRequest) -> Result<(), ApiError> {
    match secrets {
        Some(secrets) => {
            let header = request.headers().get(AUTHORIZATION).and_then(|v| v.to_str().ok());
            let token = header.and_then(|header| header.strip_prefix("Bearer "));
            let known = token.is_some_and(|token| secrets.verify_token(TOKEN_PURPOSE, token));
            if known { Ok(()) } else { Err(ApiError::no_token()) }
        }
        None => match stranger(request.peer_addr(), request.headers()) {
            None => Ok(()),
            Some(why) => Err(ApiError::forbidden(format!(
                "Without a cluster secret, only an operator on this host is answered here, and \
                 {why}: start the coordinator with --cluster-secret-file, and use it here too"
            ))),
        },
    }
}

/// Returns why a request does not come from an operator on this host, as far as can be told: a
/// proxy or a browser on this host speaks for others.
fn stranger(peer: Option<SocketAddr>, headers: &HeaderMap) -> Option<String> {
    let Some(peer) = peer else {
        return Some("this request comes from a Unix socket, which a proxy may use".to_owned());
    };
    if !peer.ip().to_canonical().is_loopback() {
        return Some("this request comes from another host".to_owned());
    }
    let told = |name: &&HeaderName| {
        let name = name.as_str();
        name.starts_with("x-forwarded-") || ["forwarded", "via", "x-real-ip"].contains(&name)
    };
    if let Some(name) = headers.keys().find(told) {
        return Some(format!("this request comes through a proxy (it has the header {name})"));
    }
    if headers.contains_key(ORIGIN) {
        return Some("this request comes from a web page (it has the header origin)".to_owned());
    }
    // A web page would reach it under a name that resolves to this host.
    let host = headers.get(HOST)?;
    let host = host.to_str().unwrap_or_default();
    (!is_loopback(host))
        .then(|| format!("this request was sent to `{host}`, which is not a loopback name"))
}

/// Whether a `Host` header names loopback.
fn is_loopback(host: &str) -> bool {
    let bare = match host.rsplit_once(':') {
        Some((bare, port)) if port.bytes().all(|b| b.is_ascii_digit()) => bare,
        _ => host,
    };
    let bare = bare.trim_start_matches('[').trim_end_matches(']');
    bare.eq_ignore_ascii_case("localhost")
        || bare.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// Reads an operator's body, after authenticating: nobody else can hold a connection open with it.
async fn read<T: DeserializeOwned + 'static>(
    request: &HttpRequest,
    body: Payload,
) -> Result<T, Error> {
    let (mut body, deadline) = (body.into_inner(), Duration::from_secs(BODY_DEADLINE_S));
    let read = Json::<T>::from_request(request, &mut body);
    let read = tokio::time::timeout(deadline, read).await;
    Ok(read.map_err(|_| ApiError::too_slow(BODY_DEADLINE_S))??.into_inner())
}

fn gone(_: actix::MailboxError) -> ApiError {
    ApiError::overloaded("the cluster does not answer")
}

async fn status(state: Data<AppState>, request: HttpRequest) -> Result<HttpResponse, ApiError> {
    let admin = allowed(&state, &request)?;
    let mut status = admin.cluster.send(GetStatus).await.map_err(gone)?;
    let readiness = (state.readiness)();
    (status.ready, status.message) = (readiness.ready, readiness.message);
    status.model = state.models.name(&AdapterUse::default()).to_string();
    status.classes = state.text.classifier.as_ref().map(|it| it.names.len() as u32);
    status.commands.stored = admin.membership.as_ref().map(|view| {
        let count = status.commands.count;
        count == 0 || is_stored(&view.borrow(), admin.run, count)
    });
    status.nodes.extend(admin.frontends.linked().into_iter().map(|(node, slot, pid)| Node {
        node,
        role: "frontend".to_owned(),
        slot: slot.0,
        pid,
        state: "alive".to_owned(),
        ..Node::default()
    }));
    if let Some(view) = &admin.membership {
        status.nodes.extend(coordinators(&view.borrow()));
    }
    status.refused = admin.refused.list(since_1970());
    Ok(HttpResponse::Ok().json(status))
}

async fn logs(state: Data<AppState>, request: HttpRequest) -> Result<HttpResponse, ApiError> {
    let admin = allowed(&state, &request)?;
    let query = query::<LogsQuery>(&request)?;
    let lines = query.lines.unwrap_or(100).min(LOG_LINES_MAX);
    if query.node == OWN_NODE {
        let pid = std::process::id();
        let lines = admin.log.ring().last(lines);
        let logs = NodeLogs { node: query.node, pid, alive: true, lines, ..NodeLogs::default() };
        return Ok(HttpResponse::Ok().json(logs));
    }
    let process = match (query.pid, query.previous) {
        (Some(pid), _) => WhichProcess::Pid(pid),
        (None, true) => WhichProcess::Ended,
        (None, false) => WhichProcess::Newest,
    };
    let ask = GetLogs { node: query.node.clone(), process, lines };
    let mut logs = admin.cluster.send(ask).await.map_err(gone)?;
    if let Some(logs) = logs.as_mut().filter(|logs| logs.alive) {
        // Lines written since it last sent some; otherwise those already sent must do.
        let actor = admin.actors.addr::<LogQuery>(&LogActor::name(&query.node));
        let query = LogQuery { lines: u32::try_from(lines).unwrap_or(u32::MAX) };
        match actor.ask(&query, FRESH_LOG_DEADLINE).await {
            Ok(fresh) => logs.lines = fresh.lines,
            Err(error) => tracing::debug!(%error, node = logs.node, "its fresh log"),
        }
    }
    let Some(logs) = logs else {
        let what = if process == WhichProcess::Newest { "worker" } else { "such process of" };
        let nodes = known_nodes(admin).await?;
        let message = format!("there is no {what} `{}`; known are {nodes}", query.node);
        return Err(ApiError::field("node", message));
    };
    Ok(HttpResponse::Ok().json(logs))
}

/// Lists the nodes with logs, in words.
async fn known_nodes(admin: &Admin) -> Result<String, ApiError> {
    let status = admin.cluster.send(GetStatus).await.map_err(gone)?;
    let workers = status.nodes.iter().filter(|node| node.role == "worker").map(|it| &it.node);
    let mut names: Vec<&str> =
        workers.chain(status.dead.iter().map(|dead| &dead.node)).map(String::as_str).collect();
    names.sort_unstable();
    names.dedup();
    let more = names.len().saturating_sub(NODES_SAID);
    names.truncate(NODES_SAID);
    names.insert(0, OWN_NODE);
    let more = if more == 0 { String::new() } else { format!(" and {more} more (tutti status)") };
    Ok(names.join(", ") + &more)
}

/// Lists the coordinators that etcd knows: the leader and the standbys, and what keeps one of these
/// from going on with the leader's requests.
fn coordinators(view: &View) -> Vec<Node> {
    let leader = view.leader.as_ref().map(|leader| leader.record.incarnation);
    let state = |record: &Record| {
        if leader == Some(record.incarnation) {
            return "leading".to_owned();
        }
        match view.differences(record).first() {
            Some(difference) => format!("standby (another {})", difference.what()),
            None => "standby".to_owned(),
        }
    };
    let all = view.records.values().filter(|record| record.role == Role::Coordinator);
    all.map(|record| Node {
        node: record.node.clone(),
        role: "coordinator".to_owned(),
        pid: record.pid,
        state: state(record),
        ..Node::default()
    })
    .collect()
}

async fn scale(
    state: Data<AppState>,
    request: HttpRequest,
    body: Payload,
) -> Result<HttpResponse, Error> {
    let admin = allowed(&state, &request)?;
    let asked: ScaleRequest = read(&request, body).await?;
    scale_to(admin, &asked).await?;
    Ok(HttpResponse::Ok().json(json!({"scaled": asked})))
}

/// Maximum number of workers of `tutti up`.
pub const LOCAL_WORKERS_MAX: u32 = 256;

async fn scale_to(admin: &Admin, body: &ScaleRequest) -> Result<(), ApiError> {
    if body.reset && body.replicas.is_some() {
        return Err(ApiError::field("reset", "`reset` and `replicas` cannot be combined"));
    }
    if let Some(workers) = body.workers {
        let Some(scaler) = &admin.workers else {
            return Err(ApiError::field(
                "workers",
                "`workers` is for `tutti up`; here, workers are started on their own hosts",
            ));
        };
        if !(1..=LOCAL_WORKERS_MAX).contains(&workers) {
            let message = format!("`workers` is {workers}, it must be 1 to {LOCAL_WORKERS_MAX}");
            return Err(ApiError::field("workers", message));
        }
        let (answer, answered) = oneshot::channel();
        let sent = scaler.send(ScaleWorkers { workers, answer }).await;
        let outcome = match sent {
            Ok(()) => answered.await.unwrap_or_else(|_| Err("it is stopping".to_owned())),
            Err(_) => Err("it is stopping".to_owned()),
        };
        outcome.map_err(|reason| ApiError::field("workers", reason))?;
    }
    if body.replicas.is_some() || body.reset {
        let commands = admin.cluster.send(Scale(body.replicas)).await.map_err(gone)?;
        stored(admin, commands).await?;
    }
    Ok(())
}

async fn drain(
    state: Data<AppState>,
    request: HttpRequest,
    body: Payload,
) -> Result<HttpResponse, Error> {
    let admin = allowed(&state, &request)?;
    let body: DrainRequest = read(&request, body).await?;
    let drained = admin.cluster.send(Drain(vec![body.node.clone()])).await.map_err(gone)?;
    stored(admin, drained.map_err(|reason| ApiError::field("node", reason))?).await?;
    Ok(HttpResponse::Ok().json(json!({"drained": body.node})))
}

async fn kill(
    state: Data<AppState>,
    request: HttpRequest,
    body: Payload,
) -> Result<HttpResponse, Error> {
    let admin = allowed(&state, &request)?;
    let body: KillRequest = read(&request, body).await?;
    let killed = admin.actors.kill(&body.actor, body.restart, KILL_DEADLINE).await;
    killed.map_err(|error| match error {
        CreateError::Refused(refused) => ApiError::field("actor", refused.to_string()),
        error => ApiError::overloaded(error.to_string()),
    })?;
    Ok(HttpResponse::Ok().json(json!({"killed": body.actor})))
}

/// Reads what stands behind the path.
fn query<T: DeserializeOwned>(request: &HttpRequest) -> Result<T, ApiError> {
    web::Query::from_query(request.query_string())
        .map(web::Query::into_inner)
        .map_err(|error| ApiError::field("query", error.to_string()))
}

/// Waits until the next leader would know of this many commands, if there can be one.
async fn stored(admin: &Admin, commands: u64) -> Result<(), ApiError> {
    let stored = are_stored(admin.membership.clone(), admin.run, commands).await;
    stored.map_err(ApiError::overloaded)
}

/// Waits until the next leader would know of this many commands, if there can be one.
///
/// # Errors
/// Why it may not, in a sentence.
pub async fn are_stored(
    view: Option<watch::Receiver<View>>,
    run: u64,
    commands: u64,
) -> Result<(), &'static str> {
    let Some(mut view) = view else { return Ok(()) };
    let is_stored = view.wait_for(|view| is_stored(view, run, commands));
    match tokio::time::timeout(STORED_DEADLINE, is_stored).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_)) | Err(_) => {
            Err("the command is in force, but may not be stored: etcd does not answer, or another \
             coordinator leads. This coordinator stores it when etcd is back; one that takes over \
             before that does not know of it")
        }
    }
}

fn is_stored(view: &View, run: u64, commands: u64) -> bool {
    view.desired.as_ref().is_some_and(|desired| desired.has(run, commands))
}

#[cfg(test)]
mod tests {
    use actix_web::test::TestRequest;

    use super::*;

    #[test]
    fn without_a_secret_only_an_operator_of_this_host_is_known() {
        let stranger_from = |peer: &str, headers: &[(&str, &str)]| {
            let mut request = TestRequest::default().peer_addr(peer.parse().unwrap());
            for header in headers {
                request = request.insert_header(*header);
            }
            let request = request.to_http_request();
            stranger(request.peer_addr(), request.headers())
        };
        let local = "127.0.0.1:5";
        for host in
            ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.3.2.1", "[::1]:8000", "[::1]"]
        {
            assert_eq!(stranger_from(local, &[("host", host)]), None, "{host}");
        }
        assert_eq!(stranger_from("[::ffff:127.0.0.1]:5", &[]), None);
        for host in
            ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1:8000", ""]
        {
            assert!(stranger_from(local, &[("host", host)]).is_some(), "{host}");
        }
        assert!(stranger_from("10.0.0.1:5", &[("host", "localhost")]).is_some());
        // A proxy may ask without a header of its own, by this name, for somebody on another host.
        let unknown = TestRequest::default().insert_header(("host", "localhost")).to_http_request();
        let why = stranger(unknown.peer_addr(), unknown.headers());
        assert!(why.unwrap().contains("Unix socket"));
        for header in
            ["forwarded", "via", "x-forwarded-for", "x-forwarded-proto", "x-real-ip", "origin"]
        {
            let why = stranger_from(local, &[("host", "localhost"), (header, "x")]);
            assert!(why.unwrap().contains(header), "{header}");
        }
    }
}

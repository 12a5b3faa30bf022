//! The operator's side of the API: who is there, how many replicas, who shall leave.
//!
//! With a cluster secret a request shows a token that only its holders can make; without one only
//! this host is answered.
use std::sync::Arc;

use actix::Addr;
use actix_web::http::header::AUTHORIZATION;
use actix_web::web::{self, Data, ServiceConfig};
use actix_web::{HttpRequest, HttpResponse};
use serde::{Deserialize, Serialize};
use serde_json::json;
use shared::membership::{Role, View};
use shared::wire::auth::Secret;
use tokio::sync::{mpsc, oneshot, watch};

use super::error::ApiError;
use super::state::AppState;
use crate::cluster::actor::{ClusterActor, Drain, GetStatus, SetReplicas};
use crate::cluster::status::Node;
use crate::frontends::Frontends;

/// The purpose that an operator's token is made for.
pub const TOKEN_PURPOSE: &str = "admin";

/// What is behind the operator's API.
#[derive(Clone, Debug)]
pub struct Admin {
    /// The cluster.
    pub cluster: Addr<ClusterActor>,
    /// The front ends.
    pub frontends: Arc<Frontends>,
    /// The cluster's secret.
    pub secret: Option<Secret>,
    /// Who starts and stops worker processes, where this process does.
    pub workers: Option<mpsc::Sender<ScaleWorkers>>,
    /// The cluster as etcd says, where it is asked.
    pub membership: Option<watch::Receiver<View>>,
}

/// So many worker processes shall run; the answer says why they cannot.
#[derive(Debug)]
pub struct ScaleWorkers {
    /// How many.
    pub workers: u32,
    /// Told what became of it.
    pub answer: oneshot::Sender<Result<(), String>>,
}

/// The body of `POST /admin/scale`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleRequest {
    /// At most so many replicas; 0 takes the bound away.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// So many local workers, of `tutti up`.
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

/// Declares the routes.
pub(super) fn routes(config: &mut ServiceConfig) {
    config
        .route("/admin/status", web::get().to(status))
        .route("/admin/scale", web::post().to(scale))
        .route("/admin/drain", web::post().to(drain));
}

/// The operator's side, if there is one here and the request may use it.
fn allowed<'a>(state: &'a AppState, request: &HttpRequest) -> Result<&'a Admin, ApiError> {
    let Some(admin) = &state.admin else {
        return Err(ApiError::not_here("This is a front end: ask the coordinator"));
    };
    let allowed = match &admin.secret {
        Some(secret) => {
            let header = request.headers().get(AUTHORIZATION).and_then(|v| v.to_str().ok());
            let token = header.and_then(|header| header.strip_prefix("Bearer "));
            token.is_some_and(|token| secret.verify_token(TOKEN_PURPOSE, token))
        }
        None => request.peer_addr().is_some_and(|peer| peer.ip().is_loopback()),
    };
    if allowed { Ok(admin) } else { Err(ApiError::forbidden(admin.secret.is_some())) }
}

fn gone(_: actix::MailboxError) -> ApiError {
    ApiError::overloaded("the cluster does not answer")
}

async fn status(state: Data<AppState>, request: HttpRequest) -> Result<HttpResponse, ApiError> {
    let admin = allowed(&state, &request)?;
    let mut status = admin.cluster.send(GetStatus).await.map_err(gone)?;
    let readiness = (state.readiness)();
    (status.ready, status.message) = (readiness.ready, readiness.message);
    status.model = state.model_name.to_string();
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
    Ok(HttpResponse::Ok().json(status))
}

/// The coordinators that etcd knows: the one that leads and those that stand by.
fn coordinators(view: &View) -> Vec<Node> {
    let leader = view.leader.as_ref().map(|leader| leader.record.incarnation);
    let all = view.records.values().filter(|record| record.role == Role::Coordinator);
    all.map(|record| Node {
        node: record.node.clone(),
        role: "coordinator".to_owned(),
        pid: record.pid,
        state: if leader == Some(record.incarnation) { "leading" } else { "standby" }.to_owned(),
        ..Node::default()
    })
    .collect()
}

async fn scale(
    state: Data<AppState>,
    request: HttpRequest,
    body: web::Json<ScaleRequest>,
) -> Result<HttpResponse, ApiError> {
    let admin = allowed(&state, &request)?;
    if let Some(workers) = body.workers {
        let Some(scaler) = &admin.workers else {
            return Err(ApiError::field(
                "workers",
                "`workers` is for `tutti up`; here workers are started on their own hosts",
            ));
        };
        let (answer, answered) = oneshot::channel();
        let sent = scaler.send(ScaleWorkers { workers, answer }).await;
        let outcome = match sent {
            Ok(()) => answered.await.unwrap_or_else(|_| Err("it is stopping".to_owned())),
            Err(_) => Err("it is stopping".to_owned()),
        };
        outcome.map_err(|reason| ApiError::field("workers", reason))?;
    }
    if let Some(replicas) = body.replicas {
        let max = Some(replicas).filter(|replicas| *replicas > 0);
        admin.cluster.send(SetReplicas(max)).await.map_err(gone)?;
    }
    Ok(HttpResponse::Ok().json(json!({"scaled": *body})))
}

async fn drain(
    state: Data<AppState>,
    request: HttpRequest,
    body: web::Json<DrainRequest>,
) -> Result<HttpResponse, ApiError> {
    let admin = allowed(&state, &request)?;
    let drained = admin.cluster.send(Drain(body.node.clone())).await.map_err(gone)?;
    drained.map_err(|reason| ApiError::field("node", reason))?;
    Ok(HttpResponse::Ok().json(json!({"drained": body.node})))
}

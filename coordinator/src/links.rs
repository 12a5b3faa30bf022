//! Connections of workers and front ends: accepted, shaken hands with, handed to their owners.
//!
//! Strangers are kept cheap: a bounded number of half-open connections, a deadline, small frames,
//! and with a cluster secret nothing is decoded before the peer has proved that it knows it.
use std::sync::Arc;
use std::time::Duration;

use actix::Addr;
use serde::Serialize;
use serde::de::DeserializeOwned;
use shared::actor::link::{CloseReason, Connection};
use shared::actor::remote::RemoteAddr;
use shared::protocol::{FrontendHello, Hello, ToWorker, Welcome};
use shared::wire::auth::{AUTH_MAGIC, AuthError, Secret};
use shared::wire::codec;
use shared::wire::frame::{FrameError, FrameKind};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::cluster::actor::{Admit, ClusterActor, Joined, Refusal};
use crate::frontends::Frontends;

/// The address of one worker.
pub type WorkerLink = RemoteAddr<ToWorker>;

/// How long a stranger has for its hello.
const HELLO_DEADLINE: Duration = Duration::from_secs(3);
/// Connections that have not said hello yet.
const HALF_OPEN_MAX: usize = 64;
/// Longest node name.
const NODE_NAME_MAX: usize = 128;

/// Accepts workers and front ends until the task is dropped.
pub async fn accept(
    listener: TcpListener,
    cluster: Addr<ClusterActor>,
    frontends: Arc<Frontends>,
    secret: Option<Secret>,
) {
    let half_open = Arc::new(Semaphore::new(HALF_OPEN_MAX));
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(permit) = half_open.clone().try_acquire_owned() else {
            tracing::warn!(%peer, "{HALF_OPEN_MAX} connections are half open; this one is refused");
            continue;
        };
        let (cluster, frontends, secret) = (cluster.clone(), frontends.clone(), secret.clone());
        actix::spawn(async move {
            if let Err(reason) = shake_hands(stream, &cluster, &frontends, secret.as_ref()).await {
                tracing::warn!(%peer, %reason, "a connection was not taken");
            }
            drop(permit);
        });
    }
}

async fn shake_hands(
    stream: TcpStream,
    cluster: &Addr<ClusterActor>,
    frontends: &Arc<Frontends>,
    secret: Option<&Secret>,
) -> Result<(), String> {
    let mut connection = Connection::new(stream).map_err(text)?;
    let first = match secret {
        Some(secret) => match connection.authenticate_as_server(secret, HELLO_DEADLINE).await {
            Ok(()) => connection.receive(HELLO_DEADLINE).await,
            Err(reason) => Err(reason),
        },
        None => connection.receive(HELLO_DEADLINE).await,
    };
    let frame = match first {
        Ok(frame) => frame,
        Err(reason) => {
            // Said to those who run with the other setting; nothing else is.
            let mismatch = match &reason {
                CloseReason::Auth(AuthError::NoGreeting) => {
                    Some("this cluster has a secret: give its file with --cluster-secret-file")
                }
                CloseReason::Frame(FrameError::BadMagic(AUTH_MAGIC)) => {
                    Some("this coordinator runs without --cluster-secret-file")
                }
                _ => None,
            };
            if let Some(sentence) = mismatch {
                let body = codec::encode(sentence).map_err(text)?;
                let _ = connection.send(FrameKind::Refused, &body).await;
            }
            return Err(reason.to_string());
        }
    };
    match frame.kind {
        FrameKind::Hello => {
            let hello: Hello = decode(&frame.body)?;
            let admitted = match check(&[("node", &hello.node), ("host", &hello.host)]) {
                Ok(()) => match cluster.send(Admit(hello.clone())).await.map_err(text)? {
                    Ok(welcome) => Ok(welcome),
                    Err(Refusal::Never(reason)) => Err(reason),
                    // Without an answer, it dials again.
                    Err(Refusal::NotYet(reason)) => return Err(reason),
                },
                Err(reason) => Err(reason),
            };
            let welcome: Welcome = answer(&mut connection, admitted).await?;
            let joined = Joined { hello, worker: welcome.worker, connection };
            cluster.send(joined).await.map_err(text)
        }
        FrameKind::FrontendHello => {
            let hello: FrontendHello = decode(&frame.body)?;
            let admitted = check(&[("node", &hello.node)]).and_then(|()| frontends.admit(&hello));
            let welcome = answer(&mut connection, admitted).await?;
            frontends.joined(&hello, welcome.frontend, connection);
            Ok(())
        }
        kind => Err(format!("expected a hello, got {kind:?}")),
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    codec::decode_message(body).map_err(text)
}

/// Sends the welcome or the refusal; returns the welcome.
async fn answer<T: Serialize>(
    connection: &mut Connection,
    admitted: Result<T, String>,
) -> Result<T, String> {
    let (kind, body) = match &admitted {
        Ok(welcome) => (FrameKind::Welcome, codec::encode(welcome)),
        Err(reason) => (FrameKind::Refused, codec::encode(reason)),
    };
    connection.send(kind, &body.map_err(text)?).await.map_err(text)?;
    admitted
}

fn check(names: &[(&str, &String)]) -> Result<(), String> {
    for (field, value) in names {
        if value.is_empty() || value.len() > NODE_NAME_MAX {
            return Err(format!(
                "{field} has {} bytes, it must have 1 to {NODE_NAME_MAX}",
                value.len()
            ));
        }
    }
    Ok(())
}

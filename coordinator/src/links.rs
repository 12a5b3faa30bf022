//! Workers' connections: accepted, shaken hands with, handed to the cluster actor.
//!
//! Strangers are kept cheap: a bounded number of half-open connections, a deadline, small frames,
//! and nothing is decoded before the frame's checksum holds. (Authentication will stand before
//! decoding, here.)
use std::sync::Arc;
use std::time::Duration;

use actix::Addr;
use shared::actor::link::{CloseReason, Connection};
use shared::actor::remote::RemoteAddr;
use shared::protocol::{Hello, ToWorker, Welcome};
use shared::wire::codec;
use shared::wire::frame::FrameKind;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::cluster::actor::{Admit, ClusterActor, Joined};

/// The address of one worker.
pub type WorkerLink = RemoteAddr<ToWorker>;

/// How long a stranger has for its hello.
const HELLO_DEADLINE: Duration = Duration::from_secs(3);
/// Connections that have not said hello yet.
const HALF_OPEN_MAX: usize = 64;
/// Longest node name.
const NODE_NAME_MAX: usize = 128;

/// Accepts workers until the listener fails or the task is dropped.
pub async fn accept(listener: TcpListener, cluster: Addr<ClusterActor>) {
    let half_open = Arc::new(Semaphore::new(HALF_OPEN_MAX));
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a worker's connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(permit) = half_open.clone().try_acquire_owned() else {
            tracing::warn!(%peer, "{HALF_OPEN_MAX} connections are half open; this one is refused");
            continue;
        };
        let cluster = cluster.clone();
        actix::spawn(async move {
            if let Err(reason) = shake_hands(stream, &cluster).await {
                tracing::warn!(%peer, %reason, "a connection did not become a worker");
            }
            drop(permit);
        });
    }
}

async fn shake_hands(stream: TcpStream, cluster: &Addr<ClusterActor>) -> Result<(), String> {
    let text = |reason: CloseReason| reason.to_string();
    let mut connection = Connection::new(stream).map_err(|error| error.to_string())?;
    let frame = connection.receive(HELLO_DEADLINE).await.map_err(text)?;
    if frame.kind != FrameKind::Hello {
        return Err(format!("expected a hello, got {:?}", frame.kind));
    }
    let hello: Hello = codec::decode_message(&frame.body).map_err(|error| error.to_string())?;
    let admitted = match check(&hello) {
        Ok(()) => cluster.send(Admit(hello.clone())).await.map_err(|error| error.to_string())?,
        Err(reason) => Err(reason),
    };
    match admitted {
        Ok(welcome) => {
            let body = codec::encode::<Welcome>(&welcome).map_err(|error| error.to_string())?;
            connection.send(FrameKind::Welcome, &body).await.map_err(text)?;
            let joined = Joined { hello, worker: welcome.worker, connection };
            cluster.send(joined).await.map_err(|error| error.to_string())
        }
        Err(reason) => {
            let body = codec::encode(&reason).map_err(|error| error.to_string())?;
            connection.send(FrameKind::Refused, &body).await.map_err(text)?;
            Err(reason)
        }
    }
}

fn check(hello: &Hello) -> Result<(), String> {
    for (field, value) in [("node", &hello.node), ("host", &hello.host)] {
        if value.is_empty() || value.len() > NODE_NAME_MAX {
            return Err(format!(
                "{field} has {} bytes, it must have 1 to {NODE_NAME_MAX}",
                value.len()
            ));
        }
    }
    Ok(())
}

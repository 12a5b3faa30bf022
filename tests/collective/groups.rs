//! Groups of every kind, one thread per rank.
use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kernels::collective::{
    Collective, SharedMemoryOptions, TcpOptions, local_group, shared_memory, tcp,
};

/// A transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Threads,
    SharedMemory,
    Tcp,
}

pub(crate) const KINDS: [Kind; 3] = [Kind::Threads, Kind::SharedMemory, Kind::Tcp];

/// A shared memory name that no other test uses.
pub(crate) fn unique_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("tutti-test-{}-{next}", std::process::id())
}

/// Connects a group and runs `work` on every rank; returns the results in rank order.
pub(crate) fn run<R: Send>(
    kind: Kind,
    ranks: u32,
    timeout: Duration,
    work: impl Fn(u32, Box<dyn Collective>) -> R + Sync,
) -> Vec<R> {
    let listeners: Vec<TcpListener> =
        (0..ranks).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses: Vec<_> = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
    let name = unique_name();
    let mut threads = local_group(ranks as usize, timeout).unwrap();
    threads.reverse();
    let connect = |rank: u32, listener: &TcpListener, thread: Box<dyn Collective>| match kind {
        Kind::Threads => thread,
        Kind::SharedMemory => {
            let name = name.clone();
            shared_memory(&SharedMemoryOptions { name, rank, world_size: ranks, timeout }, &|| {
                false
            })
            .unwrap()
        }
        Kind::Tcp => {
            tcp(&TcpOptions { listener, ranks: &addresses, rank, token: 5, timeout }, &|| false)
                .unwrap()
        }
    };
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..ranks)
            .zip(&listeners)
            .map(|(rank, listener)| {
                let thread = threads.pop().unwrap();
                let (connect, work) = (&connect, &work);
                scope.spawn(move || work(rank, connect(rank, listener, thread)))
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

//! Scrapers that ask and then read nothing: they share a few pages, whatever their number.
use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use coordinator::http::metrics::{self, MetricsPage};
use coordinator::http::state::Readiness;
use coordinator::metrics::Hub;
use coordinator::metrics::exposition::PageOptions;
use shared::actor::pulse::Pulse;
use shared::clock::SystemClock;
use shared::ids::{Incarnation, ReplicaId, WorkerId};
use shared::metrics::{Limits, RankStats, Source};
use testkit::client::Client;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const NUM: usize = 60;

/// Serves the page of a cluster with 800 workers, more than sockets hold.
fn server() -> SocketAddr {
    let hub = Arc::new(Hub::new(Incarnation(1), Limits::default()));
    for worker in (0..800).map(WorkerId) {
        let mut rank = RankStats::new(worker);
        rank.formed(ReplicaId(worker.0), 0, 1 << 30, Duration::from_secs(3));
        hub.report(Source::Worker(worker), Incarnation(7), &rank.report().unwrap()).unwrap();
    }
    let page = MetricsPage::new(hub, Arc::new(SystemClock::start()), PageOptions::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        actix_web::rt::System::new().block_on(async move {
            let ready = Arc::new(|| Readiness { ready: true, message: String::new() });
            let (page, pulse) = (Arc::new(page), Pulse::default());
            let server = metrics::start(listener.into(), page, ready, pulse, None);
            server.unwrap().await.unwrap();
        });
    });
    address
}

/// Asks, and reads no more than the beginning.
async fn ask(address: SocketAddr, more: &str) -> (TcpStream, Vec<u8>) {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(16 << 10).unwrap();
    let mut stream = socket.connect(address).await.unwrap();
    let request = format!("GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{more}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut begun = vec![0; 4096];
    let read = stream.read(&mut begun).await.unwrap();
    begun.truncate(read);
    (stream, begun)
}

/// Which scrape a page is, by the number of those before it; `None` if it was cut off.
async fn number((mut stream, mut page): (TcpStream, Vec<u8>)) -> Option<String> {
    let whole = stream.read_to_end(&mut page).await;
    let text = String::from_utf8(page).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    if whole.is_err() || body.len() != length.parse::<usize>().unwrap() {
        return None;
    }
    assert!(body.len() > 6 << 20, "{}", body.len());
    let count = "tutti_scrape_duration_seconds_count ";
    Some(body.lines().find_map(|line| line.strip_prefix(count)).unwrap().to_owned())
}

#[tokio::test]
async fn scrapers_that_do_not_read_share_a_few_pages() {
    let address = server();
    let mut slow = Vec::new();
    for _ in 0..NUM {
        slow.push(ask(address, "").await);
    }
    // Whoever reads is served meanwhile.
    let client = Client::new(&format!("http://{address}")).unwrap();
    assert!(client.metrics_page().await.unwrap().len() > 1 << 20);
    let mut found = BTreeSet::new();
    let mut whole = 0;
    for asked in slow {
        let number = number(asked).await;
        whole += usize::from(number.is_some());
        found.extend(number);
    }
    assert!((1..=4).contains(&found.len()), "{found:?}");
    // Nobody was cut off, unless this took so long that the first page was given up.
    assert!(whole > NUM / 2, "{whole} of {NUM}");
    // The next page is a new one.
    let next = number(ask(address, "").await).await.unwrap();
    assert!(!found.contains(&next), "{next} {found:?}");
}

#[tokio::test]
async fn a_compressed_page_is_that_page() {
    let address = server();
    let (mut stream, mut page) = ask(address, "accept-encoding: gzip\r\n").await;
    stream.read_to_end(&mut page).await.unwrap();
    let head_end = page.windows(4).position(|it| it == b"\r\n\r\n").unwrap();
    let head = String::from_utf8_lossy(&page[..head_end]).into_owned();
    let body = &page[head_end + 4..];
    assert!(head.contains("content-encoding: gzip"), "{head}");
    assert!(head.to_lowercase().contains("vary: accept, accept-encoding"), "{head}");
    // As the format says: its magic number, and the length of what it holds at its end.
    assert_eq!(body[..3], [0x1f, 0x8b, 8]);
    let length = u32::from_le_bytes(body[body.len() - 4..].try_into().unwrap());
    assert!(length > 1 << 20 && body.len() < (length / 4) as usize, "{length} {}", body.len());
}

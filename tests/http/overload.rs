//! Keeping one client's requests from affecting all others: limits per key and address, time limits
//! of requests, cached prompts that are not shared.
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use coordinator::engine::EngineError;
use coordinator::http::keys::{ApiKey, ApiKeys, KeyLimits};
use coordinator::http::options::{ApiOptions, ConnectionBound};
use reqwest::Response;
use serde_json::{Value, json};
use testkit::scrape::Scrape;

use crate::rig::{Rig, Script};

/// Time limit that is generous enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

async fn complete(rig: &Rig, headers: &[(&str, &str)], body: Value) -> Response {
    let url = format!("http://{}/v1/completions", rig.address);
    let request = reqwest::Client::new().post(url).json(&body);
    let request =
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    request.send().await.unwrap()
}

fn retry_after(response: &Response) -> Option<u64> {
    response.headers().get("retry-after")?.to_str().ok()?.parse().ok()
}

async fn counted(rig: &Rig, name: &str, labels: &[(&str, &str)]) -> f64 {
    let page = rig.client.metrics_page().await.unwrap();
    Scrape::parse(&page).unwrap().sum(name, labels)
}

fn limited(requests: Option<u32>, per_minute: Option<u32>) -> ApiOptions {
    let key = |name, limits| ApiKey::new(name, limits).unwrap();
    let keys = ApiKeys::of([
        key("tight", KeyLimits { requests, per_minute, ..KeyLimits::default() }),
        key("free", KeyLimits::default()),
    ]);
    ApiOptions { keys, ..ApiOptions::default() }
}

fn rate(response: &Response, name: &str) -> Option<String> {
    let header = response.headers().get(format!("x-ratelimit-{name}"))?;
    Some(header.to_str().unwrap().to_owned())
}

const TIGHT: (&str, &str) = ("authorization", "Bearer tight");
const FREE: (&str, &str) = ("authorization", "Bearer free");

#[tokio::test]
async fn a_key_has_so_many_requests_under_way_and_others_are_not_concerned() {
    let rig = Rig::with_api(&limited(Some(2), None));
    rig.script(|script| script.hang = true);
    let streamed = json!({"prompt": "x", "stream": true});
    let first = complete(&rig, &[TIGHT], streamed.clone()).await;
    let second = complete(&rig, &[TIGHT], streamed.clone()).await;
    assert_eq!(
        (first.status(), second.status()),
        (200.try_into().unwrap(), 200.try_into().unwrap())
    );
    let third = complete(&rig, &[TIGHT], streamed.clone()).await;
    assert_eq!(third.status(), 429);
    assert!(retry_after(&third).is_some());
    let error: Value = third.json().await.unwrap();
    assert_eq!(error["error"]["code"], "rate_limit_exceeded", "{error}");
    assert_eq!(error["error"]["type"], "rate_limit_error", "{error}");
    assert_eq!(complete(&rig, &[FREE], streamed.clone()).await.status(), 200);
    let refused = [("reason", "key_limit")];
    assert_eq!(counted(&rig, "tutti_requests_rejected_total", &refused).await, 1.0);
    let invalid = [("reason", "invalid")];
    assert_eq!(counted(&rig, "tutti_requests_rejected_total", &invalid).await, 0.0);
    // The client leaves.
    drop(first);
    let began = Instant::now();
    while complete(&rig, &[TIGHT], streamed.clone()).await.status() != 200 {
        assert!(began.elapsed() < PATIENCE, "its place is free again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(second);
}

#[tokio::test]
async fn a_key_begins_so_many_requests_in_a_minute() {
    let rig = Rig::with_api(&limited(None, Some(3)));
    for _ in 0..3 {
        assert_eq!(complete(&rig, &[TIGHT], json!({"prompt": "x"})).await.status(), 200);
    }
    let fourth = complete(&rig, &[TIGHT], json!({"prompt": "x"})).await;
    assert_eq!(fourth.status(), 429);
    let wait = retry_after(&fourth).unwrap();
    assert!((1..=20).contains(&wait), "one every 20 s: {wait}");
    assert_eq!(complete(&rig, &[FREE], json!({"prompt": "x"})).await.status(), 200);
}

#[tokio::test]
async fn a_key_uses_so_many_tokens_in_a_minute() {
    let key = |name, limits| ApiKey::new(name, limits).unwrap();
    // One is there again every 0.6 s.
    let per_minute = Some(100);
    let tight = KeyLimits { per_minute, tokens_per_minute: Some(100), ..KeyLimits::default() };
    let keys = ApiKeys::of([key("tight", tight), key("free", KeyLimits::default())]);
    let rig = Rig::with_api(&ApiOptions { keys, ..ApiOptions::default() });
    let began = Instant::now();
    let ask = async |key, more: Value| {
        let mut body = json!({"prompt": vec![300; 60], "max_tokens": 4});
        more.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
        complete(&rig, &[key], body).await
    };
    let left = |response: &Response| -> u64 {
        rate(response, "remaining-tokens").unwrap().parse().unwrap()
    };
    // A refused request costs nothing, and one that ended with its whole text what it used.
    let full = EngineError::QueueFull { queued: 1, max: 1, retry_after_s: 1 };
    rig.script(|script| script.refuse = Some(full));
    let refused = ask(TIGHT, json!({})).await;
    assert_eq!((refused.status().as_u16(), left(&refused)), (429, 100));
    rig.script(|script| script.refuse = None);
    let first = ask(TIGHT, json!({})).await;
    let back = (began.elapsed().as_secs_f64() / 0.6) as u64 + 1;
    assert_eq!(first.status(), 200);
    assert!((36..=36 + back).contains(&left(&first)), "{} with {back}", left(&first));
    assert_eq!(rate(&first, "limit-tokens").as_deref(), Some("100"));
    assert_eq!(rate(&first, "limit-requests").as_deref(), Some("100"));
    assert!(["98", "99"].map(Some).contains(&rate(&first, "remaining-requests").as_deref()));
    // Some are left: it may use more than these, and has to make up for that.
    let second = ask(TIGHT, json!({"stream": true})).await;
    assert_eq!(second.status(), 200);
    assert!(second.text().await.unwrap().ends_with("[DONE]\n\n"));
    let third = ask(TIGHT, json!({})).await;
    assert_eq!((third.status().as_u16(), left(&third)), (429, 0));
    let wait = retry_after(&third).unwrap();
    // 128 and the next one, less 100 and what has come back since.
    let least = 17.4 - began.elapsed().as_secs_f64();
    assert!(wait <= 18 && wait as f64 >= least, "{wait} s, at least {least}");
    assert!(rate(&third, "reset-tokens").unwrap().starts_with("1m"), "{third:?}");
    let error: Value = third.json().await.unwrap();
    assert_eq!(error["error"]["code"], "rate_limit_exceeded");
    assert!(error["error"]["message"].as_str().unwrap().contains("100 tokens"), "{error}");
    // Below Anthropic's paths the same account is told of in Anthropic's headers, and no others.
    let url = format!("http://{}/v1/messages", rig.address);
    let body = json!({"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]});
    let sent = reqwest::Client::new().post(url).header("x-api-key", "tight").json(&body).send();
    let message = sent.await.unwrap();
    assert_eq!((message.status().as_u16(), rate(&message, "limit-tokens")), (429, None));
    let told = |name: &str| {
        let header = message.headers().get(format!("anthropic-ratelimit-{name}"));
        header.unwrap_or_else(|| panic!("{name}: {message:?}")).to_str().unwrap()
    };
    assert_eq!((told("requests-limit"), told("tokens-limit")), ("100", "100"));
    assert_eq!(told("tokens-remaining"), "0");
    assert!(told("requests-remaining").parse::<u32>().unwrap() >= 97);
    for kind in ["requests", "tokens"] {
        let reset = told(&format!("{kind}-reset"));
        assert!(reset.len() == 20 && reset.starts_with("20") && reset.ends_with('Z'), "{reset}");
    }
    assert!(told("tokens-reset") > told("requests-reset"));
    let free = ask(FREE, json!({})).await;
    assert_eq!((free.status().as_u16(), rate(&free, "limit-tokens")), (200, None));
    assert_eq!(free.headers().get("anthropic-ratelimit-tokens-limit"), None);
    let counts = [("reason", "key_limit")];
    assert_eq!(counted(&rig, "tutti_requests_rejected_total", &counts).await, 2.0);
}

#[tokio::test]
async fn a_request_of_several_texts_that_is_refused_costs_nothing() {
    let limits = KeyLimits { tokens_per_minute: Some(100), ..KeyLimits::default() };
    let keys = ApiKeys::of([ApiKey::new("tight", limits).unwrap()]);
    let rig = Rig::with_api(&ApiOptions { keys, ..ApiOptions::default() });
    let left = |response: &Response| rate(response, "remaining-tokens").unwrap();
    // The third finds the queue full, while the others are under way.
    rig.script(|script| script.full_behind = Some(0));
    let prompts = json!({"prompt": vec![[300; 20]; 3], "max_tokens": 4});
    let refused = complete(&rig, &[TIGHT], prompts.clone()).await;
    assert_eq!((refused.status().as_u16(), left(&refused).as_str()), (429, "100"));
    let url = format!("http://{}/v1/embeddings", rig.address);
    let request = reqwest::Client::new().post(url).header(TIGHT.0, TIGHT.1);
    let sent = request.json(&json!({"input": vec![[300; 20]; 3]})).send();
    let refused = sent.await.unwrap();
    assert_eq!((refused.status().as_u16(), left(&refused).as_str()), (429, "100"));
    // A stream that has begun is charged for what it brought.
    let mut stream = prompts;
    stream["stream"] = json!(true);
    let begun = complete(&rig, &[TIGHT], stream).await;
    assert_eq!(begun.status(), 200);
    assert!(begun.text().await.unwrap().contains("queue_full"));
    rig.script(|script| script.full_behind = None);
    let next = complete(&rig, &[TIGHT], json!({"prompt": [300], "max_tokens": 1})).await;
    let remaining: u32 = left(&next).parse().unwrap();
    assert!((50..75).contains(&remaining), "{remaining}");
}

#[tokio::test]
async fn a_stream_that_ends_with_an_error_is_not_charged_for_prompts_that_only_waited() {
    let limits = KeyLimits { tokens_per_minute: Some(100), ..KeyLimits::default() };
    let keys = ApiKeys::of([ApiKey::new("tight", limits).unwrap()]);
    let rig = Rig::with_api(&ApiOptions { keys, ..ApiOptions::default() });
    // The first prompt is answered, the second waits, the third finds the queue full.
    rig.script(|script| {
        *script = Script {
            text: "a".to_owned(),
            full_behind: Some(0),
            silent: Some(301),
            ..Script::default()
        };
    });
    let prompts = json!([vec![300; 10], vec![301; 60], vec![300; 10]]);
    let stream = json!({"prompt": prompts, "max_tokens": 4, "stream": true});
    let began = Instant::now();
    let begun = complete(&rig, &[TIGHT], stream).await;
    assert_eq!(begun.status(), 200);
    let text = begun.text().await.unwrap();
    assert!(text.contains("queue_full") && text.contains("\"text\":"), "{text}");
    rig.script(|script| script.full_behind = None);
    let next = complete(&rig, &[TIGHT], json!({"prompt": [300], "max_tokens": 1})).await;
    let remaining: u128 = rate(&next, "remaining-tokens").unwrap().parse().unwrap();
    // One token comes back every 0.6 s.
    let back = began.elapsed().as_millis() / 600 + 1;
    assert!((80..90 + back).contains(&remaining), "{remaining}, up to {back} of them came back");
}

#[tokio::test]
async fn a_request_ends_when_the_time_that_its_client_gives_is_over() {
    let rig = Rig::new(Script { text: "a b c".to_owned(), hang: true, ..Script::default() });
    // In less, a busy machine may not even have begun the stream.
    let brief = [("x-request-timeout", "3")];
    let began = Instant::now();
    let whole = complete(&rig, &brief, json!({"prompt": "x"})).await;
    assert_eq!(whole.status(), 504);
    assert!(began.elapsed() >= Duration::from_secs(3));
    let error: Value = whole.json().await.unwrap();
    assert_eq!(error["error"]["code"], "request_timeout", "{error}");
    assert!(rig.cancelled().await, "nothing more is computed");
    // A stream that has begun ends with an error.
    let stream = complete(&rig, &brief, json!({"prompt": "x", "stream": true})).await;
    assert_eq!(stream.status(), 200);
    let text = stream.text().await.unwrap();
    assert!(text.contains("request_timeout") && !text.contains("[DONE]"), "{text}");
    let over = [("reason", "deadline")];
    assert_eq!(counted(&rig, "tutti_requests_expired_total", &over).await, 2.0);
    // A sufficient time changes nothing, and an invalid one is refused.
    rig.script(|script| script.hang = false);
    let enough = complete(&rig, &[("x-request-timeout", "60")], json!({"prompt": "x"})).await;
    assert_eq!(enough.status(), 200);
    let wrong = complete(&rig, &[("x-request-timeout", "soon")], json!({"prompt": "x"})).await;
    assert_eq!(wrong.status(), 400);
}

#[tokio::test]
async fn the_time_of_a_request_is_over_even_if_its_body_has_not_come() {
    let rig = Rig::new(Script::default());
    let mut stream = TcpStream::connect(rig.address).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
                Content-Length: 20\r\nX-Request-Timeout: 0.2\r\n\r\n{";
    stream.write_all(head.as_bytes()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 504");
    let over = [("reason", "deadline")];
    assert_eq!(counted(&rig, "tutti_requests_expired_total", &over).await, 1.0);
    assert!(rig.seen.lock().unwrap().requests.is_empty());
}

#[tokio::test]
async fn keys_share_no_cached_prompts_unless_they_are_to() {
    for share in [false, true] {
        let api = ApiOptions { share_prefix_cache: share, ..limited(None, None) };
        let rig = Rig::with_api(&api);
        let salted = json!({"prompt": "x", "cache_salt": "s"});
        for (key, body) in [
            (TIGHT, json!({"prompt": "x"})),
            (TIGHT, json!({"prompt": "y"})),
            (FREE, json!({"prompt": "x"})),
            (TIGHT, salted.clone()),
            (FREE, salted),
        ] {
            assert_eq!(complete(&rig, &[key], body).await.status(), 200);
        }
        let seen = rig.seen.lock().unwrap();
        let salts: Vec<u64> = seen.requests.iter().map(|request| request.cache_salt).collect();
        let [tight, again, free, tight_salted, free_salted] = salts[..] else {
            panic!("{salts:?}")
        };
        assert_eq!(tight, again);
        assert_eq!((tight == free, tight_salted == free_salted), (share, share), "{salts:?}");
        assert!(tight != tight_salted && free != free_salted && free != tight_salted);
        assert_eq!(tight == 0, share);
    }
}

#[tokio::test]
async fn what_the_server_is_to_blame_for_is_no_fault_of_the_request() {
    let rig = Rig::new(Script::default());
    let late = EngineError::Overloaded { message: "it waited".to_owned(), retry_after_s: 7 };
    rig.script(|script| script.refuse = Some(late));
    let id = [("x-request-id", "mine-1")];
    let response = complete(&rig, &id, json!({"prompt": "x"})).await;
    assert_eq!((response.status().as_u16(), retry_after(&response)), (503, Some(7)));
    let message = response.text().await.unwrap();
    assert!(message.contains("(request mine-1)"), "{message}");
    let broke = EngineError::Broke { message: "a defect".to_owned() };
    rig.script(|script| script.refuse = Some(broke));
    let response = complete(&rig, &id, json!({"prompt": "x"})).await;
    assert_eq!((response.status().as_u16(), retry_after(&response)), (500, None));
}

/// Whether a server answers on this connection, or ends it.
fn answers(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    if stream.write_all(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n").is_err() {
        return false;
    }
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut next = [0];
        if stream.read_exact(&mut next).is_err() {
            return false;
        }
        head.extend(next);
    }
    head.starts_with(b"HTTP/1.1 200")
}

#[tokio::test]
async fn an_address_has_so_many_connections_and_gets_back_those_it_closes() {
    let api = ApiOptions { connections: ConnectionBound::Of(3), ..ApiOptions::default() };
    let rig = Rig::with_api(&api);
    let connect = || TcpStream::connect(rig.address).unwrap();
    let mut three = [connect(), connect(), connect()];
    assert!(three.iter_mut().all(answers));
    assert!(!answers(&mut connect()), "the fourth is closed");
    assert!(three.iter_mut().all(answers), "the others are as they were");
    let [first, ..] = three;
    drop(first);
    let began = Instant::now();
    while !answers(&mut connect()) {
        assert!(began.elapsed() < PATIENCE, "its place is free again");
        std::thread::sleep(Duration::from_millis(20));
    }
    // Many connections from one address, as from a proxy on this host: the default allows them.
    let rig = Rig::with_api(&ApiOptions::default());
    let mut many: Vec<TcpStream> =
        (0..400).map(|_| TcpStream::connect(rig.address).unwrap()).collect();
    assert!(many.iter_mut().all(answers));
    let refused = counted(&rig, "tutti_http_connections_refused_total", &[]).await;
    assert_eq!(refused, 0.0);
}

/// Asks three times, with pauses shorter than `kept`, then sends half a head: how long it takes
/// until the connection ends. `None` if the machine made a pause so long that it may have ended
/// before.
fn asked_then_half_a_head(address: SocketAddr, kept: Duration) -> Option<Duration> {
    // The server's pauses are never longer than what is measured here: each begins after its
    // request was sent.
    let mut last = Instant::now();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut answer = [0; 4096];
    for _ in 0..3 {
        let now = Instant::now();
        let asked = stream.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
        let answered = asked.and_then(|()| stream.read(&mut answer));
        if last.elapsed() >= kept {
            return None;
        }
        assert!(answered.unwrap() > 0);
        last = now;
        std::thread::sleep(kept * 2 / 3);
    }
    let began = Instant::now();
    let asked = stream.write_all(b"GET /hea");
    if last.elapsed() >= kept {
        return None;
    }
    asked.unwrap();
    // The end, or what says it.
    let _ = stream.read(&mut answer).unwrap_or_default();
    Some(began.elapsed())
}

#[tokio::test]
async fn a_connection_on_which_nothing_is_asked_ends_also_with_half_a_head() {
    let kept = Duration::from_millis(1500);
    let rig = Rig::keeping(kept);
    rig.script(|script| (script.text, script.hang) = ("a b".to_owned(), true));
    let address = rig.address;
    // One that waits for its answer for longer stays.
    let client = rig.client.clone();
    let slow = tokio::spawn(async move {
        let body = json!({"prompt": "x", "stream": true});
        let mut stream = client.open("/v1/completions", &body).await.unwrap();
        let began = Instant::now();
        while began.elapsed() < 2 * kept {
            let piece = tokio::time::timeout(kept, stream.chunk()).await;
            assert!(piece.is_err() || piece.unwrap().unwrap().is_some());
        }
    });
    let ended = tokio::task::spawn_blocking(move || {
        (0..10).find_map(|_| asked_then_half_a_head(address, kept))
    });
    let ended = ended.await.unwrap().expect("a round without a pause that is too long");
    assert!(ended < Duration::from_secs(15), "{ended:?}");
    slow.await.unwrap();
}

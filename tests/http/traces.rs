//! Spans of requests, as a collector gets them; and collectors that are slow, busy or away.
use std::time::{Duration, Instant};

use coordinator::engine::EngineError;
use coordinator::http::options::ApiOptions;
use coordinator::http::root_path::RootPath;
use coordinator::traces::settings::{self, Settings};
use coordinator::traces::{self, Traces};
use reqwest::header::HeaderMap;
use serde_json::{Value, json};
use testkit::collector::{Collector, Manner, attribute, spans};
use testkit::scrape::Scrape;
use testkit::wait::until;

use crate::rig::{Rig, Script};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";
const PROMPT: &str = "secret words of a prompt";

/// What messages of a test say, in no time.
fn settings(url: &str, more: &[(&str, &str)]) -> Settings {
    let quick = [("OTEL_BSP_SCHEDULE_DELAY", "10")];
    let find = |name: &str| {
        let found = more.iter().chain(&quick).find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    let reading = settings::read(Some(url), find).unwrap();
    assert!(reading.warnings.is_empty(), "{:?}", reading.warnings);
    reading.settings.unwrap()
}

/// A rig whose requests are traced.
fn traced(url: &str, more: &[(&str, &str)]) -> (Rig, Traces) {
    let settings = settings(url, more);
    let agent = traces::client(&settings, None);
    let process = vec![("service.name".to_owned(), "tutti".to_owned())];
    let traces = Traces::start(&settings, agent, process).unwrap();
    let options = ApiOptions { traces: Some(traces.clone()), ..ApiOptions::default() };
    (Rig::with_api(&options), traces)
}

fn completion() -> Value {
    json!({"prompt": PROMPT, "max_tokens": 5, "temperature": 0.7, "seed": 7, "n": 2})
}

/// Asks with these headers; returns the status and the answer.
async fn ask(rig: &Rig, body: &Value, headers: &[(&str, &str)]) -> (u16, String) {
    let mut all = HeaderMap::new();
    for (name, value) in headers {
        let name = reqwest::header::HeaderName::from_bytes(name.as_bytes()).unwrap();
        all.append(name, value.parse().unwrap());
    }
    let url = format!("http://{}/v1/completions", rig.address);
    let reply = reqwest::Client::new().post(url).headers(all).json(body).send().await.unwrap();
    (reply.status().as_u16(), reply.text().await.unwrap())
}

fn named<'a>(name: &'a str) -> impl Fn(&Value) -> bool + 'a {
    move |span| attribute(span, "gen_ai.request.id").as_str().is_some_and(|id| id.contains(name))
}

#[tokio::test]
async fn a_request_is_a_span_in_its_callers_trace() {
    let collector = Collector::start().unwrap();
    let more =
        [("OTEL_EXPORTER_OTLP_HEADERS", "x-token=of%20mine"), ("OTEL_SERVICE_NAME", "chat-eu")];
    let (rig, _traces) = traced(&collector.url(), &more);
    let parent = format!("00-{TRACE}-{PARENT}-01");
    let headers =
        [("traceparent", parent.as_str()), ("tracestate", "a=1"), ("x-request-id", "r-1")];
    let (status, answer) = ask(&rig, &completion(), &headers).await;
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let all = collector.request(named("r-1")).await;
    let own = &all[0];
    assert_eq!(
        (status, &own["traceId"], &own["parentSpanId"]),
        (200, &json!(TRACE), &json!(PARENT))
    );
    assert_eq!(
        (&own["traceState"], &own["flags"], &own["kind"]),
        (&json!("a=1"), &json!(769), &json!(2))
    );
    assert_eq!(own["status"], json!({}));
    let usage = &answer["usage"];
    for (name, expected) in [
        ("gen_ai.request.id", answer["id"].clone()),
        ("gen_ai.response.model", json!("demo")),
        ("gen_ai.operation.name", json!("text_completion")),
        ("gen_ai.request.n", json!(2)),
        ("gen_ai.request.max_tokens", json!(5)),
        ("gen_ai.request.temperature", json!(0.7)),
        ("gen_ai.request.seed", json!(7)),
        ("gen_ai.usage.prompt_tokens", usage["prompt_tokens"].clone()),
        ("gen_ai.usage.completion_tokens", usage["completion_tokens"].clone()),
        ("gen_ai.response.finish_reasons", json!(["length", "length"])),
        ("http.response.status_code", json!(200)),
        ("http.route", json!("/v1/completions")),
        ("error.type", Value::Null),
    ] {
        assert_eq!(attribute(own, name), expected, "{name}");
    }
    let first = attribute(own, "gen_ai.latency.time_to_first_token").as_f64().unwrap();
    assert!(first > 0.0 && first <= attribute(own, "gen_ai.latency.e2e").as_f64().unwrap());
    let time = |span: &Value, name: &str| span[name].as_str().unwrap().parse::<u64>().unwrap();
    let parts: Vec<&str> = all[1..].iter().map(|span| span["name"].as_str().unwrap()).collect();
    // The rig's engine does not say when it runs what.
    assert_eq!(parts, ["decode"]);
    for part in &all[1..] {
        assert_eq!((&part["parentSpanId"], &part["flags"]), (&own["spanId"], &json!(257)));
        assert!(time(part, "startTimeUnixNano") >= time(own, "startTimeUnixNano"));
        assert!(time(part, "endTimeUnixNano") <= time(own, "endTimeUnixNano"));
    }
    let message = &collector.messages()[0];
    assert_eq!(message.request, "POST /v1/traces");
    for header in [("content-type", "application/json"), ("x-token", "of mine")] {
        let (name, value) = header;
        assert!(message.headers.contains(&(name.to_owned(), value.to_owned())), "{header:?}");
    }
    let resource = &message.body["resourceSpans"][0]["resource"];
    assert_eq!(attribute(resource, "service.name"), "chat-eu");
    let text = answer["choices"][0]["text"].as_str().unwrap();
    let sent = message.body.to_string();
    assert!(!sent.contains("secret words") && !sent.contains(text.trim()), "{sent}");
}

#[tokio::test]
async fn a_span_names_the_route_without_the_path_of_a_proxy() {
    let collector = Collector::start().unwrap();
    let settings = settings(&collector.url(), &[]);
    let process = vec![("service.name".to_owned(), "tutti".to_owned())];
    let traces = Traces::start(&settings, traces::client(&settings, None), process).unwrap();
    let root_path = RootPath::parse("/llm").unwrap();
    let options = ApiOptions { traces: Some(traces), root_path, ..ApiOptions::default() };
    let rig = Rig::with_api(&options);
    let url = format!("http://{}/llm/v1/completions", rig.address);
    let request = reqwest::Client::new().post(url).header("x-request-id", "r-2");
    assert_eq!(request.json(&completion()).send().await.unwrap().status(), 200);
    let all = collector.request(named("r-2")).await;
    assert_eq!(attribute(&all[0], "http.route"), "/v1/completions");
    assert_eq!(attribute(&all[0], "gen_ai.operation.name"), "text_completion");
}

#[tokio::test]
async fn callers_decide_whether_their_traces_are_sampled() {
    let collector = Collector::start().unwrap();
    let (rig, traces) = traced(&collector.url(), &[]);
    let parent = |flags: &str| format!("00-{TRACE}-{PARENT}-{flags}");
    ask(&rig, &completion(), &[("traceparent", &parent("00")), ("x-request-id", "off")]).await;
    ask(&rig, &completion(), &[("traceparent", "garbage"), ("x-request-id", "alone")]).await;
    // No request for the engine.
    rig.client.get("/v1/models").await.unwrap();
    rig.client.post("/tokenize", &json!({"prompt": "a"})).await.unwrap();
    let alone = collector.request(named("alone")).await.remove(0);
    assert!(alone.get("parentSpanId").is_none() && alone["flags"] == 1);
    assert!(alone["traceId"] != TRACE && alone["traceId"].as_str().unwrap().len() == 32);
    traces.flush(Duration::from_secs(10)).await;
    assert_eq!(collector.spans().iter().filter(|span| span["name"] == "llm_request").count(), 1);
    let none = [("OTEL_TRACES_SAMPLER", "always_off")];
    let (rig, traces) = traced(&collector.url(), &none);
    ask(&rig, &completion(), &[("traceparent", &parent("01"))]).await;
    traces.flush(Duration::from_secs(10)).await;
    assert_eq!(collector.spans().iter().filter(|span| span["name"] == "llm_request").count(), 1);
    assert!(rig.seen.lock().unwrap().requests.iter().all(|request| !request.traced));
}

#[tokio::test]
async fn errors_have_their_kind() {
    let collector = Collector::start().unwrap();
    let (rig, _traces) = traced(&collector.url(), &[]);
    let bad = json!({"prompt": PROMPT, "model": "other"});
    assert_eq!(ask(&rig, &bad, &[("x-request-id", "unknown")]).await.0, 404);
    let bad = json!({"prompt": PROMPT, "max_tokens": "many"});
    assert_eq!(ask(&rig, &bad, &[("x-request-id", "bad")]).await.0, 400);
    let unavailable = EngineError::Unavailable { message: "none".to_owned() };
    rig.script(|script| script.refuse = Some(unavailable));
    assert_eq!(ask(&rig, &completion(), &[("x-request-id", "refused")]).await.0, 503);
    rig.script(|script| {
        *script = Script { text: "a b c d".to_owned(), fail_after: Some(2), ..Script::default() };
    });
    let stream = json!({"prompt": PROMPT, "max_tokens": 5, "stream": true});
    assert_eq!(ask(&rig, &stream, &[("x-request-id", "broken")]).await.0, 200);
    for (name, kind, status) in [
        ("unknown", "model_not_found", json!({})),
        ("bad", "400", json!({})),
        ("refused", "unavailable", json!({"code": 2, "message": "no replica is ready: none"})),
        (
            "broken",
            "corrupted",
            json!({"code": 2, "message": "the model produced invalid numbers for this request"}),
        ),
    ] {
        let own = collector.request(named(name)).await.remove(0);
        assert_eq!(
            (attribute(&own, "error.type"), &own["status"]),
            (json!(kind), &status),
            "{name}"
        );
    }
    let broken = collector.request(named("broken")).await.remove(0);
    assert_eq!(attribute(&broken, "gen_ai.usage.completion_tokens"), 2);
    assert_eq!(attribute(&broken, "http.response.status_code"), 200);
}

#[tokio::test]
async fn a_client_that_leaves_is_no_failure() {
    let collector = Collector::start().unwrap();
    let (rig, _traces) = traced(&collector.url(), &[]);
    rig.script(|script| script.hang = true);
    let mut body = completion();
    body["stream"] = json!(true);
    let mut response = rig.client.open("/v1/completions", &body).await.unwrap();
    assert!(response.chunk().await.unwrap().is_some());
    drop(response);
    let own = collector.request(|_| true).await.remove(0);
    assert_eq!((attribute(&own, "error.type"), &own["status"]), (json!("cancelled"), &json!({})));
    assert!(attribute(&own, "gen_ai.latency.time_to_first_token").is_f64());
}

/// What the server counts of spans.
async fn counted(rig: &Rig, wanted: impl Fn(f64, &dyn Fn(&str) -> f64) -> bool) {
    until("the count of spans", async || {
        let page = rig.client.metrics_page().await.ok()?;
        let scrape = Scrape::parse(&page).ok()?;
        let dropped =
            |reason: &str| scrape.sum("tutti_trace_spans_dropped_total", &[("reason", reason)]);
        let exported = scrape.sum("tutti_trace_spans_exported_total", &[]);
        wanted(exported, &dropped).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_busy_collector_is_asked_again_when_it_says() {
    let collector = Collector::start().unwrap();
    let (rig, _traces) = traced(&collector.url(), &[]);
    let headers = "retry-after: 1\r\n".to_owned();
    collector.answer(Manner { status: 503, headers, ..Manner::default() });
    ask(&rig, &completion(), &[]).await;
    let first = until("a message", async || collector.messages().into_iter().next()).await;
    collector.answer(Manner::default());
    counted(&rig, |exported, _| exported == 2.0).await;
    let all = collector.messages();
    assert_eq!((all.len(), &all[0].body), (2, &all[1].body), "the same");
    let waited = all[1].at - first.at;
    assert!(waited >= Duration::from_millis(900), "{waited:?}");
    // One that says no is not asked again, and one that takes a part has it.
    collector.answer(Manner { status: 400, ..Manner::default() });
    ask(&rig, &completion(), &[]).await;
    counted(&rig, |exported, dropped| (exported, dropped("refused")) == (2.0, 2.0)).await;
    let body = r#"{"partialSuccess":{"rejectedSpans":"1","errorMessage":"no"}}"#.to_owned();
    collector.answer(Manner { body, ..Manner::default() });
    ask(&rig, &completion(), &[]).await;
    counted(&rig, |exported, dropped| (exported, dropped("refused")) == (3.0, 3.0)).await;
    assert_eq!(collector.messages().len(), 4);
}

#[tokio::test]
async fn no_request_waits_for_a_collector() {
    let collector = Collector::start().unwrap();
    collector.answer(Manner { delay: Duration::from_secs(600), ..Manner::default() });
    let more = [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "7"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "100"),
        ("OTEL_BSP_EXPORT_TIMEOUT", "200"),
    ];
    for url in [collector.url(), format!("http://127.0.0.1:{}", testkit::fleet::free_port())] {
        let (rig, _traces) = traced(&url, &more);
        let began = Instant::now();
        for _ in 0..20 {
            assert_eq!(ask(&rig, &completion(), &[]).await.0, 200);
        }
        let took = began.elapsed();
        assert!(took < Duration::from_secs(10), "{took:?}");
        // Some find no room, and no collector takes the others: all 40 are counted.
        counted(&rig, |exported, dropped| {
            exported == 0.0 && dropped("unreachable") + dropped("queue_full") == 40.0
        })
        .await;
    }
}

#[tokio::test]
async fn many_spans_go_in_few_messages_and_the_last_when_the_process_ends() {
    let collector = Collector::start().unwrap();
    let more = [("OTEL_BSP_SCHEDULE_DELAY", "600000"), ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")];
    let (rig, traces) = traced(&collector.url(), &more);
    for _ in 0..5 {
        ask(&rig, &completion(), &[]).await;
    }
    until("two messages", async || (collector.messages().len() == 2).then_some(())).await;
    let sizes = || collector.messages().iter().map(|it| spans(&it.body).len()).collect::<Vec<_>>();
    assert_eq!(sizes(), [4, 4]);
    traces.flush(Duration::from_secs(10)).await;
    assert_eq!(sizes(), [4, 4, 2]);
    collector.answer(Manner { delay: Duration::from_secs(600), ..Manner::default() });
    ask(&rig, &completion(), &[]).await;
    let began = Instant::now();
    traces.flush(Duration::from_millis(200)).await;
    assert!(began.elapsed() < Duration::from_secs(5), "the end waits for nobody");
}

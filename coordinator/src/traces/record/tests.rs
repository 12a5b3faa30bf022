//! Requests as spans.
use super::*;

const MS: Duration = Duration::from_millis(1);

fn record() -> RequestRecord {
    let place = Place { trace: [1; 16], span: [2; 8], parent: Some([3; 8]), state: "s=1".into() };
    let began = Duration::from_secs(1000);
    RequestRecord::new(place, "req-1".into(), "chat", "/v1/chat/completions", began)
}

fn asked() -> Asked {
    Asked {
        model: "m".into(),
        response: "chatcmpl-1".into(),
        n: 2,
        max_tokens: 9,
        temperature: 0.7,
        top_p: 1.0,
        top_k: 0,
        frequency_penalty: 0.0,
        presence_penalty: 0.5,
        seed: Some(u64::MAX),
        generates: true,
    }
}

fn value<'a>(span: &'a Span, name: &str) -> Option<&'a Value> {
    span.attributes.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
}

fn spans(record: RequestRecord, end: &End) -> Vec<Span> {
    let mut drawn = 10;
    let spans = record.spans(end, || {
        drawn += 1;
        [drawn; 8]
    });
    for span in &spans {
        let names: std::collections::BTreeSet<_> =
            span.attributes.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), span.attributes.len(), "each once");
        assert!(span.start <= span.end);
    }
    spans
}

fn scheduled(replica: u32) -> RequestNote {
    RequestNote::Scheduled { replica: ReplicaId(replica), ranks: 2 }
}

#[test]
fn a_request_is_a_span_with_its_phases_as_parts() {
    let mut record = record();
    record.asked(asked);
    record.asked(|| panic!("the first says it"));
    record.note(100 * MS, scheduled(4), false);
    // Of another prompt.
    record.note(120 * MS, scheduled(4), false);
    record.first_token(350 * MS);
    record.first_token(400 * MS);
    record.choice_ended(500 * MS, "length", 3);
    record.choice_ended(1350 * MS, "stop", 0);
    record.note(1350 * MS, RequestNote::Drafted { tokens: 8, accepted: 5 }, true);
    let end = End {
        at: 1400 * MS,
        status: 200,
        sent: true,
        tokens: Some((7, 11)),
        key: Some(2),
        code: None,
    };
    let spans = spans(record, &end);
    let own = &spans[0];
    assert_eq!((own.name, own.kind, &own.status), ("llm_request", Kind::Server, &Status::Unset));
    assert_eq!(own.parent, Some(Parent { id: [3; 8], remote: true }));
    assert_eq!(own.start, Duration::from_secs(1000));
    assert_eq!(own.end, Duration::from_millis(1_001_400));
    for (name, expected) in [
        ("gen_ai.request.id", "chatcmpl-1".into()),
        ("gen_ai.operation.name", "chat".into()),
        ("gen_ai.response.model", "m".into()),
        ("gen_ai.request.n", Value::Int(2)),
        ("gen_ai.request.choice.count", Value::Int(2)),
        ("gen_ai.request.max_tokens", Value::Int(9)),
        ("gen_ai.request.temperature", Value::Float(0.7)),
        ("gen_ai.request.top_p", Value::Float(1.0)),
        ("gen_ai.request.presence_penalty", Value::Float(0.5)),
        ("gen_ai.request.seed", Value::Int(-1)),
        ("gen_ai.usage.prompt_tokens", Value::Int(7)),
        ("gen_ai.usage.completion_tokens", Value::Int(11)),
        ("gen_ai.usage.cache_read.input_tokens", Value::Int(3)),
        ("gen_ai.response.finish_reasons", Value::Texts(vec!["length", "stop"])),
        ("gen_ai.latency.e2e", Value::Float(1.4)),
        ("gen_ai.latency.time_in_queue", Value::Float(0.1)),
        ("gen_ai.latency.time_to_first_token", Value::Float(0.35)),
        ("gen_ai.latency.time_in_model_prefill", Value::Float(0.25)),
        ("gen_ai.latency.time_in_model_decode", Value::Float(1.0)),
        ("gen_ai.latency.time_in_model_inference", Value::Float(1.25)),
        ("tutti.replica", Value::Int(4)),
        ("tutti.ranks", Value::Int(2)),
        ("tutti.failovers", Value::Int(0)),
        ("tutti.preemptions", Value::Int(0)),
        ("tutti.drafts.accepted", Value::Int(5)),
        ("tutti.api_key", Value::Int(2)),
        ("http.response.status_code", Value::Int(200)),
    ] {
        assert_eq!(value(own, name), Some(&expected), "{name}");
    }
    assert!(own.events.is_empty(), "{:?}", own.events);
    for absent in ["error.type", "gen_ai.request.top_k", "gen_ai.request.frequency_penalty"] {
        assert_eq!(value(own, absent), None);
    }
    let parts: Vec<_> = spans[1..].iter().map(|it| (it.name, it.end - it.start)).collect();
    assert_eq!(parts, [("queue", 100 * MS), ("prefill", 250 * MS), ("decode", 1000 * MS)]);
    for part in &spans[1..] {
        assert_eq!(part.parent, Some(Parent { id: own.id, remote: false }));
        assert_eq!((part.trace, &*part.state), (own.trace, "s=1"));
    }
    assert_eq!((spans[1].id, spans[3].id), ([11; 8], [13; 8]));
}

#[test]
fn what_happened_meanwhile_is_told_as_events() {
    let mut record = record();
    record.asked(asked);
    record.note(MS, scheduled(0), false);
    record.note(2 * MS, RequestNote::Preempted { replica: ReplicaId(0) }, true);
    record.note(3 * MS, scheduled(0), true);
    record.note(4 * MS, RequestNote::Interrupted { replica: ReplicaId(0), failed: true }, true);
    record.note(5 * MS, scheduled(1), true);
    record.note(6 * MS, RequestNote::Interrupted { replica: ReplicaId(1), failed: false }, true);
    record.note(7 * MS, RequestNote::CoordinatorLost, true);
    let end = End { at: 9 * MS, status: 200, sent: false, ..End::default() };
    let own = spans(record, &end).remove(0);
    let told: Vec<_> = own.events.iter().map(|event| event.name).collect();
    let expected =
        ["preempted", "resumed", "replica_failed", "resumed", "replica_paused", "coordinator_lost"];
    assert_eq!(told, expected);
    let on = Value::Int(1);
    assert_eq!(
        own.events[3].attributes,
        [("tutti.replica", on.clone()), ("tutti.ranks", Value::Int(2))]
    );
    assert_eq!(own.events[2].at, Duration::from_millis(1_000_004));
    assert_eq!(value(&own, "tutti.replica"), Some(&on), "where it ran last");
    assert_eq!(value(&own, "tutti.failovers"), Some(&Value::Int(2)));
    assert_eq!(value(&own, "tutti.preemptions"), Some(&on));
    assert_eq!(value(&own, "error.type"), Some(&"cancelled".into()));
    assert_eq!(own.status, Status::Unset);
}

#[test]
fn who_never_ran_waited_until_the_end_and_nothing_grows_without_bound() {
    let mut waiting = record();
    waiting.asked(asked);
    let end = End { at: 8 * MS, status: CLIENT_LEFT, sent: false, ..End::default() };
    let parts: Vec<_> =
        spans(waiting, &end).iter().skip(1).map(|it| (it.name, it.end - it.start)).collect();
    assert_eq!(parts, [("queue", 8 * MS)]);
    let mut record = record();
    for n in 0..1000 {
        record.note(n * MS, RequestNote::Preempted { replica: ReplicaId(0) }, true);
        record.choice_ended(n * MS, "stop", 0);
    }
    record.failed("broke", || "\u{e9}".repeat(1000));
    let own =
        spans(record, &End { at: Duration::from_secs(1), status: 200, ..End::default() }).remove(0);
    assert_eq!(own.events.len(), EVENTS_MAX);
    let Some(Value::Texts(reasons)) = value(&own, "gen_ai.response.finish_reasons") else {
        panic!()
    };
    assert_eq!(reasons.len(), REASONS_MAX);
    assert_eq!(own.status, Status::Error("\u{e9}".repeat(MESSAGE_MAX / 2)));
}

#[test]
fn failures_are_the_servers_or_the_clients() {
    let told = |failure: Option<&'static str>, status, sent, code| {
        let mut record = record();
        if let Some(kind) = failure {
            record.failed(kind, || "why".to_owned());
            record.failed("later", || panic!("the first counts"));
        }
        let own = spans(record, &End { status, sent, code, ..End::default() }).remove(0);
        let kind = match value(&own, "error.type") {
            Some(Value::Text(kind)) => Some(kind.to_string()),
            None => None,
            other => panic!("{other:?}"),
        };
        (kind, own.status)
    };
    let failed = |why: &str| Status::Error(why.to_owned());
    let kind = |kind: &str| Some(kind.to_owned());
    assert_eq!(told(None, 200, true, None), (None, Status::Unset));
    assert_eq!(told(None, 200, false, None), (kind("cancelled"), Status::Unset));
    assert_eq!(told(None, 499, false, None), (kind("cancelled"), Status::Unset));
    assert_eq!(told(None, 400, true, None), (kind("400"), Status::Unset));
    let unknown = told(None, 404, true, Some("model_not_found"));
    assert_eq!(unknown, (kind("model_not_found"), Status::Unset));
    assert_eq!(told(None, 503, true, None), (kind("503"), failed("")));
    assert_eq!(told(Some("broke"), 500, true, None), (kind("broke"), failed("why")));
    // In the middle of a stream.
    assert_eq!(told(Some("corrupted"), 200, true, None), (kind("corrupted"), failed("why")));
    assert_eq!(told(Some("queue_full"), 429, true, None), (kind("queue_full"), Status::Unset));
}

//! What the coordinator accepts on a front end's link: no request that a working front end would
//! not send.
use std::path::Path;

use shared::actor::link::{CloseReason, LinkEvent};
use shared::actor::registry::Home;
use shared::clock::{ManualClock, SystemClock};
use shared::metrics::catalogue::{HTTP_REQUESTS, PROCESS_CPU, REPORTS_REFUSED, REQUESTS_REJECTED};
use shared::metrics::labels::{Method, RejectReason};
use shared::metrics::{Limits as MetricLimits, LocalStats, encode_snapshot};
use shared::protocol::actors::ActorFrame;
use shared::protocol::{
    AcceptedChoice, BadWords, FromFrontend, GuideSpec, SubmitRequest, ThinkingBudget,
};
use shared::sampling::{LOGPROBS_MAX, Pooling, SUPPRESSED_MAX, SamplingParams};
use shared::wire::codec;

use super::link::LINK_SHIFT;
use super::preparation::Turns;
use super::*;
use crate::adapters::AdapterUse;
use crate::engine::FinishReason;
use crate::http::state::Readiness;
use crate::metrics::FrontendStats;
use crate::text::samples::sentencepiece_bpe;

fn receiver() -> (Receiver, mpsc::Receiver<EngineCommand>) {
    receiver_of(false)
}

fn receiver_of(priorities: bool) -> (Receiver, mpsc::Receiver<EngineCommand>) {
    receiver_into(priorities, mpsc::channel(64))
}

fn receiver_into(
    priorities: bool,
    channel: (mpsc::Sender<EngineCommand>, mpsc::Receiver<EngineCommand>),
) -> (Receiver, mpsc::Receiver<EngineCommand>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
    receiver_for(TextModel::load(&folder).unwrap(), priorities, channel)
}

fn receiver_for(
    text: TextModel,
    priorities: bool,
    (commands, taken): (mpsc::Sender<EngineCommand>, mpsc::Receiver<EngineCommand>),
) -> (Receiver, mpsc::Receiver<EngineCommand>) {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
    let frontends = frontends(text, priorities, commands, clock);
    let peer = frontends.actors.reserve_peer();
    let requests = LinkRequests::new(mpsc::channel(64).0, LinkState::new());
    let receiver = Receiver::new(frontends, &hello("a", 2), FrontendId(1), 3, requests, peer);
    (receiver, taken)
}

fn hello(node: &str, run: u64) -> FrontendHello {
    FrontendHello {
        node: node.to_owned(),
        incarnation: Incarnation(run),
        pid: 1,
        version: String::new(),
        slot: None,
    }
}

fn frontends(
    text: TextModel,
    priorities: bool,
    commands: mpsc::Sender<EngineCommand>,
    clock: Arc<dyn Clock>,
) -> Arc<Frontends> {
    let text = Arc::new(text);
    let serving = Serving {
        model: "m".into(),
        served_model_name: "m".into(),
        model_aliases: Vec::new(),
        adapters: Vec::new(),
        max_model_len: 100,
        text_fingerprint: text.fingerprint,
        priorities,
    };
    let ready = || Readiness { ready: true, message: String::new() };
    Arc::new(Frontends::new(
        Arc::new(Hub::new(Incarnation(1), MetricLimits::default())),
        clock.clone(),
        commands,
        text,
        serving,
        (ServedAdapters::default(), AdapterChanges::channel().0),
        Arc::new(ready),
        ActorRuntime::hub("coordinator", 1, clock),
        Gate::default(),
    ))
}

/// Pods get new names with every roll-out. Each of these answers one request, and half of them end
/// without a goodbye.
#[tokio::test]
async fn front_ends_that_come_and_go_leave_totals_and_nothing_that_grows() {
    const NAMES: u64 = 1000;
    let clock = Arc::new(ManualClock::default());
    let made = || {
        let (commands, clock) = (mpsc::channel(1).0, clock.clone());
        frontends(sentencepiece_bpe(), false, commands, clock)
    };
    let frontends = made();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let _peer = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let connection = Connection::new(listener.accept().await.unwrap().0).unwrap();
    let link = connection.start(LivenessConfig::default(), clock.clone(), |_| true);
    let (queue, _incoming) = mpsc::channel(1);
    let pod = |name: u64| hello(&format!("pod-{name}"), 1 << 40 | name);
    let mut sizes = Vec::new();
    for name in 0..NAMES {
        clock.advance(Duration::from_secs(200));
        let hello = pod(name);
        let id = frontends.admit(&hello).unwrap().frontend;
        let (handle, queue) = (link.clone(), queue.clone());
        let requests = LinkRequests::new(queue.clone(), LinkState::new());
        let peer = frontends.actors.reserve_peer();
        let linked = LinkedFrontend { number: name, peer, pid: 1, handle, queue };
        let mut slots = frontends.slots.lock().unwrap();
        slots.joined(&hello.node, id, hello.incarnation, linked).unwrap();
        drop(slots);
        let receiver = Receiver::new(frontends.clone(), &hello, id, name, requests, peer);
        let stats = FrontendStats::new();
        stats.http_started();
        stats.http_finished("/v1/completions", Method::Post, 200, Duration::from_millis(10));
        let (sequence, mut snapshot) = stats.report();
        let mut usage = LocalStats::new();
        let cpu = usage.counter(PROCESS_CPU, [&id.to_string()]);
        usage.add(cpu, 5);
        snapshot.add(usage.snapshot());
        let snapshot = encode_snapshot(&snapshot).unwrap();
        assert!(receiver.message(FromFrontend::Stats(WorkerStats { sequence, snapshot })));
        if name.is_multiple_of(2) {
            assert!(receiver.message(FromFrontend::Goodbye { reason: "it stops".to_owned() }));
        }
        receiver.take(LinkEvent::Closed { reason: CloseReason::PeerClosed });
        frontends.give_up_absent();
        sizes.push(frontends.hub.checkpoint().encode().unwrap().len());
    }
    let (half, all) = (sizes[NAMES as usize / 2 - 1], sizes[NAMES as usize - 1]);
    assert!(all < half + 100 && all < 64 << 10, "{half} bytes, then {all}");
    let merged = frontends.hub.merged();
    let answered = merged.counter(HTTP_REQUESTS, ["POST", "/v1/completions", "200"]);
    assert_eq!(answered, Some(NAMES));
    assert_eq!(merged.counter_sum(PROCESS_CPU), 5 * NAMES);
    assert_eq!(merged.counter_sum(REPORTS_REFUSED), 0);
    // One that is back would be counted again, here and at the next leader.
    let next = made();
    next.hub.restore(frontends.hub.checkpoint());
    for (frontends, names) in
        [(&frontends, [0, 1, NAMES - 2]), (&next, [NAMES - 20, NAMES - 19, NAMES - 2])]
    {
        for name in names {
            let refused = frontends.admit(&pod(name)).unwrap_err();
            assert!(matches!(refused, JoinRefusal::Never(why) if why.contains("start it again")));
        }
    }
    // One whose link was lost just now is expected back at either.
    for frontends in [&frontends, &next] {
        assert!(frontends.admit(&pod(NAMES - 1)).is_ok());
    }
}

/// A process whose link is dead may dial again before that is noticed here.
#[actix_rt::test]
async fn actors_of_a_front_end_that_links_anew_are_taken_over_its_new_link() {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
    let frontends = frontends(sentencepiece_bpe(), false, mpsc::channel(1).0, clock);
    let hello = hello("a", 2);
    let id = frontends.admit(&hello).unwrap().frontend;
    let report = ActorFrame::Report(ActorReport {
        name: "own".to_owned(),
        kind: "kind".to_owned(),
        generation: 7,
        life: ActorLife::Alive,
        restarts: 0,
        max_restarts: None,
        reason: None,
    });
    let report = codec::encode(&report).unwrap();
    let own = || frontends.actors.list().into_iter().find(|it| it.report.name == "own");
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut process = Vec::new();
    let mut peers = Vec::new();
    for _ in 0..2 {
        let dialled = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await;
        process.push(dialled.unwrap());
        let connection = Connection::new(listener.accept().await.unwrap().0).unwrap();
        frontends.joined(&hello, id, connection);
        let peer = {
            let slots = frontends.slots.lock().unwrap();
            slots.linked().next().unwrap().2.peer
        };
        assert!(frontends.actors.frame(peer, &report));
        assert_eq!(own().unwrap().home, Home::Peer(peer));
        peers.push(peer);
    }
    // The old link's end is noticed.
    tokio::time::sleep(Duration::from_millis(100)).await;
    frontends.actors.peer_lost(peers[0], "closed");
    let own = own().unwrap();
    assert_eq!((own.home, own.report.life), (Home::Peer(peers[1]), ActorLife::Alive));
    assert_eq!(frontends.linked().len(), 1);
}

fn request() -> SubmitRequest {
    SubmitRequest {
        id: RequestId(7),
        prompt: vec![1, 2, 3],
        sampling: SamplingParams::greedy(),
        n: 2,
        stops: vec!["x".into(); 4],
        keep_special: false,
        goes_on: false,
        guide: None,
        thinking: None,
        bad_words: None,
        max_tokens: 5,
        open_ended: false,
        priority: 0,
        cache_salt: 0,
        adapter: 0,
        adapter_name: String::new(),
        end_tokens: vec![1; SUPPRESSED_MAX],
        waited_us: 0,
        response_id: "cmpl-1".into(),
        traced: false,
        accepted: Vec::new(),
        again: false,
    }
}

/// Turns a valid request into another one.
type Change<'a> = &'a dyn Fn(&mut SubmitRequest);

/// Whose front end lets such a request through has others that must not be cancelled for it.
#[test]
fn requests_that_would_harm_a_rank_are_refused_and_the_link_stays() {
    let (receiver, mut taken) = receiver();
    let refused = || {
        let merged = receiver.frontends.hub.merged();
        merged.counter_sum_of(REQUESTS_REJECTED, RejectReason::Unavailable)
    };
    let mut submit = |change: Change<'_>| {
        let (mut submit, before) = (request(), refused());
        change(&mut submit);
        let kept = receiver.message(FromFrontend::Submit(Box::new(submit)));
        (kept, taken.try_recv().is_ok(), refused() - before)
    };
    assert_eq!(submit(&|_| ()), (true, true, 0), "what is allowed");
    let other_link = submit(&|it| it.id = RequestId(1 << LINK_SHIFT));
    assert_eq!(other_link, (false, false, 0), "another link's number");
    let nothing_ends_it =
        ThinkingBudget { tokens: 1, open: None, closes: Vec::new(), is_open: true };
    let wrong: [(&str, Change<'_>); 13] = [
        ("no prompt", &|it| it.prompt.clear()),
        ("a long prompt", &|it| it.prompt = vec![1; 101]),
        ("no token", &|it| it.prompt[0] = u32::MAX),
        ("log-probabilities", &|it| it.sampling.logprobs = Some(LOGPROBS_MAX + 1)),
        ("biases", &|it| it.sampling.logit_bias = vec![(1, 0.0); 1025]),
        ("a temperature", &|it| it.sampling.temperature = f32::NAN),
        ("end tokens", &|it| it.end_tokens.push(1)),
        ("a long stop string", &|it| it.stops[3] = "x".repeat(257)),
        ("an empty choice", &|it| it.guide = Some(GuideSpec::Choice(Vec::new()))),
        ("no end of reasoning", &|it| it.thinking = Some(nothing_ends_it.clone())),
        ("an empty bad word", &|it| it.bad_words = Some(BadWords { sequences: vec![vec![]] })),
        ("an embedding and tokens", &|it| it.sampling.pooling = Some(Pooling::Last)),
        ("an empty stop string", &|it| it.stops[3].clear()),
    ];
    for (what, change) in wrong {
        assert_eq!(submit(change), (true, false, 1), "{what}");
    }
}

/// Makes a request of two choices, with the first one's accepted tokens.
fn with_accepted(submit: &mut SubmitRequest, first: AcceptedChoice) {
    submit.accepted = vec![first, AcceptedChoice::GoesOn(vec![4])];
}

#[test]
fn what_was_never_accepted_is_refused() {
    let (receiver, _taken) = receiver();
    let goes_on = |tokens: Vec<u32>| AcceptedChoice::GoesOn(tokens);
    let kept = |change: Change<'_>| {
        let mut submit = request();
        change(&mut submit);
        receiver
            .frontends
            .request(submit.id, submit, AdapterUse::default())
            .map(|request| request.resumed.is_some())
    };
    assert_eq!(kept(&|_| ()), Ok(false));
    assert_eq!(kept(&|it| with_accepted(it, goes_on(vec![3; 5]))), Ok(true));
    assert_eq!(kept(&|it| with_accepted(it, AcceptedChoice::Over { tokens: 5 })), Ok(true));
    let wrong: [(&str, Change<'_>); 7] = [
        ("1 choices of 2", &|it| it.accepted = vec![goes_on(vec![3])]),
        ("of which 0 go on", &|it| it.accepted = vec![AcceptedChoice::Over { tokens: 1 }; 2]),
        ("6 accepted tokens", &|it| with_accepted(it, goes_on(vec![3; 6]))),
        ("6 accepted tokens", &|it| with_accepted(it, AcceptedChoice::Over { tokens: 6 })),
        ("5 accepted tokens of a choice, at most 4", &|it| {
            it.prompt = vec![1; 96];
            with_accepted(it, goes_on(vec![3; 5]));
        }),
        ("is not below the vocabulary", &|it| with_accepted(it, goes_on(vec![u32::MAX]))),
        ("an embedding", &|it| {
            it.sampling.pooling = Some(Pooling::Last);
            with_accepted(it, goes_on(Vec::new()));
        }),
    ];
    for (what, change) in wrong {
        let error = kept(change).unwrap_err();
        assert!(error.contains(what), "{error} without {what}");
    }
}

#[actix_rt::test]
async fn what_was_accepted_is_told_to_stop_checks_and_guides() {
    let (receiver, mut taken) = receiver();
    let letter = |it: &str| receiver.frontends.text.tokenizer.token_to_id(it).unwrap();
    let (a, b, c) = (letter("a"), letter("b"), letter("c"));
    let within = Duration::from_secs(60);
    let ask = async |change: Change<'_>| {
        let mut submit = SubmitRequest { n: 3, end_tokens: vec![c], ..request() };
        submit.stops.clear();
        let goes_on = AcceptedChoice::GoesOn;
        submit.accepted =
            vec![AcceptedChoice::Over { tokens: 2 }, goes_on(vec![a]), goes_on(vec![a, b])];
        change(&mut submit);
        let request = receiver.frontends.request(submit.id, submit, AdapterUse::default()).unwrap();
        let made = receiver.frontends.prepare(Box::new(request), &Turns::default(), || true).await;
        let request = made.unwrap();
        let choices: Vec<u32> = request.sampling.iter().map(|it| it.choice).collect();
        assert_eq!((choices, request.n()), (vec![1, 2], 3));
        let resumed = request.resumed.clone().unwrap();
        assert_eq!(resumed.over, [(0, 2)]);
        let ends: Vec<_> = resumed.choices.iter().map(|choice| choice.end).collect();
        (request, ends)
    };
    let (mut made, ends) = ask(&|it| {
        it.id = RequestId(1);
        it.guide = Some(GuideSpec::Regex("[a-z][b-d]d?".to_owned()));
    })
    .await;
    assert_eq!(ends, [None, None]);
    for (guide, next) in made.guides.iter_mut().zip([b, letter("d")]) {
        let ready = std::future::poll_fn(|context| guide.poll(context));
        tokio::time::timeout(within, ready).await.unwrap().unwrap();
        let allowed = guide.allowed().unwrap();
        assert!(allowed.allows(next) && !allowed.allows(a), "it knows what is there");
    }
    let (made, ends) = ask(&|it| {
        it.id = RequestId(2);
        it.guide = Some(GuideSpec::Regex("[a-z][b-d]".to_owned()));
    })
    .await;
    assert_eq!(ends, [None, Some(FinishReason::Complete)]);
    assert_eq!(made.guides.len(), 2);
    // Of two tokens of reasoning one choice has taken both.
    let thinking = ThinkingBudget { tokens: 2, open: None, closes: vec![7], is_open: true };
    let (mut made, ends) = ask(&|it| {
        (it.id, it.thinking) = (RequestId(5), Some(thinking.clone()));
    })
    .await;
    assert_eq!(ends, [None, None]);
    let allowed = made.guides.iter_mut().map(|guide| guide.allowed().cloned().unwrap());
    let allowed: Vec<bool> = allowed.map(|mask| mask.allows(a)).collect();
    assert_eq!(allowed, [true, false]);
    // Both have taken one token, and one of them another.
    let words = BadWords { sequences: vec![vec![a, b], vec![7]] };
    let (made, ends) = ask(&|it| (it.id, it.bad_words) = (RequestId(6), Some(words.clone()))).await;
    assert_eq!(ends, [None, None]);
    let allowed = made.guides.iter().map(|guide| guide.allowed().cloned().unwrap());
    let allowed: Vec<[bool; 3]> = allowed.map(|mask| [a, b, 7].map(|it| mask.allows(it))).collect();
    assert_eq!(allowed, [[true, false, false], [true, true, false]]);
    // The stop string has begun before.
    let (mut made, ends) = ask(&|it| (it.id, it.stops) = (RequestId(3), vec!["bab".into()])).await;
    assert_eq!(ends, [None, None]);
    let stops: Vec<bool> = made.stop_checks.iter_mut().map(|it| it.push(a) | it.push(b)).collect();
    assert_eq!(stops, [false, true], "behind a, and behind ab");
    let (_, ends) = ask(&|it| (it.id, it.stops) = (RequestId(4), vec!["ab".into()])).await;
    assert_eq!(ends, [None, Some(FinishReason::StopString)]);
    let mut submit = SubmitRequest { stops: Vec::new(), ..request() };
    with_accepted(&mut submit, AcceptedChoice::GoesOn(vec![a]));
    assert!(receiver.message(FromFrontend::Submit(Box::new(submit))));
    let command = tokio::time::timeout(within, taken.recv()).await.unwrap().unwrap();
    assert!(matches!(command, EngineCommand::Submit { .. }), "{command:?}");
}

/// After a change of coordinators, what has no text to replay and no grammar is computed at once,
/// however long others take.
#[actix_rt::test]
async fn a_plain_stream_goes_on_while_others_are_prepared() {
    let (receiver, mut taken) = receiver();
    let a = receiver.frontends.text.tokenizer.token_to_id("a").unwrap();
    let turns = receiver.pending.turns.clone();
    let count = |turns: &tokio::sync::Semaphore| turns.available_permits() as u32;
    let all = (count(&turns.compiling), count(&turns.replaying));
    let compiling = turns.compiling.acquire_many(all.0).await.unwrap();
    let replaying = turns.replaying.acquire_many(all.1).await.unwrap();
    let ask = |id: u64, change: Change<'_>| {
        let mut submit = SubmitRequest { id: RequestId(id), stops: Vec::new(), ..request() };
        submit.end_tokens.truncate(2);
        submit.accepted = vec![AcceptedChoice::GoesOn(vec![a]); 2];
        change(&mut submit);
        assert!(receiver.message(FromFrontend::Submit(Box::new(submit))));
    };
    let regex = || Some(GuideSpec::Regex("[a-z]*".to_owned()));
    ask(1, &|it| it.guide = regex());
    ask(2, &|it| it.stops = vec!["never".into()]);
    ask(3, &|_| ());
    let within = Duration::from_secs(60);
    let mut next = async || {
        let command = tokio::time::timeout(within, taken.recv()).await.unwrap().unwrap();
        let EngineCommand::Submit { request, events } = command else { panic!("{command:?}") };
        (request.id.0 & 0xff, events)
    };
    let (id, _plain) = next().await;
    assert_eq!(id, 3, "it waits for neither");
    drop(replaying);
    let (id, _stops) = next().await;
    assert_eq!(id, 2, "it needs no grammar");
    // One whose client leaves while it waits for its turn has nothing compiled.
    assert!(receiver.message(FromFrontend::Cancel(RequestId(1))));
    drop(compiling);
    while count(&turns.compiling) < all.0 || !receiver.pending.is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(receiver.frontends.text.loaded_guides().is_none());
    // One that is wanted has.
    ask(4, &|it| it.guide = regex());
    assert_eq!(next().await.0, 4);
    assert!(receiver.frontends.text.loaded_guides().is_some());
}

#[test]
fn priorities_of_front_ends_count_where_they_are_followed() {
    for (followed, expected) in [(true, -3), (false, 0)] {
        let (receiver, mut taken) = receiver_of(followed);
        let submit = SubmitRequest { priority: -3, ..request() };
        assert!(receiver.message(FromFrontend::Submit(Box::new(submit))));
        let command = taken.try_recv().unwrap();
        let EngineCommand::Submit { request, .. } = command else { panic!("{command:?}") };
        assert_eq!(request.priority, expected);
    }
}

/// The coordinator finds the end of a text where the front end does, continuing its prompt.
#[actix_rt::test]
async fn what_goes_on_from_its_prompt_does_so_here_too() {
    let model = sentencepiece_bpe();
    let token = |piece: &str| model.tokenizer.token_to_id(piece).unwrap();
    let (before, spaced) = (token("b"), token("\u{2581}a"));
    let (receiver, mut taken) = receiver_for(sentencepiece_bpe(), false, mpsc::channel(64));
    let ask = |receiver: &Receiver, id: u64, goes_on: bool, change: Change<'_>| {
        let mut submit = SubmitRequest { id: RequestId(id), goes_on, ..request() };
        (submit.prompt, submit.stops) = (vec![before], vec![" a".into()]);
        submit.end_tokens.clear();
        change(&mut submit);
        assert!(receiver.message(FromFrontend::Submit(Box::new(submit))));
    };
    // Dropping its events would fail a request, and nothing here reads what the front end is told.
    let mut kept = Vec::new();
    for (id, goes_on) in [(1, true), (2, false)] {
        ask(&receiver, id, goes_on, &|_| ());
        let command = taken.recv().await.unwrap();
        let EngineCommand::Submit { mut request, events } = command else { panic!("{command:?}") };
        kept.push(events);
        assert_eq!(request.stop_checks[0].push(spaced), goes_on, "whether a space was said");
    }
    let guide = |submit: &mut SubmitRequest| {
        submit.guide = Some(GuideSpec::Regex(" a".to_owned()));
    };
    ask(&receiver, 4, true, &guide);
    let within = Duration::from_secs(60);
    let command = tokio::time::timeout(within, taken.recv()).await.unwrap().unwrap();
    let EngineCommand::Submit { request, events } = command else { panic!("{command:?}") };
    kept.push(events);
    assert_eq!(request.id, RequestId(3 << LINK_SHIFT | 4));
    assert!(request.guides[0].allowed().unwrap().allows(spaced));
    // No text can begin with this.
    ask(&receiver, 3, false, &guide);
    while !receiver.pending.is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(taken.try_recv().is_err());
}

#[test]
fn a_front_end_cancels_its_own_requests_alone() {
    let (receiver, mut taken) = receiver();
    assert!(receiver.message(FromFrontend::Cancel(RequestId(7))));
    let command = taken.try_recv().unwrap();
    let own = RequestId(3 << LINK_SHIFT | 7);
    assert!(matches!(command, EngineCommand::Cancel { id } if id == own), "{command:?}");
    // Request 7 of link 4, as seen from link 3.
    assert!(!receiver.message(FromFrontend::Cancel(RequestId(1 << LINK_SHIFT | 7))));
    assert!(taken.try_recv().is_err());
}

#[actix_rt::test]
async fn a_request_gets_its_guides_first_unless_it_is_cancelled_meanwhile() {
    let (receiver, mut taken) = receiver();
    let ask = |id: u64, regex: &str| {
        let guide = Some(GuideSpec::Regex(regex.to_owned()));
        let submit = SubmitRequest { id: RequestId(id), guide, ..request() };
        assert!(receiver.message(FromFrontend::Submit(Box::new(submit))));
    };
    ask(7, "[a-z]{3}");
    assert!(receiver.message(FromFrontend::Cancel(RequestId(7))));
    // It does not compile to a grammar: a front end would have told its client so.
    ask(8, "(");
    ask(9, "[a-z]{3}");
    let within = Duration::from_secs(60);
    let command = tokio::time::timeout(within, taken.recv()).await.unwrap().unwrap();
    let EngineCommand::Submit { request, .. } = command else { panic!("{command:?}") };
    assert_eq!(request.id, RequestId(3 << LINK_SHIFT | 9));
    assert_eq!((request.guides.len(), request.sampling.len()), (2, 2));
    while !receiver.pending.is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(taken.try_recv().is_err(), "neither of the others, and no cancellation of nothing");
}

#[test]
fn a_request_that_is_let_go_of_without_an_end_has_one_nonetheless() {
    let (queue, mut events) = mpsc::channel(16);
    let remote = |choices: usize| {
        let link = LinkRequests::new(queue.clone(), LinkState::new());
        link.begin(RequestId(7), choices, None).unwrap()
    };
    let finished =
        |choice| EngineEvent::Finished { choice, reason: FinishReason::Length, cached: 0 };
    // One of two choices ends; the last clone reports the loss, once.
    let lost = remote(2);
    lost.send(finished(0)).unwrap();
    let other = lost.clone();
    drop(lost);
    assert!(matches!(events.try_recv().unwrap(), (RequestId(7), EngineEvent::Finished { .. })));
    assert!(events.try_recv().is_err());
    drop(other);
    assert!(matches!(events.try_recv().unwrap(), (RequestId(7), EngineEvent::Failed(_))));
    // A request that has ended, well or badly, ends only once.
    let whole = remote(1);
    whole.send(finished(0)).unwrap();
    let failed = remote(3);
    failed.send(EngineEvent::Failed(EngineError::Corrupted)).unwrap();
    drop((whole, failed));
    assert_eq!((events.try_recv().is_ok(), events.try_recv().is_ok()), (true, true));
    assert!(events.try_recv().is_err());
}

#[test]
fn a_cancellation_reaches_a_request_though_the_queue_is_full() {
    let (receiver, mut taken) = receiver_into(false, mpsc::channel(1));
    let submit = |id| {
        let submit = SubmitRequest { id: RequestId(id), ..request() };
        receiver.message(FromFrontend::Submit(Box::new(submit)))
    };
    assert!(submit(7));
    let command = taken.try_recv().unwrap();
    let EngineCommand::Submit { events, .. } = command else { panic!("{command:?}") };
    assert!(submit(8));
    assert!(!events.is_closed());
    assert!(receiver.message(FromFrontend::Cancel(RequestId(7))));
    assert!(events.is_closed());
    assert_eq!(
        events.send(EngineEvent::Failed(EngineError::Corrupted)),
        Err(crate::engine::ReceiverGone)
    );
    let command = taken.try_recv().unwrap();
    let EngineCommand::Submit { events, .. } = command else { panic!("{command:?}") };
    assert!(!events.is_closed(), "the other one runs");
    assert!(taken.try_recv().is_err(), "there was no room for the cancellation");
}

/// The next leader lets in what the last one had let in, though nothing came of it yet.
#[actix_rt::test]
async fn what_is_sent_again_waits_for_room() {
    let (receiver, mut taken) = receiver_into(false, mpsc::channel(1));
    let submit = |id: u64, again: bool, pooling| {
        let mut submit = SubmitRequest { id: RequestId(id), again, ..request() };
        submit.stops.clear();
        if pooling {
            (submit.n, submit.max_tokens) = (1, 0);
            submit.sampling.pooling = Some(Pooling::Last);
        }
        assert!(receiver.message(FromFrontend::Submit(Box::new(submit))));
    };
    submit(7, false, false);
    // The queue is full.
    submit(8, true, false);
    submit(9, true, true);
    let within = Duration::from_secs(60);
    // Dropping its events would fail a request, and nothing here reads what the front end is told.
    let (mut found, mut kept) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let command = tokio::time::timeout(within, taken.recv()).await.unwrap().unwrap();
        let EngineCommand::Submit { request, events } = command else { panic!("{command:?}") };
        let resumed = request.resumed.as_ref();
        found.push((request.id.0 & 0xff, resumed.map(|it| (it.choices.len(), it.has_begun()))));
        kept.push(events);
    }
    found.sort_unstable();
    assert_eq!(found, [(7, None), (8, Some((2, false))), (9, Some((1, false)))]);
    // A new one is told that the queue is full.
    submit(10, false, false);
    submit(11, false, false);
    let command = taken.try_recv().unwrap();
    assert!(matches!(command, EngineCommand::Submit { .. }), "{command:?}");
    assert!(taken.try_recv().is_err());
}

#[test]
fn a_request_number_that_runs_ends_the_link() {
    let (receiver, mut taken) = receiver();
    let submit = || receiver.message(FromFrontend::Submit(Box::new(request())));
    assert!(submit());
    assert!(!submit(), "it is in the queue");
    let first = taken.try_recv().unwrap();
    assert!(taken.try_recv().is_err() && !submit(), "the engine has it");
    drop(first);
    assert!(submit(), "it is over");
}

#[actix_rt::test]
async fn a_cancelled_request_is_inside_no_longer_though_its_grammar_is_being_made() {
    let (receiver, mut taken) = receiver();
    let guide = Some(GuideSpec::Regex("[a-z]{3}".to_owned()));
    let gate = receiver.frontends.gate.clone();
    for id in [7, 8] {
        let submit = SubmitRequest { id: RequestId(id), guide: guide.clone(), ..request() };
        assert!(receiver.message(FromFrontend::Submit(Box::new(submit))));
    }
    assert_eq!(gate.inside(), 2);
    assert!(receiver.message(FromFrontend::Cancel(RequestId(7))));
    assert_eq!(gate.inside(), 1);
    let reason = CloseReason::Local;
    assert!(receiver.take(LinkEvent::Closed { reason }));
    assert_eq!(gate.inside(), 0, "the link is over");
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(taken.try_recv().is_err());
}

#[tokio::test]
async fn a_front_end_that_reads_nothing_loses_its_link_when_its_queue_is_full() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    // The peer also sends nothing, which this side tolerates for a while.
    let _peer = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let connection = Connection::new(listener.accept().await.unwrap().0).unwrap();
    let patient = Duration::from_secs(3600);
    let liveness =
        LivenessConfig { ping_interval: patient, suspect_after: patient, dead_after: patient };
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
    let link = connection.start(liveness, clock, |_| true);
    let (queue, incoming) = mpsc::channel(8);
    let open = LinkState::new();
    let requests = LinkRequests::new(queue, open.clone());
    let events = requests.begin(RequestId(7), 1, None).unwrap();
    let sending = tokio::spawn(events::send(incoming, PeerAddr::new(link), open));
    // More than queues and buffers hold together.
    let large = EngineEvent::Embedding(vec![0.5; 1 << 18]);
    let mut sent = 0;
    while events.send(large.clone()).is_ok() {
        sent += 1;
        assert!(sent < 4096, "4 GiB are in a queue of 8");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(events.is_closed());
    tokio::time::timeout(Duration::from_secs(30), sending).await.expect("it ends").unwrap();
}

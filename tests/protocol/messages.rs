//! Every message through codec and frame, and hostile bytes.
use proptest::prelude::*;
use shared::ids::{
    BlockId, Epoch, HostBlockId, Incarnation, ReplicaId, RequestId, SeqId, StateId, StepId,
    WorkerId,
};
use shared::log::LogLines;
use shared::model_config::{ConfigOverrides, OVERRIDES_BYTES_MAX};
use shared::model_identity::ModelIdentity;
use shared::protocol::actors::creation::{
    ARGUMENT_MAX, Begin, CLASSES_MAX, Creation, EndHow, Hosting, Instance, Needs, Placed,
    PlacementError, PlacementReply, PlacementRequest, Restarted, Where,
};
use shared::protocol::actors::{
    ACTOR_NAME_MAX, ActorFrame, ActorLife, ActorReport, AskError, Wants,
};
use shared::protocol::control::{RESOURCE_NAME_MAX, RESOURCES_MAX};
use shared::protocol::lora::{ADAPTER_NAME_MAX, ADAPTER_PATH_MAX, ADAPTERS_MAX};
use shared::protocol::{
    AcceptedChoice, Adapter, AdapterChange, AdapterCommand, AdapterDone, AdapterError, BUILD_MAX,
    BadWords, ChangeAdapter, CollectiveSpec, DeviceKind, Drafts, Dtype, EngineConfig, EngineError,
    EngineEvent, ExitReason, FailedGroups, FinishReason, Form, FormFailed, Formed, FromFrontend,
    FromWorker, FrontendHello, FrontendId, FrontendWelcome, GROUP_ID_MAX, GroupId, GuideSpec,
    HeldShard, Hello, KeptState, KvCacheDtype, LoadProgress, Lora, MODEL_NAME_MAX, MODEL_NAMES_MAX,
    NewSequence, NodeResources, Quantization, Rejoin, RequestNote, SequenceOutput, SequenceStep,
    Serving, Start, Started, StepFailed, StepMasks, StepPlan, StepResult, StepTimings,
    SubmitRequest, Swap, SwapPair, ThinkingBudget, ToFetch, ToFrontend, ToWorker, TokenLogprobs,
    TokenMask, Trouble, Whitespace, WorkerStats,
};
use shared::sampling::{Pooling, SamplingParams};
use shared::wire::codec::{self, CodecError};
use shared::wire::frame::{CONTROL_MAX, HANDSHAKE_MAX, WELCOME_MAX};

fn round_trip<T>(value: &T)
where
    T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug,
{
    let bytes = codec::encode(value).unwrap();
    assert_eq!(&codec::decode_message::<T>(&bytes).unwrap(), value);
    let longer = [bytes.as_slice(), &[0]].concat();
    let trailing = codec::decode_message::<T>(&longer);
    assert!(matches!(trailing, Err(CodecError::Trailing { extra: 1 })), "{trailing:?}");
    for len in 0..bytes.len() {
        assert!(codec::decode_message::<T>(&bytes[..len]).is_err(), "{len} of {}", bytes.len());
    }
    // Wherever a length may be: one of 64 KiB, and one of 128 MiB.
    for at in 0..bytes.len().min(256) {
        for lie in [&[0xfb, 0xff, 0xff][..], &[0xfc, 0, 0, 0, 8]] {
            let hostile = [&bytes[..at], lie, &bytes[at + 1..]].concat();
            let missing = codec::decode_message::<T>(&hostile).err().map_or(0, missing);
            assert!(missing <= 16 * hostile.len(), "{missing} bytes are reserved, by {hostile:?}");
        }
    }
}

/// How many bytes a decoder found missing, for which it had reserved memory.
fn missing(error: CodecError) -> usize {
    let CodecError::Decode(why) = error else { return 0 };
    let count = why.split_once("additional: ").map_or("", |(_, count)| count);
    count.split(|c: char| !c.is_ascii_digit()).next().unwrap_or("").parse().unwrap_or(0)
}

fn swap_pair(device: u32, host: u32) -> SwapPair {
    SwapPair { device: BlockId(device), host: HostBlockId(host) }
}

fn plan() -> StepPlan {
    StepPlan {
        epoch: Epoch(3),
        step: StepId(300),
        finished: vec![SeqId(1), SeqId(u64::MAX)],
        swap_out: vec![Swap { seq: SeqId(4), blocks: vec![swap_pair(3, 70_000)] }],
        swap_in: vec![Swap { seq: SeqId(5), blocks: vec![swap_pair(0, 1), swap_pair(2, 0)] }],
        admitted: vec![NewSequence {
            seq: SeqId(9),
            tokens: vec![1, 2, 70_000],
            num_prompt: 2,
            adapter: 1,
            sampling: SamplingParams {
                logit_bias: vec![(5, -1.5)],
                pooling: Some(Pooling::Mean),
                ..SamplingParams::greedy()
            },
        }],
        begin_with: vec![KeptState { seq: SeqId(9), place: StateId(300) }],
        sequences: vec![SequenceStep {
            seq: SeqId(9),
            start: 0,
            count: 3,
            new_blocks: vec![BlockId(0), BlockId(77)],
            sample: true,
            masked: true,
            drafts: Drafts::none(),
        }],
        keep: vec![KeptState { seq: SeqId(9), place: StateId(1) }],
    }
}

fn result() -> StepResult {
    let logprobs = TokenLogprobs { token: 4, logprob: -0.25, rank: 1, top: vec![(4, -0.25)] };
    StepResult {
        epoch: Epoch(3),
        step: StepId(300),
        outputs: vec![SequenceOutput {
            seq: SeqId(9),
            position: 3,
            token: Some(4),
            logprobs: Some(logprobs.clone()),
            prompt_logprobs: vec![logprobs],
            prompt_start: 1,
            corrupted: false,
            embedding: vec![0.5, -2.0],
        }],
        drafted: vec![2, 300],
        digest: 0x0102_0304,
        timings: StepTimings {
            step_us: 1,
            forward_us: 2,
            collective_us: 3,
            sample_us: 4,
            masks_us: Some(7),
            draft_us: Some(8),
            idle_us: 5,
        },
        stats: WorkerStats { sequence: 8, snapshot: vec![1, 2, 3] },
    }
}

fn adapter() -> Adapter {
    let (name, path) = ("sql".to_owned(), "/adapters/\u{e9}".to_owned());
    Adapter { number: 70, name, path, identity: Some(ModelIdentity(5)) }
}

fn form(collective: CollectiveSpec) -> ToWorker {
    ToWorker::Form(Form {
        epoch: Epoch(1),
        replica: ReplicaId(2),
        rank: 0,
        world_size: 2,
        reduction_ranks: 4,
        collective,
        collective_timeout_ms: 30_000,
        step_timeout_ms: 60_000,
        model: "/models/\u{e9}".to_owned(),
        config_overrides: ConfigOverrides::parse(r#"{"rope_theta": 1e6}"#).unwrap(),
        dtype: Dtype::Bfloat16,
        quantization: Quantization::Int8,
        lora: Lora { adapters: vec![adapter()], max_rank: 16, places: 4 },
        draft_model: Some("/models/\u{e8}".to_owned()),
        engine: EngineConfig {
            block_size: 16,
            max_model_len: 1024,
            max_num_seqs: 64,
            max_num_batched_tokens: 512,
            kv_cache_bytes: 1 << 40,
            swap_bytes: 0,
            kv_cache_dtype: KvCacheDtype::Fp8,
            prefix_states: 5,
        },
    })
}

fn failed_groups(count: u32) -> FailedGroups {
    let ms = u64::from(count) << 32;
    FailedGroups { failures: count, last_ms: ms, rests: count, rests_ms: ms }
}

#[test]
fn every_message_survives_and_every_cut_is_noticed() {
    let ranks = vec!["10.0.0.1:1".parse().unwrap(), "[::1]:65535".parse().unwrap()];
    let to = [
        form(CollectiveSpec::None),
        form(CollectiveSpec::SharedMemory { name: "tutti-1".to_owned() }),
        form(CollectiveSpec::Tcp { ranks, token: u64::MAX }),
        ToWorker::Start(Start { epoch: Epoch(1), num_blocks: 9, host_blocks: 0 }),
        ToWorker::Step(plan()),
        ToWorker::Abort { epoch: Epoch(1) },
        ToWorker::Shutdown { reason: "r".to_owned(), again: true },
        ToWorker::GroupId(GroupId { epoch: Epoch(1), bytes: vec![7; GROUP_ID_MAX] }),
        ToWorker::Masks(StepMasks {
            epoch: Epoch(3),
            step: StepId(9),
            masks: vec![None, Some(TokenMask::Bits(vec![0x8000_0001, 0, u32::MAX]))],
        }),
        ToWorker::Adapter(ChangeAdapter {
            epoch: Epoch(3),
            change: AdapterChange::Load(adapter()),
        }),
        ToWorker::Adapter(ChangeAdapter { epoch: Epoch(3), change: AdapterChange::Drop(7) }),
        ToWorker::Fetch(ToFetch { models: vec!["m".to_owned()], adapters: vec!["a".to_owned()] }),
    ];
    to.iter().for_each(round_trip);
    let epoch = Epoch(1);
    let from = [
        FromWorker::Progress(LoadProgress { epoch, adapter: 70, bytes_done: 1, bytes_total: 2 }),
        FromWorker::Formed(Formed {
            epoch,
            kv_blocks: 1,
            host_blocks: 0,
            weight_bytes: 2,
            load_seconds: 0.5,
            identity: ModelIdentity(1),
            adapters: 0,
        }),
        FromWorker::FormFailed(FormFailed { epoch, message: "m".to_owned(), permanent: true }),
        FromWorker::Started(Started { epoch }),
        FromWorker::Step(result()),
        FromWorker::StepFailed(StepFailed { epoch, step: StepId(1), message: "m".to_owned() }),
        FromWorker::Stats(WorkerStats::default()),
        FromWorker::Logs(LogLines { first: 1 << 40, lines: vec!["l\u{e9}".to_owned()] }),
        FromWorker::Goodbye { reason: "r".to_owned(), exit: ExitReason::DeviceLost },
        FromWorker::GroupId(GroupId { epoch, bytes: vec![7; 128] }),
        FromWorker::Adapter(AdapterDone { epoch, number: 70, outcome: Ok(ModelIdentity(1)) }),
        FromWorker::Adapter(AdapterDone { epoch, number: 70, outcome: Err("m".to_owned()) }),
    ];
    from.iter().for_each(round_trip);
    let shard = HeldShard {
        model: "/models/m".to_owned(),
        identity: ModelIdentity(0x0102_0304_0506_0708),
        rank: 3,
        world_size: 4,
    };
    let [formations, steps, device] = [1, 300, 70_000].map(failed_groups);
    let trouble = Trouble { formations, steps, device };
    round_trip(&ToWorker::Remember(trouble));
    let rejoin = Rejoin { slot: Some(WorkerId(7)), shard: Some(shard), trouble };
    for rejoin in [Rejoin::default(), rejoin] {
        round_trip(&Hello {
            node: "n".to_owned(),
            incarnation: Incarnation(1),
            host: "h".to_owned(),
            pid: 1,
            device: DeviceKind::Cpu,
            threads: 2,
            offer: NodeResources::default(),
            collective_addr: "10.0.0.1:1".parse().unwrap(),
            version: "0".to_owned(),
            build: "0+1".to_owned(),
            gpu: String::new(),
            fetched: u64::MAX,
            rejoin,
        });
    }
}

#[test]
fn a_hello_with_all_it_may_offer_fits_into_its_frame() {
    let long = |n: usize| format!("{n:->RESOURCE_NAME_MAX$}");
    let offer = NodeResources {
        cpus: 8,
        gpus: 1,
        memory_bytes: u64::MAX,
        custom: (0..RESOURCES_MAX).map(|n| (long(n), u64::MAX)).collect(),
        labels: (0..RESOURCES_MAX).map(|n| (long(n), long(n))).collect(),
    };
    assert_eq!(offer.check(), Ok(()));
    let hello = Hello {
        node: "n".repeat(128),
        incarnation: Incarnation(u64::MAX),
        host: "h".repeat(128),
        pid: u32::MAX,
        device: DeviceKind::Cuda,
        threads: 1024,
        offer: offer.clone(),
        collective_addr: "[::1]:65535".parse().unwrap(),
        version: "0.1.0".to_owned(),
        build: "b".repeat(BUILD_MAX),
        gpu: "g".repeat(BUILD_MAX),
        fetched: u64::MAX,
        rejoin: Rejoin {
            slot: Some(WorkerId(u32::MAX)),
            shard: Some(HeldShard {
                model: "m".repeat(1792),
                identity: ModelIdentity(u64::MAX),
                rank: 63,
                world_size: 64,
            }),
            trouble: Trouble {
                formations: failed_groups(u32::MAX),
                steps: failed_groups(u32::MAX),
                device: failed_groups(u32::MAX),
            },
        },
    };
    round_trip(&hello);
    assert!(codec::encode(&hello).unwrap().len() <= HANDSHAKE_MAX as usize);
    let with = |key: &str| NodeResources { custom: [(key.to_owned(), 1)].into(), ..offer.clone() };
    assert!(
        with("").check().is_err() && with("a b").check().is_err() && with("a/b").check().is_ok()
    );
    assert!(with(&"x".repeat(RESOURCE_NAME_MAX + 1)).check().is_err());
    let many = (0..=RESOURCES_MAX).map(|n| (n.to_string(), 1)).collect();
    let many = NodeResources { custom: many, ..NodeResources::default() };
    assert!(many.check().unwrap_err().contains("resources"));
}

#[test]
fn what_names_all_adapters_fits_into_its_frame() {
    let adapter = |number: usize| Adapter {
        number: u32::MAX,
        identity: Some(ModelIdentity(u64::MAX)),
        name: format!("{number:->ADAPTER_NAME_MAX$}"),
        path: format!("{number:/>ADAPTER_PATH_MAX$}"),
    };
    let adapters: Vec<Adapter> = (0..ADAPTERS_MAX).map(adapter).collect();
    let lora = Lora { adapters: adapters.clone(), max_rank: 512, places: 64 };
    let name = "m".repeat(MODEL_NAME_MAX);
    assert_eq!(lora.check([name.as_str()].into_iter()), Ok(()));
    let welcome = FrontendWelcome {
        frontend: FrontendId(u32::MAX),
        stats_interval_ms: u64::MAX,
        serving: Serving {
            model: "/".repeat(4096),
            served_model_name: name.clone(),
            model_aliases: vec![name; MODEL_NAMES_MAX - 1],
            adapters,
            max_model_len: u32::MAX,
            text_fingerprint: u64::MAX,
            priorities: true,
        },
    };
    round_trip(&welcome);
    assert!(codec::encode(&welcome).unwrap().len() <= WELCOME_MAX as usize);
    assert!(codec::encode(&lora).unwrap().len() <= CONTROL_MAX as usize / 2);
    let text = format!("{{\"a\":\"{}\"}}", "x".repeat(OVERRIDES_BYTES_MAX - 8));
    let config_overrides = ConfigOverrides::parse(&text).unwrap();
    assert!(codec::encode(&config_overrides).unwrap().len() <= CONTROL_MAX as usize / 8);
}

#[test]
fn what_is_laid_over_a_configuration_is_checked_when_it_arrives() {
    for bad in ["{", "[1]"] {
        let bytes = codec::encode(&bad.to_owned()).unwrap();
        let decoded = codec::decode_message::<ConfigOverrides>(&bytes);
        assert!(decoded.is_err(), "{bad}: {decoded:?}");
    }
}

fn actor_frames() -> Vec<ActorFrame> {
    let report = ActorReport {
        name: "a".to_owned(),
        kind: "k".to_owned(),
        generation: u64::MAX,
        life: ActorLife::Restarting,
        restarts: 3,
        max_restarts: Some(10),
        reason: Some("r".to_owned()),
    };
    let (to, body) = ("a".to_owned(), vec![1, 2, 3]);
    let answer = |outcome| ActorFrame::Answer { id: 1, outcome };
    vec![
        ActorFrame::Report(report),
        ActorFrame::Refused { name: "a".to_owned(), generation: 1, reason: "r".to_owned() },
        ActorFrame::Deliver { id: 1, to, wants: Wants::Reply, within_ms: u32::MAX, body },
        answer(Ok(vec![9])),
        answer(Err(AskError::NoSuchActor("a".to_owned()))),
        answer(Err(AskError::MailboxFull("a".to_owned()))),
        answer(Err(AskError::TooManyAsks(4096))),
        answer(Err(AskError::LinkLost("n".to_owned()))),
        answer(Err(AskError::Deadline(1))),
        answer(Err(AskError::Failed("f".to_owned()))),
        answer(Err(AskError::Malformed("m".to_owned()))),
        answer(Err(AskError::TooLarge(1 << 40))),
        answer(Err(AskError::Unavailable("a".to_owned()))),
        ActorFrame::Watch { id: 1, name: "a".to_owned(), generation: Some(2) },
        ActorFrame::Watching { id: 1, generation: 2 },
        ActorFrame::Unwatch { id: 1 },
        ActorFrame::Died { id: 1, reason: "r".to_owned() },
        ActorFrame::NotWatched { id: 1, reason: "r".to_owned() },
        ActorFrame::Hosting(Hosting { classes: vec!["c".to_owned()], offer: offer() }),
        ActorFrame::Begin(Box::new(begin())),
        placed(None),
        placed(Some((begin().creation, begin().restarted))),
        end(EndHow::Finish),
        end(EndHow::Kill),
    ]
}

fn offer() -> NodeResources {
    NodeResources {
        cpus: 8,
        gpus: 1,
        memory_bytes: 1 << 40,
        custom: [("seats".to_owned(), 3)].into(),
        labels: [("zone".to_owned(), "west".to_owned())].into(),
    }
}

fn begin() -> Begin {
    Begin {
        instance: Instance { generation: u64::MAX, incarnation: 2 },
        restarted: Restarted { total: 9, in_a_row: 1 },
        creation: Creation {
            name: "a".to_owned(),
            class: "c".to_owned(),
            argument: vec![1, 2, 3],
            needs: Needs::nothing().cpus(0.25).gpus(1.0).memory(1 << 33).custom("seats", 1),
            at: Where::rather("n").label("zone", "west"),
            max_restarts: Some(3),
            mailbox: 64,
            start_limit_ms: 60_000,
            message_limit_ms: 0,
        },
    }
}

fn placed(known: Option<(Creation, Restarted)>) -> ActorFrame {
    let (name, reason) = ("a".to_owned(), Some("r".to_owned()));
    let instance = begin().instance;
    ActorFrame::Placed(Box::new(Placed { name, instance, life: ActorLife::Dead, reason, known }))
}

fn end(how: EndHow) -> ActorFrame {
    let (name, reason) = ("a".to_owned(), "r".to_owned());
    ActorFrame::End { name, instance: begin().instance, how, reason }
}

#[test]
fn requests_about_created_actors_survive_and_every_cut_is_noticed() {
    let name = || "a".to_owned();
    let creation = begin().creation;
    let create = PlacementRequest::Create {
        creation,
        generation: u64::MAX,
        again: true,
        or_get: true,
        within_ms: u32::MAX,
    };
    let kill = PlacementRequest::Kill { name: name(), restart: true };
    [create, kill, PlacementRequest::Find { name: name() }].iter().for_each(round_trip);
    let errors = [
        PlacementError::NoHost(name()),
        PlacementError::NoMatch { asked: name(), hosts: name() },
        PlacementError::NoRoom { asked: name(), free: name() },
        PlacementError::NameTaken(name()),
        PlacementError::Invalid(name()),
        PlacementError::Full(name()),
        PlacementError::NotStarted(name()),
        PlacementError::Settling,
        PlacementError::NoSuchActor(name()),
        PlacementError::NotYours(name()),
    ];
    let replies = errors.into_iter().map(Err).chain([Ok(PlacementReply { node: name() })]);
    replies.for_each(|reply: Result<PlacementReply, PlacementError>| round_trip(&reply));
}

#[test]
fn the_largest_actor_that_may_be_created_fits_its_frame() {
    let text = |len: usize, number: usize| format!("{number:a>len$}");
    let labels = (0..RESOURCES_MAX)
        .map(|n| (text(RESOURCE_NAME_MAX, n), text(RESOURCE_NAME_MAX, 0)))
        .collect();
    let custom: std::collections::BTreeMap<String, u64> =
        (0..RESOURCES_MAX).map(|n| (text(RESOURCE_NAME_MAX, n), 1 << 48)).collect();
    let mut largest = begin();
    largest.creation = Creation {
        name: text(ACTOR_NAME_MAX, 0),
        class: text(ACTOR_NAME_MAX, 0),
        argument: vec![0xff; ARGUMENT_MAX],
        needs: Needs { custom: custom.clone(), ..largest.creation.needs },
        at: Where { node: Some(text(ACTOR_NAME_MAX, 0)), labels, ..Where::default() },
        ..largest.creation
    };
    assert_eq!(largest.creation.check(), Ok(()));
    let frame = ActorFrame::Begin(Box::new(largest.clone()));
    assert!(codec::encode(&frame).unwrap().len() <= CONTROL_MAX as usize / 8);
    let more = |creation: Creation| creation.check().unwrap_err();
    let Begin { creation, .. } = largest;
    let argument = vec![0; ARGUMENT_MAX + 1];
    assert!(more(Creation { argument, ..creation.clone() }).contains("the argument has 65537"));
    let needs = Needs { cpus: u64::MAX, ..Needs::nothing() };
    assert!(more(Creation { needs, ..creation.clone() }).contains("cpus"));
    let needs = creation.needs.clone().custom("one more", 1);
    assert!(more(Creation { needs, ..creation.clone() }).contains("9 resources"));
    assert!(more(Creation { mailbox: 0, ..creation.clone() }).contains("mailbox of 0"));
    assert!(more(Creation { class: String::new(), ..creation }).contains("class"));
    let hosting = |count: usize| Hosting {
        classes: (0..count).map(|n| text(ACTOR_NAME_MAX, n)).collect(),
        offer: NodeResources { custom: custom.clone(), ..offer() },
    };
    assert_eq!(hosting(CLASSES_MAX).check(), Ok(()));
    assert!(hosting(CLASSES_MAX + 1).check().unwrap_err().contains("65 classes"));
    let frame = ActorFrame::Hosting(hosting(CLASSES_MAX));
    assert!(codec::encode(&frame).unwrap().len() <= CONTROL_MAX as usize / 8);
}

#[test]
fn every_frame_of_actors_survives_and_every_cut_is_noticed() {
    actor_frames().iter().for_each(round_trip);
}

fn submit() -> SubmitRequest {
    SubmitRequest {
        id: RequestId(1 << 39),
        prompt: vec![1, 2, 70_000],
        sampling: SamplingParams { seed: u64::MAX, ..SamplingParams::greedy() },
        n: 2,
        stops: vec!["\u{e9}nd".to_owned()],
        keep_special: true,
        goes_on: true,
        guide: Some(GuideSpec::Json {
            schema: r#"{"type":"object"}"#.to_owned(),
            whitespace: Whitespace::Pattern(" ?".to_owned()),
        }),
        thinking: Some(ThinkingBudget {
            tokens: 70_000,
            open: Some(300),
            closes: vec![301, 7],
            is_open: true,
        }),
        bad_words: Some(BadWords { sequences: vec![vec![5], vec![70_000, 6]] }),
        max_tokens: 9,
        open_ended: true,
        priority: -3,
        cache_salt: u64::MAX,
        adapter: 0,
        adapter_name: "sql".to_owned(),
        end_tokens: vec![0],
        waited_us: 12,
        response_id: "cmpl-1".to_owned(),
        traced: true,
        accepted: vec![
            AcceptedChoice::GoesOn(vec![7, 70_000]),
            AcceptedChoice::Over { tokens: 300 },
        ],
        again: true,
    }
}

fn asking(guide: GuideSpec) -> SubmitRequest {
    SubmitRequest { guide: Some(guide), ..submit() }
}

#[test]
fn every_message_of_front_ends_survives_and_every_cut_is_noticed() {
    let id = RequestId(7);
    let from = [
        FromFrontend::Submit(Box::new(submit())),
        FromFrontend::Submit(Box::new(asking(GuideSpec::Regex("a+".to_owned())))),
        FromFrontend::Submit(Box::new(asking(GuideSpec::Choice(vec!["a".to_owned(); 2])))),
        FromFrontend::Submit(Box::new(asking(GuideSpec::Lark("start: \"a\"".to_owned())))),
        FromFrontend::Submit(Box::new(asking(GuideSpec::Tokens(vec![3, 70_000])))),
        FromFrontend::Cancel(id),
        FromFrontend::Stats(WorkerStats { sequence: 1, snapshot: vec![9] }),
        FromFrontend::ChangeAdapter(
            7,
            AdapterCommand::Load { name: "a".to_owned(), path: "/a".to_owned(), replace: true },
        ),
        FromFrontend::ChangeAdapter(8, AdapterCommand::Unload { name: "a".to_owned() }),
        FromFrontend::Goodbye { reason: "r".to_owned() },
    ];
    from.iter().for_each(round_trip);
    let logprobs = TokenLogprobs { token: 4, logprob: -0.25, rank: 1, top: vec![(4, -0.25)] };
    let events = [
        EngineEvent::PromptLogprobs(vec![logprobs.clone()]),
        EngineEvent::Embedding(vec![1.0, -0.5]),
        EngineEvent::Token { choice: 1, token: 70_000, logprobs: Some(logprobs) },
        EngineEvent::Token { choice: 0, token: 3, logprobs: None },
        EngineEvent::Finished { choice: 0, reason: FinishReason::EndToken(5), cached: 3 },
        EngineEvent::Finished { choice: 1, reason: FinishReason::StopString, cached: 0 },
        EngineEvent::Finished { choice: 2, reason: FinishReason::Complete, cached: 0 },
        EngineEvent::Failed(EngineError::Guide { message: "m".to_owned() }),
        EngineEvent::Failed(EngineError::QueueFull { queued: 1, max: 2, retry_after_s: 3 }),
        EngineEvent::Failed(EngineError::Unavailable { message: "m".to_owned() }),
        EngineEvent::Failed(EngineError::Overloaded { message: "m".to_owned(), retry_after_s: 9 }),
        EngineEvent::Failed(EngineError::Broke { message: "m".to_owned() }),
        EngineEvent::Note(RequestNote::Scheduled { replica: ReplicaId(2), ranks: 300 }),
        EngineEvent::Note(RequestNote::Preempted { replica: ReplicaId(0) }),
        EngineEvent::Note(RequestNote::Interrupted { replica: ReplicaId(1), failed: true }),
        EngineEvent::Note(RequestNote::CoordinatorLost),
        EngineEvent::Note(RequestNote::Drafted { tokens: 70_000, accepted: 3 }),
    ];
    round_trip(&ToFrontend::Events(events.into_iter().map(|event| (id, event)).collect()));
    round_trip(&ToFrontend::Readiness { ready: true, message: "serving".to_owned() });
    round_trip(&ToFrontend::Adapters(vec![adapter()]));
    round_trip(&ToFrontend::AdapterChanged(7, Ok(())));
    let name = "a".to_owned();
    for error in [
        AdapterError::Unknown(name.clone()),
        AdapterError::Taken(name.clone()),
        AdapterError::Wrong(name.clone()),
        AdapterError::NotNow(name),
    ] {
        round_trip(&ToFrontend::AdapterChanged(8, Err(error)));
    }
    round_trip(&FrontendHello {
        node: "n".to_owned(),
        incarnation: Incarnation(3),
        pid: 4,
        version: "0.1.0".to_owned(),
        slot: Some(FrontendId(7)),
    });
    round_trip(&FrontendWelcome {
        frontend: FrontendId(2),
        stats_interval_ms: 500,
        serving: Serving {
            model: "/models/m".to_owned(),
            served_model_name: "m".to_owned(),
            model_aliases: vec!["n".to_owned()],
            adapters: vec![adapter()],
            max_model_len: 4096,
            text_fingerprint: u64::MAX,
            priorities: true,
        },
    });
}

/// A change of the messages' wire form requires a new protocol version.
#[test]
fn the_form_of_messages_is_pinned() {
    let hex = |bytes: Vec<u8>| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let abort = codec::encode(&ToWorker::Abort { epoch: Epoch(300) }).unwrap();
    assert_eq!(hex(abort), "03fb2c01");
    let ToWorker::Form(form) = form(CollectiveSpec::None) else { panic!("a form") };
    let engine = hex(codec::encode(&form.engine).unwrap());
    assert_eq!(engine, "10fb000440fb0002".to_owned() + "fd0000000000010000" + "000105");
    let start = codec::encode(&ToWorker::Start(Start {
        epoch: Epoch(1),
        num_blocks: 70_000,
        host_blocks: 0,
    }))
    .unwrap();
    assert_eq!(hex(start), "0101fc7011010000");
    let swap = Swap { seq: SeqId(9), blocks: vec![swap_pair(7, 300)] };
    assert_eq!(hex(codec::encode(&swap).unwrap()), "090107fb2c01");
    let kept = KeptState { seq: SeqId(9), place: StateId(300) };
    assert_eq!(hex(codec::encode(&kept).unwrap()), "09fb2c01");
    let id = GroupId { epoch: Epoch(5), bytes: vec![0xab, 0xcd] };
    assert_eq!(hex(codec::encode(&ToWorker::GroupId(id.clone())).unwrap()), "050502abcd");
    assert_eq!(hex(codec::encode(&FromWorker::GroupId(id.clone())).unwrap()), "090502abcd");
    // Debug output does not reveal a secret.
    assert!(!format!("{id:?}").contains("171") && format!("{id:?}").contains("2 bytes"));
    let goes_on = AcceptedChoice::GoesOn(vec![7, 70_000]);
    assert_eq!(hex(codec::encode(&goes_on).unwrap()), "000207fc70110100");
    let over = AcceptedChoice::Over { tokens: 300 };
    assert_eq!(hex(codec::encode(&over).unwrap()), "01fb2c01");
    let entry = SequenceStep {
        seq: SeqId(9),
        start: 3,
        count: 1,
        new_blocks: vec![BlockId(7)],
        sample: true,
        masked: false,
        drafts: Drafts::none(),
    };
    assert_eq!(hex(codec::encode(&entry).unwrap()), "090301010701000000");
    let masked = SequenceStep { masked: true, ..entry.clone() };
    assert_eq!(hex(codec::encode(&masked).unwrap()), "090301010701010000");
    let masks = [
        TokenMask::Only(vec![5, 70_000]),
        TokenMask::Except(vec![300]),
        TokenMask::Bits(vec![u32::MAX, 1]),
    ];
    let masks = [None].into_iter().chain(masks.map(Some)).collect();
    let masks = StepMasks { epoch: Epoch(3), step: StepId(300), masks };
    assert_eq!(
        hex(codec::encode(&ToWorker::Masks(masks)).unwrap()),
        "0603fb2c010400".to_owned()
            + "01000205fc70110100"
            + "010101fb2c01"
            + "010208ffffffff01000000"
    );
    let embedding = EngineEvent::Embedding(vec![1.0, -0.5]);
    assert_eq!(hex(codec::encode(&embedding).unwrap()), "01020000803f000000bf");
    let note = RequestNote::Interrupted { replica: ReplicaId(300), failed: true };
    assert_eq!(hex(codec::encode(&EngineEvent::Note(note)).unwrap()), "0502fb2c0101");
    let sampling = codec::encode(&SamplingParams::greedy()).unwrap();
    let pooled = SamplingParams { pooling: Some(Pooling::Mean), ..SamplingParams::greedy() };
    let pooled = hex(codec::encode(&pooled).unwrap());
    assert_eq!(pooled, hex(sampling).strip_suffix("00").unwrap().to_owned() + "0102");
    let new = NewSequence {
        seq: SeqId(9),
        tokens: vec![5],
        num_prompt: 1,
        adapter: 2,
        sampling: SamplingParams::greedy(),
    };
    let sampling = hex(codec::encode(&SamplingParams::greedy()).unwrap());
    assert_eq!(hex(codec::encode(&new).unwrap()), "0901050102".to_owned() + &sampling);
    let (name, path) = ("a".to_owned(), "/b".to_owned());
    let adapter = Adapter { number: 70, name, path, identity: Some(ModelIdentity(5)) };
    let lora = Lora { adapters: vec![adapter.clone()], max_rank: 16, places: 3 };
    assert_eq!(hex(codec::encode(&lora).unwrap()), "01460161022f6201051003");
    let change = ChangeAdapter { epoch: Epoch(9), change: AdapterChange::Load(adapter) };
    assert_eq!(hex(codec::encode(&ToWorker::Adapter(change)).unwrap()), "070900460161022f620105");
    let change = ChangeAdapter { epoch: Epoch(9), change: AdapterChange::Drop(70) };
    assert_eq!(hex(codec::encode(&ToWorker::Adapter(change)).unwrap()), "07090146");
    let outcome = Err("x".to_owned());
    let done = FromWorker::Adapter(AdapterDone { epoch: Epoch(9), number: 70, outcome });
    assert_eq!(hex(codec::encode(&done).unwrap()), "0a0946010178");
    let drafts = SequenceStep { count: 3, drafts: Drafts::Known(vec![5, 70_000]), ..entry };
    assert_eq!(
        hex(codec::encode(&drafts).unwrap()),
        "09030301070100".to_owned() + "000205fc70110100"
    );
    let trouble = Trouble { device: failed_groups(1), ..Trouble::default() };
    let groups = "00000000".repeat(2) + "01" + "fd0000000001000000" + "01" + "fd0000000001000000";
    let remember = codec::encode(&ToWorker::Remember(trouble)).unwrap();
    assert_eq!(hex(remember), "09".to_owned() + &groups);
    let asks = SequenceStep { drafts: Drafts::UpTo(300), ..drafts };
    assert_eq!(hex(codec::encode(&asks).unwrap()), "09030301070100".to_owned() + "01fb2c01");
}

#[test]
fn hostile_lengths_are_errors() {
    // Lists that claim 2^32 elements, 2^63, and as many as a limit of 16 MiB just allows.
    for claim in [
        &[0xfd, 0, 0, 0, 0, 1, 0, 0, 0][..],
        &[0xfd, 0, 0, 0, 0, 0, 0, 0, 0x80],
        &[0xfc, 0xff, 0xff, 0x3f, 0],
    ] {
        assert!(codec::decode_message::<Vec<u32>>(claim).is_err(), "{claim:?}");
        assert!(codec::decode_message::<String>(claim).is_err(), "{claim:?}");
        assert!(codec::decode_message::<Vec<NewSequence>>(claim).is_err(), "{claim:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]
    #[test]
    fn random_bytes_are_errors_or_values_but_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
        let _ = codec::decode_message::<ToWorker>(&bytes);
        let _ = codec::decode_message::<FromWorker>(&bytes);
        let _ = codec::decode_message::<FromFrontend>(&bytes);
        let _ = codec::decode_message::<ToFrontend>(&bytes);
    }

    #[test]
    fn plans_with_any_numbers_survive(
        tokens in prop::collection::vec(any::<u32>(), 0..50),
        ids in prop::collection::vec(any::<u64>(), 0..20),
        temperature in any::<f32>().prop_filter("comparable", |t| !t.is_nan()),
    ) {
        let mut plan = plan();
        plan.admitted[0].tokens = tokens;
        plan.admitted[0].sampling.temperature = temperature;
        plan.finished = ids.into_iter().map(SeqId).collect();
        let message = ToWorker::Step(plan);
        let bytes = codec::encode(&message).unwrap();
        prop_assert_eq!(codec::decode_message::<ToWorker>(&bytes).unwrap(), message);
    }
}

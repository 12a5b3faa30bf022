//! Each plan is sent as one frame, whatever is admitted at a time; and so are its results.
use coordinator::scheduler::{Scheduler, SchedulerConfig};
use shared::protocol::ToWorker;
use shared::sampling::{LOGPROBS_MAX, Pooling};
use shared::wire::codec;
use shared::wire::frame::{BODY_MAX, FrameDecoder, FrameEncoder, FrameKind};

use crate::rig::{ClientRequest, Rig, sizes};

/// Checks that a worker decodes a plan, or masks, exactly as sent.
pub(crate) fn travels(message: ToWorker) {
    let body = codec::encode(&message).unwrap();
    let mut bytes = Vec::new();
    FrameEncoder::default().encode(FrameKind::Step, 1, &body, &mut bytes).unwrap();
    let mut decoder = FrameDecoder::default();
    decoder.feed(&bytes);
    let frame = decoder.next_frame().unwrap().unwrap();
    let read = codec::decode_message::<ToWorker>(&frame.body);
    assert!(read.as_ref() == Ok(&message), "{} bytes: {:?}", body.len(), read.err());
}

fn long() -> SchedulerConfig {
    SchedulerConfig {
        max_model_len: 131_072,
        max_num_seqs: 64,
        max_num_batched_tokens: 8192,
        ..sizes()
    }
}

#[test]
fn many_questions_about_one_long_document_go_over_several_plans() {
    let mut rig = Rig::new(long());
    rig.ready(16_384);
    // Token ids of a large vocabulary, which take the most bytes.
    let document: Vec<u32> = (0..100_000).map(|i| 70_000 + i).collect();
    let ask = |question: u32| {
        let prompt = document.iter().copied().chain([question]).collect();
        ClientRequest { prompt, max_tokens: 2, ..ClientRequest::default() }
    };
    rig.submit(ask(0)).unwrap();
    rig.drain();
    for question in 1..50 {
        rig.submit(ask(question)).unwrap();
    }
    assert!(rig.plan());
    let admitted = rig.plan.admitted.len();
    assert!((10..49).contains(&admitted), "{admitted} admitted in one plan");
    let tokens: u32 = rig.plan.sequences.iter().map(|entry| entry.count).sum();
    assert!(tokens < 1000, "the document is there: {tokens} computed");
    rig.drain();
}

#[test]
fn embeddings_that_are_too_many_for_a_frame_are_of_several_steps() {
    // With vectors of this size, 63 fill a quarter of a frame.
    let sizes = SchedulerConfig { hidden_size: 16_384, max_num_seqs: 256, ..long() };
    let mut rig = Rig::new(sizes);
    rig.ready(2000);
    let text = |at: u32| ClientRequest {
        prompt: vec![at, 1, 2],
        max_tokens: 0,
        pooling: Some(Pooling::Mean),
        ..ClientRequest::default()
    };
    let ids: Vec<_> = (0..90).map(|at| rig.submit(text(at)).unwrap()).collect();
    let mut steps = Vec::new();
    while rig.plan() {
        steps.push(rig.plan.sequences.len());
        rig.deliver();
    }
    assert_eq!(steps, [63, 27]);
    assert!(ids.iter().all(|id| rig.requests[id].1.embedded));
    // A long prompt begins in a step that completes no further embeddings, and does not delay
    // others.
    rig.submit(ClientRequest { prompt: vec![1; 9000], ..text(0) }).unwrap();
    rig.drain();
}

/// The worker refuses a step whose report could be too large.
#[test]
fn log_probabilities_of_prompts_that_are_too_many_for_a_frame_are_of_several_steps() {
    let ask = |at: u32, length: u32| ClientRequest {
        prompt: (0..length).map(|i| 1000 * at + i % 999).collect(),
        max_tokens: 2,
        prompt_logprobs: Some(LOGPROBS_MAX),
        ..ClientRequest::default()
    };
    let mut rig = Rig::new(SchedulerConfig { max_num_batched_tokens: 24_576, ..long() });
    rig.ready(2500);
    let plain = ClientRequest { prompt_logprobs: None, ..ask(9, 9000) };
    let ids = [ask(1, 8100), plain, ask(2, 8100), ask(3, 8100)];
    let ids = ids.map(|client| rig.submit(client).unwrap());
    let mut prefills = Vec::new();
    while rig.plan() {
        let tokens: u32 = rig.plan.sequences.iter().map(|entry| entry.count).sum();
        prefills.extend((tokens > 4).then_some(tokens));
        rig.deliver();
    }
    // A frame has room for the alternatives of 5,354 tokens, and others share the step.
    assert_eq!(prefills[0], 5354 + 9000);
    assert!(prefills.iter().skip(1).all(|tokens| *tokens <= 5354 + 4), "{prefills:?}");
    assert_eq!(prefills.len(), 5);
    let told = ids.map(|id| rig.requests[&id].1.prompt_logprobs);
    assert_eq!(told, [Some(8099), None, Some(8099), Some(8099)]);
    rig.drain();
    // A prompt longer than a step leaves shorter ones some of it, and keeps a part of the report.
    let mut rig = Rig::new(long());
    rig.ready(4000);
    let long = rig.submit(ask(1, 20_000)).unwrap();
    let short: Vec<_> = (2..12).map(|at| rig.submit(ask(at, 900)).unwrap()).collect();
    assert!(rig.plan());
    let shares: Vec<u32> = rig.plan.sequences.iter().map(|entry| entry.count).collect();
    assert_eq!(shares, [900, 359, 4096]);
    rig.drain();
    assert_eq!(rig.requests[&long].1.prompt_logprobs, Some(19_999));
    assert!(short.iter().all(|id| rig.requests[id].1.prompt_logprobs == Some(899)));
}

#[test]
fn sequences_with_a_long_beginning_in_common_come_back_over_several_plans() {
    // Tables of 1,876 blocks: a few of them, found or copied, use up a plan's share for swaps.
    let mut rig = Rig::new(SchedulerConfig { max_num_batched_tokens: 256, ..long() });
    rig.host_blocks = 200_000;
    rig.ready(2060);
    let document: Vec<u32> = (0..30_000).map(|i| 70_000 + i).collect();
    let ask = |question: u32, max_tokens: u32| {
        let prompt = document.iter().copied().chain([question]).collect();
        ClientRequest { prompt, max_tokens, seed: question.into(), ..ClientRequest::default() }
    };
    rig.submit(ask(0, 1)).unwrap();
    rig.drain();
    // Another request's blocks, which all become free at once.
    let prompt = vec![7; 60 * 16];
    let large = ClientRequest { prompt, max_tokens: 4000, priority: -1, ..ask(0, 0) };
    let large = rig.submit(large).unwrap();
    for question in 1..61 {
        rig.submit(ask(question, 100)).unwrap();
    }
    for _ in 0..1000 {
        if rig.scheduler.gauges().swapped >= 25 {
            break;
        }
        let _ = rig.plan();
        let _ = rig.deliver();
    }
    assert!(rig.scheduler.gauges().swapped >= 25, "{:?}", rig.scheduler.gauges());
    rig.cancel(large);
    let mut most = 0;
    while rig.scheduler.gauges().swapped > 0 {
        if rig.plan() {
            let back = rig.plan.swap_in.iter().map(|swap| swap.seq);
            let tables = back.map(|seq| {
                let entry = rig.plan.sequences.iter().find(|entry| entry.seq == seq).unwrap();
                entry.new_blocks.len() * 3 * 5
            });
            let bytes: usize = tables.sum();
            assert!(bytes <= BODY_MAX as usize / 32, "{bytes} bytes for what comes back");
            most = most.max(rig.plan.swap_in.len());
        }
        let _ = rig.deliver();
    }
    assert!(most > 5, "{most} come back at a time");
}

#[test]
fn bounds_of_which_a_plan_would_be_over_a_frame_are_refused() {
    let refused = |config| Scheduler::new(config).unwrap_err().to_string();
    let error = refused(SchedulerConfig { max_model_len: 4 << 20, ..long() });
    assert!(error.contains("max_model_len (4194304)"), "{error}");
    let max_num_batched_tokens = 64 << 20;
    let error = refused(SchedulerConfig { max_num_batched_tokens, ..long() });
    assert!(error.contains("max_num_batched_tokens (67108864)"), "{error}");
    let many = SchedulerConfig { max_num_seqs: 1 << 20, max_num_batched_tokens: 1 << 20, ..long() };
    assert!(refused(many).contains("max_num_seqs (1048576)"));
    let large = SchedulerConfig { max_model_len: 1 << 20, max_num_seqs: 4096, ..long() };
    assert!(Scheduler::new(large).is_ok());
}

#[test]
fn the_replicas_devices_bound_its_steps() {
    let mut rig = Rig::new(SchedulerConfig { max_num_batched_tokens: 64, ..sizes() });
    rig.ready(64);
    // Never fewer than one token for each sequence, nor more than it was made for.
    for (limit, most) in [(64, 64), (16, 16), (1, 4), (1000, 64)] {
        rig.scheduler.limit_steps(limit);
        let prompt = (0..100).map(|i| 1000 * limit + i).collect();
        rig.submit(ClientRequest { prompt, max_tokens: 1, ..ClientRequest::default() }).unwrap();
        let mut largest = 0;
        while rig.plan() {
            largest = largest.max(rig.plan.sequences.iter().map(|entry| entry.count).sum());
            let _ = rig.deliver();
        }
        assert_eq!(largest, most, "of {limit}");
        rig.drain();
    }
}

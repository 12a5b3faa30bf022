//! Plans travel as one frame each, whatever is admitted at a time.
use coordinator::scheduler::{Scheduler, SchedulerConfig};
use shared::protocol::{StepPlan, ToWorker};
use shared::wire::codec;
use shared::wire::frame::{FrameDecoder, FrameEncoder, FrameKind};

use crate::rig::{ClientRequest, Rig};

/// What a worker reads of a plan.
pub(crate) fn travels(plan: &StepPlan) {
    let message = ToWorker::Step(plan.clone());
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
        block_size: 16,
        max_model_len: 131_072,
        max_num_seqs: 64,
        max_num_batched_tokens: 8192,
        max_queued_requests: 100,
        max_steps_in_flight: 2,
        prefix_caching: true,
        speculation: None,
    }
}

#[test]
fn many_questions_about_one_long_document_go_over_several_plans() {
    let mut rig = Rig::new(long());
    rig.ready(16_384);
    // Token numbers of a large vocabulary, which take most bytes.
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

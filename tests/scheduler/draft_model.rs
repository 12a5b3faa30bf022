//! Drafts by rank 0's draft model: which sequences ask for how many, and how the scheduler handles
//! the answers.
use coordinator::engine::EngineError;
use coordinator::scheduler::{Effect, Method, SchedulerConfig, Speculation};
use shared::ids::{Epoch, SeqId, StepId};
use shared::protocol::{Drafts, SequenceOutput, StepPlan};

use crate::guided::Guidance;
use crate::rig::{ClientRequest, Rig, sizes};
use crate::worker::Skill;

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_model_len: 600,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        speculation: Some(Speculation {
            num_speculative_tokens: 4,
            method: Method::DraftModel,
            disable_by_batch_size: None,
        }),
        ..sizes()
    }
}

/// A request whose text does not repeat itself.
fn request(max_tokens: u32) -> ClientRequest {
    ClientRequest { seed: 7, prompt: (0..20).collect(), max_tokens, ..Default::default() }
}

fn rig(config: SchedulerConfig, skill: Skill, blocks: u32) -> Rig {
    let mut rig = Rig::new(config);
    rig.ready(blocks);
    rig.worker.as_mut().unwrap().skill = skill;
    rig
}

/// Number of steps that one text takes, and of tokens drafted and accepted.
fn steps(skill: Skill, speculation: Option<Speculation>, max_tokens: u32) -> (u64, (u32, u32)) {
    let mut rig = rig(SchedulerConfig { speculation, ..config() }, skill, 60);
    rig.submit(request(max_tokens)).unwrap();
    while rig.plan() || rig.deliver() {}
    // The rig has compared every token with the undisturbed text.
    rig.drain();
    (rig.plan.step.0, rig.drafted)
}

fn asked(rig: &Rig) -> Vec<u32> {
    rig.plan.sequences.iter().map(|entry| entry.drafts.asked().unwrap_or(0)).collect()
}

#[test]
fn a_model_that_knows_all_is_asked_for_all_it_may_and_its_drafts_count() {
    // The prompt with the first token; then five tokens at a time.
    assert_eq!(steps(Skill::All, config().speculation, 201), (1 + 40, (160, 160)));
    assert_eq!(steps(Skill::All, None, 201), (201, (0, 0)));
    // No more drafts are requested than the rest of a text can use.
    let (steps, (drafted, accepted)) = steps(Skill::All, config().speculation, 9);
    assert_eq!((steps, drafted, accepted), (3, 6, 6));
}

#[test]
fn a_model_that_knows_nothing_is_asked_ever_less_and_the_text_is_one_step_ahead() {
    let (all, (drafted, accepted)) = steps(Skill::Nothing, config().speculation, 500);
    assert_eq!((all, accepted), (500, 0));
    assert!((10..50).contains(&drafted), "{drafted}");
    let mut rig = rig(config(), Skill::Nothing, 60);
    rig.submit(request(300)).unwrap();
    let mut ahead = 0;
    while rig.plan() || rig.deliver() {
        ahead += u32::from(rig.scheduler.gauges().steps_in_flight == 2);
    }
    assert!(ahead > 200, "{ahead} looks found a second step");
    rig.drain();
}

#[test]
fn a_model_that_knows_some_speeds_up_what_it_can() {
    let (some, (drafted, accepted)) = steps(Skill::Some, config().speculation, 500);
    assert!(some < 350 && accepted > 150, "{some} steps, {accepted} of {drafted} accepted");
}

#[test]
fn a_model_that_never_catches_up_is_hardly_asked() {
    let mut rig = rig(config(), Skill::Behind, 60);
    rig.submit(request(500)).unwrap();
    let mut last = 0;
    let mut times = 0;
    while rig.plan() || rig.deliver() {
        let step = rig.plan.step.0;
        times += u32::from(step != last && asked(&rig).iter().any(|asked| *asked > 0));
        last = step;
    }
    rig.drain();
    assert_eq!(rig.drafted, (0, 0));
    assert!((32..45).contains(&times), "{times}");
}

#[test]
fn a_prompt_waits_for_no_draft() {
    // 20 tokens in parts of 8. The last part has one token if the sequence begins after another's
    // block.
    let mut rig = rig(SchedulerConfig { max_num_batched_tokens: 8, ..config() }, Skill::All, 60);
    for len in [20, 17, 17] {
        let prompt = (0..len).collect();
        rig.submit(ClientRequest { prompt, ..request(20) }).unwrap();
        // `FakeWorker::run` checks that nothing is drafted after a prompt.
        rig.drain();
    }
    assert!(rig.drafted.0 > 0);
}

#[test]
fn rows_tokens_and_blocks_are_left_to_others() {
    let mut rig = rig(config(), Skill::All, 100);
    for seed in 0..6 {
        rig.submit(ClientRequest { seed, ..request(60) }).unwrap();
    }
    let mut most = 0;
    while rig.plan() || rig.deliver() {
        let (rows, drafts) = (rig.plan.sequences.len() as u32, asked(&rig).iter().sum::<u32>());
        assert!(rows + drafts <= 8, "{rows} sequences, {drafts} drafts");
        if rows >= 5 {
            most = most.max(drafts);
        }
    }
    assert!((2..=3).contains(&most), "{most}");
    rig.drain();
}

#[test]
fn who_must_not_draft_does_not() {
    let speculation =
        Speculation { disable_by_batch_size: Some(2), ..config().speculation.unwrap() };
    let config = SchedulerConfig { speculation: Some(speculation), ..config() };
    let mut rig = rig(config, Skill::All, 100);
    let guide = Some(Guidance::default());
    rig.submit(ClientRequest { guide, ..request(30) }).unwrap();
    rig.drain();
    for _ in 0..3 {
        rig.submit(request(30)).unwrap();
    }
    rig.drain();
    assert_eq!(rig.drafted, (0, 0));
    rig.submit(request(30)).unwrap();
    rig.submit(request(30)).unwrap();
    rig.drain();
    assert!(rig.drafted.1 > 20);
}

#[test]
fn drafts_survive_preemption_swapping_loss_and_a_move_of_their_sequence() {
    for (skill, host_blocks) in [(Skill::Some, 0), (Skill::All, 0), (Skill::Some, 20)] {
        let mut rig = Rig::new(config());
        rig.host_blocks = host_blocks;
        rig.ready(9);
        for seed in 0..4 {
            rig.submit(ClientRequest { seed: seed * 3 + 1, ..request(60) }).unwrap();
        }
        rig.disturbed(9, |rig| rig.worker.as_mut().unwrap().skill = skill);
        assert!(rig.preemptions > 0 && rig.drafted.1 > 20, "{:?}", rig.drafted);
    }
}

/// Wrong answers from a rank.
#[test]
fn an_answer_that_does_not_fit_what_was_asked_is_not_believed() {
    // Positions and tokens in the answer, and how many are reported as drafted; what is believed:
    // the number of tokens, and how many were drafted and how many of those were right.
    type Case = (&'static [(u32, u32)], &'static [u32], Option<(usize, Option<(u32, u32)>)>);
    let cases: [Case; 11] = [
        (&[(21, 5), (22, 6), (23, 7), (24, 8), (25, 9)], &[4], Some((5, Some((4, 4))))),
        (&[(21, 5), (22, 6), (23, 7)], &[4], Some((3, Some((4, 2))))),
        (&[(21, 5)], &[4], Some((1, Some((4, 0))))),
        (&[(21, 5), (22, 6)], &[1], Some((2, Some((1, 1))))),
        (&[(21, 5)], &[0], Some((1, None))),
        // More tokens than possible, than requested, or than reported; gaps; nothing.
        (&[(21, 5), (22, 6), (23, 7)], &[1], None),
        (&[(21, 5)], &[5], None),
        (&[(21, 5)], &[u32::MAX], None),
        (&[(21, 5)], &[], None),
        (&[(21, 5), (23, 6)], &[4], None),
        (&[], &[4], None),
    ];
    for (outputs, drafted, believed) in cases {
        let output = |(position, token): &(u32, u32)| SequenceOutput {
            seq: SeqId(1),
            position: *position,
            token: Some(*token),
            logprobs: None,
            prompt_logprobs: Vec::new(),
            prompt_start: 0,
            corrupted: false,
            embedding: Vec::new(),
        };
        let mut rig = rig(config(), Skill::All, 30);
        rig.submit(request(100)).unwrap();
        let (mut effects, mut plan) = (Vec::new(), StepPlan::default());
        let scheduler = &mut rig.scheduler;
        assert!(scheduler.plan(&mut plan, &mut effects));
        let first = vec![output(&(20, 3))];
        scheduler.apply(Epoch(1), StepId(1), first, &[], &mut |_, _| false, &mut effects).unwrap();
        assert!(scheduler.plan(&mut plan, &mut effects));
        assert_eq!((plan.sequences[0].count, &plan.sequences[0].drafts), (5, &Drafts::UpTo(4)));
        effects.clear();
        let told = outputs.iter().map(output).collect();
        scheduler
            .apply(Epoch(1), StepId(2), told, drafted, &mut |_, _| false, &mut effects)
            .unwrap();
        let is_token = |effect: &&Effect| matches!(effect, Effect::Token { .. });
        let tokens = effects.iter().filter(is_token).count();
        let corrupted = Some(EngineError::Corrupted);
        let ended = effects
            .iter()
            .any(|effect| matches!(effect, Effect::Dropped { error, .. } if *error == corrupted));
        assert_eq!(ended, believed.is_none(), "{outputs:?} {drafted:?}");
        let counted = effects.iter().find_map(|effect| match effect {
            Effect::Drafted { tokens, accepted, .. } => Some((*tokens, *accepted)),
            _ => None,
        });
        if let Some(believed) = believed {
            assert_eq!((tokens, counted), believed, "{outputs:?} {drafted:?}");
            assert!(scheduler.plan(&mut plan, &mut Vec::new()));
            assert_eq!(plan.sequences[0].start, 20 + tokens as u32, "{outputs:?}");
        }
    }
}

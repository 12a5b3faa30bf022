//! Random schedules of everything that can happen, with few blocks.
use coordinator::engine::EngineError;
use coordinator::scheduler::{Method, NgramConfig, SchedulerConfig, Speculation};
use proptest::prelude::*;

use shared::protocol::ThinkingBudget;
use shared::sampling::Pooling;

use crate::guided::Guidance;
use crate::rig::{ClientRequest, Rig};

#[derive(Clone, Debug)]
enum Event {
    Submit(ClientRequest),
    Plan,
    Deliver,
    Cancel(u64),
    Canary,
    Lost,
    Move,
    LeadAnew,
    Ready(u32, u32),
}

fn request() -> impl Strategy<Value = ClientRequest> {
    (
        // Many prompts begin alike.
        (prop_oneof![Just(0u32), Just(30u32), 0u32..31], prop::collection::vec(0u32..50, 1..30))
            .prop_map(|(same, tail)| (0..same).chain(tail).collect::<Vec<u32>>()),
        prop_oneof![4 => Just(1u32), 1 => 2u32..4],
        0u32..40,
        prop::collection::vec(0u32..50, 0..3),
        0u32..6,
        prop::option::weighted(0.3, 0u32..50),
        any::<u64>(),
        (
            prop::bool::weighted(0.2),
            prop_oneof![3 => Just(0), 1 => -2i32..3],
            prop::option::weighted(0.2, prop_oneof![Just(Pooling::Last), Just(Pooling::Mean)]),
        ),
        prop::option::weighted(0.3, (any::<u64>(), 0u64..30, any::<bool>())),
    )
        .prop_map(
            |(
                prompt,
                n,
                max_tokens,
                end_tokens,
                min_tokens,
                stop_token,
                seed,
                (logprobs, priority, pooling),
                guide,
            )| {
                let guide = guide.map(|(key, over_in, slow)| Guidance {
                    key,
                    over_in,
                    slow,
                    // Some guides give up, while they run or while they wait to run again.
                    fails_behind: key.is_multiple_of(5).then_some((key >> 8) as usize % 12),
                    ..Guidance::default()
                });
                let thinking = (guide.is_none() && (seed >> 40) % 3 == 1).then(|| ThinkingBudget {
                    tokens: (seed >> 8) as u32 % 12,
                    open: Some((seed >> 16) as u32 % 4),
                    closes: vec![4 + (seed >> 24) as u32 % 4, 8],
                    is_open: seed & 1 == 0,
                });
                let prompt_logprobs = (logprobs && prompt.len() > 1).then_some(0);
                if pooling.is_some() {
                    let plain = ClientRequest::default();
                    return ClientRequest { prompt, priority, pooling, max_tokens: 0, ..plain };
                }
                ClientRequest {
                    prompt,
                    n,
                    max_tokens,
                    open_ended: seed.is_multiple_of(3),
                    end_tokens,
                    min_tokens: if guide.is_some() { 0 } else { min_tokens.min(max_tokens) },
                    stop_token,
                    seed,
                    priority,
                    prompt_logprobs,
                    pooling,
                    guide,
                    thinking,
                }
            },
        )
}

/// Several choices, one of which gives up at some point.
fn giving_up() -> impl Strategy<Value = ClientRequest> {
    let prompt = prop::collection::vec(0u32..50, 1..40);
    let (n, priority) = (2u32..4, -1i32..2);
    (prompt, n, any::<u64>(), priority, 1usize..30, 0u32..3, any::<bool>()).prop_map(
        |(prompt, n, seed, priority, behind, choice, slow)| ClientRequest {
            prompt,
            n,
            seed,
            priority,
            max_tokens: 40,
            guide: Some(Guidance {
                key: seed >> 3,
                slow,
                fails_behind: Some(behind),
                fails_in: Some(choice % n),
                ..Guidance::default()
            }),
            ..ClientRequest::default()
        },
    )
}

fn event(request: impl Strategy<Value = ClientRequest>) -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => request.prop_map(Event::Submit),
        20 => Just(Event::Plan),
        18 => Just(Event::Deliver),
        2 => (0u64..40).prop_map(Event::Cancel),
        1 => Just(Event::Canary),
        1 => Just(Event::Lost),
        1 => Just(Event::Move),
        1 => Just(Event::LeadAnew),
        2 => (7u32..30, host_blocks()).prop_map(|(blocks, host)| Event::Ready(blocks, host)),
    ]
}

/// None; too few for any sequence; enough for some; enough for all.
fn host_blocks() -> impl Strategy<Value = u32> {
    prop_oneof![1 => Just(0u32), 2 => 1u32..4, 2 => 4u32..20, 1 => Just(100u32)]
}

fn speculation() -> impl Strategy<Value = Option<Speculation>> {
    let size = prop::option::weighted(0.2, 2u32..6);
    let method = prop_oneof![
        (1u32..4, 0u32..3).prop_map(|(min, more)| {
            Method::Ngram(NgramConfig { prompt_lookup_max: min + more, prompt_lookup_min: min })
        }),
        Just(Method::DraftModel),
    ];
    let speculation = (1u32..6, method, size).prop_map(|(tokens, method, size)| Speculation {
        num_speculative_tokens: tokens,
        method,
        disable_by_batch_size: size,
    });
    prop::option::weighted(0.6, speculation)
}

fn config() -> impl Strategy<Value = SchedulerConfig> {
    let caching = prop::bool::weighted(0.8);
    // So large that a step may complete only one embedding, or two.
    let hidden = prop_oneof![4 => Just(2), 1 => Just(1u32 << 19), 1 => Just(1u32 << 20)];
    let mixed = prop::option::weighted(0.4, 1u32..20);
    let few = (1u32..8, 1u32..3, 1u32..8);
    let states = prop::option::weighted(0.3, 0u32..9);
    (few, 0u32..40, mixed, (caching, states), hidden, speculation()).prop_map(
        |((seqs, steps, queued), budget, mixed, (caching, states), hidden_size, speculation)| {
            SchedulerConfig {
                block_size: 16,
                max_model_len: 100,
                max_num_seqs: seqs,
                max_num_batched_tokens: seqs + budget,
                max_mixed_prefill_tokens: mixed,
                max_queued_requests: queued,
                max_steps_in_flight: steps,
                prefix_caching: caching,
                prefix_states: states,
                hidden_size,
                vocab_size: u32::MAX,
                speculation: speculation.filter(|_| seqs > 1 && states.is_none()).map(|it| {
                    Speculation {
                        num_speculative_tokens: it.num_speculative_tokens.min(seqs - 1),
                        ..it
                    }
                }),
            }
        },
    )
}

fn run(config: SchedulerConfig, host_blocks: u32, events: Vec<Event>) -> Result<(), TestCaseError> {
    let mut rig = Rig::new(config);
    // States are not swapped.
    let host = |blocks| if config.prefix_states.is_some() { 0 } else { blocks };
    rig.host_blocks = host(host_blocks);
    rig.ready(12);
    for event in events {
        match event {
            Event::Submit(client) => match rig.submit(client) {
                Ok(_) => {}
                Err(EngineError::QueueFull { queued, max, .. }) => {
                    prop_assert!(queued >= max && max == config.max_queued_requests);
                }
                Err(EngineError::TooLarge { needed, available }) => {
                    prop_assert!(needed > available);
                }
                Err(other) => prop_assert!(false, "{other}"),
            },
            Event::Plan => {
                rig.plan();
            }
            Event::Deliver => {
                rig.deliver();
            }
            Event::Cancel(id) => rig.cancel(shared::ids::RequestId(id)),
            Event::Canary
                if rig.scheduler.gauges().steps_in_flight < config.max_steps_in_flight =>
            {
                rig.canary()
            }
            Event::Canary => {}
            Event::Lost => rig.lost(),
            Event::Move => rig.move_on(),
            Event::LeadAnew => rig.lead_anew(),
            Event::Ready(blocks, host_blocks) => {
                rig.host_blocks = host(host_blocks);
                rig.ready(blocks);
            }
        }
    }
    rig.ready(20);
    rig.drain();
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn nothing_is_lost_repeated_or_leaked(
        config in config(),
        host_blocks in host_blocks(),
        events in prop::collection::vec(event(request()), 1..250),
    ) {
        run(config, host_blocks, events)?;
    }

    #[test]
    fn requests_end_by_guides_that_give_up_anywhere(
        config in config(),
        host_blocks in 4u32..40,
        events in prop::collection::vec(event(prop_oneof![giving_up(), request()]), 1..200),
    ) {
        run(config, host_blocks, events)?;
    }
}

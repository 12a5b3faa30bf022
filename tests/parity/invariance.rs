//! The same request gives the same tokens and, bit for bit, the same log-probabilities, however it
//! is cut into steps and whatever else is in them.
use std::path::PathBuf;

use kernels::{Backend, ReferenceBackend};
use shared::sampling::SamplingParams;

use crate::goldens::golden;
use crate::replica::{Generated, Make, Replica, Request, Schedule};
use crate::repository;

/// Grouped queries, and attention that forgets: the two that depend most on where a chunk ends.
fn folders() -> Vec<PathBuf> {
    vec![repository("models/demo"), repository("tests/models/mistral-swa")]
}

/// 32 requests of different lengths and parameters.
fn mixed_requests(dir: &std::path::Path) -> Vec<Request> {
    let prompts = golden(dir).prompts;
    (0..32)
        .map(|i| {
            let prompt = &prompts[i % prompts.len()].prompt_ids;
            let sampling = SamplingParams {
                temperature: [0.0, 0.7, 1.0, 1.5][i % 4],
                top_p: [1.0, 0.9][i / 4 % 2],
                top_k: [0, 50, 5][i % 3],
                min_p: [0.0, 0.05][i / 8 % 2],
                seed: 1000 + i as u64 / 2,
                choice: i as u32 % 2,
                repetition_penalty: [1.0, 1.2][i / 2 % 2],
                frequency_penalty: [0.0, 0.5][i / 3 % 2],
                presence_penalty: [0.0, -0.3][i / 5 % 2],
                logit_bias: if i % 7 == 0 { vec![(17, 2.0), (1 << 30, 1.0)] } else { Vec::new() },
                suppress_until_min: vec![2, 6],
                min_tokens: [0, 4][i % 2],
                logprobs: Some(i as u32 % 4),
                prompt_logprobs: (i % 3 == 0).then_some(2),
            };
            Request { prompt: prompt.clone(), sampling, max_tokens: 6 + i % 9 }
        })
        .collect()
}

fn each_alone(replica: &mut Replica, requests: &[Request]) -> Vec<Generated> {
    let alone: Vec<_> = requests
        .iter()
        .flat_map(|request| replica.run(std::slice::from_ref(request), Schedule::WHOLE))
        .collect();
    // The test would show nothing if every request gave the same.
    let distinct: std::collections::HashSet<_> = alone.iter().map(|one| &one.tokens).collect();
    assert!(distinct.len() > requests.len() / 2);
    alone
}

fn assert_same(what: &str, found: &[Generated], wanted: &[Generated]) {
    assert_eq!(found.len(), wanted.len());
    for (i, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        // Floats are compared with ==: every bit counts (there is no NaN and no -0 here).
        assert_eq!(found, wanted, "{what}: request {i}");
    }
}

fn steps_do_not_matter<B: Backend + 'static>(make: Make<B>, tp: u32) {
    for dir in folders() {
        let mut replica = Replica::start(&dir, tp, make);
        let requests = mixed_requests(&dir);
        let alone = each_alone(&mut replica, &requests);
        let whole = Schedule::WHOLE;
        for (what, schedule) in [
            ("in one batch", whole),
            ("joining a running batch", Schedule { arrival: 1, ..whole }),
            ("in chunks of 5", Schedule { chunk: 5, ..whole }),
            ("joining, in chunks of 3", Schedule { chunk: 3, arrival: 2, ..whole }),
            ("preempted", Schedule { preempt_every: Some(5), ..whole }),
            ("preempted, joining", Schedule { preempt_every: Some(4), arrival: 1, ..whole }),
        ] {
            let found = replica.run(&requests, schedule);
            assert_same(&format!("{} tp {tp} {what}", dir.display()), &found, &alone);
        }
    }
}

#[test]
fn reference_one_rank() {
    steps_do_not_matter(ReferenceBackend::new, 1);
}

#[test]
fn reference_two_ranks() {
    steps_do_not_matter(ReferenceBackend::new, 2);
}

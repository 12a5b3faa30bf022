//! Prompt and greedy log-probabilities equal those of transformers in float32.
use std::path::Path;

use kernels::{Backend, ReferenceBackend};
use serde::Deserialize;

use crate::model_folders;
use crate::replica::{Generated, Make, Replica, Request, Schedule};

const NEW_TOKENS: usize = 32;

#[derive(Deserialize)]
pub(crate) struct Golden {
    pub(crate) prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
pub(crate) struct Prompt {
    name: String,
    pub(crate) prompt_ids: Vec<u32>,
    /// The first entry is null.
    prompt_logprobs: Vec<Option<f32>>,
    first_step_top5: Vec<Candidate>,
    greedy_ids: Vec<u32>,
    greedy_logprobs: Vec<f32>,
    greedy_top1_top2_gap: Vec<f32>,
}

#[derive(Deserialize)]
struct Candidate {
    id: u32,
    logprob: f32,
}

/// How far from float32 arithmetic a backend may be.
#[derive(Clone, Copy, Debug)]
struct Tolerance {
    /// Of a log-probability.
    logprob: f32,
    /// Two candidates closer than this may change places.
    gap: f32,
}

const EXACT: Tolerance = Tolerance { logprob: 1e-3, gap: 1e-3 };

pub(crate) fn golden(dir: &Path) -> Golden {
    serde_json::from_str(&std::fs::read_to_string(dir.join("golden.json")).unwrap()).unwrap()
}

fn check_all<B: Backend + 'static>(make: Make<B>, tp: u32, tolerance: Tolerance) {
    for dir in model_folders() {
        let golden = golden(&dir);
        let requests: Vec<_> = golden
            .prompts
            .iter()
            .map(|prompt| Request::greedy(&prompt.prompt_ids, NEW_TOKENS))
            .collect();
        let generated = Replica::start(&dir, tp, make).run(&requests, Schedule::WHOLE);
        assert_eq!(generated.len(), golden.prompts.len());
        let mut compared = 0;
        for (prompt, generated) in golden.prompts.iter().zip(&generated) {
            let name = format!("{} `{}` tp {tp}", dir.display(), prompt.name);
            compared += check(&name, prompt, generated, tolerance);
        }
        // A tie may end a comparison early; it must not end them all.
        let possible = golden.prompts.len() * NEW_TOKENS;
        assert!(compared * 10 >= possible * 9, "{}: {compared} of {possible}", dir.display());
    }
}

/// Returns how many greedy tokens were compared.
fn check(name: &str, prompt: &Prompt, generated: &Generated, tolerance: Tolerance) -> usize {
    let close = |what: &str, found: f32, wanted: f32| {
        let difference = (found - wanted).abs();
        assert!(difference < tolerance.logprob, "{name}: {what}: {found}, not {wanted}");
    };

    assert_eq!(generated.prompt_logprobs.len(), prompt.prompt_ids.len() - 1, "{name}");
    let wanted = prompt.prompt_logprobs.iter().zip(&prompt.prompt_ids).skip(1);
    for (i, (found, (wanted, token))) in generated.prompt_logprobs.iter().zip(wanted).enumerate() {
        assert_eq!(found.token, *token, "{name}");
        close(&format!("prompt token {}", i + 1), found.logprob, wanted.unwrap());
    }

    let top = &generated.logprobs[0].top;
    assert_eq!(top.len(), prompt.first_step_top5.len(), "{name}");
    for (i, (&(id, logprob), wanted)) in top.iter().zip(&prompt.first_step_top5).enumerate() {
        close(&format!("first token, candidate {i}"), logprob, wanted.logprob);
        let tied = |j: usize| {
            let other = prompt.first_step_top5.get(j);
            other.is_none_or(|other| (other.logprob - wanted.logprob).abs() < tolerance.gap)
        };
        let may_swap = i.checked_sub(1).is_some_and(tied) || tied(i + 1);
        assert!(id == wanted.id || may_swap, "{name}: candidate {i} is {id}, not {}", wanted.id);
    }

    assert_eq!(generated.tokens.len(), NEW_TOKENS, "{name}");
    for i in 0..NEW_TOKENS {
        let (found, wanted) = (generated.tokens[i], prompt.greedy_ids[i]);
        if found != wanted {
            let gap = prompt.greedy_top1_top2_gap[i];
            assert!(gap < tolerance.gap, "{name}: token {i} is {found}, not {wanted}; gap {gap}");
            return i;
        }
        let scored = &generated.logprobs[i];
        assert_eq!((scored.token, scored.rank), (found, 1), "{name}");
        close(&format!("token {i}"), scored.logprob, prompt.greedy_logprobs[i]);
    }
    NEW_TOKENS
}

macro_rules! goldens {
    ($backend:ident, $make:expr, $tolerance:expr) => {
        mod $backend {
            use super::*;

            #[test]
            fn one_rank() {
                check_all($make, 1, $tolerance);
            }

            #[test]
            fn two_ranks() {
                check_all($make, 2, $tolerance);
            }

            #[test]
            fn four_ranks() {
                check_all($make, 4, $tolerance);
            }
        }
    };
}

goldens!(reference, ReferenceBackend::new, EXACT);

//! Prompts of a model with linear attention that begin with a prefix whose state was kept get the
//! tokens that they get when all of them is computed: the real scheduler with real engines, one
//! step ahead.
use coordinator::engine::{GenerateRequest, TokenGuide};
use kernels::collective::Collective;
use kernels::cpu::Precision;
use kernels::cuda::CudaOptions;
use kernels::{Backend, CpuBackend, ReferenceBackend};
use shared::ids::RequestId;
use shared::protocol::KvCacheDtype;
use shared::sampling::SamplingParams;

use crate::rig::fake_cuda_with;
use crate::swapping::{Outcome, Rule, Scheduling, run_load};

/// Prompts of 101 tokens with 72 in common, of which 64 are in whole blocks. The fourth after each
/// is the same but for its last token. Of the first two, one is guided while the other's prompt is
/// computed, which leaves its state in a step with a mask.
fn load(count: u32, answer: u32) -> Vec<GenerateRequest> {
    let request = |at: u32| {
        let own = (0..28).map(|i| (i * 11 + 3 * (at % 4)) % 384).chain([at]);
        let sampling = SamplingParams {
            temperature: if at.is_multiple_of(2) { 0.0 } else { 0.9 },
            seed: u64::from(at),
            logprobs: Some(1),
            ..SamplingParams::greedy()
        };
        let guides = match at % 2 {
            0 => vec![Box::new(Rule::new(u64::from(at))) as Box<dyn TokenGuide>],
            _ => Vec::new(),
        };
        let prompt = (0..72).map(|i| (i * 5) % 384).chain(own).collect();
        let request = GenerateRequest::new(RequestId(at.into()), prompt, vec![sampling], answer);
        GenerateRequest { guides, ..request }
    };
    (0..count).map(request).collect()
}

/// Two at a time, with room for so many kept states.
fn run<B: Backend>(
    model: &str,
    load: Vec<GenerateRequest>,
    degree: u32,
    blocks: u32,
    states: u32,
    make: impl Fn(Box<dyn Collective>) -> B + Copy + Send,
) -> Outcome {
    let scheduling = Scheduling {
        seqs: 2,
        max_len: 160,
        prefix_caching: true,
        prefix_states: Some(states),
        speculation: None,
    };
    run_load((model, load), degree, (blocks, 0), scheduling, KvCacheDtype::Auto, make)
}

fn agrees<B: Backend>(
    model: &str,
    degree: u32,
    make: impl Fn(Box<dyn Collective>) -> B + Copy + Send,
) {
    // Answers reach the next length at which states of sequences that decode are kept, 128.
    let load = || load(8, 48);
    let whole = run(model, load(), degree, 100, 0, make);
    assert_eq!((whole.cached, whole.choices.len()), (0, 8));
    let kept = run(model, load(), degree, 100, 12, make);
    // The first two leave their own states, the third that of what all have in common.
    assert!(kept.cached >= 96 * 2 + 64 * 3, "{} tokens", kept.cached);
    assert_eq!(kept.choices, whole.choices);
    assert!(kept.keeps.0 > 0 && kept.keeps.1 > 0, "{:?}", kept.keeps);
    // Few places, and few blocks.
    let few = run(model, load(), degree, 10, 2, make);
    assert!(few.cached > 0, "{} tokens", few.cached);
    assert_eq!(few.choices, whole.choices, "with few places");
}

#[test]
fn on_the_cpu_by_one_rank_and_by_two() {
    for (model, degree) in [("qwen3_5", 1), ("qwen3_5", 2), ("granite-4-h", 2)] {
        agrees(model, degree, |collective| {
            CpuBackend::new(2, Precision::Float32, collective).unwrap()
        });
    }
}

#[test]
fn on_the_reference() {
    agrees("qwen3_5", 1, ReferenceBackend::new);
}

/// With graphs, and steps begun ahead of those that leave a state.
#[test]
fn on_an_emulated_gpu() {
    let options = CudaOptions { graphs: true, batch_invariant: true, ..CudaOptions::default() };
    let make = |collective| fake_cuda_with(options.clone(), collective);
    let load = || load(6, 30);
    let whole = run("qwen3_5", load(), 1, 100, 0, make);
    let kept = run("qwen3_5", load(), 1, 100, 12, make);
    assert!(kept.cached >= 96 * 2, "{} tokens", kept.cached);
    assert!(kept.keeps.0 > 0 && kept.keeps.1 > 0, "{:?}", kept.keeps);
    assert!(kept.ahead[0] > 0 && kept.ahead[1] > 0 && kept.ahead[3] > 0, "{:?}", kept.ahead);
    assert_eq!(kept.choices, whole.choices);
}

//! Ranks on GPUs that see each other's memory: their bits are those of ranks that exchange data
//! through host memory, with sums fused with norms and apart, in one shot and in two, in graphs.
use testkit::models::variant;

use crate::cuda::check;
use crate::nccl::transcript;
use crate::rig::On;

fn same_bits(folder: &str, degree: u32) {
    let model = variant(folder);
    let host = transcript(On::FakeCuda, &model, degree, 12);
    // All fused; by size; all in two shots.
    for one_shot in [1 << 20, 1024, 0] {
        let devices = transcript(On::FakePeers(one_shot), &model, degree, 12);
        assert_eq!(devices, host, "one-shot up to {one_shot} bytes");
    }
}

#[test]
fn llama_gqa_tp2() {
    same_bits("llama-gqa", 2);
}

/// Two ranks have the same KV head.
#[test]
fn llama_gqa_tp4() {
    same_bits("llama-gqa", 4);
}

#[test]
fn qwen2_tp2() {
    same_bits("qwen2", 2);
}

#[test]
fn llama_mha_bias_tp4() {
    same_bits("llama-mha-bias", 4);
}

#[test]
fn goldens_hold() {
    check(On::FakePeers(1 << 20), &variant("llama-gqa"), 2, 2, 12);
    check(On::FakePeers(1 << 20), &variant("qwen3"), 2, 1, 12);
}

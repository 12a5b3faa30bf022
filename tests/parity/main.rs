//! Every model folder against its golden values (transformers, float32), at tp 1, 2 and 4.
//!
//! - [`adapters`]: LoRA adapters beside the model
//! - `ahead`: steps of any mix, begun while the previous step runs
//! - [`goldens`]: prompt log-probabilities and greedy tokens
//! - [`invariance`]: chunked, batched and re-admitted sequences give the same bits
//! - [`broken`]: broken model folders give one clear error
//! - [`checkpoint`]: temporary copies of model folders with changed tensors
//! - `classes`: models that sort texts into classes, compared with transformers
//! - `coming`: LoRA adapters that come and go
//! - `cuda`, [`nccl`], `peers`: on stand-ins for GPUs, for one rank and for several
//! - [`cuda_invariance`]: `--batch-invariant`: bits do not depend on the batch
//! - [`draft_model`]: a model's drafts change nothing but the number of steps
//! - [`drafts`]: drafted tokens change nothing but the number of steps
//! - `embeddings`: compared with transformers, whole and in chunks, on every device and degree
//! - `experts`: mixtures of experts on CUDA, in many chunks of slots
//! - `family`: scaled rotary embeddings, fused projections, text models within multimodal ones
//! - `fp8`: K and V in FP8, on every device and degree
//! - [`forming`]: ranks on stand-ins, formed as by a coordinator
//! - `latent`: multi-head latent attention: refusals, sizes
//! - `fp8_blocks`: checkpoints in FP8 of models with latent or linear attention
//! - [`masks`]: structured output by token masks, on every device and degree
//! - [`odd`]: sizes, types and values that the repository's models do not have
//! - [`plans`]: plans that do not fit are refused; plans at the bounds run
//! - `prefix_states`: prompts that begin with a kept state of linear attention
//! - [`quantised`]: weights in int8, and their distance from the goldens
//! - `queued`: queued sampling compared with the reference sampler
//! - `refusals`: every backend refuses invalid arguments in the same words
//! - [`rig`]: ranks as threads, driven by step plans
//! - [`samplers`]: the fast sampler compared with the reference sampler
//! - `states`: states of linear attention in graphs
//! - `swapping`: sequences swapped to host memory and back, on every device
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test ends by panicking, and says how close it was"
)]

mod adapters;
mod ahead;
mod broken;
mod checkpoint;
mod classes;
mod collective_time;
mod coming;
mod cuda;
mod cuda_invariance;
mod draft_model;
mod drafts;
mod embeddings;
mod experts;
mod family;
mod forming;
mod fp8;
mod fp8_blocks;
mod goldens;
mod invariance;
mod latent;
mod masks;
mod nccl;
mod odd;
mod peers;
mod plans;
mod prefix_states;
mod quantised;
mod queued;
mod refusals;
mod rig;
mod samplers;
mod states;
mod swapping;

//! The replica life cycle, event by event.
//!
//! - `life`: a replica starts and ends; `failures`: failed replicas are retried, or held
//! - `placing`: which worker gets which rank; `degrees`: fewer ranks while some stay away
//! - `slow`: slow ranks
//! - `passes`: passes over members and replicas
//! - `operators`: scaling and draining
//! - `silent`: ranks that do not answer; `apart`: ranks that do not reach each other; `hung`: ranks
//!   whose every step hangs
//! - `alike`: ranks of one model and build
//! - `devices`: devices set aside, and how large a step suits them
//! - `adapters`: LoRA adapters that come and go
mod adapters;
mod alike;
mod apart;
mod degrees;
mod devices;
mod failures;
mod hung;
mod life;
mod operators;
mod passes;
mod placing;
mod silent;
mod slow;

use core::net::SocketAddr;

use shared::protocol::{
    CollectiveSpec, Dtype, EngineConfig, FormFailed, Formed, GroupId, KvCacheDtype, Lora,
    NodeResources, Quantization, Started, Trouble,
};
use shared::wire::auth::Secret;

use super::formation::collective_for;
use shared::model_config::ConfigOverrides;
use shared::model_identity::ModelIdentity;

use super::*;

fn config(tensor_parallel: u32) -> ClusterConfig {
    ClusterConfig {
        tensor_parallel,
        degrees: vec![tensor_parallel],
        reshard_after: secs(2),
        max_replicas: None,
        model: "m".into(),
        identity: Some(ModelIdentity(1)),
        config_overrides: ConfigOverrides::default(),
        dtype: Dtype::Bfloat16,
        quantization: Quantization::None,
        engine: EngineConfig {
            block_size: 16,
            max_model_len: 1024,
            max_num_seqs: 8,
            max_num_batched_tokens: 64,
            kv_cache_bytes: 1 << 20,
            swap_bytes: 0,
            kv_cache_dtype: KvCacheDtype::Auto,
            prefix_states: 0,
        },
        cpu_step_tokens: 64,
        collective_timeout: Duration::from_secs(5),
        step_timeout: Duration::from_secs(60),
        form_timeout: Duration::from_secs(60),
        lora: Lora::default(),
        model_names: vec!["m".to_owned()],
        draft_model: None,
        worker_stats: true,
        collective_key: Secret::of_random([5; 32]),
        placement: PlacementRules::default(),
        run: 7,
    }
}

fn member(worker: u32, incarnation: u64, host: &str) -> Member {
    Member {
        worker: WorkerId(worker),
        incarnation: Incarnation(incarnation),
        node: format!("node-{worker}"),
        host: host.into(),
        collective_addr: SocketAddr::from(([127, 0, 0, 1], 9000 + worker as u16)),
        draining: false,
        offer: NodeResources::default(),
        gpu: String::new(),
        build: "b".into(),
    }
}

fn secs(s: u64) -> Duration {
    Duration::from_secs(s)
}

/// Collects the orders to form: worker, rank, epoch, collective.
fn forms(effects: &[Effect]) -> Vec<(u32, u32, u64, CollectiveSpec)> {
    effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Send { worker, message: ToWorker::Form(form), .. } => {
                Some((worker.0, form.rank, form.epoch.0, form.collective.clone()))
            }
            _ => None,
        })
        .collect()
}

/// A cluster that so many workers of one host have joined, and its effects.
fn cluster_of(config: ClusterConfig, workers: u32) -> (Cluster, Vec<Effect>) {
    let (mut cluster, mut effects) = (Cluster::new(config), Vec::new());
    for worker in 0..workers {
        cluster.worker_joined(secs(0), member(worker, 1, "a"), &mut effects);
    }
    (cluster, effects)
}

/// Collects the workers told to end, and why.
fn shut_down(effects: &[Effect]) -> Vec<(u32, &str)> {
    let told = |effect| match effect {
        &Effect::Send { worker, message: ToWorker::Shutdown { ref reason, .. }, .. } => {
            Some((worker.0, reason.as_str()))
        }
        _ => None,
    };
    effects.iter().filter_map(told).collect()
}

fn bring_up(cluster: &mut Cluster, now: Duration, epoch: u64, workers: &[u32]) -> Vec<Effect> {
    let mut effects = Vec::new();
    for (i, worker) in workers.iter().enumerate() {
        let kv_blocks = 100 + i as u32;
        let formed = Formed {
            epoch: Epoch(epoch),
            kv_blocks,
            host_blocks: 0,
            weight_bytes: 1,
            load_seconds: 0.0,
            identity: ModelIdentity(1),
            adapters: 0,
        };
        cluster.worker_formed(now, WorkerId(*worker), formed, &mut effects);
    }
    for worker in workers {
        let started = Started { epoch: Epoch(epoch) };
        cluster.worker_started(now, WorkerId(*worker), started, &mut effects);
    }
    effects
}

/// The world size of each rank told to form, by worker.
fn world_sizes(effects: &[Effect]) -> Vec<(u32, u32, u32)> {
    effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Send { worker, message: ToWorker::Form(form), .. } => {
                Some((worker.0, form.rank, form.world_size))
            }
            _ => None,
        })
        .collect()
}

/// A cluster of four workers that serve as one replica, which may shrink to one rank.
fn four() -> Cluster {
    let mut config = config(4);
    config.degrees = vec![4, 2, 1];
    let (mut cluster, effects) = cluster_of(config, 4);
    assert_eq!(world_sizes(&effects).len(), 4);
    bring_up(&mut cluster, secs(1), 1, &[0, 1, 2, 3]);
    cluster
}

/// What workers are told to remember.
fn remembered(effects: &[Effect]) -> BTreeMap<u32, Trouble> {
    let of = |effect: &Effect| match effect {
        Effect::Send { worker, message: ToWorker::Remember(it), .. } => Some((worker.0, *it)),
        _ => None,
    };
    effects.iter().filter_map(of).collect()
}

/// The workers of each replica, by number.
fn groups(cluster: &Cluster) -> Vec<Vec<Option<u32>>> {
    let ranks = |it: ReplicaStatus| it.ranks.iter().map(|rank| rank.map(|it| it.0)).collect();
    cluster.replicas().map(ranks).collect()
}

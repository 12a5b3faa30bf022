//! Measures what a thousand workers cost the one thread that decides for the cluster.
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use coordinator::cluster::{Cluster, ClusterConfig, Effect, Member, PlacementRules};
use shared::ids::{Epoch, Incarnation, ReplicaId, WorkerId};
use shared::model_config::ConfigOverrides;
use shared::model_identity::ModelIdentity;
use shared::protocol::{
    Dtype, EngineConfig, Formed, KvCacheDtype, Lora, NodeResources, Quantization, Started, ToWorker,
};
use shared::wire::auth::Secret;

const WORKERS: u32 = 1000;

fn cluster(tensor_parallel: u32) -> Cluster {
    Cluster::new(ClusterConfig {
        tensor_parallel,
        degrees: vec![tensor_parallel],
        reshard_after: Duration::from_secs(2),
        max_replicas: None,
        model: "m".into(),
        identity: Some(ModelIdentity(1)),
        config_overrides: ConfigOverrides::default(),
        dtype: Dtype::Float32,
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
    })
}

fn member(worker: u32) -> Member {
    Member {
        worker: WorkerId(worker),
        incarnation: Incarnation(1),
        node: format!("node-{worker}"),
        host: format!("host-{}", worker / 8),
        collective_addr: SocketAddr::from(([127, 0, 0, 1], 9000)),
        draining: false,
        offer: NodeResources::default(),
        gpu: String::new(),
        build: "b".into(),
    }
}

/// Run with `--release -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn time_of_a_pass_over_a_thousand_workers() {
    for degree in [1, 2, 8] {
        let (mut cluster, mut effects, now) = (cluster(degree), Vec::new(), Duration::ZERO);
        let began = Instant::now();
        for worker in 0..WORKERS {
            cluster.worker_joined(now, member(worker), &mut effects);
        }
        let joining = began.elapsed();
        let formed: Vec<(WorkerId, Epoch)> = effects
            .drain(..)
            .filter_map(|effect| match effect {
                Effect::Send { worker, epoch, message: ToWorker::Form(_) } => Some((worker, epoch)),
                _ => None,
            })
            .collect();
        assert_eq!(formed.len() as u32, WORKERS / degree * degree);
        for (worker, epoch) in &formed {
            let done = Formed {
                epoch: *epoch,
                kv_blocks: 9,
                host_blocks: 0,
                weight_bytes: 1,
                load_seconds: 0.0,
                identity: ModelIdentity(1),
                adapters: 0,
            };
            cluster.worker_formed(now, *worker, done, &mut effects);
        }
        for (worker, epoch) in &formed {
            cluster.worker_started(now, *worker, Started { epoch: *epoch }, &mut effects);
        }
        cluster.tick(now, &mut effects);
        effects.clear();
        // A rank that keeps pace: its report changes nothing, but is handled all the same.
        let (worker, epoch) = formed[0];
        let passes = 100;
        let began = Instant::now();
        for _ in 0..passes {
            cluster.rank_pace(now, ReplicaId(0), epoch, worker, false, &mut effects);
        }
        let pass = began.elapsed() / passes;
        let began = Instant::now();
        for tick in 0..u64::from(passes) {
            cluster.tick(Duration::from_millis(50 * tick), &mut effects);
        }
        let tick = began.elapsed() / passes;
        assert!(effects.is_empty());
        println!("tp {degree}: {joining:?} for joining, {pass:?} a pass, {tick:?} an idle tick");
    }
}

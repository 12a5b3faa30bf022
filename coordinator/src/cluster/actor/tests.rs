//! Actors that panic are noticed; places of adapters are free as soon as nobody uses them.
use std::net::SocketAddr;

use shared::clock::SystemClock;
use shared::metrics::Limits;
use shared::protocol::{
    AdapterCommand, Dtype, Formed, KvCacheDtype, Lora, NodeResources, Quantization, Started,
};
use shared::wire::auth::Secret;

use shared::model_config::ConfigOverrides;
use shared::model_identity::ModelIdentity;

use super::*;
use crate::cluster::{Effect, Member, PlacementRules, ReplicaPhase};
use crate::coordinator::ended;
use crate::replica::driver::{DriverLimits, ReplicaDriver};
use crate::scheduler::{EpochEnd, Scheduler, SchedulerConfig};
use shared::metrics::labels::FailoverReason;

const PATIENCE: Duration = Duration::from_secs(10);

/// Runs a closure within an actor.
#[derive(Message)]
#[rtype(result = "()")]
struct Within<A: Actor>(What<A>);

type What<A> = Box<dyn FnOnce(&mut A, &mut <A as Actor>::Context) + Send>;

impl Handler<Within<Self>> for ClusterActor {
    type Result = ();

    fn handle(&mut self, Within(what): Within<Self>, ctx: &mut Self::Context) {
        what(self, ctx);
    }
}

impl Handler<Within<Self>> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, Within(what): Within<Self>, ctx: &mut Self::Context) {
        what(self, ctx);
    }
}

fn cluster() -> (Addr<ClusterActor>, watch::Receiver<ClusterView>) {
    cluster_with(Lora::default())
}

fn cluster_with(lora: Lora) -> (Addr<ClusterActor>, watch::Receiver<ClusterView>) {
    let engine = EngineConfig {
        block_size: 16,
        max_model_len: 64,
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        kv_cache_bytes: 1 << 20,
        swap_bytes: 0,
        kv_cache_dtype: KvCacheDtype::Auto,
        prefix_states: 0,
    };
    let config = ClusterConfig {
        tensor_parallel: 1,
        degrees: vec![1],
        reshard_after: Duration::from_secs(2),
        max_replicas: None,
        model: "m".into(),
        identity: Some(ModelIdentity(1)),
        config_overrides: ConfigOverrides::default(),
        dtype: Dtype::Float32,
        quantization: Quantization::None,
        engine,
        cpu_step_tokens: 64,
        collective_timeout: Duration::from_secs(5),
        step_timeout: Duration::from_secs(60),
        form_timeout: Duration::from_secs(60),
        lora,
        model_names: vec!["m".to_owned()],
        draft_model: None,
        worker_stats: true,
        collective_key: Secret::of_random([5; 32]),
        placement: PlacementRules::default(),
        run: 7,
    };
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
    let hub = Arc::new(Hub::new(Incarnation(1), Limits::default()));
    let (of_replicas, time) = (hub.clone(), clock.clone());
    let make: ReplicaFactory = Box::new(move |id, cluster, load| {
        let scheduler = Scheduler::new(SchedulerConfig {
            block_size: 16,
            max_model_len: 64,
            max_num_seqs: 4,
            max_num_batched_tokens: 64,
            max_mixed_prefill_tokens: None,
            max_queued_requests: 4,
            max_steps_in_flight: 2,
            prefix_caching: true,
            prefix_states: None,
            hidden_size: 2,
            vocab_size: u32::MAX,
            speculation: None,
        })?;
        let limits = DriverLimits {
            step_timeout: PATIENCE,
            step_floor: PATIENCE,
            unavailable_timeout: PATIENCE,
            max_queue_wait: None,
        };
        let observer = of_replicas.observer().clone();
        let driver = ReplicaDriver::new(time.now(), id, scheduler, observer, limits);
        let (failed, migrating) = (cluster.clone().recipient(), cluster.clone().recipient());
        let paces = cluster.recipient();
        Ok(ReplicaActor::new(id, driver, time.clone(), load, failed, migrating, paces))
    });
    let (view, seen) = watch::channel(ClusterView::default());
    let actors = ActorRuntime::hub("coordinator", 1, clock.clone());
    (ClusterActor::new(config, clock, hub, make, view, actors).start(), seen)
}

async fn within<A, T>(
    addr: &Addr<A>,
    what: impl FnOnce(&mut A, &mut A::Context) -> T + Send + 'static,
) -> T
where
    A: Actor<Context = Context<A>> + Handler<Within<A>>,
    T: Send + 'static,
{
    let (answer, answered) = tokio::sync::oneshot::channel();
    let what = Box::new(move |actor: &mut A, ctx: &mut A::Context| {
        let _ = answer.send(what(actor, ctx));
    });
    addr.send(Within(what)).await.unwrap();
    answered.await.unwrap()
}

/// Makes a worker join the cluster's core, and a replica of it serve.
fn serve(actor: &mut ClusterActor) -> (WorkerId, Epoch) {
    let (now, worker, mut effects) = (actor.clock.now(), WorkerId(0), Vec::new());
    let member = Member {
        worker,
        incarnation: Incarnation(1),
        node: "node".into(),
        host: "host".into(),
        collective_addr: SocketAddr::from(([127, 0, 0, 1], 9000)),
        draining: false,
        offer: NodeResources::default(),
        gpu: String::new(),
        build: "b".into(),
    };
    actor.core.worker_joined(now, member, &mut effects);
    let epoch = Epoch(1);
    let formed = Formed {
        epoch,
        kv_blocks: 9,
        host_blocks: 0,
        weight_bytes: 1,
        load_seconds: 0.0,
        identity: ModelIdentity(1),
        adapters: 0,
    };
    actor.core.worker_formed(Duration::ZERO, worker, formed, &mut effects);
    actor.core.worker_started(now, worker, Started { epoch }, &mut effects);
    (worker, epoch)
}

#[test]
fn the_end_of_the_cluster_is_noticed() {
    actix::System::new().block_on(async {
        let (cluster, view) = cluster();
        let quiet = tokio::time::timeout(Duration::from_millis(200), ended(view.clone())).await;
        assert!(quiet.is_err(), "it is there");
        cluster.do_send(Within(Box::new(|_: &mut ClusterActor, _| panic!("a defect"))));
        tokio::time::timeout(PATIENCE, ended(view)).await.expect("it is gone");
    });
}

#[test]
fn a_replica_that_pauses_as_planned_has_not_been_restarted() {
    actix::System::new().block_on(async {
        let (cluster, _view) = cluster();
        let broke = |end| Effect::ReplicaBroken {
            replica: ReplicaId(0),
            epoch: Epoch(1),
            end,
            reason: "so".to_owned(),
        };
        for (end, restarts) in [
            (EpochEnd::Planned, 0),
            (EpochEnd::Failed(FailoverReason::StepOverdue), 1),
            (EpochEnd::Planned, 1),
        ] {
            let effect = broke(end);
            let counted = within(&cluster, move |actor, ctx| {
                actor.carry_out(ctx, vec![effect]);
                actor.broken.get(&ReplicaId(0)).copied().unwrap_or(0)
            });
            assert_eq!(counted.await, restarts);
        }
    });
}

#[test]
fn a_replica_whose_actor_is_gone_forms_anew_under_another() {
    actix::System::new().block_on(async {
        let (cluster, _view) = cluster();
        let id = ReplicaId(0);
        let addr = within(&cluster, move |actor, ctx| {
            let (worker, epoch) = serve(actor);
            actor.start_replica(ctx, id);
            actor.dispatch.ready(id, epoch, vec![worker], 144, &mut Vec::new());
            actor.replicas[&id].clone()
        })
        .await;
        let phase = |actor: &mut ClusterActor| {
            let status = actor.core.replicas().next().unwrap();
            (status.phase, status.epoch, actor.replicas.len())
        };
        let serving = within(&cluster, move |actor, _| phase(actor)).await;
        assert_eq!(serving, (ReplicaPhase::Serving, Epoch(1), 1));
        addr.do_send(Within(Box::new(|_: &mut ReplicaActor, _| panic!("a defect"))));
        let anew = async {
            while within(&cluster, move |actor, _| phase(actor)).await
                != (ReplicaPhase::Forming, Epoch(2), 0)
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, anew).await.expect("it forms anew");
    });
}

fn load(name: &str) -> AdapterCommand {
    AdapterCommand::Load { name: name.to_owned(), path: format!("/{name}"), replace: false }
}

/// The adapters and their states after a command.
fn after(
    command: AdapterCommand,
    actor: &mut ClusterActor,
    ctx: &mut Context<ClusterActor>,
) -> Vec<(String, String)> {
    drop(actor.handle(ChangeAdapters(command), ctx));
    actor.core.adapter_statuses().into_iter().map(|it| (it.name, it.state)).collect()
}

#[test]
fn an_adapter_takes_the_place_of_one_unloaded_just_before_that_nobody_uses() {
    actix::System::new().block_on(async {
        let lora = Lora { places: 1, ..Lora::fixed([("a".to_owned(), "/a".to_owned())], 16) };
        let (cluster, _view) = cluster_with(lora);
        // One pass of the actor: no time passes for its core.
        let (used, free) = within(&cluster, move |actor, ctx| {
            serve(actor);
            let served = ServedAdapters::default();
            actor.adapters.serve(served.clone());
            actor.adapters_changed();
            let in_use = served.find("a").unwrap();
            after(AdapterCommand::Unload { name: "a".to_owned() }, actor, ctx);
            let used = after(load("b"), actor, ctx);
            drop(in_use);
            (used, after(load("c"), actor, ctx))
        })
        .await;
        let of = |name: &str, state: &str| vec![(name.to_owned(), state.to_owned())];
        assert_eq!(used, of("a", "leaving"), "a request still uses it");
        assert_eq!(free, of("c", "loading"));
    });
}

//! What passes over the cluster cost, and that no pass is skipped that would find something to do.
use proptest::prelude::*;
use shared::metrics::labels::FailoverReason;

use shared::model_identity::ModelIdentity;

use super::*;

/// Makes all replicas serve that have formed so far.
fn serve(cluster: &mut Cluster, now: Duration, effects: &[Effect]) {
    for (worker, _, epoch, _) in forms(effects) {
        let epoch = Epoch(epoch);
        let formed = Formed {
            epoch,
            kv_blocks: 9,
            host_blocks: 0,
            weight_bytes: 1,
            load_seconds: 0.0,
            identity: ModelIdentity(1),
            adapters: 0,
        };
        cluster.worker_formed(now, WorkerId(worker), formed, &mut Vec::new());
    }
    for (worker, _, epoch, _) in forms(effects) {
        cluster.worker_started(now, WorkerId(worker), Started { epoch: Epoch(epoch) }, &mut vec![]);
    }
}

/// What so many workers cost, in look-ups of replicas: one pass over a healthy cluster, the joining
/// of all workers, and the loss of a rank of each replica.
fn looks(workers: u32, degrees: &[u32]) -> [u64; 3] {
    let config = ClusterConfig { degrees: degrees.to_vec(), ..config(degrees[0]) };
    let (mut cluster, effects) = cluster_of(config, workers);
    let joining = cluster.replicas.looks();
    serve(&mut cluster, secs(1), &effects);
    let serving = cluster.replicas().filter(|it| it.phase == ReplicaPhase::Serving).count();
    assert_eq!(serving as u32, workers / degrees[0], "all of them serve");
    let before = cluster.replicas.looks();
    let mut effects = Vec::new();
    cluster.reconcile(secs(2), &mut effects);
    let healthy = cluster.replicas.looks() - before;
    assert!(effects.is_empty(), "{effects:?}");
    let before = cluster.replicas.looks();
    for worker in (0..workers).step_by(degrees[0] as usize) {
        cluster.worker_left(secs(3), WorkerId(worker), Incarnation(1), "killed", &mut effects);
    }
    cluster.tick(secs(3) + cluster.config.reshard_after, &mut effects);
    [healthy, joining, cluster.replicas.looks() - before]
}

#[test]
fn a_pass_looks_at_each_worker_and_replica_a_few_times() {
    for degrees in [&[1][..], &[2], &[8, 4, 2, 1]] {
        let [healthy, joining, lost] = looks(500, degrees);
        assert!(healthy <= 10_000, "{healthy} looks of one pass at degrees {degrees:?}");
        // A pass for each worker.
        assert!(joining <= 5_000_000, "{joining} looks while all join, at degrees {degrees:?}");
        assert!(lost <= 5_000_000, "{lost} looks after losses, at degrees {degrees:?}");
    }
}

#[test]
fn nothing_is_looked_at_while_nothing_happens() {
    let (mut cluster, mut effects) = cluster_of(config(2), 5);
    let formed = std::mem::take(&mut effects);
    serve(&mut cluster, secs(1), &formed);
    cluster.tick(secs(1), &mut effects);
    cluster.tick(secs(1), &mut effects);
    let before = cluster.replicas.looks();
    for second in 2..1000 {
        cluster.tick(secs(second), &mut effects);
    }
    assert_eq!((cluster.replicas.looks() - before, effects.len()), (0, 0));
}

/// An event in a cluster.
#[derive(Clone, Debug)]
enum Happening {
    Joins(u32, u32),
    Left(u32),
    Leaves(u32),
    /// What the ranks of these workers were last told succeeds.
    Formed(u32),
    Fails(u32),
    Broke(u32),
    Pace(u32, bool),
    Scaled(Option<u32>),
    Drained(u32),
    Passes(u64),
}

fn happening() -> impl Strategy<Value = Happening> {
    let worker = 0..9u32;
    prop_oneof![
        4 => (worker.clone(), 0..3u32).prop_map(|(worker, host)| Happening::Joins(worker, host)),
        2 => worker.clone().prop_map(Happening::Left),
        1 => worker.clone().prop_map(Happening::Leaves),
        4 => any::<u32>().prop_map(Happening::Formed),
        1 => worker.clone().prop_map(Happening::Fails),
        1 => (0..4u32).prop_map(Happening::Broke),
        2 => (worker.clone(), any::<bool>()).prop_map(|(worker, slow)| Happening::Pace(worker, slow)),
        1 => proptest::option::of(0..4u32).prop_map(Happening::Scaled),
        1 => worker.prop_map(Happening::Drained),
        8 => (1..1500u64).prop_map(Happening::Passes),
    ]
}

/// A cluster that makes passes only when due, as in operation, and one that makes every pass.
struct Twins {
    lazy: Cluster,
    eager: Cluster,
    now: Duration,
    incarnation: u64,
    told: Vec<(u32, u64)>,
}

impl Twins {
    fn both(&mut self, mut event: impl FnMut(&mut Cluster, Duration, &mut Vec<Effect>)) {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        event(&mut self.lazy, self.now, &mut a);
        event(&mut self.eager, self.now, &mut b);
        self.compare(&a, &b);
    }

    fn compare(&mut self, a: &[Effect], b: &[Effect]) {
        assert_eq!(a, b, "at {:?}", self.now);
        self.told.extend(forms(a).into_iter().map(|(worker, _, epoch, _)| (worker, epoch)));
    }

    fn tick(&mut self) {
        self.now += Duration::from_millis(50);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        self.lazy.tick(self.now, &mut a);
        self.eager.reconcile(self.now, &mut b);
        self.eager.tell_trouble(self.now, &mut b);
        self.compare(&a, &b);
    }

    fn incarnation(&self, worker: u32) -> Incarnation {
        self.eager.member(WorkerId(worker)).map_or(Incarnation(0), |member| member.incarnation)
    }

    fn happens(&mut self, happening: &Happening) {
        match *happening {
            Happening::Joins(worker, host) => {
                self.incarnation += 1;
                let joined = member(worker, self.incarnation, &format!("host-{host}"));
                self.both(|it, now, effects| it.worker_joined(now, joined.clone(), effects));
            }
            Happening::Left(worker) => {
                let incarnation = self.incarnation(worker);
                self.both(|it, now, effects| {
                    it.worker_left(now, WorkerId(worker), incarnation, "killed", effects);
                });
            }
            Happening::Leaves(worker) => {
                self.both(|it, now, effects| it.worker_leaves(now, WorkerId(worker), "", effects));
            }
            Happening::Formed(which) => {
                let told = std::mem::take(&mut self.told);
                for (worker, epoch) in told.iter().filter(|(worker, _)| which >> worker & 1 == 1) {
                    let (worker, epoch) = (WorkerId(*worker), Epoch(*epoch));
                    let done = Formed {
                        epoch,
                        kv_blocks: 9,
                        host_blocks: 0,
                        weight_bytes: 1,
                        load_seconds: 0.0,
                        identity: ModelIdentity(1),
                        adapters: 0,
                    };
                    self.both(|it, now, effects| it.worker_formed(now, worker, done, effects));
                }
                for (worker, epoch) in told.iter().filter(|(worker, _)| which >> worker & 1 == 1) {
                    let (worker, started) = (WorkerId(*worker), Started { epoch: Epoch(*epoch) });
                    self.both(|it, now, effects| it.worker_started(now, worker, started, effects));
                }
            }
            Happening::Fails(worker) => {
                let Some((worker, epoch)) = self.told.iter().find(|it| it.0 == worker).copied()
                else {
                    return;
                };
                let (epoch, message) = (Epoch(epoch), String::new());
                let failure = FormFailed { epoch, message, permanent: false };
                let worker = WorkerId(worker);
                self.both(|it, now, effects| it.form_failed(now, worker, &failure, effects));
            }
            Happening::Broke(replica) => {
                let Some(it) = self.eager.replicas().find(|it| it.id.0 == replica) else { return };
                let (id, epoch) = (it.id, it.epoch);
                self.both(|it, now, effects| {
                    it.epoch_failed(now, id, epoch, FailoverReason::StepOverdue, "hung", effects)
                });
            }
            Happening::Pace(worker, slow) => {
                let worker = WorkerId(worker);
                let is_its = |it: &ReplicaStatus| it.ranks.contains(&Some(worker));
                let Some(it) = self.eager.replicas().find(is_its) else { return };
                self.both(|cluster, now, effects| {
                    cluster.rank_pace(now, it.id, it.epoch, worker, slow, effects);
                });
            }
            Happening::Scaled(max) => {
                self.both(|it, now, effects| it.scale(now, max, effects));
            }
            Happening::Drained(worker) => self.both(|it, now, effects| {
                drop(it.drain(now, &[WorkerId(worker)], effects));
            }),
            Happening::Passes(ms) => (0..ms / 50).for_each(|_| self.tick()),
        }
    }
}

proptest! {
    #[test]
    fn no_pass_that_would_find_something_to_do_is_left_out(
        degrees in proptest::sample::select(vec![vec![1], vec![2], vec![2, 1], vec![4, 2, 1], vec![3, 2]]),
        expected in 0..4u32,
        spares in 0..3u32,
        patience in 1..6u64,
        happenings in prop::collection::vec(happening(), 1..80),
    ) {
        let placement = PlacementRules { spares, ..PlacementRules::default() };
        let config = ClusterConfig {
            degrees: degrees.clone(),
            placement,
            form_timeout: secs(patience),
            ..config(degrees[0])
        };
        let mut twins = Twins {
            lazy: Cluster::new(config.clone()),
            eager: Cluster::new(config),
            now: secs(1),
            incarnation: 0,
            told: Vec::new(),
        };
        let nodes: BTreeSet<String> = (0..expected).map(|worker| format!("node-{worker}")).collect();
        twins.both(|it, _, _| it.expect(nodes.clone()));
        for happening in &happenings {
            twins.happens(happening);
        }
        (0..250).for_each(|_| twins.tick());
        let statuses = |cluster: &Cluster| cluster.replicas().collect::<Vec<_>>();
        prop_assert_eq!(statuses(&twins.lazy), statuses(&twins.eager));
        // And the index of ranks agrees with the replicas.
        for status in twins.lazy.replicas() {
            for worker in status.ranks.iter().flatten() {
                prop_assert_eq!(twins.lazy.replicas.of(*worker), Some(status.id));
            }
        }
    }
}

//! The replica life cycle, event by event.
//!
//! - `passes`: passes over members and replicas
//! - `operators`: scaling and draining
//! - `silent`: ranks that do not answer
//! - `alike`: ranks of one model and build
//! - `devices`: devices set aside
mod alike;
mod devices;
mod operators;

use core::net::SocketAddr;

use shared::protocol::{
    CollectiveSpec, Dtype, EngineConfig, FormFailed, Formed, GroupId, Lora, NodeResources,
    Quantization, Started,
};
use shared::wire::auth::Secret;

use super::formation::collective_for;
use shared::model_identity::ModelIdentity;

use super::*;

mod passes;
mod silent;

fn config(tensor_parallel: u32) -> ClusterConfig {
    ClusterConfig {
        tensor_parallel,
        degrees: vec![tensor_parallel],
        reshard_after: secs(2),
        max_replicas: None,
        model: "m".into(),
        identity: Some(ModelIdentity(1)),
        dtype: Dtype::Bfloat16,
        quantization: Quantization::None,
        engine: EngineConfig {
            block_size: 16,
            max_model_len: 1024,
            max_num_seqs: 8,
            max_num_batched_tokens: 64,
            kv_cache_bytes: 1 << 20,
            swap_bytes: 0,
        },
        collective_timeout: Duration::from_secs(5),
        form_timeout: Duration::from_secs(60),
        lora: Lora::default(),
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

/// Who is told to form which rank, in which epoch, over what.
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

#[test]
fn no_epoch_s_token_tells_of_another_s() {
    let ranks = [member(0, 1, "a"), member(1, 1, "b")];
    let token = |config: &ClusterConfig, epoch| match collective_for(
        &ranks.each_ref(),
        config,
        Epoch(epoch),
    ) {
        CollectiveSpec::Tcp { token, .. } => token,
        other => panic!("{other:?}"),
    };
    let config = config(2);
    let other_run = ClusterConfig { run: 8, ..config.clone() };
    let other_key = ClusterConfig { collective_key: Secret::of_random([6; 32]), ..config.clone() };
    let tokens: BTreeSet<u64> = [&config, &other_run, &other_key]
        .iter()
        .flat_map(|config| (1..100).map(|epoch| token(config, epoch)))
        .collect();
    assert_eq!(tokens.len(), 3 * 99);
    // HMAC-SHA-256 under 32 bytes of 5, of "tutti number collective 0000000000000007 1".
    assert_eq!(token(&config, 1).to_le_bytes(), [0x12, 0x3c, 0x15, 0x2c, 0xa9, 0xf4, 0xad, 0xcd]);
}

/// A cluster that so many workers of one host have joined, and what it did.
fn cluster_of(config: ClusterConfig, workers: u32) -> (Cluster, Vec<Effect>) {
    let (mut cluster, mut effects) = (Cluster::new(config), Vec::new());
    for worker in 0..workers {
        cluster.worker_joined(secs(0), member(worker, 1, "a"), &mut effects);
    }
    (cluster, effects)
}

/// Who is told to end, and why.
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
        };
        cluster.worker_formed(now, WorkerId(*worker), formed, &mut effects);
    }
    for worker in workers {
        let started = Started { epoch: Epoch(epoch) };
        cluster.worker_started(now, WorkerId(*worker), started, &mut effects);
    }
    effects
}

#[test]
fn a_group_forms_when_complete_and_serves_with_the_smallest_cache() {
    let mut cluster = Cluster::new(config(2));
    let mut effects = Vec::new();
    cluster.worker_joined(secs(0), member(0, 1, "a"), &mut effects);
    assert!(effects.is_empty(), "one of two ranks forms nothing: {effects:?}");
    cluster.worker_joined(secs(0), member(1, 1, "a"), &mut effects);
    let shm = CollectiveSpec::SharedMemory { name: format!("tutti-{:016x}-1", 7) };
    assert_eq!(forms(&effects), [(0, 0, 1, shm.clone()), (1, 1, 1, shm)]);
    let effects = bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    let ready = Effect::ReplicaReady {
        replica: ReplicaId(0),
        epoch: Epoch(1),
        ranks: vec![WorkerId(0), WorkerId(1)],
        num_blocks: 100,
        host_blocks: 0,
    };
    assert_eq!(effects.last(), Some(&ready));
}

#[test]
fn rank_0s_group_id_reaches_the_other_ranks_of_its_epoch_once() {
    let (mut cluster, _) = cluster_of(config(3), 4);
    let tell = |cluster: &mut Cluster, worker: u32, epoch: u64, bytes: usize| {
        let mut effects = Vec::new();
        let id = GroupId { epoch: Epoch(epoch), bytes: vec![epoch as u8; bytes] };
        cluster.group_id(secs(0), WorkerId(worker), id.clone(), &mut effects);
        let told = effects.iter().map(|effect| match effect {
            Effect::Send { worker, epoch, message: ToWorker::GroupId(sent) } => {
                assert!(*epoch == id.epoch && *sent == id, "{effect:?}");
                worker.0
            }
            effect => panic!("{effect:?}"),
        });
        told.collect::<Vec<u32>>()
    };
    // Another rank's, a spare's, another epoch's, one that is too long: nobody's.
    for (worker, epoch, bytes) in [(1, 1, 128), (3, 1, 128), (0, 2, 128), (0, 0, 128), (0, 1, 257)]
    {
        assert!(tell(&mut cluster, worker, epoch, bytes).is_empty(), "{worker} {epoch} {bytes}");
    }
    assert_eq!(tell(&mut cluster, 0, 1, 128), [1, 2]);
    assert!(tell(&mut cluster, 0, 1, 128).is_empty(), "a second one");
    bring_up(&mut cluster, secs(1), 1, &[0, 1, 2]);
    assert!(tell(&mut cluster, 0, 1, 128).is_empty(), "when it serves");
    let mut effects = Vec::new();
    cluster.worker_left(secs(2), WorkerId(1), Incarnation(1), "killed", &mut effects);
    assert!(tell(&mut cluster, 0, 1, 128).is_empty(), "when its epoch is over");
    cluster.tick(secs(3), &mut effects);
    assert!(tell(&mut cluster, 0, 1, 128).is_empty(), "of the old epoch");
    assert_eq!(tell(&mut cluster, 0, 2, 128), [3, 2], "new in every epoch");
}

#[test]
fn ranks_on_two_hosts_meet_over_tcp() {
    let mut cluster = Cluster::new(config(2));
    let mut effects = Vec::new();
    cluster.worker_joined(secs(0), member(0, 1, "a"), &mut effects);
    cluster.worker_joined(secs(0), member(1, 1, "b"), &mut effects);
    let forms = forms(&effects);
    assert_eq!(forms.len(), 2);
    assert!(matches!(&forms[0].3, CollectiveSpec::Tcp { ranks, .. } if ranks.len() == 2));
}

#[test]
fn a_lost_rank_breaks_the_replica_frees_the_survivor_and_its_return_forms_a_new_epoch() {
    let mut cluster = Cluster::new(config(2));
    let mut effects = Vec::new();
    cluster.worker_joined(secs(0), member(0, 1, "a"), &mut effects);
    cluster.worker_joined(secs(0), member(1, 1, "a"), &mut effects);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    effects.clear();
    cluster.worker_left(secs(2), WorkerId(0), Incarnation(1), "killed", &mut effects);
    let abort = Effect::Send {
        worker: WorkerId(1),
        epoch: Epoch(1),
        message: ToWorker::Abort { epoch: Epoch(1) },
    };
    assert!(effects.contains(&abort), "{effects:?}");
    assert!(effects.iter().any(|e| matches!(e, Effect::ReplicaBroken { .. })));
    effects.clear();
    cluster.worker_joined(secs(3), member(0, 2, "a"), &mut effects);
    let forms = forms(&effects);
    let ranks: Vec<(u32, u32, u64)> = forms.iter().map(|f| (f.0, f.1, f.2)).collect();
    assert_eq!(ranks, [(0, 0, 2), (1, 1, 2)], "same ranks, next epoch");
}

#[test]
fn a_spare_takes_the_place_of_a_lost_rank() {
    let (mut cluster, mut effects) = cluster_of(config(2), 3);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    effects.clear();
    cluster.worker_left(secs(2), WorkerId(1), Incarnation(1), "killed", &mut effects);
    cluster.tick(secs(3), &mut effects);
    let ranks: Vec<(u32, u32)> = forms(&effects).iter().map(|f| (f.0, f.1)).collect();
    assert_eq!(ranks, [(0, 0), (2, 1)]);
}

#[test]
fn messages_of_an_older_epoch_or_incarnation_change_nothing() {
    let mut cluster = Cluster::new(config(1));
    let mut effects = Vec::new();
    cluster.worker_joined(secs(0), member(0, 1, "a"), &mut effects);
    effects.clear();
    let stale = bring_up(&mut cluster, secs(1), 99, &[0]);
    assert!(stale.is_empty(), "{stale:?}");
    cluster.worker_left(secs(1), WorkerId(0), Incarnation(77), "old link", &mut effects);
    assert!(effects.is_empty() && cluster.members().count() == 1);
    let ready = bring_up(&mut cluster, secs(1), 1, &[0]);
    assert!(matches!(ready.last(), Some(Effect::ReplicaReady { .. })));
}

#[test]
fn failures_in_a_row_back_off_and_a_permanent_one_is_reported_and_held() {
    let mut cluster = Cluster::new(config(1));
    let mut effects = Vec::new();
    cluster.worker_joined(secs(0), member(0, 1, "a"), &mut effects);
    let mut now = Duration::ZERO;
    let mut waits = Vec::new();
    for epoch in 1..=4 {
        let failure =
            FormFailed { epoch: Epoch(epoch), message: "busy".into(), permanent: epoch == 4 };
        effects.clear();
        cluster.form_failed(now, WorkerId(0), &failure, &mut effects);
        let broke_at = now;
        while forms(&effects).is_empty() {
            now += Duration::from_millis(50);
            cluster.tick(now, &mut effects);
        }
        waits.push((now - broke_at).as_millis());
        let unservable = effects.iter().any(|e| matches!(e, Effect::Unservable { .. }));
        assert_eq!(unservable, epoch == 4);
    }
    assert_eq!(waits, [100, 200, 400, 60_000]);
}

#[test]
fn what_failed_for_good_waits_for_a_change() {
    let mut cluster = Cluster::new(config(1));
    let mut effects = Vec::new();
    cluster.worker_joined(secs(0), member(0, 1, "a"), &mut effects);
    let (mut now, mut epoch) = (secs(0), 0);
    let mut fail = |cluster: &mut Cluster, now: Duration| {
        epoch += 1;
        let failure =
            FormFailed { epoch: Epoch(epoch), message: "truncated".into(), permanent: true };
        cluster.form_failed(now, WorkerId(0), &failure, &mut Vec::new());
    };
    for wait in [60, 120, 240, 480, 600, 600] {
        fail(&mut cluster, now);
        let held = cluster.replicas().next().unwrap().held_until;
        assert_eq!(held, Some(now + secs(wait)));
        effects.clear();
        cluster.tick(now + secs(wait) - Duration::from_millis(50), &mut effects);
        assert!(forms(&effects).is_empty(), "it is held for {wait} s");
        now += secs(wait);
        cluster.tick(now, &mut effects);
        assert_eq!(forms(&effects).len(), 1);
        assert_eq!(cluster.replicas().next().unwrap().held_until, None);
    }
    // Somebody comes, somebody goes, an operator says something: each is a change.
    type Change = fn(&mut Cluster, Duration, &mut Vec<Effect>);
    let changes: [Change; 3] = [
        |cluster, now, effects| cluster.worker_joined(now, member(1, 1, "b"), effects),
        |cluster, now, effects| {
            cluster.worker_left(now, WorkerId(1), Incarnation(1), "gone", effects);
        },
        |cluster, now, effects| cluster.scale(now, Some(1), effects),
    ];
    cluster.scale(now, Some(1), &mut effects);
    for change in changes {
        fail(&mut cluster, now);
        now += secs(1);
        effects.clear();
        change(&mut cluster, now, &mut effects);
        cluster.tick(now, &mut effects);
        assert_eq!(forms(&effects).len(), 1);
    }
    // And the next wait begins small again.
    fail(&mut cluster, now);
    assert_eq!(cluster.replicas().next().unwrap().held_until, Some(now + secs(60)));
}

#[test]
fn what_failed_for_good_is_held_whoever_says_first_that_it_failed() {
    let mut cluster = Cluster::new(config(2));
    let mut effects = Vec::new();
    cluster.worker_joined(secs(0), member(0, 1, "a"), &mut effects);
    cluster.worker_joined(secs(0), member(1, 1, "a"), &mut effects);
    cluster.tick(secs(0), &mut effects);
    let fails = |message: &str, permanent| FormFailed {
        epoch: Epoch(1),
        message: message.into(),
        permanent,
    };
    let (lost, missing) = (fails("rank 1 is gone", false), fails("no model", true));
    cluster.form_failed(secs(1), WorkerId(0), &lost, &mut effects);
    assert_eq!(cluster.replicas().next().unwrap().held_until, None);
    effects.clear();
    cluster.form_failed(secs(1), WorkerId(1), &missing, &mut effects);
    assert!(effects.iter().any(|effect| matches!(effect, Effect::Unservable { .. })));
    let replica = cluster.replicas().next().unwrap();
    assert_eq!(replica.held_until, Some(secs(61)));
    assert!(replica.last_failure.unwrap().contains("no model"));
    // Of an epoch that was over before it says nothing.
    cluster.tick(secs(61), &mut effects);
    cluster.form_failed(secs(62), WorkerId(1), &missing, &mut effects);
    assert_eq!(cluster.replicas().next().unwrap().held_until, None);
}

#[test]
fn placement_keeps_groups_on_one_host_where_it_can() {
    let members = [
        member(0, 1, "a"),
        member(1, 1, "b"),
        member(2, 1, "a"),
        member(3, 1, "b"),
        member(4, 1, "c"),
    ];
    let free: Vec<&Member> = members.iter().collect();
    let ids = |groups: Vec<Vec<WorkerId>>| -> Vec<Vec<u32>> {
        groups.into_iter().map(|g| g.into_iter().map(|w| w.0).collect()).collect()
    };
    let (nothing, any) = (|_| None, PlacementRules::default());
    assert_eq!(ids(place(&free, 2, &any, nothing)), [[0, 2], [1, 3]]);
    assert_eq!(ids(place(&free, 4, &any, nothing)), [[0, 2, 1, 3]]);
    assert_eq!(ids(place(&free, 1, &any, nothing)), [[0], [1], [2], [3], [4]]);
    assert!(place(&free, 6, &any, nothing).is_empty());
}

#[test]
fn workers_get_the_ranks_whose_weights_they_hold() {
    let members: Vec<Member> = (0..5).map(|worker| member(worker, 1, "a")).collect();
    let free: Vec<&Member> = members.iter().collect();
    let placed = |held: [Option<usize>; 5]| -> Vec<Vec<u32>> {
        let groups = place(&free, 2, &PlacementRules::default(), |worker| held[worker.0 as usize]);
        groups.into_iter().map(|g| g.into_iter().map(|w| w.0).collect()).collect()
    };
    assert_eq!(placed([Some(1), Some(1), Some(0), Some(0), None]), [[2, 0], [3, 1]]);
    assert_eq!(placed([None, Some(1), None, Some(0), Some(1)]), [[0, 4], [3, 1]]);
    // More of one rank than there are groups, and a rank there is none of.
    assert_eq!(placed([Some(1), Some(1), Some(1), Some(9), None]), [[2, 0], [3, 1]]);
}

#[test]
fn a_new_coordinator_waits_for_the_workers_there_were_and_keeps_their_ranks() {
    let mut cluster = Cluster::new(config(2));
    cluster.expect((0..4).map(|worker| format!("node-{worker}")).collect());
    let mut effects = Vec::new();
    // Everybody is back in the worst order: two of the same rank first.
    for (worker, rank) in [(1, 1), (3, 1), (0, 0), (2, 0)] {
        assert!(forms(&effects).is_empty(), "not before all are here");
        let shard =
            HeldShard { model: "m".into(), identity: ModelIdentity(1), rank, world_size: 2 };
        cluster.holds(WorkerId(worker), Some(shard));
        cluster.worker_joined(secs(1), member(worker, 1, "a"), &mut effects);
    }
    let ranks: Vec<(u32, u32)> = forms(&effects).iter().map(|form| (form.0, form.1)).collect();
    assert_eq!(ranks, [(0, 0), (1, 1), (2, 0), (3, 1)]);
    // Who comes later is not waited for.
    let mut cluster = Cluster::new(config(2));
    cluster.expect(["node-9".to_owned()].into());
    let mut effects = Vec::new();
    cluster.tick(secs(100), &mut effects);
    cluster.worker_joined(secs(100), member(0, 1, "a"), &mut effects);
    cluster.worker_joined(secs(101), member(1, 1, "a"), &mut effects);
    assert!(forms(&effects).is_empty());
    cluster.tick(secs(102), &mut effects);
    assert_eq!(forms(&effects).len(), 2, "it stayed away");
    // The weights of another model or degree mean nothing.
    let mut cluster = Cluster::new(config(2));
    let mut effects = Vec::new();
    for (worker, model, world_size) in [(0, "other", 2), (1, "m", 4)] {
        let shard = HeldShard {
            model: model.into(),
            identity: ModelIdentity(1),
            rank: 1 - worker,
            world_size,
        };
        cluster.holds(WorkerId(worker), Some(shard));
        cluster.worker_joined(secs(1), member(worker, 1, "a"), &mut effects);
    }
    let ranks: Vec<(u32, u32)> = forms(&effects).iter().map(|form| (form.0, form.1)).collect();
    assert_eq!(ranks, [(0, 0), (1, 1)]);
}

/// The world size of each rank that was told to form, by worker.
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

/// A cluster of four workers that serve as one replica, which may go down to one.
fn four() -> Cluster {
    let mut config = config(4);
    config.degrees = vec![4, 2, 1];
    let (mut cluster, effects) = cluster_of(config, 4);
    assert_eq!(world_sizes(&effects).len(), 4);
    bring_up(&mut cluster, secs(1), 1, &[0, 1, 2, 3]);
    cluster
}

#[test]
fn the_degree_follows_the_members_down_and_up_again() {
    let mut cluster = four();
    let mut effects = Vec::new();
    cluster.worker_left(secs(10), WorkerId(1), Incarnation(1), "killed", &mut effects);
    cluster.tick(secs(11), &mut effects);
    assert!(world_sizes(&effects).is_empty(), "it may be back in a moment");
    cluster.tick(secs(12), &mut effects);
    assert_eq!(world_sizes(&effects), [(0, 0, 2), (2, 1, 2)]);
    bring_up(&mut cluster, secs(13), 2, &[0, 2]);

    // One of the two goes: down to one. The third is a spare and takes its place instead.
    effects.clear();
    cluster.worker_left(secs(20), WorkerId(2), Incarnation(1), "killed", &mut effects);
    cluster.tick(secs(21), &mut effects);
    assert_eq!(world_sizes(&effects), [(0, 0, 2), (3, 1, 2)], "without waiting: nothing shrinks");
    bring_up(&mut cluster, secs(21), 3, &[0, 3]);
    effects.clear();
    cluster.worker_left(secs(30), WorkerId(3), Incarnation(1), "killed", &mut effects);
    cluster.tick(secs(32), &mut effects);
    assert_eq!(world_sizes(&effects), [(0, 0, 1)]);
    bring_up(&mut cluster, secs(33), 4, &[0]);

    // Back: to two as soon as there are two, to four when all are there.
    effects.clear();
    cluster.worker_joined(secs(40), member(3, 2, "a"), &mut effects);
    assert!(effects.iter().any(|e| matches!(e, Effect::ReplicaBroken { .. })), "{effects:?}");
    assert_eq!(world_sizes(&effects), [(0, 0, 2), (3, 1, 2)]);
    bring_up(&mut cluster, secs(41), 5, &[0, 3]);
    effects.clear();
    cluster.worker_joined(secs(42), member(1, 2, "a"), &mut effects);
    assert!(world_sizes(&effects).is_empty(), "three make no larger degree");
    cluster.worker_joined(secs(43), member(2, 2, "a"), &mut effects);
    assert_eq!(world_sizes(&effects), [(0, 0, 4), (3, 1, 4), (1, 2, 4), (2, 3, 4)]);
    assert_eq!(cluster.replicas().count(), 1);
}

#[test]
fn without_permission_a_replica_waits_for_its_ranks() {
    let (mut cluster, mut effects) = cluster_of(config(2), 2);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    effects.clear();
    cluster.worker_left(secs(2), WorkerId(1), Incarnation(1), "killed", &mut effects);
    cluster.tick(secs(1000), &mut effects);
    assert!(world_sizes(&effects).is_empty());
}

#[test]
fn too_few_workers_from_the_start_serve_as_a_small_replica() {
    let mut config = config(4);
    config.degrees = vec![4, 2];
    let (mut cluster, mut effects) = cluster_of(config, 3);
    cluster.tick(secs(1), &mut effects);
    assert!(world_sizes(&effects).is_empty(), "the others may still come");
    cluster.tick(secs(3), &mut effects);
    assert_eq!(world_sizes(&effects), [(0, 0, 2), (1, 1, 2)]);
}

#[test]
fn two_broken_replicas_complete_one() {
    let (mut cluster, mut effects) = cluster_of(config(2), 4);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    bring_up(&mut cluster, secs(1), 2, &[2, 3]);
    effects.clear();
    cluster.worker_left(secs(2), WorkerId(1), Incarnation(1), "killed", &mut effects);
    cluster.worker_left(secs(2), WorkerId(3), Incarnation(1), "killed", &mut effects);
    cluster.tick(secs(5), &mut effects);
    assert_eq!(world_sizes(&effects), [(0, 0, 2), (2, 1, 2)]);
    assert!(effects.contains(&Effect::ReplicaRemoved { replica: ReplicaId(1) }));
    // And four again: the lost ones make a replica of their own, under the number that was given
    // up.
    effects.clear();
    bring_up(&mut cluster, secs(6), 3, &[0, 2]);
    cluster.worker_joined(secs(7), member(1, 2, "a"), &mut effects);
    cluster.worker_joined(secs(7), member(3, 2, "a"), &mut effects);
    assert_eq!(world_sizes(&effects), [(1, 0, 2), (3, 1, 2)]);
    let ids: Vec<u32> = cluster.replicas().map(|replica| replica.id.0).collect();
    assert_eq!(ids, [0, 1]);
    // What is still said of the epoch that the number had before changes nothing.
    effects.clear();
    cluster.epoch_failed(secs(8), ReplicaId(1), Epoch(2), "late", &mut effects);
    assert!(effects.is_empty(), "{effects:?}");
}

#[test]
fn a_worker_that_leaves_is_not_waited_for_and_no_failure() {
    let mut config = config(2);
    config.degrees = vec![2, 1];
    config.reshard_after = secs(5);
    let (mut cluster, mut effects) = cluster_of(config, 2);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    effects.clear();
    cluster.worker_leaves(secs(2), WorkerId(0), "told to end", &mut effects);
    let broken = |effect: &Effect| match effect {
        Effect::ReplicaBroken { end, reason, .. } => Some((*end, reason.clone())),
        _ => None,
    };
    let ends: Vec<_> = effects.iter().filter_map(broken).collect();
    assert!(matches!(&ends[..], [(EpochEnd::Planned, why)] if why.contains("told to end")));
    assert_eq!(world_sizes(&effects), [(1, 0, 1)], "at once, with one rank fewer");
    let told: Vec<u32> = shut_down(&effects).into_iter().map(|(to, _)| to).collect();
    assert_eq!(told, [0], "it is let go");
    effects.clear();
    cluster.worker_leaves(secs(3), WorkerId(0), "again", &mut effects);
    cluster.worker_leaves(secs(3), WorkerId(7), "unknown", &mut effects);
    assert!(effects.is_empty(), "{effects:?}");
    // One that only dies is waited for.
    bring_up(&mut cluster, secs(4), 2, &[1]);
    cluster.worker_left(secs(4), WorkerId(0), Incarnation(1), "the end", &mut effects);
    cluster.worker_joined(secs(40), member(0, 2, "a"), &mut effects);
    bring_up(&mut cluster, secs(41), 3, &[1, 0]);
    effects.clear();
    cluster.worker_left(secs(42), WorkerId(0), Incarnation(2), "killed", &mut effects);
    cluster.tick(secs(44), &mut effects);
    assert!(world_sizes(&effects).is_empty());
}

#[test]
fn a_spare_takes_the_rank_of_a_slow_worker_which_is_used_last() {
    let (mut cluster, mut effects) = cluster_of(config(2), 2);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    effects.clear();
    cluster.rank_pace(secs(40), ReplicaId(0), Epoch(7), WorkerId(1), true, &mut effects);
    assert!(effects.is_empty(), "of another epoch");
    cluster.rank_pace(secs(40), ReplicaId(0), Epoch(1), WorkerId(1), true, &mut effects);
    assert_eq!(effects, [Effect::Pace { worker: WorkerId(1), slow: true }], "there is no spare");
    effects.clear();
    cluster.rank_pace(secs(45), ReplicaId(0), Epoch(1), WorkerId(1), true, &mut effects);
    assert!(effects.is_empty(), "it is known");
    cluster.worker_joined(secs(50), member(5, 1, "a"), &mut effects);
    let planned = |effect: &Effect| {
        matches!(effect, Effect::ReplicaBroken { end: EpochEnd::Planned, reason, .. }
            if reason.contains("node-1 is slow"))
    };
    assert!(effects.iter().any(planned), "{effects:?}");
    assert_eq!(world_sizes(&effects), [(0, 0, 2), (5, 1, 2)], "at once, when there is one");
    bring_up(&mut cluster, secs(51), 2, &[0, 5]);
    effects.clear();
    // A process that starts anew is not known to be slow.
    cluster.worker_left(secs(60), WorkerId(1), Incarnation(1), "killed", &mut effects);
    assert!(effects.contains(&Effect::Pace { worker: WorkerId(1), slow: false }));
}

#[test]
fn a_slow_spare_is_the_last_to_be_taken() {
    let (mut cluster, mut effects) =
        cluster_of(ClusterConfig { max_replicas: Some(1), ..config(2) }, 3);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    cluster.rank_pace(secs(40), ReplicaId(0), Epoch(1), WorkerId(0), true, &mut effects);
    bring_up(&mut cluster, secs(41), 2, &[2, 1]);
    cluster.worker_joined(secs(42), member(3, 1, "a"), &mut effects);
    effects.clear();
    cluster.worker_left(secs(43), WorkerId(1), Incarnation(1), "killed", &mut effects);
    cluster.tick(secs(44), &mut effects);
    assert_eq!(world_sizes(&effects), [(2, 0, 2), (3, 1, 2)], "not worker-0, which is slow");
    bring_up(&mut cluster, secs(45), 3, &[2, 3]);
    effects.clear();
    cluster.worker_left(secs(80), WorkerId(3), Incarnation(1), "killed", &mut effects);
    cluster.tick(secs(82), &mut effects);
    assert_eq!(world_sizes(&effects), [(2, 0, 2), (0, 1, 2)], "better than none");
}

/// The workers of each replica, by number.
fn groups(cluster: &Cluster) -> Vec<Vec<Option<u32>>> {
    let ranks = |it: ReplicaStatus| it.ranks.iter().map(|rank| rank.map(|it| it.0)).collect();
    cluster.replicas().map(ranks).collect()
}

//! Fewer ranks while some stay away.
use super::*;
use shared::metrics::labels::FailoverReason;

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
    // And four again: the lost ones make a new replica, under the number that was given up.
    effects.clear();
    bring_up(&mut cluster, secs(6), 3, &[0, 2]);
    cluster.worker_joined(secs(7), member(1, 2, "a"), &mut effects);
    cluster.worker_joined(secs(7), member(3, 2, "a"), &mut effects);
    assert_eq!(world_sizes(&effects), [(1, 0, 2), (3, 1, 2)]);
    let ids: Vec<u32> = cluster.replicas().map(|replica| replica.id.0).collect();
    assert_eq!(ids, [0, 1]);
    // Late messages about the number's earlier epoch change nothing.
    effects.clear();
    cluster.epoch_failed(
        secs(8),
        ReplicaId(1),
        Epoch(2),
        FailoverReason::StepOverdue,
        "late",
        &mut effects,
    );
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
    // One that merely dies is waited for.
    bring_up(&mut cluster, secs(4), 2, &[1]);
    cluster.worker_left(secs(4), WorkerId(0), Incarnation(1), "the end", &mut effects);
    cluster.worker_joined(secs(40), member(0, 2, "a"), &mut effects);
    bring_up(&mut cluster, secs(41), 3, &[1, 0]);
    effects.clear();
    cluster.worker_left(secs(42), WorkerId(0), Incarnation(2), "killed", &mut effects);
    cluster.tick(secs(44), &mut effects);
    assert!(world_sizes(&effects).is_empty());
}

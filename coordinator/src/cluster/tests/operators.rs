//! Commands of operators: scaling and draining, which the next coordinator continues.
use super::*;

/// The last state to be stored for the next leader.
fn desired(effects: &[Effect]) -> Option<&DesiredState> {
    effects.iter().rev().find_map(|effect| match effect {
        Effect::StoreDesired(desired) => Some(desired),
        _ => None,
    })
}

#[test]
fn scaling_removes_the_youngest_and_makes_new_ones_of_spares() {
    let (mut cluster, mut effects) = cluster_of(config(1), 3);
    for (epoch, worker) in [(1, 0), (2, 1), (3, 2)] {
        bring_up(&mut cluster, secs(1), epoch, &[worker]);
    }
    effects.clear();
    cluster.scale(secs(2), Some(1), &mut effects);
    let removed: Vec<&Effect> =
        effects.iter().filter(|e| matches!(e, Effect::ReplicaRemoved { .. })).collect();
    assert_eq!(removed.len(), 2);
    assert!(!effects.contains(&Effect::ReplicaRemoved { replica: ReplicaId(0) }));
    // A spare takes over at once when the last one breaks.
    effects.clear();
    cluster.worker_left(secs(3), WorkerId(0), Incarnation(1), "killed", &mut effects);
    cluster.tick(secs(4), &mut effects);
    assert_eq!(world_sizes(&effects), [(1, 0, 1)]);
    effects.clear();
    cluster.scale(secs(5), Some(0), &mut effects);
    assert_eq!(world_sizes(&effects), [(2, 0, 1)]);
}

/// Ids of removed replicas are reused: the lowest may be the youngest.
#[test]
fn the_youngest_is_the_one_that_was_made_last() {
    let (mut cluster, mut effects) = cluster_of(config(1), 3);
    for (epoch, worker) in [(1, 0), (2, 1), (3, 2)] {
        bring_up(&mut cluster, secs(1), epoch, &[worker]);
    }
    cluster.worker_left(secs(2), WorkerId(0), Incarnation(1), "killed", &mut effects);
    effects.clear();
    cluster.scale(secs(2), Some(2), &mut effects);
    assert!(effects.contains(&Effect::ReplicaRemoved { replica: ReplicaId(0) }), "{effects:?}");
    cluster.worker_joined(secs(3), member(0, 2, "a"), &mut effects);
    cluster.scale(secs(3), Some(3), &mut effects);
    bring_up(&mut cluster, secs(4), 4, &[0]);
    let serving = cluster.replicas().filter(|it| it.phase == ReplicaPhase::Serving).count();
    assert_eq!(serving, 3);
    effects.clear();
    cluster.scale(secs(5), Some(2), &mut effects);
    assert!(effects.contains(&Effect::ReplicaRemoved { replica: ReplicaId(0) }), "{effects:?}");
}

#[test]
fn a_drained_worker_is_replaced_and_told_to_end() {
    let (mut cluster, mut effects) = cluster_of(config(2), 3);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    effects.clear();
    cluster.drain(secs(2), &[WorkerId(0)], &mut effects).unwrap();
    assert_eq!(world_sizes(&effects), [(2, 0, 2), (1, 1, 2)], "the spare has its rank");
    let told = |worker: u32| shut_down(&effects).iter().any(|(to, _)| *to == worker);
    assert!(told(0) && !told(1) && !told(2));
    let mut effects = Vec::new();
    cluster.worker_left(secs(3), WorkerId(0), Incarnation(1), "goodbye", &mut effects);
    let refused = cluster.drain(secs(4), &[WorkerId(1)], &mut effects).unwrap_err();
    assert!(refused.contains("1 workers are left") && refused.contains("needs 2"), "{refused}");
    assert!(cluster.drain(secs(4), &[WorkerId(9)], &mut effects).is_err());
    assert!(effects.is_empty(), "a refusal changes nothing: {effects:?}");
}

#[test]
fn several_workers_are_drained_together_or_not_at_all() {
    let (mut cluster, mut effects) = cluster_of(config(2), 4);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    bring_up(&mut cluster, secs(1), 2, &[2, 3]);
    effects.clear();
    let last = [3, 2, 1].map(WorkerId);
    let refused = cluster.drain(secs(2), &last, &mut effects).unwrap_err();
    let expected = "without node-3, node-2, node-1, 1 workers are left, but a replica needs 2";
    assert_eq!(refused, expected);
    assert!(cluster.drain(secs(2), &[WorkerId(3), WorkerId(9)], &mut effects).is_err());
    assert!(effects.is_empty(), "a refusal changes nothing: {effects:?}");
    assert!(cluster.members().all(|member| !member.draining));
    cluster.drain(secs(2), &last[..2], &mut effects).unwrap();
    let told: Vec<u32> = shut_down(&effects).iter().map(|(to, _)| *to).collect();
    assert_eq!(told, [3, 2]);
    assert_eq!(world_sizes(&effects), [], "the replica that stays is not formed again");
}

/// Ids, phases and ranks of the replicas.
fn shape(cluster: &Cluster) -> Vec<(u32, ReplicaPhase, Vec<Option<u32>>)> {
    let ranks = |it: &ReplicaStatus| it.ranks.iter().map(|rank| rank.map(|it| it.0)).collect();
    cluster.replicas().map(|it| (it.id.0, it.phase, ranks(&it))).collect()
}

fn two_of_two() -> (Cluster, Vec<Effect>) {
    let (mut cluster, effects) = cluster_of(config(2), 4);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    bring_up(&mut cluster, secs(1), 2, &[2, 3]);
    (cluster, effects)
}

#[test]
fn a_replica_whose_workers_were_drained_is_wanted_again_when_they_are_back() {
    use ReplicaPhase::{Forming, Serving};
    let (mut cluster, mut effects) = two_of_two();
    effects.clear();
    cluster.drain(secs(2), &[3, 2].map(WorkerId), &mut effects).unwrap();
    for worker in [3, 2] {
        cluster.worker_left(secs(3), WorkerId(worker), Incarnation(1), "goodbye", &mut effects);
    }
    cluster.tick(secs(99), &mut effects);
    let whole = || (0, Serving, vec![Some(0), Some(1)]);
    assert_eq!(shape(&cluster), [whole()]);
    assert!(effects.contains(&Effect::ReplicaRemoved { replica: ReplicaId(1) }), "{effects:?}");
    for worker in [2, 3] {
        cluster.worker_joined(secs(100), member(worker, 2, "a"), &mut effects);
    }
    assert_eq!(shape(&cluster), [whole(), (1, Forming, vec![Some(2), Some(3)])]);
}

#[test]
fn what_a_drain_leaves_of_a_replica_is_spare_and_completes_others() {
    use ReplicaPhase::{Serving, Waiting};
    let (mut cluster, mut effects) = two_of_two();
    cluster.drain(secs(2), &[WorkerId(3)], &mut effects).unwrap();
    assert_eq!(shape(&cluster), [(0, Serving, vec![Some(0), Some(1)])], "2 is a spare");
    // One that crashes is missed, unless a spare is there.
    cluster.worker_left(secs(3), WorkerId(0), Incarnation(1), "killed", &mut effects);
    cluster.tick(secs(4), &mut effects);
    let ranks: Vec<_> = shape(&cluster).remove(0).2.into_iter().flatten().collect();
    assert!(ranks.contains(&1) && ranks.contains(&2), "{ranks:?}");

    let (mut cluster, mut effects) = two_of_two();
    for worker in [2, 3] {
        cluster.worker_left(secs(2), WorkerId(worker), Incarnation(1), "killed", &mut effects);
    }
    cluster.tick(secs(99), &mut effects);
    let missing = (1, Waiting, vec![None, None]);
    assert_eq!(shape(&cluster), [(0, Serving, vec![Some(0), Some(1)]), missing]);
}

/// An autoscaler takes workers away, and nobody says that they will not be back.
#[test]
fn a_replica_whose_workers_left_on_purpose_is_not_wanted_for_ever() {
    use ReplicaPhase::{Forming, Serving, Waiting};
    let leave = |cluster: &mut Cluster, effects: &mut Vec<Effect>, at: u64, worker: u32| {
        cluster.worker_leaves(secs(at), WorkerId(worker), "SIGTERM", effects);
        cluster.worker_left(secs(at), WorkerId(worker), Incarnation(1), "goodbye", effects);
    };
    let whole = || (0, Serving, vec![Some(0), Some(1)]);
    let (mut cluster, mut effects) = two_of_two();
    leave(&mut cluster, &mut effects, 2, 3);
    leave(&mut cluster, &mut effects, 50, 2);
    effects.clear();
    cluster.tick(secs(649), &mut effects);
    assert_eq!(shape(&cluster), [whole(), (1, Waiting, vec![None, None])], "as in a roll-out");
    cluster.tick(secs(650), &mut effects);
    assert_eq!(shape(&cluster), [whole()]);
    assert!(effects.contains(&Effect::ReplicaRemoved { replica: ReplicaId(1) }), "{effects:?}");
    for worker in [2, 3] {
        cluster.worker_joined(secs(700), member(worker, 2, "a"), &mut effects);
    }
    assert_eq!(shape(&cluster), [whole(), (1, Forming, vec![Some(2), Some(3)])]);
    // What is left of one is a spare.
    let (mut cluster, mut effects) = two_of_two();
    leave(&mut cluster, &mut effects, 2, 3);
    cluster.tick(secs(602), &mut effects);
    assert_eq!(shape(&cluster), [whole()]);
    // A worker that crashed is missed, whoever left beside it.
    let (mut cluster, mut effects) = two_of_two();
    cluster.worker_left(secs(2), WorkerId(2), Incarnation(1), "killed", &mut effects);
    leave(&mut cluster, &mut effects, 2, 3);
    cluster.tick(secs(9999), &mut effects);
    assert_eq!(shape(&cluster), [whole(), (1, Waiting, vec![None, None])]);
    // And so is the last replica.
    let (mut cluster, mut effects) = cluster_of(config(2), 2);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    for worker in [0, 1] {
        leave(&mut cluster, &mut effects, 2, worker);
    }
    cluster.tick(secs(9999), &mut effects);
    assert_eq!(shape(&cluster), [(0, Waiting, vec![None, None])]);
}

#[test]
fn at_a_smaller_degree_a_replica_goes_on_without_who_was_drained() {
    use ReplicaPhase::Forming;
    let degrees = ClusterConfig { degrees: vec![2, 1], ..config(2) };
    let (mut cluster, mut effects) = cluster_of(degrees, 4);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    bring_up(&mut cluster, secs(1), 2, &[2, 3]);
    cluster.drain(secs(2), &[WorkerId(3)], &mut effects).unwrap();
    assert_eq!(shape(&cluster)[1], (1, Forming, vec![Some(2)]));
    cluster.drain(secs(3), &[WorkerId(2)], &mut effects).unwrap();
    assert_eq!(shape(&cluster).len(), 1, "nothing is left of it");
}

#[test]
fn a_drain_outlives_a_link_that_broke_before_the_worker_heard_of_it() {
    let (mut cluster, mut effects) = cluster_of(config(1), 2);
    cluster.drain(secs(1), &[WorkerId(0)], &mut effects).unwrap();
    cluster.worker_left(secs(2), WorkerId(0), Incarnation(1), "the link broke", &mut effects);
    effects.clear();
    cluster.worker_joined(secs(3), member(0, 1, "a"), &mut effects);
    let told = |effects: &[Effect]| {
        shut_down(effects).iter().any(|(to, reason)| *to == 0 && reason.contains("drained"))
    };
    assert!(told(&effects) && world_sizes(&effects).is_empty(), "{effects:?}");
    assert!(cluster.member(WorkerId(0)).is_some_and(|member| member.draining));
    // Another process with that name is not affected.
    effects.clear();
    cluster.worker_joined(secs(4), member(0, 2, "a"), &mut effects);
    assert!(!told(&effects));
    assert!(cluster.member(WorkerId(0)).is_some_and(|member| !member.draining));
}

#[test]
fn the_next_coordinator_goes_by_what_the_last_one_was_told() {
    let bounded = ClusterConfig { max_replicas: Some(3), ..config(1) };
    let (mut cluster, mut effects) = cluster_of(bounded.clone(), 4);
    assert_eq!((cluster.max_replicas(), desired(&effects)), (Some(3), None), "nobody said more");
    cluster.scale(secs(1), Some(2), &mut effects);
    cluster.drain(secs(1), &[WorkerId(3)], &mut effects).unwrap();
    let said = desired(&effects).unwrap().clone();
    assert_eq!((said.generation, said.replicas, said.leaving.len()), (2, Some(2), 1));
    let refused = cluster.drain(secs(1), &[WorkerId(9)], &mut effects);
    assert!(refused.is_err() && *cluster.desired() == said, "a refusal is not kept");

    let (mut next, mut effects) = (Cluster::new(bounded), Vec::new());
    next.adopt_desired(said);
    for worker in 0..4 {
        next.worker_joined(secs(2), member(worker, 1, "b"), &mut effects);
    }
    assert_eq!((next.max_replicas(), next.replicas().count()), (Some(2), 2));
    let told = shut_down(&effects);
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].0 == 3 && told[0].1.contains("is drained"), "{told:?}");
    // Another process with that name was told nothing.
    effects.clear();
    next.worker_joined(secs(3), member(3, 2, "b"), &mut effects);
    assert!(shut_down(&effects).is_empty());
    // Without a bound; then as the coordinator was started.
    next.scale(secs(4), Some(0), &mut effects);
    assert_eq!((next.max_replicas(), next.replicas().count()), (None, 4));
    next.scale(secs(5), None, &mut effects);
    assert_eq!((next.max_replicas(), next.replicas().count()), (Some(3), 3));
    assert_eq!(desired(&effects).map(|it| it.generation), Some(4), "over all coordinators");
}

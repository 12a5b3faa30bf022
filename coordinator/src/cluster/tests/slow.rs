//! Slow ranks.
use super::*;

#[test]
fn a_spare_takes_the_rank_of_a_slow_worker_which_is_used_last() {
    let (mut cluster, mut effects) = cluster_of(config(2), 2);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    effects.clear();
    cluster.rank_pace(secs(40), ReplicaId(0), Epoch(7), WorkerId(1), true, &mut effects);
    assert!(effects.is_empty(), "of another epoch");
    cluster.rank_pace(secs(40), ReplicaId(0), Epoch(1), WorkerId(1), true, &mut effects);
    assert_eq!(
        effects,
        [Effect::WorkerPace { worker: WorkerId(1), slow: true }],
        "there is no spare"
    );
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
    let no_rank = Effect::WorkerPace { worker: WorkerId(1), slow: false };
    assert!(effects.contains(&no_rank), "nobody waits for it any more: {effects:?}");
    bring_up(&mut cluster, secs(51), 2, &[0, 5]);
    effects.clear();
    cluster.worker_left(secs(60), WorkerId(1), Incarnation(1), "killed", &mut effects);
    assert!(!effects.contains(&no_rank), "told already");
    cluster.worker_joined(secs(61), member(1, 2, "a"), &mut effects);
    assert_eq!(cluster.doubt(WorkerId(1)), None, "a restarted process is not known to be slow");
}

#[test]
fn a_rank_is_said_to_be_slow_while_it_is_seen_and_doubted_for_longer() {
    let (mut cluster, mut effects) = cluster_of(config(2), 2);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    effects.clear();
    let worker = WorkerId(1);
    let said = |slow| Effect::WorkerPace { worker, slow };
    for second in [40, 100] {
        cluster.rank_pace(secs(second), ReplicaId(0), Epoch(1), worker, true, &mut effects);
    }
    cluster.tick(secs(219), &mut effects);
    assert_eq!(effects, [said(true)]);
    // The steps of an idle replica do not tell who is slow.
    cluster.tick(secs(220), &mut effects);
    cluster.tick(secs(900), &mut effects);
    assert_eq!(effects, [said(true), said(false)]);
    assert!(cluster.doubt(worker).is_some(), "it is still the last choice");
    effects.clear();
    cluster.rank_pace(secs(901), ReplicaId(0), Epoch(1), worker, true, &mut effects);
    cluster.rank_pace(secs(940), ReplicaId(0), Epoch(1), worker, false, &mut effects);
    assert_eq!(effects, [said(true), said(false)]);
    assert_eq!(cluster.doubt(worker), None);
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
    // What was seen of it as another rank says nothing about this one.
    let slow = Effect::WorkerPace { worker: WorkerId(0), slow: true };
    assert!(!effects.contains(&slow));
    let ReplicaStatus { id, epoch, .. } = cluster.replicas().next().unwrap();
    cluster.rank_pace(secs(120), id, epoch, WorkerId(0), true, &mut effects);
    assert!(effects.contains(&slow), "{effects:?}");
}

//! Ranks of one replica have one model and one build.
use super::*;

/// Reports that a rank formed, with the contents of its model folder.
fn formed_with(cluster: &mut Cluster, worker: u32, epoch: u64, identity: u64) -> Vec<Effect> {
    let mut effects = Vec::new();
    let formed = Formed {
        epoch: Epoch(epoch),
        kv_blocks: 9,
        host_blocks: 0,
        weight_bytes: 1,
        load_seconds: 0.0,
        identity: ModelIdentity(identity),
        adapters: 0,
    };
    cluster.worker_formed(secs(1), WorkerId(worker), formed, &mut effects);
    effects
}

/// Why no replica can be formed.
fn unservable(effects: &[Effect]) -> Option<&str> {
    effects.iter().find_map(|effect| match effect {
        Effect::Unservable { reason, .. } => Some(reason.as_str()),
        _ => None,
    })
}

#[test]
fn ranks_of_other_models_are_no_replica() {
    // The coordinator has no weights itself: ranks are compared with each other.
    let (mut cluster, _) = cluster_of(ClusterConfig { identity: None, ..config(2) }, 2);
    assert_eq!(unservable(&formed_with(&mut cluster, 0, 1, 7)), None);
    let effects = formed_with(&mut cluster, 1, 1, 8);
    let reason = unservable(&effects).unwrap();
    for word in ["node-0", "node-1", "0000000000000007", "0000000000000008", " m "] {
        assert!(reason.contains(word), "{reason}");
    }
    assert!(
        !effects.iter().any(|it| matches!(it, Effect::Send { message: ToWorker::Start(_), .. }))
    );
    // It is not retried over and over, but when somebody has come with a remedy.
    let mut effects = Vec::new();
    cluster.tick(secs(30), &mut effects);
    assert!(forms(&effects).is_empty());
    cluster.worker_joined(secs(31), member(1, 2, "a"), &mut effects);
    assert_eq!(forms(&effects).len(), 2);
    assert!(bring_up(&mut cluster, secs(32), 2, &[0, 1]).len() > 2, "with equal ones it serves");
}

#[test]
fn a_rank_of_another_model_than_the_coordinator_s_is_none() {
    let (mut cluster, _) = cluster_of(config(1), 1);
    let effects = formed_with(&mut cluster, 0, 1, 8);
    let reason = unservable(&effects).unwrap();
    assert!(reason.contains("node-0") && reason.contains("the coordinator"), "{reason}");
    assert!(reason.contains("0000000000000008, not 0000000000000001"), "{reason}");
}

/// A worker of this build.
fn built(worker: u32, incarnation: u64, build: &str) -> Member {
    Member { build: build.to_owned(), ..member(worker, incarnation, "a") }
}

#[test]
fn builds_are_exchanged_replica_by_replica_and_never_mixed() {
    let mut cluster = Cluster::new(config(2));
    let mut effects = Vec::new();
    for worker in 0..4 {
        cluster.worker_joined(secs(0), built(worker, 1, "old"), &mut effects);
    }
    assert_eq!(groups(&cluster), [[Some(0), Some(1)], [Some(2), Some(3)]]);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    bring_up(&mut cluster, secs(1), 2, &[2, 3]);
    // One comes back with another build: its replica waits for the other one.
    cluster.worker_left(secs(10), WorkerId(0), Incarnation(1), "upgraded", &mut effects);
    cluster.worker_joined(secs(11), built(0, 2, "new"), &mut effects);
    effects.clear();
    cluster.tick(secs(12), &mut effects);
    assert_eq!(groups(&cluster), [[None, Some(1)], [Some(2), Some(3)]]);
    assert!(forms(&effects).is_empty());
    cluster.worker_left(secs(12), WorkerId(1), Incarnation(1), "upgraded", &mut effects);
    cluster.worker_joined(secs(13), built(1, 2, "new"), &mut effects);
    assert_eq!(groups(&cluster), [[Some(0), Some(1)], [Some(2), Some(3)]]);
    assert_eq!(forms(&effects).len(), 2);
    // A spare of the old build does not fit the new one, and nobody is sent away for it.
    bring_up(&mut cluster, secs(14), 3, &[0, 1]);
    cluster.worker_joined(secs(20), built(4, 1, "old"), &mut effects);
    effects.clear();
    cluster.rank_pace(secs(20), ReplicaId(0), Epoch(3), WorkerId(1), true, &mut effects);
    assert!(forms(&effects).is_empty() && groups(&cluster)[0] == [Some(0), Some(1)]);
    cluster.rank_pace(secs(20), ReplicaId(1), Epoch(2), WorkerId(3), true, &mut effects);
    assert_eq!(groups(&cluster)[1], [Some(2), Some(4)], "{effects:?}");
}

#[test]
fn a_small_replica_grows_by_workers_of_its_build_alone() {
    let mut cluster = Cluster::new(ClusterConfig { degrees: vec![2, 1], ..config(2) });
    let mut effects = Vec::new();
    cluster.worker_joined(secs(0), built(0, 1, "1-old"), &mut effects);
    cluster.worker_joined(secs(0), built(1, 1, "2-new"), &mut effects);
    assert!(groups(&cluster).is_empty(), "they make no whole replica");
    cluster.tick(secs(5), &mut effects);
    assert_eq!(groups(&cluster), [[Some(0)]], "one of them makes a small one");
    bring_up(&mut cluster, secs(6), 1, &[0]);
    effects.clear();
    cluster.tick(secs(60), &mut effects);
    assert!(effects.is_empty(), "and does not end for what it cannot have: {effects:?}");
    cluster.worker_joined(secs(61), built(2, 1, "1-old"), &mut effects);
    assert_eq!(groups(&cluster), [[Some(0), Some(2)]]);
}

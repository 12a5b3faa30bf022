//! Which worker gets which rank.
use super::*;

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
    // More workers of one rank than there are groups, and a rank that does not exist.
    assert_eq!(placed([Some(1), Some(1), Some(1), Some(9), None]), [[2, 0], [3, 1]]);
}

#[test]
fn a_new_coordinator_waits_for_the_workers_there_were_and_keeps_their_ranks() {
    let mut cluster = Cluster::new(config(2));
    cluster.expect((0..4).map(|worker| format!("node-{worker}")).collect());
    let mut effects = Vec::new();
    // All are back in the worst order: two of the same rank first.
    for (worker, rank) in [(1, 1), (3, 1), (0, 0), (2, 0)] {
        assert!(forms(&effects).is_empty(), "not before all are here");
        let shard =
            HeldShard { model: "m".into(), identity: ModelIdentity(1), rank, world_size: 2 };
        cluster.set_held_weights(WorkerId(worker), Some(shard));
        cluster.worker_joined(secs(1), member(worker, 1, "a"), &mut effects);
    }
    let ranks: Vec<(u32, u32)> = forms(&effects).iter().map(|form| (form.0, form.1)).collect();
    assert_eq!(ranks, [(0, 0), (1, 1), (2, 0), (3, 1)]);
    // Later workers are not waited for.
    let mut cluster = Cluster::new(config(2));
    cluster.expect(["node-9".to_owned()].into());
    let mut effects = Vec::new();
    cluster.tick(secs(100), &mut effects);
    cluster.worker_joined(secs(100), member(0, 1, "a"), &mut effects);
    cluster.worker_joined(secs(101), member(1, 1, "a"), &mut effects);
    assert!(forms(&effects).is_empty());
    cluster.tick(secs(102), &mut effects);
    assert_eq!(forms(&effects).len(), 2, "it stayed away");
    // Weights of another model or degree mean nothing.
    let mut cluster = Cluster::new(config(2));
    let mut effects = Vec::new();
    for (worker, model, world_size) in [(0, "other", 2), (1, "m", 4)] {
        let shard = HeldShard {
            model: model.into(),
            identity: ModelIdentity(1),
            rank: 1 - worker,
            world_size,
        };
        cluster.set_held_weights(WorkerId(worker), Some(shard));
        cluster.worker_joined(secs(1), member(worker, 1, "a"), &mut effects);
    }
    let ranks: Vec<(u32, u32)> = forms(&effects).iter().map(|form| (form.0, form.1)).collect();
    assert_eq!(ranks, [(0, 0), (1, 1)]);
}

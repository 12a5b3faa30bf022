//! Ranks whose every step hangs, although they answer when they are formed.
use super::super::failing_ranks::HUNG_MAX;
use super::*;
use shared::metrics::labels::FailoverReason;

/// Forms `effects`' replica, lets it serve for a while, and has a step hang in which all of its
/// ranks wait for each other. Returns who they were, and what came of it.
fn hangs(cluster: &mut Cluster, now: &mut Duration, effects: &[Effect]) -> (Vec<u32>, Vec<Effect>) {
    let told = forms(effects);
    let epoch = told.last().unwrap().2;
    let group: Vec<u32> = told.iter().filter(|it| it.2 == epoch).map(|form| form.0).collect();
    bring_up(cluster, *now, epoch, &group);
    *now += secs(20);
    let ranks: Vec<WorkerId> = group.iter().copied().map(WorkerId).collect();
    let mut effects = Vec::new();
    let id = ReplicaId(0);
    cluster.ranks_hang(*now, id, Epoch(epoch), &ranks);
    cluster.epoch_failed(
        *now,
        id,
        Epoch(epoch),
        FailoverReason::StepOverdue,
        "a step took over 15 s",
        &mut effects,
    );
    // All are heard: they left when they were told to.
    ranks.iter().for_each(|rank| cluster.executor_heard(*now, *rank));
    for _ in 0..12 {
        *now += secs(1);
        cluster.tick(*now, &mut effects);
    }
    (group, effects)
}

#[test]
fn a_rank_that_has_waited_for_another_in_vain_says_that_a_step_hangs() {
    // Ranks wait for each other for 5 s here; the last step was finished 4 s before, or just now.
    let of = |ranks, last, in_vain| {
        let (mut cluster, mut effects) = of_one_replica(3, &[ranks]);
        let mut now = secs(0);
        for _ in 0..HUNG_MAX {
            let told = forms(&effects);
            let (epoch, group) = (told[0].2, told.iter().map(|form| form.0).collect::<Vec<_>>());
            bring_up(&mut cluster, now + secs(1), epoch, &group);
            effects.clear();
            let (id, epoch, why) = (ReplicaId(0), Epoch(epoch), "it failed");
            let (last, at) = (Some(now + last), now + secs(10));
            // The other one says so, too.
            for worker in [0, 1].map(WorkerId) {
                cluster.step_failed(at, worker, id, epoch, last, in_vain, why, &mut effects);
            }
            now += secs(100);
            cluster.tick(now, &mut effects);
        }
        cluster.doubt(WorkerId(0)).is_some()
    };
    assert!(of(2, secs(6), true));
    assert!(!of(2, secs(10), true), "it did not wait for long");
    assert!(!of(2, secs(6), false), "it waited for masks, or computed for as long itself");
    assert!(!of(1, secs(6), false));
}

#[test]
fn a_request_that_hangs_every_step_is_failed_before_ranks_are_blamed() {
    let (mut cluster, mut effects) = of_one_replica(2, &[2, 1]);
    let mut now = secs(1);
    // Its client sends it once more.
    for _ in 0..2 * crate::scheduler::SUSPICION_MAX {
        let (group, next) = hangs(&mut cluster, &mut now, &effects);
        assert_eq!(group, [0, 1]);
        effects = next;
    }
    assert_eq!(world_sizes(&effects).len(), 2);
    assert_eq!(cluster.doubt(WorkerId(0)).or(cluster.doubt(WorkerId(1))), None);
}

#[test]
fn what_hung_is_forgotten_after_an_hour_of_serving() {
    let (mut cluster, mut effects) = of_one_replica(2, &[2]);
    let mut now = secs(1);
    for _ in 0..HUNG_MAX {
        effects = hangs(&mut cluster, &mut now, &effects).1;
    }
    // Half an hour without serving does not count; nor does an end that is no hang start anew.
    now += secs(1800);
    for _ in 0..2 {
        assert!(cluster.doubt(WorkerId(0)).is_some());
        let epoch = forms(&effects)[0].2;
        bring_up(&mut cluster, now, epoch, &[0, 1]);
        now += secs(1799);
        effects.clear();
        cluster.tick(now, &mut effects);
        cluster.epoch_failed(
            now,
            ReplicaId(0),
            Epoch(epoch),
            FailoverReason::StepOverdue,
            "a device",
            &mut effects,
        );
        cluster.tick(now + secs(10), &mut effects);
        now += secs(20);
    }
    assert!(cluster.doubt(WorkerId(0)).is_some());
    bring_up(&mut cluster, now, forms(&effects)[0].2, &[0, 1]);
    cluster.tick(now + secs(3), &mut effects);
    assert_eq!(cluster.doubt(WorkerId(0)), None);
}

fn of_one_replica(workers: u32, degrees: &[u32]) -> (Cluster, Vec<Effect>) {
    let mut config = config(degrees[0]);
    (config.degrees, config.max_replicas) = (degrees.to_vec(), Some(1));
    cluster_of(config, workers)
}

/// Who is formed until a group is without `bad`.
fn until_without(bad: u32, workers: u32) -> Vec<Vec<u32>> {
    let (mut cluster, mut effects) = of_one_replica(workers, &[2]);
    let (mut now, mut tried) = (secs(1), Vec::new());
    while !forms(&effects).is_empty() && tried.len() < 20 {
        let group: Vec<u32> = forms(&effects).iter().map(|form| form.0).collect();
        if !group.contains(&bad) {
            tried.push(group);
            break;
        }
        let (group, next) = hangs(&mut cluster, &mut now, &effects);
        tried.push(group);
        effects = next;
    }
    tried
}

#[test]
fn a_rank_whose_every_step_hangs_gives_way_to_a_spare_whoever_it_is() {
    for bad in 0..2 {
        let tried = until_without(bad, 3);
        assert!(!tried.last().unwrap().contains(&bad), "{bad}: {tried:?}");
        let most = HUNG_MAX as usize;
        assert_eq!(tried[..most], vec![vec![0, 1]; most], "fewer may be an accident");
        assert!(tried.len() <= most + 2, "{bad}: {tried:?}");
    }
}

#[test]
fn operators_see_who_is_doubted_and_why() {
    let (mut cluster, mut effects) = of_one_replica(3, &[2]);
    let mut now = secs(1);
    for _ in 1..HUNG_MAX {
        effects = hangs(&mut cluster, &mut now, &effects).1;
        assert_eq!(cluster.doubt(WorkerId(1)), None);
    }
    effects = hangs(&mut cluster, &mut now, &effects).1;
    let to = WorkerId(2);
    let replaced = Effect::RankReplaced { worker: WorkerId(1), to, failing: Failing::Steps };
    assert!(effects.contains(&replaced), "{effects:?}");
    let doubt = cluster.doubt(WorkerId(1)).unwrap();
    assert_eq!(doubt, "steps hung 7 times in a row while it was a rank");
    assert_eq!(cluster.doubt(to), None);
    // Another process of it is not known to hang, nor is one that an operator has tried again.
    cluster.worker_left(now, WorkerId(1), Incarnation(1), "killed", &mut effects);
    cluster.worker_joined(now, member(1, 2, "a"), &mut effects);
    assert_eq!(cluster.doubt(WorkerId(1)), None);
    assert!(cluster.doubt(WorkerId(0)).is_some());
    cluster.scale(now, None, &mut effects);
    assert_eq!(cluster.doubt(WorkerId(0)), None);
}

#[test]
fn steps_that_hang_now_and_then_are_no_reason() {
    let (mut cluster, mut effects) = of_one_replica(3, &[2]);
    let mut now = secs(1);
    for _ in 0..2 * HUNG_MAX {
        let (group, next) = hangs(&mut cluster, &mut now, &effects);
        assert_eq!(group, [0, 1]);
        effects = next;
        now += secs(600);
    }
}

#[test]
fn without_a_spare_it_goes_on_with_fewer_ranks_if_it_may() {
    let (mut cluster, mut effects) = of_one_replica(2, &[2, 1]);
    let mut now = secs(1);
    for _ in 0..HUNG_MAX {
        let (group, next) = hangs(&mut cluster, &mut now, &effects);
        assert_eq!(group, [0, 1]);
        effects = next;
    }
    assert_eq!(world_sizes(&effects), [(0, 0, 1)]);
    // Should it be the one that hangs, the other takes its place.
    let (_, next) = hangs(&mut cluster, &mut now, &effects);
    assert_eq!(world_sizes(&next), [(1, 0, 1)]);
    let epoch = forms(&next)[0].2;
    let mut effects = bring_up(&mut cluster, now, epoch, &[1]);
    effects.clear();
    for _ in 0..55 {
        now += secs(10);
        cluster.tick(now, &mut effects);
    }
    assert_eq!(effects, [], "it does not grow again soon");
    for _ in 0..10 {
        if world_sizes(&effects).is_empty() {
            now += secs(10);
            cluster.tick(now, &mut effects);
        }
    }
    assert_eq!(world_sizes(&effects).len(), 2, "but it does: {effects:?}");
    // Once is enough now.
    let (_, next) = hangs(&mut cluster, &mut now, &effects);
    assert_eq!(world_sizes(&next).len(), 1);
}

#[test]
fn without_permission_and_a_spare_the_same_ranks_are_formed_with_a_growing_wait() {
    let (mut cluster, mut effects) = of_one_replica(2, &[2]);
    let mut now = secs(1);
    for _ in 0..HUNG_MAX + 3 {
        let (group, next) = hangs(&mut cluster, &mut now, &effects);
        assert_eq!(group, [0, 1]);
        effects = next;
    }
    // It served for longer than another failure's wait would be forgotten after.
    let epoch = forms(&effects)[0].2;
    bring_up(&mut cluster, now, epoch, &[0, 1]);
    now += secs(20);
    let mut effects = Vec::new();
    cluster.ranks_hang(now, ReplicaId(0), Epoch(epoch), &[WorkerId(0), WorkerId(1)]);
    cluster.epoch_failed(
        now,
        ReplicaId(0),
        Epoch(epoch),
        FailoverReason::StepOverdue,
        "it hangs",
        &mut effects,
    );
    cluster.tick(now + secs(9), &mut effects);
    assert!(forms(&effects).is_empty());
    cluster.tick(now + secs(10), &mut effects);
    assert_eq!(forms(&effects).len(), 2);
}

//! Ranks that do not reach each other, while the coordinator reaches each of them.
use super::*;

/// Workers of hosts of their own join; those formed fail as long as `apart` says so of their group.
/// Returns who was formed each time, until the first replica serves.
fn formations(workers: u32, degree: u32, apart: impl Fn(&[u32]) -> bool) -> Vec<Vec<u32>> {
    let mut config = config(degree);
    config.max_replicas = Some(1);
    let (mut cluster, mut effects) = (Cluster::new(config), Vec::new());
    for worker in 0..workers {
        cluster.worker_joined(secs(0), member(worker, 1, &format!("h{worker}")), &mut effects);
    }
    let (mut all, mut now) = (Vec::new(), secs(0));
    while all.len() < 40 {
        let told = forms(&std::mem::take(&mut effects));
        let Some(epoch) = told.last().map(|form| form.2) else {
            now += secs(1);
            cluster.tick(now, &mut effects);
            continue;
        };
        let group: Vec<u32> = told.iter().filter(|it| it.2 == epoch).map(|form| form.0).collect();
        all.push(group.clone());
        now += secs(30);
        if !apart(&group) {
            let last = bring_up(&mut cluster, now, epoch, &group);
            assert!(last.iter().any(|it| matches!(it, Effect::ReplicaReady { .. })), "{last:?}");
            break;
        }
        // All of them say so, the last one when another may have its rank.
        for worker in &group {
            let message = "cannot reach the others".to_owned();
            let failure = FormFailed { epoch: Epoch(epoch), message, permanent: false };
            cluster.form_failed(now, WorkerId(*worker), &failure, &mut effects);
        }
        cluster.tick(now, &mut effects);
    }
    all
}

#[test]
fn one_of_two_ranks_that_do_not_reach_each_other_gives_way_to_a_spare() {
    let tried = formations(3, 2, |group| group.contains(&0) && group.contains(&1));
    assert_eq!(tried, [vec![0, 1], vec![0, 1], vec![0, 2]], "once may be an accident");
}

#[test]
fn whoever_reaches_nobody_is_found() {
    for degree in [2, 4] {
        for workers in degree + 1..=degree + 3 {
            for bad in 0..workers {
                let tried = formations(workers, degree, |group| group.contains(&bad));
                let last = tried.last().unwrap();
                assert!(!last.contains(&bad), "{bad} of {workers}: {tried:?}");
                assert!(tried.len() <= 2 * degree as usize + 1, "{bad} of {workers}: {tried:?}");
            }
        }
    }
}

#[test]
fn two_halves_of_a_network_that_are_apart_find_whoever_is_together() {
    let halves = |group: &[u32]| group.iter().any(|it| it % 2 != group[0] % 2);
    let tried = formations(4, 2, halves);
    assert!(!halves(tried.last().unwrap()), "{tried:?}");
}

#[test]
fn without_a_spare_the_same_ranks_are_tried_again() {
    let tried = formations(2, 2, |_| true);
    assert_eq!(tried.len(), 40);
    assert!(tried.iter().all(|group| *group == [0, 1]), "{tried:?}");
}

#[test]
fn what_failed_is_forgotten_when_it_serves() {
    let (mut cluster, effects) = cluster_of(config(2), 3);
    let mut epoch = forms(&effects)[0].2;
    for _ in 0..4 {
        let message = "busy".to_owned();
        let failure = FormFailed { epoch: Epoch(epoch), message, permanent: false };
        let mut effects = Vec::new();
        cluster.form_failed(secs(1), WorkerId(0), &failure, &mut effects);
        cluster.tick(secs(100), &mut effects);
        epoch = forms(&effects)[0].2;
        bring_up(&mut cluster, secs(101), epoch, &[0, 1]);
        let mut effects = Vec::new();
        cluster.epoch_failed(secs(102), ReplicaId(0), Epoch(epoch), "a step", &mut effects);
        cluster.tick(secs(200), &mut effects);
        epoch = forms(&effects)[0].2;
        assert_eq!(groups(&cluster), [[Some(0), Some(1)]]);
    }
}

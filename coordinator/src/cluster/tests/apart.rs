//! Ranks that do not reach each other, while the coordinator reaches each of them.
use shared::metrics::labels::FailoverReason;

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
        cluster.epoch_failed(
            secs(102),
            ReplicaId(0),
            Epoch(epoch),
            FailoverReason::StepOverdue,
            "a step",
            &mut effects,
        );
        cluster.tick(secs(200), &mut effects);
        epoch = forms(&effects)[0].2;
        assert_eq!(groups(&cluster), [[Some(0), Some(1)]]);
    }
}

/// Two workers that do not reach each other join a coordinator that may go on with one of them,
/// with what an earlier one had them remember. Returns how often they are formed in vain, what they
/// remember then, and the coordinator.
fn one_of_two(
    at: Duration,
    brought: &BTreeMap<u32, Trouble>,
) -> (usize, BTreeMap<u32, Trouble>, Cluster) {
    let mut config = config(2);
    config.degrees = vec![2, 1];
    config.max_replicas = Some(1);
    let (mut cluster, mut effects, mut now) = (Cluster::new(config), Vec::new(), at);
    for worker in 0..2 {
        let trouble = brought.get(&worker).copied().unwrap_or_default();
        let member = member(worker, 1, &format!("h{worker}"));
        cluster.trouble_brought(now, &member, trouble);
        cluster.worker_joined(now, member, &mut effects);
    }
    let (mut tried, mut all) = (0, BTreeMap::new());
    while tried < 9 {
        let told = forms(&std::mem::take(&mut effects));
        if told.len() == 1 {
            bring_up(&mut cluster, now, told[0].2, &[told[0].0]);
            break;
        }
        if let Some(epoch) = told.first().map(|form| form.2) {
            tried += 1;
            now += secs(30);
            let message = "cannot reach the others".to_owned();
            let failure = FormFailed { epoch: Epoch(epoch), message, permanent: false };
            for worker in 0..2 {
                cluster.form_failed(now, WorkerId(worker), &failure, &mut effects);
            }
        }
        now += secs(1);
        cluster.tick(now, &mut effects);
        all.extend(remembered(&effects));
    }
    (tried, all, cluster)
}

#[test]
fn what_failed_is_known_to_the_next_coordinator_from_the_workers() {
    let (tried, told, mut cluster) = one_of_two(secs(0), &BTreeMap::new());
    assert_eq!(tried, 3);
    let (stays, rests) = (told[&0].formations, told[&1].formations);
    // Of equals, the first goes on; what it was told is what was before it served.
    assert_eq!((stays.failures, stays.rests, rests.failures, rests.rests), (3, 0, 3, 1));
    assert!((500_000..=600_000).contains(&rests.rests_ms), "{rests:?}");
    let mut effects = Vec::new();
    cluster.tick(secs(200), &mut effects);
    assert_eq!(remembered(&effects), [(0, Trouble::default())].into(), "it serves");
    let told = BTreeMap::from([(0, Trouble::default()), (1, told[&1].after(secs(100)))]);
    assert_eq!(told[&1].formations.rests_ms, rests.rests_ms - 100_000);
    // The next one goes on with one of them when they have failed once more.
    let (tried, again, next) = one_of_two(secs(0), &told);
    assert_eq!((tried, again[&1].formations.failures), (1, 4), "{again:?}");
    assert_eq!(groups(&next), [[Some(0)]]);
    assert!(next.rests(WorkerId(1)) && !next.rests(WorkerId(0)));
    // A restarted worker brings nothing.
    assert_eq!(one_of_two(secs(0), &BTreeMap::new()).0, 3);
}

/// A cluster of so many workers on hosts of their own, in time.
struct Apart {
    cluster: Cluster,
    now: Duration,
    /// Whether these cannot be one group.
    apart: fn(&[u32]) -> bool,
    /// Who was formed each time, and whether it served.
    tried: Vec<(Vec<u32>, bool)>,
}

impl Apart {
    fn new(config: ClusterConfig, workers: u32, apart: fn(&[u32]) -> bool) -> Self {
        let mut all =
            Self { cluster: Cluster::new(config), now: secs(0), apart, tried: Vec::new() };
        for worker in 0..workers {
            all.joins(worker);
        }
        all
    }

    fn joins(&mut self, worker: u32) {
        let member = member(worker, 1, &format!("h{worker}"));
        let mut effects = Vec::new();
        self.cluster.worker_joined(self.now, member, &mut effects);
        self.goes_on(effects);
    }

    /// Answers what is formed: 30 s later, that the others cannot be reached, or at once.
    fn goes_on(&mut self, mut effects: Vec<Effect>) {
        loop {
            let told = forms(&std::mem::take(&mut effects));
            let Some(epoch) = told.last().map(|form| form.2) else { return };
            let of = told.iter().filter(|it| it.2 == epoch).map(|form| form.0);
            let group: Vec<u32> = of.collect();
            let works = !(self.apart)(&group);
            self.tried.push((group.clone(), works));
            assert!(self.tried.len() < 50, "it never ends: {:?}", self.tried);
            if works {
                effects = bring_up(&mut self.cluster, self.now, epoch, &group);
                continue;
            }
            self.now += secs(30);
            let message = "cannot reach the others".to_owned();
            let failure = FormFailed { epoch: Epoch(epoch), message, permanent: false };
            for worker in group {
                self.cluster.form_failed(self.now, WorkerId(worker), &failure, &mut effects);
            }
            self.now += secs(11);
            self.cluster.tick(self.now, &mut effects);
        }
    }

    /// Lets time pass, ten seconds at a time; returns who was formed meanwhile.
    fn wait(&mut self, seconds: u64) -> Vec<(Vec<u32>, bool)> {
        let (until, before) = (self.now + secs(seconds), self.tried.len());
        while self.now < until {
            self.now += secs(10);
            let mut effects = Vec::new();
            self.cluster.tick(self.now, &mut effects);
            self.goes_on(effects);
        }
        self.tried.split_off(before)
    }
}

fn shrinking(degrees: &[u32]) -> ClusterConfig {
    let mut config = config(degrees[0]);
    (config.degrees, config.max_replicas) = (degrees.to_vec(), Some(1));
    config
}

#[test]
fn ranks_that_do_not_reach_each_other_go_on_with_fewer_where_there_is_no_spare() {
    let mut all = Apart::new(shrinking(&[2, 1]), 2, |group| group.len() > 1);
    assert_eq!(all.tried.pop(), Some((vec![0], true)));
    assert_eq!(all.tried, vec![(vec![0, 1], false); 3], "twice may be an accident");
    assert!(all.cluster.doubt(WorkerId(1)).unwrap().contains("formations"));
    all.tried.clear();
    // It is tried again, but rarely, and one failure is enough then.
    assert_eq!(all.wait(580), []);
    assert_eq!(all.wait(40), [(vec![0, 1], false), (vec![0], true)]);
    assert_eq!(all.wait(1100), []);
    assert_eq!(all.wait(200), [(vec![0, 1], false), (vec![0], true)], "after twice as long");
    // Until an operator says that it is mended.
    all.apart = |_| false;
    let mut effects = Vec::new();
    all.cluster.scale(all.now, None, &mut effects);
    all.goes_on(effects);
    assert_eq!(all.tried.pop(), Some((vec![0, 1], true)));
    assert_eq!(all.cluster.doubt(WorkerId(1)), None);
}

#[test]
fn the_largest_smaller_degree_that_works_is_found() {
    // Who reaches whom, and how many then serve.
    type Case = (u32, &'static [u32], fn(&[u32]) -> bool, usize);
    let cases: [Case; 4] = [
        (4, &[4, 2, 1], |group| group.len() > 2 && group.contains(&3), 2),
        (4, &[4, 2, 1], |group| group.len() > 1 && group.contains(&0), 2),
        (4, &[4, 2, 1], |group| group.len() > 1 && *group != [2, 3] && *group != [3, 2], 2),
        (4, &[4, 2, 1], |group| group.len() > 1, 1),
    ];
    for (index, (workers, degrees, apart, serve)) in cases.into_iter().enumerate() {
        let all = Apart::new(shrinking(degrees), workers, apart);
        let (last, works) = all.tried.last().unwrap();
        assert!(*works && last.len() == serve, "case {index}: {:?}", all.tried);
        assert!(all.tried.len() <= 16, "case {index}: {:?}", all.tried);
    }
}

#[test]
fn who_comes_makes_a_small_replica_grow_at_once() {
    let mut all = Apart::new(shrinking(&[2, 1]), 2, |group| group.contains(&1) && group.len() > 1);
    assert_eq!(all.tried.last(), Some(&(vec![0], true)));
    all.joins(2);
    assert_eq!(all.tried.last(), Some(&(vec![0, 2], true)));
}

#[test]
fn a_replica_grows_with_those_that_came_only() {
    // A spare that once did not answer, and is no better than the rank that it went on without.
    let mut all = Apart::new(shrinking(&[2, 1]), 0, |group| group.contains(&1) && group.len() > 1);
    all.cluster.pending_answers.strike(WorkerId(2));
    for worker in [0, 1] {
        let member = member(worker, 1, "near");
        all.cluster.worker_joined(all.now, member, &mut Vec::new());
    }
    let mut effects = Vec::new();
    all.cluster.worker_joined(all.now, member(2, 1, "far"), &mut effects);
    all.cluster.epoch_failed(
        all.now,
        ReplicaId(0),
        Epoch(1),
        FailoverReason::StepOverdue,
        "again",
        &mut effects,
    );
    all.now += secs(11);
    all.cluster.tick(all.now, &mut effects);
    all.goes_on(effects);
    assert_eq!(all.tried.last(), Some(&(vec![0, 2], true)));
    assert!(all.tried.iter().filter(|(group, _)| *group == [0, 1]).count() <= 3);
}

#[test]
fn spares_that_fail_in_another_way_do_not_take_turns() {
    // 1 has hung again and again, and 2 reaches nobody.
    let mut all = Apart::new(shrinking(&[2, 1]), 3, |group| group.len() > 1 && group.contains(&2));
    assert_eq!(all.tried.last(), Some(&(vec![0, 1], true)));
    for _ in 0..20 {
        let serves = all.tried.last().unwrap().0.clone();
        if serves.len() == 1 {
            break;
        }
        all.now += secs(20);
        let ranks: Vec<WorkerId> = serves.into_iter().map(WorkerId).collect();
        let epoch = all.cluster.replicas().next().unwrap().epoch;
        let mut effects = Vec::new();
        all.cluster.ranks_hang(all.now, ReplicaId(0), epoch, &ranks);
        all.cluster.epoch_failed(
            all.now,
            ReplicaId(0),
            epoch,
            FailoverReason::StepOverdue,
            "it hangs",
            &mut effects,
        );
        ranks.iter().for_each(|rank| all.cluster.executor_heard(all.now, *rank));
        all.now += secs(11);
        all.cluster.tick(all.now, &mut effects);
        all.goes_on(effects);
    }
    let (last, works) = all.tried.pop().unwrap();
    assert!(works && last == [0], "{last:?} after {:?}", all.tried);
}

#[test]
fn a_rank_that_fetches_what_it_lacks_is_no_reason_to_replace_one() {
    for fetches in [true, false] {
        let (mut cluster, mut effects) = cluster_of(config(2), 3);
        let mut now = secs(0);
        for _ in 0..3 {
            let epoch = Epoch(forms(&effects).last().unwrap().2);
            now += secs(30);
            if fetches {
                let progress = LoadProgress { epoch, adapter: 0, bytes_done: 1, bytes_total: 100 };
                cluster.load_progressed(now, WorkerId(1), progress);
            }
            cluster.executor_heard(now, WorkerId(1));
            let message = "rank 1 did not come".to_owned();
            let failure = FormFailed { epoch, message, permanent: false };
            effects.clear();
            cluster.form_failed(now, WorkerId(0), &failure, &mut effects);
            now += secs(11);
            cluster.tick(now, &mut effects);
        }
        assert_eq!(groups(&cluster) == [[Some(0), Some(1)]], fetches);
    }
}

#[test]
fn a_link_that_drops_is_no_reason_to_grow() {
    let mut all = Apart::new(shrinking(&[2, 1]), 2, |group| group.len() > 1);
    all.tried.clear();
    let (worker, mut effects) = (WorkerId(1), Vec::new());
    let leaves = |all: &mut Apart, incarnation: u64| {
        let (incarnation, mut effects) = (Incarnation(incarnation), Vec::new());
        all.cluster.worker_left(all.now, worker, incarnation, "no link", &mut effects);
        all.goes_on(effects);
        all.now += secs(3);
    };
    leaves(&mut all, 1);
    all.joins(1);
    assert_eq!(all.tried, []);
    assert!(all.cluster.doubt(worker).is_some());
    // Another process may do better.
    leaves(&mut all, 1);
    all.cluster.worker_joined(all.now, member(1, 2, "h1"), &mut effects);
    all.goes_on(effects);
    assert_eq!(all.tried[0], (vec![0, 1], false));
}

//! Ranks that never answer when they are formed, while their links live.
use shared::metrics::labels::FailoverReason;
use shared::model_identity::ModelIdentity;

use super::*;

/// Runs passes as time passes, until this time.
fn wait(cluster: &mut Cluster, from: u64, until: u64) -> Vec<Effect> {
    let mut effects = Vec::new();
    for tenth in from * 10..=until * 10 {
        cluster.tick(Duration::from_millis(tenth * 100), &mut effects);
    }
    effects
}

fn silent(effects: &[Effect]) -> Vec<u32> {
    let of = |effect: &Effect| match effect {
        Effect::AnswerTimedOut { worker, lasts } => {
            assert_eq!(*lasts, secs(60));
            Some(worker.0)
        }
        _ => None,
    };
    effects.iter().filter_map(of).collect()
}

fn formed(cluster: &mut Cluster, at: u64, worker: u32, epoch: u64) {
    let epoch = Epoch(epoch);
    let done = Formed {
        epoch,
        kv_blocks: 9,
        host_blocks: 0,
        weight_bytes: 1,
        load_seconds: 0.0,
        identity: ModelIdentity(1),
        adapters: 0,
    };
    cluster.worker_formed(secs(at), WorkerId(worker), done, &mut Vec::new());
}

fn loads(cluster: &mut Cluster, at: u64, worker: u32, epoch: u64) {
    let (epoch, adapter) = (Epoch(epoch), 0);
    let progress = LoadProgress { epoch, adapter, bytes_done: at, bytes_total: 1000 };
    cluster.load_progressed(secs(at), WorkerId(worker), progress);
}

#[test]
fn a_spare_takes_the_place_of_a_rank_that_does_not_answer() {
    let (mut cluster, effects) = cluster_of(config(2), 3);
    assert_eq!(forms(&effects).len(), 2);
    formed(&mut cluster, 1, 0, 1);
    let effects = wait(&mut cluster, 1, 59);
    assert!(effects.is_empty(), "{effects:?}");
    let effects = wait(&mut cluster, 59, 61);
    assert_eq!(silent(&effects), [1]);
    let ranks: Vec<u32> = forms(&effects).iter().map(|form| form.0).collect();
    assert_eq!(ranks, [0, 2], "the spare takes its place");
    assert!(shut_down(&effects).is_empty(), "it may be back");
    // It is now the last choice as a spare, and used when there is no other.
    let mut effects = Vec::new();
    cluster.worker_left(secs(62), WorkerId(2), Incarnation(1), "killed", &mut effects);
    let effects = wait(&mut cluster, 62, 63);
    let ranks: Vec<u32> = forms(&effects).iter().map(|form| form.0).collect();
    assert_eq!(ranks, [0, 1]);
    // Another strike: its process must end.
    formed(&mut cluster, 63, 0, 3);
    let effects = wait(&mut cluster, 63, 124);
    assert_eq!(silent(&effects), [1]);
    assert_eq!(shut_down(&effects).iter().map(|it| it.0).collect::<Vec<_>>(), [1]);
}

#[test]
fn a_rank_that_does_not_start_is_not_waited_for_either() {
    let (mut cluster, _) = cluster_of(config(1), 1);
    formed(&mut cluster, 10, 0, 1);
    let effects = wait(&mut cluster, 10, 71);
    assert_eq!(silent(&effects), [0]);
    assert_eq!(forms(&effects).len(), 1, "nobody else can: it is tried again");
    let effects = wait(&mut cluster, 71, 140);
    assert_eq!(shut_down(&effects).len(), 1, "once");
}

#[test]
fn weights_may_load_for_as_long_as_they_get_on() {
    let (mut cluster, _) = cluster_of(config(2), 2);
    formed(&mut cluster, 1, 0, 1);
    let mut effects = Vec::new();
    for at in (0..2000).step_by(50) {
        loads(&mut cluster, at, 1, 1);
        effects.extend(wait(&mut cluster, at, at + 50));
    }
    assert!(effects.is_empty(), "{effects:?}");
    // Progress in vain, because its epoch is over, is waited for as well.
    cluster.worker_left(secs(2000), WorkerId(0), Incarnation(1), "killed", &mut effects);
    cluster.worker_joined(secs(2001), member(0, 2, "a"), &mut effects);
    let epoch = forms(&effects).last().unwrap().2;
    assert_eq!(epoch, 2);
    formed(&mut cluster, 2002, 0, 2);
    let mut effects = Vec::new();
    for at in (2000..2500).step_by(50) {
        loads(&mut cluster, at, 1, 1);
        effects.extend(wait(&mut cluster, at, at + 50));
    }
    assert!(silent(&effects).is_empty(), "{effects:?}");
}

/// A cluster of so many workers, two of which serve since the first second.
fn serving(workers: u32, on_gpus: bool) -> Cluster {
    let (mut cluster, mut effects) = (Cluster::new(config(2)), Vec::new());
    for worker in 0..workers {
        let gpu = if on_gpus { format!("GPU-{worker}") } else { String::new() };
        let joined = Member { gpu, ..member(worker, 1, "a") };
        cluster.worker_joined(secs(0), joined, &mut effects);
    }
    bring_up(&mut cluster, secs(1), forms(&effects)[0].2, &[0, 1]);
    cluster
}

/// At ten seconds a step of both ranks has taken too long. Runs passes until 11 s.
fn hangs(cluster: &mut Cluster) {
    let (at, id, mut effects) = (secs(10), ReplicaId(0), Vec::new());
    cluster.ranks_hang(at, id, Epoch(1), &[WorkerId(0), WorkerId(1)]);
    let cause = FailoverReason::StepOverdue;
    cluster.epoch_failed(at, id, Epoch(1), cause, "a step took over 5 s", &mut effects);
    effects.extend(wait(cluster, 10, 11));
    let ranks: Vec<u32> = forms(&effects).iter().map(|form| form.0).collect();
    assert_eq!(ranks, [0, 1], "who hangs is not known");
}

/// Who did not answer, and for how many seconds.
fn timed_out(effects: &[Effect]) -> Vec<(u32, u64)> {
    let of = |effect: &Effect| match effect {
        Effect::AnswerTimedOut { worker, lasts } => Some((worker.0, lasts.as_secs())),
        _ => None,
    };
    effects.iter().filter_map(of).collect()
}

/// A GPU finds out by itself, and tells a failed device from a failed process.
#[test]
fn a_rank_whose_step_hung_makes_room_for_a_spare_sooner() {
    for (on_gpus, patience) in [(false, 5), (true, 45)] {
        let mut cluster = serving(3, on_gpus);
        hangs(&mut cluster);
        // One leaves the exchange at once, and waits in the next one.
        cluster.executor_heard(secs(11), WorkerId(0));
        let effects = wait(&mut cluster, 11, 10 + patience);
        assert!(effects.is_empty(), "{effects:?}");
        let effects = wait(&mut cluster, 10 + patience, 12 + patience);
        assert_eq!(timed_out(&effects), [(1, patience)]);
        let ranks: Vec<u32> = forms(&effects).iter().map(|form| form.0).collect();
        assert_eq!(ranks, [0, 2], "the spare takes its place");
        assert!(shut_down(&effects).is_empty(), "it may be back");
    }
}

/// Without a spare, a process that hangs is ended as soon as it is known which one that is.
#[test]
fn a_rank_whose_step_hung_is_started_again_where_there_is_no_other() {
    for (on_gpus, patience) in [(false, 5), (true, 45)] {
        let mut cluster = serving(2, on_gpus);
        hangs(&mut cluster);
        cluster.executor_heard(secs(11), WorkerId(0));
        assert_eq!(wait(&mut cluster, 11, 10 + patience), []);
        let effects = wait(&mut cluster, 10 + patience, 12 + patience);
        let ended = effects.iter().filter_map(|effect| match effect {
            Effect::Send { worker, message: ToWorker::Shutdown { again: true, .. }, .. } => {
                Some(worker.0)
            }
            _ => None,
        });
        assert_eq!(ended.collect::<Vec<_>>(), [1], "{effects:?}");
    }
}

#[test]
fn a_rank_that_was_only_slow_keeps_its_place() {
    let mut cluster = serving(3, false);
    hangs(&mut cluster);
    assert_eq!(wait(&mut cluster, 11, 14), []);
    // Both have come to their next layer, and left. Then they are formed, as slowly.
    for worker in [0, 1].map(WorkerId) {
        cluster.executor_heard(secs(14), worker);
    }
    assert_eq!(wait(&mut cluster, 14, 70), []);
    assert_eq!(silent(&wait(&mut cluster, 70, 72)), [0, 1], "they have as long as any rank");
}

#[test]
fn a_rank_that_nobody_could_hear_is_not_silent() {
    let mut cluster = serving(2, false);
    hangs(&mut cluster);
    // The coordinator stands still, and what ranks have said meanwhile waits.
    assert_eq!(timed_out(&wait(&mut cluster, 40, 43)), []);
    cluster.executor_heard(secs(43), WorkerId(0));
    assert_eq!(timed_out(&wait(&mut cluster, 43, 45)), [(1, 5)]);
}

#[test]
fn nor_is_it_if_something_else_is_heard_first() {
    let mut cluster = serving(3, false);
    hangs(&mut cluster);
    let mut effects = Vec::new();
    cluster.worker_left(secs(40), WorkerId(2), Incarnation(1), "killed", &mut effects);
    assert_eq!(timed_out(&effects), []);
    assert_eq!(timed_out(&wait(&mut cluster, 40, 43)), []);
    cluster.executor_heard(secs(43), WorkerId(0));
    assert_eq!(timed_out(&wait(&mut cluster, 43, 45)), [(1, 5)]);
}

#[test]
fn a_rank_that_another_one_waited_for_in_vain_is_not_waited_for_longer() {
    let mut cluster = serving(3, false);
    let (id, last, mut effects) = (ReplicaId(0), Some(secs(2)), Vec::new());
    let (says, why) = (WorkerId(0), "all_reduce timed out");
    cluster.step_failed(secs(10), says, id, Epoch(1), last, true, why, &mut effects);
    effects.extend(wait(&mut cluster, 10, 15));
    assert_eq!(timed_out(&effects), []);
    let effects = wait(&mut cluster, 15, 17);
    assert_eq!(timed_out(&effects), [(1, 5)], "and not the one that said so");
    let ranks: Vec<u32> = forms(&effects).iter().map(|form| form.0).collect();
    assert_eq!(ranks, [0, 2]);
}

#[test]
fn a_step_of_an_epoch_that_is_over_says_nothing_of_the_ranks_of_the_next() {
    for next_has_begun in [true, false] {
        let mut cluster = serving(3, false);
        let (id, cause, mut effects) = (ReplicaId(0), FailoverReason::StepOverdue, Vec::new());
        cluster.epoch_failed(secs(10), id, Epoch(1), cause, "a link is gone", &mut effects);
        let mut at = 10;
        if next_has_begun {
            effects.extend(wait(&mut cluster, 10, 11));
            assert_eq!(forms(&effects).len(), 2, "the next epoch");
            at = 11;
        }
        cluster.ranks_hang(secs(at), id, Epoch(1), &[WorkerId(0), WorkerId(1)]);
        effects.extend(wait(&mut cluster, at, 65));
        assert!(silent(&effects).is_empty(), "they have the time that any rank has: {effects:?}");
        effects.extend(wait(&mut cluster, 65, 72));
        assert_eq!(silent(&effects), [0, 1]);
    }
}

#[test]
fn silence_counts_over_formations_that_the_others_give_up() {
    let (mut cluster, effects) = cluster_of(config(2), 3);
    let mut epoch = forms(&effects)[0].2;
    let mut all = Vec::new();
    // Rank 0 waits 30 s for the other one to connect, again and again.
    for at in [30, 60, 90] {
        all.extend(wait(&mut cluster, at - 29, at));
        let message = "the other ranks did not connect".to_owned();
        let failure = FormFailed { epoch: Epoch(epoch), message, permanent: false };
        cluster.form_failed(secs(at), WorkerId(0), &failure, &mut all);
        all.extend(wait(&mut cluster, at, at + 1));
        epoch = forms(&all).last().map_or(epoch, |form| form.2);
    }
    assert_eq!(silent(&all), [1], "and never the one that answers");
    let last: Vec<u32> = forms(&all).iter().rev().take(2).map(|form| form.0).collect();
    assert_eq!(last, [2, 0]);
}

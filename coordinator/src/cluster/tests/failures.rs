//! Failed replicas are retried, or held.
use super::*;

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
    // A worker comes, a worker goes, an operator gives a command: each is a change.
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
    // And the next wait starts small again.
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
    // It says nothing about an epoch that was over before.
    cluster.tick(secs(61), &mut effects);
    cluster.form_failed(secs(62), WorkerId(1), &missing, &mut effects);
    assert_eq!(cluster.replicas().next().unwrap().held_until, None);
}

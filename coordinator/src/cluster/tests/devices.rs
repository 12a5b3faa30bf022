//! Devices that fail again and again.
use super::*;

#[test]
fn a_gpu_that_fails_again_and_again_rests_and_operators_may_have_it_tried() {
    let with_gpu = |worker: u32, incarnation| Member {
        gpu: format!("GPU-{worker}"),
        ..member(worker, incarnation, "a")
    };
    let mut cluster = Cluster::new(config(1));
    let mut effects = Vec::new();
    let mut now = secs(0);
    cluster.worker_joined(now, with_gpu(0, 1), &mut effects);
    let mut aside = Vec::new();
    for incarnation in 1..=3 {
        assert!(groups(&cluster) == [[Some(0)]] && !cluster.is_aside(WorkerId(0)));
        now += secs(60);
        cluster.device_failed(now, WorkerId(0), &mut effects);
        let run = Incarnation(incarnation);
        cluster.worker_left(now, WorkerId(0), run, "it says goodbye", &mut effects);
        now += secs(5);
        effects.retain(|it| matches!(it, Effect::Quarantined { .. }));
        aside.append(&mut effects);
        cluster.worker_joined(now, with_gpu(0, incarnation + 1), &mut effects);
    }
    assert_eq!(aside, [Effect::Quarantined { worker: WorkerId(0), lasts: secs(600) }]);
    assert!(cluster.is_aside(WorkerId(0)) && forms(&effects).is_empty());
    // Another GPU of the same host is not affected.
    cluster.worker_joined(now, with_gpu(1, 1), &mut effects);
    assert_eq!(groups(&cluster), [[Some(1)]]);
    bring_up(&mut cluster, now, 4, &[1]);
    effects.clear();
    cluster.tick(now + secs(594), &mut effects);
    assert!(effects.is_empty(), "{effects:?}");
    cluster.tick(now + secs(595), &mut effects);
    assert_eq!((groups(&cluster).len(), forms(&effects).len()), (2, 1), "{effects:?}");
    // The next rest is longer; an operator's command ends it.
    now += secs(700);
    for _ in 0..3 {
        cluster.device_failed(now, WorkerId(0), &mut effects);
    }
    cluster.worker_left(now, WorkerId(0), Incarnation(4), "it says goodbye", &mut effects);
    cluster.worker_joined(now, with_gpu(0, 5), &mut effects);
    cluster.tick(now + secs(1199), &mut effects);
    assert!(cluster.is_aside(WorkerId(0)));
    effects.clear();
    cluster.scale(now + secs(1199), Some(2), &mut effects);
    assert!(!cluster.is_aside(WorkerId(0)) && forms(&effects).len() == 1, "{effects:?}");
}

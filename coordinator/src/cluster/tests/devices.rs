//! Devices that fail again and again; how large a step suits them.
use shared::protocol::FailedGroups;

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
    // It is told of its rest, which its next process may have to tell.
    assert_eq!((remembered(&effects).len(), effects.len()), (1, 1), "{effects:?}");
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

/// Its process is the one that knows, though it has no rank and never had one.
#[test]
fn a_gpu_that_rests_does_so_at_the_next_coordinator_until_an_operator_has_it_tried() {
    let process = |incarnation| Member { gpu: "GPU-0".to_owned(), ..member(0, incarnation, "a") };
    let (mut cluster, mut now) = (Cluster::new(config(1)), secs(0));
    let mut told = Trouble::default();
    for incarnation in 1..=4 {
        let mut effects = Vec::new();
        cluster.worker_joined(now, process(incarnation), &mut effects);
        cluster.tick(now, &mut effects);
        // Each process is told, also one whose predecessor left since the last tick.
        told = remembered(&effects).get(&0).copied().unwrap_or_default();
        let failures = [0, 1, 2, 0][incarnation as usize - 1];
        assert_eq!((told.device.failures, told.device.last_ms), (failures, 0));
        if incarnation < 4 {
            now += secs(60);
            cluster.device_failed(now, WorkerId(0), &mut effects);
            let run = Incarnation(incarnation);
            cluster.worker_left(now, WorkerId(0), run, "it says goodbye", &mut effects);
        }
    }
    assert_eq!((told.device.rests, told.device.rests_ms), (1, 600_000));
    // Another coordinator begins, and leads.
    let (mut next, mut effects, at) = (Cluster::new(config(1)), Vec::new(), secs(5));
    next.trouble_brought(at, &process(4), told.after(secs(100)));
    next.worker_joined(at, process(4), &mut effects);
    next.tick(at, &mut effects);
    assert!(next.is_aside(WorkerId(0)) && forms(&effects).is_empty(), "{effects:?}");
    let rests_ms = remembered(&effects)[&0].device.rests_ms;
    assert_eq!(rests_ms, 500_000, "it may bring that to another one");
    next.tick(secs(504), &mut effects);
    assert!(forms(&effects).is_empty(), "{effects:?}");
    let mut scaled = Vec::new();
    next.scale(secs(504), None, &mut scaled);
    next.tick(secs(504), &mut scaled);
    assert_eq!((remembered(&scaled)[&0], forms(&scaled).len()), (Trouble::default(), 1));
}

#[test]
fn a_gpu_that_has_rested_at_two_coordinators_is_tried_again() {
    let device = FailedGroups { failures: 0, last_ms: 100_000, rests: 1, rests_ms: 500_000 };
    let process = Member { gpu: "GPU-0".to_owned(), ..member(0, 1, "a") };
    let (mut cluster, mut effects) = (Cluster::new(config(1)), Vec::new());
    cluster.trouble_brought(secs(5), &process, Trouble { device, ..Trouble::default() });
    cluster.worker_joined(secs(5), process, &mut effects);
    cluster.tick(secs(504), &mut effects);
    assert!(forms(&effects).is_empty(), "{effects:?}");
    cluster.tick(secs(505), &mut effects);
    assert_eq!((groups(&cluster), forms(&effects).len()), (vec![vec![Some(0)]], 1));
}

#[test]
fn a_step_is_as_large_as_suits_all_devices_of_its_replica() {
    let with_gpu = |worker: u32| Member { gpu: format!("GPU-{worker}"), ..member(worker, 1, "a") };
    let mut config = config(2);
    (config.engine.max_num_batched_tokens, config.cpu_step_tokens) = (2048, 512);
    let (mut cluster, mut effects) = (Cluster::new(config), Vec::new());
    for member in [with_gpu(0), with_gpu(1), member(2, 1, "b"), with_gpu(3)] {
        cluster.worker_joined(secs(0), member, &mut effects);
    }
    let told = effects.iter().filter_map(|effect| match effect {
        Effect::Send { worker, message: ToWorker::Form(form), .. } => {
            Some((worker.0, form.engine.max_num_batched_tokens))
        }
        _ => None,
    });
    assert_eq!(told.collect::<Vec<_>>(), [(0, 2048), (1, 2048), (3, 512), (2, 512)]);
    effects.extend(bring_up(&mut cluster, secs(1), 1, &[0, 1]));
    effects.extend(bring_up(&mut cluster, secs(1), 2, &[2, 3]));
    let steps = effects.iter().filter_map(|effect| match effect {
        Effect::ReplicaReady { step_tokens, .. } => Some(*step_tokens),
        _ => None,
    });
    assert_eq!(steps.collect::<Vec<_>>(), [2048, 512], "the replicas' schedulers know it, too");
}

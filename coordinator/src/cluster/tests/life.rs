//! A replica starts and ends.
use super::*;

#[test]
fn no_epoch_s_token_tells_of_another_s() {
    let ranks = [member(0, 1, "a"), member(1, 1, "b")];
    let token = |config: &ClusterConfig, epoch| match collective_for(
        &ranks.each_ref(),
        config,
        Epoch(epoch),
    ) {
        CollectiveSpec::Tcp { token, .. } => token,
        other => panic!("{other:?}"),
    };
    let config = config(2);
    let other_run = ClusterConfig { run: 8, ..config.clone() };
    let other_key = ClusterConfig { collective_key: Secret::of_random([6; 32]), ..config.clone() };
    let tokens: BTreeSet<u64> = [&config, &other_run, &other_key]
        .iter()
        .flat_map(|config| (1..100).map(|epoch| token(config, epoch)))
        .collect();
    assert_eq!(tokens.len(), 3 * 99);
    // HMAC-SHA-256 under 32 bytes of 5, of "tutti number collective 0000000000000007 1".
    assert_eq!(token(&config, 1).to_le_bytes(), [0x12, 0x3c, 0x15, 0x2c, 0xa9, 0xf4, 0xad, 0xcd]);
}

#[test]
fn a_group_forms_when_complete_and_serves_with_the_smallest_cache() {
    let mut cluster = Cluster::new(config(2));
    let mut effects = Vec::new();
    cluster.worker_joined(secs(0), member(0, 1, "a"), &mut effects);
    assert!(effects.is_empty(), "one of two ranks forms nothing: {effects:?}");
    cluster.worker_joined(secs(0), member(1, 1, "a"), &mut effects);
    let shm = CollectiveSpec::SharedMemory { name: format!("tutti-{:016x}-1", 7) };
    assert_eq!(forms(&effects), [(0, 0, 1, shm.clone()), (1, 1, 1, shm)]);
    let effects = bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    let ready = Effect::ReplicaReady {
        replica: ReplicaId(0),
        epoch: Epoch(1),
        ranks: vec![WorkerId(0), WorkerId(1)],
        num_blocks: 100,
        host_blocks: 0,
        step_tokens: 64,
    };
    assert_eq!(effects.last(), Some(&ready));
}

#[test]
fn rank_0s_group_id_reaches_the_other_ranks_of_its_epoch_once() {
    let (mut cluster, _) = cluster_of(config(3), 4);
    let tell = |cluster: &mut Cluster, worker: u32, epoch: u64, bytes: usize| {
        let mut effects = Vec::new();
        let id = GroupId { epoch: Epoch(epoch), bytes: vec![epoch as u8; bytes] };
        cluster.group_id(secs(0), WorkerId(worker), id.clone(), &mut effects);
        let told = effects.iter().map(|effect| match effect {
            Effect::Send { worker, epoch, message: ToWorker::GroupId(sent) } => {
                assert!(*epoch == id.epoch && *sent == id, "{effect:?}");
                worker.0
            }
            effect => panic!("{effect:?}"),
        });
        told.collect::<Vec<u32>>()
    };
    // From another rank, a spare, another epoch, or too long: relayed to nobody.
    for (worker, epoch, bytes) in [(1, 1, 128), (3, 1, 128), (0, 2, 128), (0, 0, 128), (0, 1, 257)]
    {
        assert!(tell(&mut cluster, worker, epoch, bytes).is_empty(), "{worker} {epoch} {bytes}");
    }
    assert_eq!(tell(&mut cluster, 0, 1, 128), [1, 2]);
    assert!(tell(&mut cluster, 0, 1, 128).is_empty(), "a second one");
    bring_up(&mut cluster, secs(1), 1, &[0, 1, 2]);
    assert!(tell(&mut cluster, 0, 1, 128).is_empty(), "when it serves");
    let mut effects = Vec::new();
    cluster.worker_left(secs(2), WorkerId(1), Incarnation(1), "killed", &mut effects);
    assert!(tell(&mut cluster, 0, 1, 128).is_empty(), "when its epoch is over");
    cluster.tick(secs(3), &mut effects);
    assert!(tell(&mut cluster, 0, 1, 128).is_empty(), "of the old epoch");
    assert_eq!(tell(&mut cluster, 0, 2, 128), [3, 2], "new in every epoch");
}

#[test]
fn ranks_on_two_hosts_meet_over_tcp() {
    let mut cluster = Cluster::new(config(2));
    let mut effects = Vec::new();
    cluster.worker_joined(secs(0), member(0, 1, "a"), &mut effects);
    cluster.worker_joined(secs(0), member(1, 1, "b"), &mut effects);
    let forms = forms(&effects);
    assert_eq!(forms.len(), 2);
    assert!(matches!(&forms[0].3, CollectiveSpec::Tcp { ranks, .. } if ranks.len() == 2));
}

#[test]
fn a_lost_rank_breaks_the_replica_frees_the_survivor_and_its_return_forms_a_new_epoch() {
    let mut cluster = Cluster::new(config(2));
    let mut effects = Vec::new();
    cluster.worker_joined(secs(0), member(0, 1, "a"), &mut effects);
    cluster.worker_joined(secs(0), member(1, 1, "a"), &mut effects);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    effects.clear();
    cluster.worker_left(secs(2), WorkerId(0), Incarnation(1), "killed", &mut effects);
    let abort = Effect::Send {
        worker: WorkerId(1),
        epoch: Epoch(1),
        message: ToWorker::Abort { epoch: Epoch(1) },
    };
    assert!(effects.contains(&abort), "{effects:?}");
    assert!(effects.iter().any(|e| matches!(e, Effect::ReplicaBroken { .. })));
    effects.clear();
    cluster.worker_joined(secs(3), member(0, 2, "a"), &mut effects);
    let forms = forms(&effects);
    let ranks: Vec<(u32, u32, u64)> = forms.iter().map(|f| (f.0, f.1, f.2)).collect();
    assert_eq!(ranks, [(0, 0, 2), (1, 1, 2)], "same ranks, next epoch");
}

#[test]
fn a_spare_takes_the_place_of_a_lost_rank() {
    let (mut cluster, mut effects) = cluster_of(config(2), 3);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    effects.clear();
    cluster.worker_left(secs(2), WorkerId(1), Incarnation(1), "killed", &mut effects);
    cluster.tick(secs(3), &mut effects);
    let ranks: Vec<(u32, u32)> = forms(&effects).iter().map(|f| (f.0, f.1)).collect();
    assert_eq!(ranks, [(0, 0), (2, 1)]);
}

#[test]
fn messages_of_an_older_epoch_or_incarnation_change_nothing() {
    let mut cluster = Cluster::new(config(1));
    let mut effects = Vec::new();
    cluster.worker_joined(secs(0), member(0, 1, "a"), &mut effects);
    effects.clear();
    let stale = bring_up(&mut cluster, secs(1), 99, &[0]);
    assert!(stale.is_empty(), "{stale:?}");
    cluster.worker_left(secs(1), WorkerId(0), Incarnation(77), "old link", &mut effects);
    assert!(effects.is_empty() && cluster.members().count() == 1);
    let ready = bring_up(&mut cluster, secs(1), 1, &[0]);
    assert!(matches!(ready.last(), Some(Effect::ReplicaReady { .. })));
}

//! LoRA adapters loaded and unloaded while replicas serve.
use shared::protocol::{AdapterChange, AdapterCommand, AdapterDone, AdapterError};

use super::*;

/// A cluster of replicas of `degree` ranks on `workers` workers, with room for two adapters and one
/// of its options, `a`; all replicas serve.
fn serving(degree: u32, workers: u32) -> Cluster {
    let (mut cluster, _) = cluster_of(with_room(degree), workers);
    for replica in 0..workers / degree {
        let ranks: Vec<u32> = (replica * degree..(replica + 1) * degree).collect();
        bring_up(&mut cluster, secs(1), u64::from(replica) + 1, &ranks);
    }
    cluster
}

fn with_room(degree: u32) -> ClusterConfig {
    let lora = Lora::fixed([("a".to_owned(), "/a".to_owned())], 16);
    ClusterConfig { lora: Lora { places: 2, ..lora }, ..config(degree) }
}

fn load(cluster: &mut Cluster, ticket: u64, name: &str, replace: bool) -> Vec<Effect> {
    let mut effects = Vec::new();
    let (name, path) = (name.to_owned(), format!("/{name}"));
    let command = AdapterCommand::Load { name, path, replace };
    cluster.change_adapters(secs(2), Ticket(ticket), command, &mut effects);
    effects
}

fn unload(cluster: &mut Cluster, ticket: u64, name: &str) -> Vec<Effect> {
    let mut effects = Vec::new();
    let command = AdapterCommand::Unload { name: name.to_owned() };
    cluster.change_adapters(secs(2), Ticket(ticket), command, &mut effects);
    effects
}

/// The adapters that workers are told to load, or to drop.
fn changes(effects: &[Effect]) -> Vec<(u32, u64, String)> {
    effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Send { worker, message: ToWorker::Adapter(told), .. } => {
                let what = match &told.change {
                    AdapterChange::Load(adapter) => format!("load {}", adapter.name),
                    AdapterChange::Drop(_) => "drop".to_owned(),
                };
                Some((worker.0, told.epoch.0, what))
            }
            _ => None,
        })
        .collect()
}

fn outcomes(effects: &[Effect]) -> Vec<(u64, Result<(), AdapterError>)> {
    effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::AdapterChanged { ticket, outcome } => Some((ticket.0, outcome.clone())),
            _ => None,
        })
        .collect()
}

/// The number that ranks are told for an adapter.
fn number_of(effects: &[Effect], name: &str) -> u32 {
    effects
        .iter()
        .find_map(|effect| match effect {
            Effect::Send { message: ToWorker::Adapter(told), .. } => match &told.change {
                AdapterChange::Load(adapter) if adapter.name == name => Some(adapter.number),
                _ => None,
            },
            _ => None,
        })
        .unwrap()
}

fn answer(
    cluster: &mut Cluster,
    worker: u32,
    epoch: u64,
    number: u32,
    outcome: Result<u64, &str>,
) -> Vec<Effect> {
    let outcome = outcome.map(ModelIdentity).map_err(str::to_owned);
    let done = AdapterDone { epoch: Epoch(epoch), number, outcome };
    let mut effects = Vec::new();
    cluster.adapter_done(secs(3), WorkerId(worker), done, &mut effects);
    effects
}

fn served(cluster: &Cluster) -> Vec<&str> {
    cluster.adapters().iter().map(|adapter| adapter.name.as_str()).collect()
}

/// The adapters that each worker told to form is told of.
fn formed_with(effects: &[Effect]) -> Vec<(u32, Vec<String>)> {
    let names = |lora: &Lora| lora.adapters.iter().map(|it| it.name.clone()).collect();
    effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Send { worker, message: ToWorker::Form(form), .. } => {
                Some((worker.0, names(&form.lora)))
            }
            _ => None,
        })
        .collect()
}

#[test]
fn an_adapter_is_served_when_every_rank_of_every_serving_replica_has_it() {
    let mut cluster = serving(2, 4);
    let told = load(&mut cluster, 1, "b", false);
    let load_b = |worker, epoch| (worker, epoch, "load b".to_owned());
    assert_eq!(changes(&told), [load_b(0, 1), load_b(1, 1), load_b(2, 2), load_b(3, 2)]);
    let number = number_of(&told, "b");
    assert!(number > 64, "not one of the options' numbers");
    for (worker, epoch) in [(0, 1), (3, 2), (1, 1)] {
        assert!(outcomes(&answer(&mut cluster, worker, epoch, number, Ok(7))).is_empty());
        assert_eq!(served(&cluster), ["a"]);
    }
    // Of an epoch that is over, of an adapter that nobody asked for, and twice.
    for (worker, epoch, number) in [(2, 1, number), (2, 2, number + 1), (1, 1, number)] {
        assert!(outcomes(&answer(&mut cluster, worker, epoch, number, Ok(7))).is_empty());
    }
    let done = answer(&mut cluster, 2, 2, number, Ok(7));
    assert_eq!(outcomes(&done), [(1, Ok(()))]);
    assert!(done.contains(&Effect::Adapters));
    assert_eq!(served(&cluster), ["a", "b"]);
    assert_eq!(cluster.desired().adapters.loaded[0].identity, Some(ModelIdentity(7)));
}

#[test]
fn a_load_that_fails_on_one_rank_fails_everywhere_and_leaves_nothing() {
    let mut cluster = serving(2, 2);
    let told = load(&mut cluster, 1, "b", false);
    let number = number_of(&told, "b");
    answer(&mut cluster, 0, 1, number, Ok(7));
    let failed = answer(&mut cluster, 1, 1, number, Err("no such folder"));
    let why = "node-1: no such folder".to_owned();
    assert_eq!(outcomes(&failed), [(1, Err(AdapterError::Wrong(why)))]);
    let drop = |worker| (worker, 1, "drop".to_owned());
    assert_eq!(changes(&failed), [drop(0), drop(1)]);
    assert_eq!((served(&cluster), &cluster.desired().adapters.loaded[..]), (vec!["a"], &[][..]));
    // Other contents on another host are a failure, too.
    let number = number_of(&load(&mut cluster, 2, "b", false), "b");
    answer(&mut cluster, 0, 1, number, Ok(7));
    let failed = answer(&mut cluster, 1, 1, number, Ok(8));
    let (_, outcome) = &outcomes(&failed)[0];
    assert!(outcome.as_ref().unwrap_err().to_string().contains("other contents"), "{outcome:?}");
    assert_eq!(served(&cluster), ["a"]);
}

#[test]
fn what_cannot_be_changed_is_refused_with_the_reason() {
    let refused = |effects: Vec<Effect>, words: &str| {
        assert!(changes(&effects).is_empty());
        let outcomes = outcomes(&effects);
        let error = outcomes[0].1.as_ref().unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let mut cluster = serving(1, 1);
    refused(load(&mut cluster, 1, "a", false), "'a' has already been loaded");
    refused(load(&mut cluster, 1, "m", false), "is a name of the model itself");
    refused(load(&mut cluster, 1, "", false), "must have 1 to 128 bytes");
    refused(unload(&mut cluster, 1, "b"), "'b' cannot be found");
    let number = number_of(&load(&mut cluster, 2, "b", false), "b");
    refused(load(&mut cluster, 3, "b", false), "'b' is being loaded");
    refused(load(&mut cluster, 3, "c", false), "all 2 places for adapters (--max-loras) are taken");
    answer(&mut cluster, 0, 1, number, Ok(1));
    refused(load(&mut cluster, 3, "c", false), "unload one first");
    // An unloaded one keeps its place while requests use it.
    assert_eq!(outcomes(&unload(&mut cluster, 4, "a")), [(4, Ok(()))]);
    assert_eq!(served(&cluster), ["b"]);
    refused(load(&mut cluster, 5, "c", false), "1 by unloaded ones that requests still use");
    let mut effects = Vec::new();
    cluster.adapters_unused(secs(3), &[1], &mut effects);
    assert_eq!(changes(&effects), [(0, 1, "drop".to_owned())]);
    assert_eq!(changes(&load(&mut cluster, 6, "c", false)), [(0, 1, "load c".to_owned())]);
    let mut fixed = cluster_of(config(1), 1).0;
    refused(load(&mut fixed, 1, "b", false), "--max-loras N");
    let mut nobody = Cluster::new(with_room(1));
    refused(load(&mut nobody, 1, "b", false), "no replica serves");
}

#[test]
fn one_adapter_takes_the_place_of_another_under_a_new_number() {
    let mut cluster = serving(1, 1);
    let told = load(&mut cluster, 1, "a", true);
    let number = number_of(&told, "a");
    assert_ne!(number, cluster.adapters()[0].number);
    answer(&mut cluster, 0, 1, number, Ok(2));
    assert_eq!(cluster.adapters().len(), 1);
    assert_eq!(cluster.adapters()[0].number, number);
    let leaving: Vec<u32> = cluster.leaving_adapters().iter().map(|it| it.number).collect();
    assert_eq!(leaving, [1]);
}

#[test]
fn loads_take_turns_and_a_rank_that_dies_meanwhile_is_not_waited_for() {
    let mut cluster =
        Cluster::new(ClusterConfig { lora: Lora { places: 4, ..Lora::default() }, ..config(1) });
    for worker in 0..2 {
        cluster.worker_joined(secs(0), member(worker, 1, "a"), &mut Vec::new());
    }
    bring_up(&mut cluster, secs(1), 1, &[0]);
    bring_up(&mut cluster, secs(1), 2, &[1]);
    let first = number_of(&load(&mut cluster, 1, "b", false), "b");
    assert!(changes(&load(&mut cluster, 2, "c", false)).is_empty(), "its turn has not come");
    answer(&mut cluster, 0, 1, first, Ok(1));
    let mut effects = Vec::new();
    cluster.worker_left(secs(3), WorkerId(1), Incarnation(1), "killed", &mut effects);
    assert_eq!(outcomes(&effects), [(1, Ok(()))], "every rank that serves has it");
    assert_eq!(changes(&effects), [(0, 1, "load c".to_owned())]);
    // It is back, and formed with what is served; the present load is told when it serves.
    effects.clear();
    cluster.worker_joined(secs(4), member(1, 2, "a"), &mut effects);
    cluster.tick(secs(5), &mut effects);
    assert_eq!(formed_with(&effects), [(1, vec!["b".to_owned()])]);
    let effects = bring_up(&mut cluster, secs(6), 3, &[1]);
    assert_eq!(changes(&effects), [(1, 3, "load c".to_owned())]);
    let second = number_of(&effects, "c");
    assert!(outcomes(&answer(&mut cluster, 0, 1, second, Ok(1))).is_empty());
    assert_eq!(outcomes(&answer(&mut cluster, 1, 3, second, Ok(1))), [(2, Ok(()))]);
}

/// An adapter may be what ends a worker: it is not loaded again and again.
#[test]
fn a_load_that_breaks_its_replica_again_and_again_is_given_up() {
    let mut cluster = serving(1, 1);
    let mut effects = load(&mut cluster, 1, "b", false);
    for (life, epoch) in [(1, 1), (2, 2), (3, 3)] {
        assert_eq!(changes(&effects), [(0, epoch, "load b".to_owned())]);
        effects.clear();
        let at = secs(10 * life);
        cluster.worker_left(at, WorkerId(0), Incarnation(life), "killed", &mut effects);
        assert_eq!(outcomes(&effects).len(), usize::from(life == 3), "{effects:?}");
        cluster.worker_joined(at, member(0, life + 1, "a"), &mut effects);
        cluster.tick(at + secs(9), &mut effects);
        effects = bring_up(&mut cluster, at + secs(9), epoch + 1, &[0]);
    }
    assert!(changes(&effects).is_empty(), "{effects:?}");
    assert_eq!(served(&cluster), ["a"]);
}

#[test]
fn a_replica_formed_meanwhile_serves_when_it_has_what_was_loaded() {
    let mut cluster = serving(1, 1);
    let mut effects = Vec::new();
    cluster.worker_joined(secs(2), member(1, 1, "a"), &mut effects);
    assert_eq!(formed_with(&effects), [(1, vec!["a".to_owned()])]);
    let number = number_of(&load(&mut cluster, 1, "b", false), "b");
    assert_eq!(outcomes(&answer(&mut cluster, 0, 1, number, Ok(1))), [(1, Ok(()))]);
    let effects = bring_up(&mut cluster, secs(3), 2, &[1]);
    assert_eq!(changes(&effects), [(1, 2, "load b".to_owned())]);
    let ready = |effects: &[Effect]| {
        effects.iter().filter(|it| matches!(it, Effect::ReplicaReady { .. })).count()
    };
    assert_eq!(ready(&effects), 0);
    let effects = answer(&mut cluster, 1, 2, number, Ok(1));
    assert_eq!(ready(&effects), 1);
    // One that cannot is held, and released when the adapter is unloaded and no request uses it.
    let mut effects = Vec::new();
    cluster.worker_joined(secs(4), member(2, 1, "a"), &mut effects);
    assert_eq!(formed_with(&effects), [(2, vec!["a".to_owned(), "b".to_owned()])]);
    let message = "no such folder".to_owned();
    let failure = FormFailed { epoch: Epoch(3), message, permanent: true };
    cluster.form_failed(secs(4), WorkerId(2), &failure, &mut effects);
    effects.clear();
    cluster.tick(secs(5), &mut effects);
    assert!(formed_with(&effects).is_empty());
    // A command that is refused changes nothing.
    assert!(formed_with(&load(&mut cluster, 2, "a", false)).is_empty());
    let mut effects = unload(&mut cluster, 3, "b");
    cluster.tick(secs(5), &mut effects);
    assert!(formed_with(&effects).is_empty(), "still used: {effects:?}");
    let mut effects = Vec::new();
    cluster.adapters_unused(secs(5), &[number], &mut effects);
    let drop = |worker, epoch| (worker, epoch, "drop".to_owned());
    assert_eq!(changes(&effects), [drop(0, 1), drop(1, 2)]);
    assert_eq!(formed_with(&effects), [(2, vec!["a".to_owned()])]);
}

/// The queue of a rank is short.
#[test]
fn a_replica_that_lacks_several_adapters_loads_one_after_the_other() {
    let lora = Lora { places: 4, ..Lora::default() };
    let (mut cluster, _) = cluster_of(ClusterConfig { lora, ..config(2) }, 2);
    bring_up(&mut cluster, secs(1), 1, &[0, 1]);
    let mut effects = Vec::new();
    for worker in [2, 3] {
        cluster.worker_joined(secs(2), member(worker, 1, "a"), &mut effects);
    }
    assert_eq!(formed_with(&effects), [(2, Vec::<String>::new()), (3, Vec::<String>::new())]);
    let mut numbers = Vec::new();
    for (ticket, name) in [(1, "b"), (2, "c"), (3, "d")] {
        let number = number_of(&load(&mut cluster, ticket, name, false), name);
        answer(&mut cluster, 0, 1, number, Ok(1));
        assert_eq!(outcomes(&answer(&mut cluster, 1, 1, number, Ok(1))), [(ticket, Ok(()))]);
        numbers.push(number);
    }
    let told = |name: &str| [2, 3].map(|worker| (worker, 2, format!("load {name}")));
    let effects = bring_up(&mut cluster, secs(3), 2, &[2, 3]);
    assert_eq!(changes(&effects), told("b"));
    assert!(changes(&answer(&mut cluster, 2, 2, numbers[0], Ok(1))).is_empty());
    assert_eq!(changes(&answer(&mut cluster, 3, 2, numbers[0], Ok(1))), told("c"));
    // One that is dropped meanwhile is not waited for.
    unload(&mut cluster, 4, "c");
    let mut effects = Vec::new();
    cluster.adapters_unused(secs(3), &[numbers[1]], &mut effects);
    assert_eq!(changes(&effects)[4..], told("d"));
    answer(&mut cluster, 2, 2, numbers[2], Ok(1));
    let effects = answer(&mut cluster, 3, 2, numbers[2], Ok(1));
    assert!(effects.iter().any(|it| matches!(it, Effect::ReplicaReady { .. })), "{effects:?}");
}

#[test]
fn a_load_that_waits_for_its_turn_gives_the_first_no_more_time() {
    let lora = Lora { places: 4, ..Lora::default() };
    let (mut cluster, _) = cluster_of(ClusterConfig { lora, ..config(1) }, 1);
    bring_up(&mut cluster, secs(1), 1, &[0]);
    load(&mut cluster, 1, "b", false);
    let mut effects = Vec::new();
    let (name, path) = ("c".to_owned(), "/c".to_owned());
    let command = AdapterCommand::Load { name, path, replace: false };
    cluster.change_adapters(secs(50), Ticket(2), command, &mut effects);
    assert!(effects.is_empty(), "{effects:?}");
    cluster.tick(secs(62), &mut effects);
    let why = "nothing was heard from node-0 for 60 s".to_owned();
    assert_eq!(outcomes(&effects), [(1, Err(AdapterError::NotNow(why)))]);
    assert_eq!(changes(&effects), [(0, 1, "drop".to_owned()), (0, 1, "load c".to_owned())]);
}

#[test]
fn a_load_whose_files_are_still_on_their_way_is_waited_for() {
    let mut cluster = serving(1, 1);
    let number = number_of(&load(&mut cluster, 1, "b", false), "b");
    let mut effects = Vec::new();
    for at in (10..300).step_by(50) {
        fetches(&mut cluster, at, number);
        cluster.tick(secs(at + 49), &mut effects);
    }
    assert!(outcomes(&effects).is_empty(), "{effects:?}");
    assert_eq!(cluster.load_progress(), (0, 0), "no weights are loaded");
    assert_eq!(outcomes(&answer(&mut cluster, 0, 1, number, Ok(1))), [(1, Ok(()))]);
}

/// The first worker says how far it is with fetching an adapter.
fn fetches(cluster: &mut Cluster, at: u64, number: u32) {
    let (epoch, bytes_total) = (Epoch(1), 300);
    let progress = LoadProgress { epoch, adapter: number, bytes_done: at, bytes_total };
    cluster.load_progressed(secs(at), WorkerId(0), progress);
}

#[test]
fn another_adapter_s_progress_gives_a_load_no_more_time() {
    let mut cluster = serving(1, 1);
    let number = number_of(&load(&mut cluster, 1, "b", false), "b");
    let mut effects = Vec::new();
    fetches(&mut cluster, 40, number + 1);
    cluster.tick(secs(60), &mut effects);
    assert!(outcomes(&effects).is_empty(), "{effects:?}");
    cluster.tick(secs(62), &mut effects);
    assert!(matches!(*outcomes(&effects), [(1, Err(AdapterError::NotNow(_)))]), "{effects:?}");
}

#[test]
fn spares_fetch_what_is_loaded_as_ranks_do() {
    let mut config = with_room(1);
    (config.max_replicas, config.lora.places) = (Some(1), 3);
    let (mut cluster, _) = cluster_of(config, 2);
    bring_up(&mut cluster, secs(1), 1, &[0]);
    let told = |effects: &[Effect]| -> Vec<(u32, Vec<String>)> {
        let of = |effect: &Effect| match effect {
            Effect::Send { worker, message: ToWorker::Fetch(it), .. } => {
                Some((worker.0, it.adapters.clone()))
            }
            _ => None,
        };
        effects.iter().filter_map(of).collect()
    };
    // Nobody fetches what is in folders.
    let number = number_of(&load(&mut cluster, 1, "b", false), "b");
    let effects = answer(&mut cluster, 0, 1, number, Ok(1));
    assert_eq!((outcomes(&effects), told(&effects)), (vec![(1, Ok(()))], vec![]));
    let path = format!("hf://org/sql@{}", "a".repeat(40));
    let load = AdapterCommand::Load { name: "c".to_owned(), path: path.clone(), replace: false };
    let mut effects = Vec::new();
    cluster.change_adapters(secs(2), Ticket(2), load, &mut effects);
    let number = number_of(&effects, "c");
    assert!(told(&effects).is_empty(), "nobody has read it yet");
    let effects = answer(&mut cluster, 0, 1, number, Ok(1));
    assert_eq!(told(&effects), [(1, vec![path])]);
}

#[test]
fn a_load_of_which_nothing_is_heard_is_given_up() {
    let mut cluster = serving(1, 2);
    let number = number_of(&load(&mut cluster, 1, "b", false), "b");
    answer(&mut cluster, 0, 1, number, Ok(1));
    let mut effects = Vec::new();
    cluster.tick(secs(62), &mut effects);
    assert!(outcomes(&effects).is_empty(), "the last answer counts");
    cluster.tick(secs(63), &mut effects);
    let why = "nothing was heard from node-1 for 60 s".to_owned();
    assert_eq!(outcomes(&effects), [(1, Err(AdapterError::NotNow(why)))]);
    assert_eq!(changes(&effects).len(), 2, "all drop it: {effects:?}");
    assert_eq!(served(&cluster), ["a"]);
}

#[test]
fn the_next_leader_serves_what_operators_loaded() {
    let mut cluster = serving(1, 1);
    unload(&mut cluster, 1, "a");
    cluster.adapters_unused(secs(2), &[1], &mut Vec::new());
    let told = load(&mut cluster, 2, "b", false);
    let number = number_of(&told, "b");
    answer(&mut cluster, 0, 1, number, Ok(1));
    let mut next = Cluster::new(ClusterConfig { run: u64::MAX, ..with_room(1) });
    assert_eq!(next.adopt_desired(cluster.desired().clone()), 0);
    assert_eq!(next.adapters(), cluster.adapters());
    let mut effects = Vec::new();
    next.worker_joined(secs(0), member(0, 1, "a"), &mut effects);
    assert_eq!(formed_with(&effects), [(0, vec!["b".to_owned()])]);
    bring_up(&mut next, secs(1), 1, &[0]);
    let told = load(&mut next, 1, "a", false);
    assert!(number_of(&told, "a") > number, "numbers are not used again");
    // Nor is that of a load which was under way, even by one that starts to count at the same.
    let unstored = number_of(&load(&mut cluster, 3, "c", false), "c");
    let mut next = Cluster::new(with_room(1));
    assert_eq!(next.adopt_desired(cluster.desired().clone()), 0);
    next.worker_joined(secs(0), member(0, 1, "a"), &mut Vec::new());
    bring_up(&mut next, secs(1), 1, &[0]);
    assert!(number_of(&load(&mut next, 1, "a", false), "a") > unstored);
    // One of the same name as an option takes its place; without room, the last ones are left out.
    let mut other = ClusterConfig { run: 0, ..with_room(1) };
    other.lora = Lora { places: 1, ..Lora::fixed([("b".into(), "/other".into())], 16) };
    let mut other = Cluster::new(other);
    assert_eq!(other.adopt_desired(cluster.desired().clone()), 0);
    assert_eq!((other.adapters().len(), &*other.adapters()[0].path), (1, "/b"));
    let mut fixed = Cluster::new(config(1));
    assert_eq!(fixed.adopt_desired(cluster.desired().clone()), 1, "no room at all");
}

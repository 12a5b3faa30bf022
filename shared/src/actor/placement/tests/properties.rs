//! Random histories of a cluster: processes run what they are told to, links and processes and
//! coordinators go and come back, and nothing is ever given away twice or forgotten.
//!
//! The oracle is the processes themselves: what they really run, added up by hand; and an etcd that
//! forgets nothing, whose answers are lost, late or errors.
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use proptest::prelude::*;

use super::super::keep::{Change, Kept, Write, Written};
use super::super::room::Amounts;
use super::super::*;
use crate::actor::exchange::PeerId;
use crate::protocol::NodeResources;
use crate::protocol::actors::creation::{Needs, Placed, Where};

const PROCESSES: usize = 3;
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
const CLASSES: [&str; 2] = ["x", "y"];

#[derive(Clone, Debug)]
struct Run {
    name: String,
    creation: Creation,
    restarted: Restarted,
    life: ActorLife,
}

enum ToProcess {
    Begin(Begin),
    End(Instance, String, EndHow),
}

#[derive(Clone)]
enum FromProcess {
    Placed(Placed),
    Hosting(Hosting),
}

struct Process {
    node: String,
    hosting: Hosting,
    link: Option<PeerId>,
    inbox: VecDeque<ToProcess>,
    outbox: VecDeque<FromProcess>,
    runs: BTreeMap<Instance, Run>,
}

impl Process {
    fn new(index: usize) -> Self {
        let offer = NodeResources {
            cpus: 1 + index as u32,
            memory_bytes: 100,
            custom: [("seats".to_owned(), 3)].into(),
            labels: [("zone".to_owned(), format!("z{}", index % 2))].into(),
            ..NodeResources::default()
        };
        let classes = CLASSES[..1 + index % 2].iter().map(|class| (*class).to_owned()).collect();
        Self {
            node: format!("n{index}"),
            hosting: Hosting { classes, offer },
            link: None,
            inbox: VecDeque::new(),
            outbox: VecDeque::new(),
            runs: BTreeMap::new(),
        }
    }

    fn says(&mut self, instance: Instance, life: ActorLife, known: bool) {
        let Some(run) = self.runs.get_mut(&instance) else { return };
        run.life = life;
        let known = known.then(|| (run.creation.clone(), run.restarted));
        let name = run.name.clone();
        if self.link.is_some() {
            let reason = (life == ActorLife::Dead).then(|| "it failed".to_owned());
            self.outbox.push_back(FromProcess::Placed(Placed {
                name,
                instance,
                life,
                reason,
                known,
            }));
            if life == ActorLife::Dead {
                self.runs.remove(&instance);
            }
        }
    }

    fn take(&mut self) {
        match self.inbox.pop_front() {
            None => {}
            Some(ToProcess::Begin(begin)) => {
                let Begin { instance, restarted, creation } = begin;
                let name = creation.name.clone();
                let life = ActorLife::Starting;
                self.runs.insert(instance, Run { name, creation, restarted, life });
            }
            Some(ToProcess::End(instance, _, EndHow::Kill))
                if self.runs.contains_key(&instance) =>
            {
                self.says(instance, ActorLife::Dead, false);
            }
            Some(ToProcess::End(instance, _, EndHow::Finish))
                if self.runs.contains_key(&instance) =>
            {
                if let Some(run) = self.runs.get_mut(&instance) {
                    run.life = ActorLife::Draining;
                }
            }
            Some(ToProcess::End(instance, name, _)) => {
                let life = ActorLife::Dead;
                let placed = Placed { name, instance, life, reason: None, known: None };
                self.outbox.push_back(FromProcess::Placed(placed));
            }
        }
    }

    fn living(&self) -> impl Iterator<Item = (&Instance, &Run)> {
        self.runs.iter().filter(|(_, run)| run.life != ActorLife::Dead)
    }

    /// What its living actors take, added up by hand.
    fn taken(&self) -> Needs {
        let mut sum = Needs::nothing();
        for (_, run) in self.living() {
            let needs = &run.creation.needs;
            sum.cpus += needs.cpus;
            sum.memory += needs.memory;
            for (name, units) in &needs.custom {
                *sum.custom.entry(name.clone()).or_default() += units;
            }
        }
        sum
    }

    fn has_room_for(&self, more: &Needs) -> bool {
        let (taken, offer) = (self.taken(), &self.hosting.offer);
        let seats = |needs: &Needs| needs.custom.get("seats").copied().unwrap_or(0);
        taken.cpus + more.cpus <= u64::from(offer.cpus) * 1000
            && taken.memory + more.memory <= offer.memory_bytes
            && seats(&taken) + seats(more) <= offer.custom["seats"]
    }

    fn may_have(&self, creation: &Creation) -> bool {
        let Where { node, soft, labels, .. } = &creation.at;
        self.hosting.classes.contains(&creation.class)
            && (*soft || node.as_ref().is_none_or(|node| *node == self.node))
            && labels.iter().all(|(key, value)| self.hosting.offer.labels.get(key) == Some(value))
            && self.has_room_for(&creation.needs)
    }
}

/// A request that a client waits for.
struct Open {
    wanted: Wanted,
}

struct World {
    core: Placement,
    now: Duration,
    processes: Vec<Process>,
    peers: u64,
    asked: u64,
    open: BTreeMap<u64, Open>,
    published: BTreeMap<String, (Home, ActorReport)>,
    etcd: BTreeMap<String, Kept>,
    /// Whether etcd takes every write at once.
    prompt: bool,
    /// What is being written.
    on_the_way: Vec<Write>,
    /// Who asked that an actor of this generation end.
    killing: BTreeMap<u64, u64>,
    /// Generations that must not be forgotten, by name: without a limit of restarts, and their
    /// creators were told that they are alive when etcd had them.
    lasting: BTreeMap<String, u64>,
    /// Generations that nobody runs and etcd does not have, when it was said that they are dead.
    dead: BTreeSet<u64>,
}

impl World {
    fn new(prompt: bool) -> Self {
        let mut world = Self {
            core: Placement::default(),
            now: Duration::ZERO,
            processes: (0..PROCESSES).map(Process::new).collect(),
            peers: 0,
            asked: 0,
            open: BTreeMap::new(),
            published: BTreeMap::new(),
            etcd: BTreeMap::new(),
            prompt,
            on_the_way: Vec::new(),
            killing: BTreeMap::new(),
            lasting: BTreeMap::new(),
            dead: BTreeSet::new(),
        };
        world.core.keep_from_now_on();
        (0..PROCESSES).for_each(|index| world.link(index));
        world
    }

    fn at(&mut self, peer: PeerId) -> Option<&mut Process> {
        self.processes.iter_mut().find(|process| process.link == Some(peer))
    }

    fn carry_out(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Begin { home: Home::Peer(peer), begin } => {
                    assert!(!self.dead.contains(&begin.instance.generation), "it is dead");
                    let process = self.at(peer).expect("it is linked");
                    process.inbox.push_back(ToProcess::Begin(*begin));
                }
                Effect::End { home: Home::Peer(peer), name, instance, how, .. } => {
                    let process = self.at(peer).expect("it is linked");
                    process.inbox.push_back(ToProcess::End(instance, name, how));
                }
                Effect::Answer { asker, outcome } => self.answered(asker, outcome.is_ok()),
                Effect::Publish { home, report, .. } => {
                    self.published.insert(report.name.clone(), (home, report));
                }
                Effect::Restarted => {}
                other => panic!("nothing is hosted here: {other:?}"),
            }
        }
    }

    fn answered(&mut self, asker: u64, ok: bool) {
        if let Some(generation) = self.killing.remove(&asker) {
            let mut runs = self.processes.iter().flat_map(|process| process.runs.keys());
            let told = |frame: &ToProcess| match frame {
                ToProcess::Begin(begin) => begin.instance.generation == generation,
                ToProcess::End(..) => false,
            };
            let mut inboxes = self.processes.iter().flat_map(|process| &process.inbox);
            if !runs.any(|instance| instance.generation == generation)
                && !inboxes.any(told)
                && !self.etcd.values().any(|kept| kept.start.instance.generation == generation)
                && self.on_the_way.is_empty()
            {
                self.dead.insert(generation);
            }
            return;
        }
        let open = self.open.remove(&asker);
        let Wanted { creation, generation, .. } = open.expect("answered twice").wanted;
        let Some(actor) = self.core.actors.get(&creation.name).filter(|_| ok) else { return };
        let kept = self.etcd.get(&creation.name);
        let kept = kept.is_some_and(|it| it.start.instance.generation == actor.generation);
        let may_end = actor.creation.max_restarts == Some(0);
        assert!(kept || may_end || !self.prompt, "{} is not in etcd", creation.name);
        let moves = actor.creation.at.node.is_none() || actor.creation.at.soft;
        if kept && moves && generation == actor.generation && creation.max_restarts.is_none() {
            self.lasting.insert(creation.name, generation);
        }
    }

    fn kills(&mut self, name: &str, restart: bool) {
        let Some(actor) = self.core.actors.get(name) else { return };
        self.asked += 1;
        let asker = self.asked;
        if restart {
            // Whoever asks for that is answered at once.
            self.killing.insert(asker, 0);
        } else {
            self.killing.insert(asker, actor.generation);
            self.lasting.remove(name);
        }
        self.decide(|core, now, effects| core.kill(now, asker, name, restart, effects).unwrap());
    }

    /// What was being written arrives at etcd.
    fn arrives(&mut self) {
        for Write { name, change } in &self.on_the_way {
            match change {
                Change::Delete => drop(self.etcd.remove(name)),
                Change::Put { creation: Some(creation), start } => {
                    let kept = Kept { creation: (**creation).clone(), start: *start };
                    self.etcd.insert(name.clone(), kept);
                }
                Change::Put { creation: None, start } => {
                    let kept = self.etcd.get_mut(name).expect("its creation is there");
                    assert_eq!(kept.start.instance.generation, start.instance.generation);
                    kept.start = *start;
                }
            }
        }
    }

    fn writes(&mut self, arrives: bool, outcome: Written) {
        if arrives {
            self.arrives();
        }
        self.on_the_way.clear();
        self.decide(|core, _, effects| core.written(outcome, effects));
    }

    /// Somebody writes to etcd.
    fn keeps(&mut self, how: u8) {
        match how % 8 {
            // The answers to some are lost.
            0 => self.writes(false, Written::Failed),
            1 => self.writes(true, Written::Failed),
            2 => self.writes(false, Written::Fenced),
            _ => self.writes(true, Written::Stored),
        }
        self.on_the_way = self.core.next_to_keep();
    }

    /// Etcd takes everything.
    fn keeps_all(&mut self) {
        while !self.on_the_way.is_empty() || self.core.has_to_keep() {
            self.keeps(7);
        }
    }

    fn decide(&mut self, decide: impl FnOnce(&mut Placement, Duration, &mut Vec<Effect>)) {
        let mut effects = Vec::new();
        decide(&mut self.core, self.now, &mut effects);
        self.carry_out(effects);
    }

    fn create(&mut self, wanted: Wanted) {
        self.open.insert(wanted.asker, Open { wanted: wanted.clone() });
        self.decide(|core, now, effects| core.create(now, wanted, None, effects));
    }

    fn wants(&mut self, (a, b, c): (u8, u8, u8)) {
        self.asked += 1;
        let at = match b % 6 {
            0 => Where::node("n1"),
            1 => Where::rather("n2"),
            2 => Where::pack().label("zone", "z0"),
            3 => Where::spread(),
            _ => Where::pack(),
        };
        let needs = Needs::nothing()
            .cpus(f64::from(c % 5) / 2.0)
            .memory(u64::from(b % 4) * 30)
            .custom("seats", u64::from(c % 3));
        let creation = Creation {
            name: NAMES[a as usize % NAMES.len()].to_owned(),
            class: CLASSES[(a / 8) as usize % 2].to_owned(),
            argument: vec![a],
            needs,
            at,
            max_restarts: [Some(0), Some(2), None][c as usize % 3],
            mailbox: 1,
            start_limit_ms: 1000,
            message_limit_ms: 0,
        };
        self.create(Wanted {
            asker: self.asked,
            creation,
            generation: 1000 + self.asked,
            again: false,
            or_get: a >= 200,
            within: Duration::from_millis(u64::from(b) * 100),
        });
    }

    fn deliver(&mut self, index: usize) {
        self.processes[index].take();
        let process = &mut self.processes[index];
        let (Some(peer), Some(frame)) = (process.link, process.outbox.pop_front()) else { return };
        let (home, node) = (Home::Peer(peer), process.node.clone());
        self.decide(|core, now, effects| match frame {
            FromProcess::Placed(placed) => core.placed(now, home, &node, placed, false, effects),
            FromProcess::Hosting(hosting) => core.hosting(now, home, &node, hosting, effects),
        });
    }

    /// Its actors get on: they are made, or fail, or finish.
    fn works(&mut self, index: usize, fails: bool) {
        let process = &mut self.processes[index];
        let all: Vec<(Instance, ActorLife)> =
            process.living().map(|(instance, run)| (*instance, run.life)).collect();
        for (instance, life) in all {
            match life {
                ActorLife::Draining => process.says(instance, ActorLife::Dead, false),
                _ if fails => process.says(instance, ActorLife::Dead, false),
                ActorLife::Starting => process.says(instance, ActorLife::Alive, false),
                _ => {}
            }
        }
    }

    fn cut(&mut self, index: usize) {
        let process = &mut self.processes[index];
        process.inbox.clear();
        process.outbox.clear();
        if let Some(peer) = process.link.take() {
            self.decide(|core, now, effects| core.lost(now, Home::Peer(peer), "cut", effects));
        }
    }

    fn link(&mut self, index: usize) {
        self.cut(index);
        self.peers += 1;
        let process = &mut self.processes[index];
        process.link = Some(PeerId(self.peers));
        let runs: Vec<(Instance, ActorLife)> =
            process.runs.iter().map(|(instance, run)| (*instance, run.life)).collect();
        for (instance, life) in runs {
            process.says(instance, life, true);
        }
        process.outbox.push_back(FromProcess::Hosting(process.hosting.clone()));
    }

    fn crash(&mut self, index: usize) {
        self.cut(index);
        self.processes[index].runs.clear();
    }

    fn passes(&mut self, ms: u64) {
        self.now += Duration::from_millis(ms);
        self.decide(|core, now, effects| core.tick(now, effects));
    }

    /// Another coordinator takes over: it knows nothing, and clients send their requests again.
    fn fails_over(&mut self) {
        if self.asked.is_multiple_of(2) {
            // The last leader's write was in time, and its answer was not.
            self.arrives();
        }
        self.on_the_way.clear();
        self.killing.clear();
        for process in &mut self.processes {
            process.link = None;
            process.inbox.clear();
            process.outbox.clear();
        }
        (self.core, self.now) = (Placement::default(), Duration::ZERO);
        self.core.settle(Duration::ZERO);
        self.published.clear();
        self.core.keep_from_now_on();
        let kept: Vec<Kept> = self.etcd.values().cloned().collect();
        for kept in kept {
            self.decide(|core, now, effects| {
                assert!(core.resume(now, kept, false, effects), "it is not taken over");
            });
        }
        for Open { mut wanted } in std::mem::take(&mut self.open).into_values() {
            wanted.again = true;
            self.create(wanted);
        }
    }

    fn act(&mut self, (what, a, b): (u8, u8, u8)) {
        let (index, name) = (a as usize % PROCESSES, NAMES[a as usize % NAMES.len()]);
        match what % 32 {
            0..=6 => self.wants((a, b, what)),
            7..=14 => self.deliver(index),
            15..=18 => self.works(index, false),
            19 => self.works(index, true),
            20 => self.cut(index),
            21..=22 => self.link(index),
            23 => self.crash(index),
            24..=25 => self.passes(u64::from(b) * 10),
            26 => self.passes(u64::from(b) * 100),
            27 => self.kills(name, b % 2 == 0),
            28 => {
                if let Some(home) = self.processes[index].link.map(Home::Peer) {
                    self.decide(|core, now, effects| core.drains(now, home, b % 2 == 0, effects));
                }
            }
            29 if b < 32 => self.fails_over(),
            29 if b < 64 => {
                self.crash(index);
                self.fails_over();
            }
            29..=30 if !self.prompt => self.keeps(b),
            _ => (0..PROCESSES).for_each(|index| self.deliver(index)),
        }
        if self.prompt {
            self.keeps_all();
        }
        for process in &self.processes {
            assert!(process.has_room_for(&Needs::nothing()), "{} is oversubscribed", process.node);
        }
    }

    /// Everything is whole again, for two minutes.
    fn settles_down(&mut self) {
        for index in 0..PROCESSES {
            // Over a new link, none is known to drain.
            self.link(index);
        }
        for _ in 0..600 {
            for index in 0..PROCESSES {
                while !self.processes[index].inbox.is_empty()
                    || !self.processes[index].outbox.is_empty()
                {
                    self.deliver(index);
                }
                self.works(index, false);
            }
            self.keeps_all();
            self.passes(200);
        }
        self.keeps_all();
    }

    fn check(&self) {
        assert!(self.killing.is_empty(), "nobody was answered: {:?}", self.killing);
        for (name, generation) in &self.lasting {
            let known = self.core.actors.get(name).map(|actor| actor.generation);
            assert_eq!(known, Some(*generation), "{name} was forgotten");
        }
        let kept =
            self.core.actors.iter().filter(|(_, actor)| {
                actor.incarnation > 0 && actor.creation.max_restarts != Some(0)
            });
        let kept: Vec<(&String, Instance)> =
            kept.map(|(name, actor)| (name, actor.instance())).collect();
        let there: Vec<(&String, Instance)> =
            self.etcd.iter().map(|(name, kept)| (name, kept.start.instance)).collect();
        assert_eq!(there, kept, "etcd has all that lives, and nothing else");
        assert!(self.open.is_empty(), "nobody was answered: {:?}", self.open.keys());
        let mut alive = 0;
        for (name, (home, report)) in &self.published {
            match report.life {
                ActorLife::Dead => assert!(report.reason.is_some(), "{name} died of nothing"),
                ActorLife::Alive => {
                    alive += 1;
                    let Home::Peer(peer) = home else { panic!("{name} is nowhere") };
                    let process = self.processes.iter().find(|it| it.link == Some(*peer));
                    let process = process.expect("its process is linked");
                    let of = |(instance, run): &(&Instance, &Run)| {
                        instance.generation == report.generation && run.life == ActorLife::Alive
                    };
                    assert_eq!(process.living().filter(of).count(), 1, "{name}");
                }
                life => {
                    // It waits because there is no room for it, not because it was forgotten.
                    let actor = &self.core.actors[name];
                    let free = self.processes.iter().find(|it| it.may_have(&actor.creation));
                    assert!(
                        free.is_none(),
                        "{name} is {life:?}, {:?} has room",
                        free.unwrap().node
                    );
                }
            }
        }
        let living: usize = self.processes.iter().map(|process| process.living().count()).sum();
        assert_eq!(living, alive, "one start of every actor, and no other");
        for host in self.core.hosts() {
            let process = self.processes.iter().find(|it| it.node == host.node).unwrap();
            assert_eq!(*host.used(), Amounts::needed(&process.taken()), "{}", host.node);
            assert_eq!(host.actors(), process.living().count(), "{}", host.node);
        }
        let sizes: usize = self.core.actors.values().map(|actor| actor.creation.size()).sum();
        assert_eq!(self.core.bytes, sizes);
        assert!(!self.core.awaits(self.now), "nothing is left to wait for");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_resources_suffice_names_are_unique_and_everyone_is_answered(
        actions in proptest::collection::vec(any::<(u8, u8, u8)>(), 0..160)
    ) {
        let mut world = World::new(false);
        actions.into_iter().for_each(|action| world.act(action));
        world.settles_down();
        world.check();
    }

    #[test]
    fn where_etcd_answers_nobody_is_told_of_a_creation_that_it_does_not_have(
        actions in proptest::collection::vec(any::<(u8, u8, u8)>(), 0..160)
    ) {
        let mut world = World::new(true);
        actions.into_iter().for_each(|action| world.act(action));
        world.settles_down();
        world.check();
    }
}

//! Replicas that could run more than they have, while requests wait at others.
use std::collections::{BTreeMap, BTreeSet};

use shared::ids::{Epoch, ReplicaId};
use shared::protocol::ToWorker;

use crate::clients::Held;
use crate::replicas::SHARE;
use crate::scenario::Time;
use crate::world::World;

/// For how many comparisons of queues a replica may idle while something waits for another: one
/// may find the requests on their way, or the replica just as it begins to serve.
const COMPARISONS: Time = 4;
/// For how many of them a request may wait while another replica has a place and room for it: that
/// one may get others first, half of a queue each time.
const COMPARISONS_OF_ONE: Time = 10;

/// What is known of a coordinator's requests and replicas.
#[derive(Clone, Default)]
pub(crate) struct Idling {
    /// Seeds of the requests that a replica has let its ranks know of, by its newest epoch: seeds
    /// are as good as numbers, and plans have no others.
    admitted: BTreeMap<ReplicaId, (Epoch, BTreeSet<u64>)>,
    /// Since when a replica has had nothing to do, and something it has room for waits elsewhere.
    since: Option<(ReplicaId, Time)>,
    /// Since when a replica has had a place and room for a request that waits at another one; by
    /// both replicas and the request's seed.
    spare: BTreeMap<(ReplicaId, ReplicaId, u64), Time>,
}

/// A replica that serves and of which all ranks are heard.
struct Serving {
    id: ReplicaId,
    room: u32,
    held: Vec<Held>,
    /// Which of them have not run there.
    waiting: Vec<(u64, u32)>,
}

impl Serving {
    /// Tokens that its KV cache has room for, whatever its requests come to; `None` if it may have
    /// no place, or something that waits.
    fn spare(&self, max_num_seqs: u32, block_size: u32) -> Option<u32> {
        let sequences: u32 = self.held.iter().map(|held| held.n).sum();
        let blocks = |held: &Held| held.n * held.needed.div_ceil(block_size);
        let used: u32 = self.held.iter().map(blocks).sum();
        let has_place = sequences < max_num_seqs && self.waiting.is_empty();
        // Each that runs keeps what it may come to, and one block at least.
        has_place.then(|| self.room.saturating_sub((used + sequences) * block_size))
    }
}

impl Idling {
    /// Nobody looks: replicas may idle.
    pub(crate) fn forget(&mut self) {
        self.since = None;
        self.spare.clear();
    }
}

impl World {
    /// A replica sends a step.
    pub(crate) fn note_admitted(&mut self, replica: ReplicaId, message: &ToWorker) {
        let ToWorker::Step(plan) = message else { return };
        let known = self.coordinator.idling.admitted.entry(replica).or_default();
        if known.0 != plan.epoch {
            *known = (plan.epoch, BTreeSet::new());
        }
        known.1.extend(plan.admitted.iter().map(|sequence| sequence.sampling.seed));
    }

    /// No replica idles for long while another has requests that have not run there, and for which
    /// the idle one has room: wherever they came from, and whether or not they ran elsewhere. Nor
    /// does a request wait for long while a replica has a place and room for it.
    pub(crate) fn check_idling(&mut self) {
        let (life, dispatch) = (self.coordinator.life, &self.coordinator.dispatch);
        let seen = |id: &ReplicaId| {
            let (epoch, room) = (dispatch.epoch(*id)?, dispatch.room(*id)?);
            let held = self.clients.held_at(life, *id);
            let admitted = self.coordinator.idling.admitted.get(id);
            let admitted = admitted.filter(|(of, _)| *of == epoch);
            let has_run = |held: &&Held| admitted.is_some_and(|(_, all)| all.contains(&held.seed));
            let waits = held.iter().filter(|held| !held.left && !has_run(held));
            // Without a bound, they should find as much room as there is where they are.
            let needed =
                |held: &Held| if held.open_ended { held.needed.min(room) } else { held.needed };
            let waiting = waits.map(|held| (held.seed, needed(held))).collect();
            Some(Serving { id: *id, room, held, waiting })
        };
        let ids = self.coordinator.replicas.keys();
        let heard = ids.filter(|id| !self.coordinator.is_doubtful(**id));
        let serving: Vec<Serving> = heard.filter_map(seen).collect();
        self.check_none_idles(&serving);
        self.check_none_waits(&serving);
    }

    fn check_none_idles(&mut self, serving: &[Serving]) {
        // Of several, the one that has room for most.
        let idle = serving.iter().filter(|it| it.held.is_empty()).max_by_key(|it| it.room);
        let waits = |room: u32| {
            let busy = serving.iter().filter(|it| it.held.len() > 1);
            let mut all = busy.flat_map(|it| it.waiting.iter().map(|waits| (it.id, *waits)));
            all.find(|(_, (_, needed))| *needed <= room).map(|(id, (seed, _))| (id, seed))
        };
        let found = idle.and_then(|it| Some((it.id, waits(it.room)?)));
        let Some((id, (other, seed))) = found else {
            self.coordinator.idling.since = None;
            return;
        };
        let since = self.coordinator.idling.since.filter(|(idle, _)| *idle == id);
        let (_, since) = since.unwrap_or((id, self.now));
        self.coordinator.idling.since = Some((id, since));
        if self.now > since + COMPARISONS * SHARE.as_micros() as Time {
            let ms = (self.now - since) / 1000;
            self.fail(format!(
                "{id} idles for {ms} ms while the request of seed {seed} waits at {other}"
            ));
        }
    }

    fn check_none_waits(&mut self, serving: &[Serving]) {
        let engine = &self.scenario.engine;
        let spare = serving
            .iter()
            .filter_map(|it| Some((it, it.spare(engine.max_num_seqs, engine.block_size)?)));
        let pairs = spare.flat_map(|(to, room)| {
            let others = serving.iter().filter(|from| from.id != to.id);
            let fit = others.flat_map(|from| from.waiting.iter().map(|waits| (from.id, *waits)));
            let fit = fit.filter(move |(_, (_, needed))| *needed <= room);
            fit.map(|(from, (seed, _))| (to.id, from, seed))
        });
        let before = std::mem::take(&mut self.coordinator.idling.spare);
        let since = |pair| (pair, before.get(&pair).copied().unwrap_or(self.now));
        let now: BTreeMap<_, _> = pairs.map(since).collect();
        let late = now
            .iter()
            .find(|(_, since)| self.now > **since + COMPARISONS_OF_ONE * SHARE.as_micros() as Time);
        if let Some(((to, from, seed), since)) = late {
            let ms = (self.now - since) / 1000;
            self.fail(format!(
                "the request of seed {seed} waits at {from} for {ms} ms while {to} has room for it"
            ));
        }
        self.coordinator.idling.spare = now;
    }
}

//! Replicas that serve and have nothing to do, while requests wait at others.
use std::collections::{BTreeMap, BTreeSet};

use shared::ids::{Epoch, ReplicaId};
use shared::protocol::ToWorker;

use crate::replicas::SHARE;
use crate::scenario::Time;
use crate::world::World;

/// For how many comparisons of queues a replica may idle while something waits for another: one
/// may find the requests on their way, or the replica just as it begins to serve.
const COMPARISONS: Time = 4;

/// What is known of a coordinator's requests and replicas.
#[derive(Clone, Default)]
pub(crate) struct Idling {
    /// Seeds of the requests that a replica has let its ranks know of, by its newest epoch: seeds
    /// are as good as numbers, and plans have no others.
    admitted: BTreeMap<ReplicaId, (Epoch, BTreeSet<u64>)>,
    /// Since when a replica has had nothing to do, and something it has room for waits elsewhere.
    since: Option<(ReplicaId, Time)>,
}

impl Idling {
    /// Nobody looks: replicas may idle.
    pub(crate) fn forget(&mut self) {
        self.since = None;
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
    /// the idle one has room: wherever they came from, and whether or not they ran elsewhere.
    pub(crate) fn check_idling(&mut self) {
        let life = self.coordinator.life;
        let dispatch = &self.coordinator.dispatch;
        let ids = self.coordinator.replicas.keys();
        let serving: Vec<(ReplicaId, Epoch, u32)> =
            ids.filter_map(|id| Some((*id, dispatch.epoch(*id)?, dispatch.room(*id)?))).collect();
        let number = |id: &ReplicaId| self.clients.number_at(life, *id);
        // Of several, the one that has room for most.
        let idle = serving.iter().filter(|(id, ..)| number(id) == 0).max_by_key(|it| it.2);
        let waits = |room: u32| {
            let busy = serving.iter().filter(|(id, ..)| number(id) > 1);
            busy.flat_map(|(id, epoch, _)| {
                let admitted = self.coordinator.idling.admitted.get(id);
                let admitted = admitted.filter(|(of, _)| of == epoch);
                let has_run = move |seed: &u64| admitted.is_some_and(|(_, all)| all.contains(seed));
                let at = self.clients.waiting_at(life, *id).into_iter();
                at.filter(move |(seed, needed)| *needed <= room && !has_run(seed))
                    .map(|(seed, _)| (*id, seed))
            })
            .next()
        };
        let found = idle.and_then(|(id, _, room)| Some((*id, waits(*room)?)));
        let Some((id, (other, seed))) = found else { return self.coordinator.idling.forget() };
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
}

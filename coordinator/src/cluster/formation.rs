//! PURE: how an epoch begins: every rank is told to form, and once all have, to start.
use std::time::Duration;

use shared::ids::{Epoch, ReplicaId, WorkerId};
use shared::protocol::{
    CollectiveSpec, Form, FormFailed, Formed, GROUP_ID_MAX, GroupId, Start, Started, ToWorker,
};

use super::replica::Replica;
use super::{Cluster, ClusterConfig, Effect, Failing, Member};
use crate::scheduler::EpochEnd;
use shared::metrics::labels::FailoverReason;

impl Cluster {
    /// Rank 0 has made NCCL's unique id: relays it to the other ranks.
    pub fn group_id(
        &mut self,
        now: Duration,
        worker: WorkerId,
        id: GroupId,
        effects: &mut Vec<Effect>,
    ) {
        let epoch = id.epoch;
        self.pending_answers.heard(now, worker);
        if id.bytes.len() > GROUP_ID_MAX {
            return;
        }
        let to = self.replicas.in_epoch(worker, epoch, |replica| {
            replica.advanced(now);
            replica.group_id_recipients(worker)
        });
        let send = |worker| Effect::Send { worker, epoch, message: ToWorker::GroupId(id.clone()) };
        effects.extend(to.into_iter().flatten().map(send));
    }

    /// A rank holds its weights and its collective is up.
    pub fn worker_formed(
        &mut self,
        now: Duration,
        worker: WorkerId,
        formed: Formed,
        effects: &mut Vec<Effect>,
    ) {
        let epoch = formed.epoch;
        if let Some(reason) = self.other_weights(worker, &formed) {
            let failure = FormFailed { epoch, message: reason, permanent: true };
            return self.form_failed(now, worker, &failure, effects);
        }
        let complete = self.replicas.in_epoch(worker, epoch, |replica| {
            replica.advanced(now);
            (replica.formed(worker, &formed), replica.ranks())
        });
        self.answered(now, worker, complete.is_some());
        let Some((Some((num_blocks, host_blocks)), ranks)) = complete else { return };
        for rank in &ranks {
            self.pending_answers.expect(now, *rank);
        }
        effects.extend(ranks.into_iter().map(|worker| Effect::Send {
            worker,
            epoch,
            message: ToWorker::Start(Start { epoch, num_blocks, host_blocks }),
        }));
    }

    /// Returns why a rank that has loaded its weights cannot be used: they differ from those of the
    /// others, or from the folder that the coordinator serves.
    fn other_weights(&self, worker: WorkerId, formed: &Formed) -> Option<String> {
        let ClusterConfig { model, identity: own, .. } = &self.config;
        let theirs = formed.identity;
        let node = |worker| self.members.get(worker).map_or("?", |member| member.node.as_str());
        let replica = self.replicas.of(worker).and_then(|id| self.replicas.get(id))?;
        let remedy = "copy the same files to both";
        if let Some((other, identity)) = replica.rank_with_other_files(theirs) {
            return Some(format!(
                "{} and {} have different models in {model} ({theirs} and {identity}): {remedy}",
                node(&worker),
                node(&other),
            ));
        }
        if let Some(other) = replica.differs_in_adapters(formed.adapters) {
            return Some(format!(
                "{} and {} have different LoRA adapters at the same paths: {remedy}",
                node(&worker),
                node(&other),
            ));
        }
        let own = own.filter(|own| *own != theirs)?;
        Some(format!(
            "{} has a different model in {model} from the coordinator's ({theirs}, not {own}): \
             {remedy}, or restart the coordinator if its own was replaced",
            node(&worker),
        ))
    }

    /// A rank could not be formed.
    pub fn form_failed(
        &mut self,
        now: Duration,
        worker: WorkerId,
        failure: &FormFailed,
        effects: &mut Vec<Effect>,
    ) {
        let Some(id) = self.replicas.of(worker) else {
            return self.pending_answers.heard(now, worker);
        };
        let is_present = self.replicas.in_epoch(worker, failure.epoch, |_| ()).is_some();
        self.answered(now, worker, is_present);
        let reason = failure.message.clone();
        if !is_present {
            // Another rank's report that it lost this one may come before the reason.
            let broke = |it: &Replica| !it.is_live() && it.epoch() == failure.epoch;
            if failure.permanent && self.replicas.get(id).is_some_and(broke) {
                let why = format!("{}: {reason}", self.display_name(worker));
                self.replicas.change(id, |replica| replica.fails_for_good(now, why));
                effects.push(Effect::Unservable { replica: id, reason });
            }
            return;
        }
        let why = format!("{}: {reason}", self.display_name(worker));
        let ranks = self.replicas.get(id).map(Replica::ranks).unwrap_or_default();
        // One that says nothing is waited for, and replaced, for that.
        let all_answer = !ranks.iter().any(|rank| self.pending_answers.is_unanswered(*rank));
        let fetches = self.replicas.get(id).is_some_and(|it| it.waited_for_files(worker));
        let end = EpochEnd::Failed(FailoverReason::RankFailed);
        self.break_replica(now, id, end, &why, effects);
        if failure.permanent {
            self.replicas.change(id, |replica| replica.hold(now));
            effects.push(Effect::Unservable { replica: id, reason });
        } else if all_answer && !fetches {
            self.failed_formations.failed(now, &ranks);
            self.gives_way(now, id, Failing::Formations, effects);
        }
    }

    /// A rank's KV cache is allocated.
    pub fn worker_started(
        &mut self,
        now: Duration,
        worker: WorkerId,
        started: Started,
        effects: &mut Vec<Effect>,
    ) {
        let Some(id) = self.replicas.of(worker) else { return };
        let epoch = started.epoch;
        let is_present = self.replicas.in_epoch(worker, epoch, |replica| {
            replica.advanced(now);
            replica.started(worker);
        });
        self.answered(now, worker, is_present.is_some());
        if is_present.is_some() {
            self.serve_if_complete(now, id, effects);
        }
    }

    pub(super) fn form(&mut self, now: Duration, id: ReplicaId, effects: &mut Vec<Effect>) {
        self.epoch.0 += 1;
        let epoch = self.epoch;
        let adapters = self.adapter_numbers();
        let ranks = self.replicas.change(id, |replica| {
            replica.form(now, epoch, adapters);
            replica.ranks()
        });
        let Some(ranks) = ranks else { return };
        for rank in &ranks {
            self.pending_answers.expect(now, *rank);
        }
        let world_size = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
        let members: Vec<&Member> =
            ranks.iter().filter_map(|worker| self.members.get(worker)).collect();
        let collective = collective_for(&members, &self.config, epoch);
        let engine = self.config.engine_of(&members);
        let step_tokens = engine.max_num_batched_tokens;
        self.replicas.change(id, |replica| replica.set_step_tokens(step_tokens));
        for (rank, worker) in (0u32..).zip(ranks) {
            let message = ToWorker::Form(Form {
                epoch,
                replica: id,
                rank,
                world_size,
                reduction_ranks: self.config.tensor_parallel,
                collective: collective.clone(),
                collective_timeout_ms: self.config.collective_timeout.as_millis() as u64,
                step_timeout_ms: self.config.step_timeout.as_millis() as u64,
                model: self.config.model.clone(),
                config_overrides: self.config.config_overrides.clone(),
                dtype: self.config.dtype,
                quantization: self.config.quantization,
                lora: self.adapters.lora(),
                draft_model: self.config.draft_model.clone(),
                engine: engine.clone(),
            });
            effects.push(Effect::Send { worker, epoch, message });
        }
    }
}

/// Shared memory if all ranks are on one host, TCP otherwise.
pub(super) fn collective_for(
    members: &[&Member],
    config: &ClusterConfig,
    epoch: Epoch,
) -> CollectiveSpec {
    match members {
        [] | [_] => CollectiveSpec::None,
        [first, rest @ ..] if rest.iter().all(|member| member.host == first.host) => {
            CollectiveSpec::SharedMemory { name: format!("tutti-{:016x}-{}", config.run, epoch.0) }
        }
        _ => CollectiveSpec::Tcp {
            ranks: members.iter().map(|member| member.collective_addr).collect(),
            // Knowing one epoch's token reveals nothing about another's.
            token: config
                .collective_key
                .number(&format!("collective {:016x} {}", config.run, epoch.0)),
        },
    }
}

//! Invariants over the whole cluster.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use coordinator::cluster::ReplicaPhase;
use coordinator::replica::core::ReplicaLoad;
use shared::ids::{Epoch, ReplicaId, WorkerId};
use shared::membership::View;
use shared::metrics::catalogue::{
    ENGINE_STEPS, FENCED_FRAMES, GENERATION_TOKENS, HOST_KV_CACHE_BLOCKS,
    HOST_KV_CACHE_BLOCKS_USED, ITERATION_TOKENS, KV_CACHE_BLOCKS, KV_CACHE_BLOCKS_USED,
    KV_SWAPPED_BLOCKS, PREEMPTIONS, PREEMPTIONS_SWAPPED, PREFIX_CACHE_HITS, PREFIX_CACHE_QUERIES,
    PROMPT_TOKENS, PROMPT_TOKENS_BY_SOURCE, RANK_STEP, REPORTS_REFUSED, REQUEST_SUCCESS,
    REQUESTS_ACCEPTED, REQUESTS_IN_FLIGHT, REQUESTS_REJECTED, REQUESTS_RUNNING, REQUESTS_SWAPPED,
    REQUESTS_WAITING, SPEC_DECODE_ACCEPTED_PER_POSITION, SPEC_DECODE_ACCEPTED_TOKENS,
    SPEC_DECODE_DRAFT_TOKENS, SPEC_DECODE_DRAFTS, SPEC_DECODE_EMITTABLE_TOKENS,
    SPEC_DECODE_EMITTED_TOKENS,
};
use shared::metrics::labels::{
    FinishedReason, LabelValue as _, PromptSource, RejectReason, SwapDirection,
};
use shared::metrics::{Merged, Value};
use shared::protocol::{StepMasks, ToWorker};

use crate::scenario::{S, Time};
use crate::world::World;

/// What the checks remember about workers.
#[derive(Default)]
pub(crate) struct Checks {
    /// Number of steps that each report of a process run counts, by the report's sequence number.
    pub(crate) reported: BTreeMap<(WorkerId, u64, u64), u64>,
    /// By slot: when its slowness begins and ends.
    slow: BTreeMap<usize, (Time, Time)>,
}

/// What the checks remember about a coordinator.
#[derive(Clone, Default)]
pub(crate) struct LifeChecks {
    /// The newest report of each process run that was delivered.
    newest: BTreeMap<(WorkerId, u64), u64>,
    pub(crate) retired: BTreeSet<(WorkerId, u64)>,
    /// Reports of retired process runs.
    pub(crate) refused: u64,
    /// The newest epoch in which a replica sent a plan, and its last step.
    plans: BTreeMap<ReplicaId, (Epoch, u64)>,
    /// The last step in that epoch whose masks were sent.
    masks: BTreeMap<ReplicaId, (Epoch, u64)>,
    /// The replica of each epoch.
    epochs: BTreeMap<Epoch, ReplicaId>,
    last: Option<Merged>,
    /// Since when an epoch has been serving.
    serving: BTreeMap<Epoch, Time>,
    /// Since when there has been a spare that never was slow.
    spare_since: Option<Time>,
}

/// A slow rank is replaced within this time, if nothing else happens.
const RELIEVED_WITHIN: Time = 70 * S;

impl Checks {
    pub(crate) fn slowed(&mut self, slot: usize, now: Time, lasts: Time) {
        let (from, until) = self.slow.entry(slot).or_insert((now, now));
        if *until < now {
            *from = now;
        }
        *until = (now + lasts).max(*until);
    }
}

impl LifeChecks {
    /// What the next coordinator continues from, given these totals.
    pub(crate) fn for_the_next(&self, totals: Merged) -> Self {
        let (newest, retired) = (self.newest.clone(), self.retired.clone());
        Self { newest, retired, refused: self.refused, last: Some(totals), ..Self::default() }
    }

    /// Continues from what the last coordinator left.
    pub(crate) fn go_on_from(&mut self, last: Self) {
        for (run, sequence) in last.newest {
            // A run that has reported here has newer figures.
            self.newest.entry(run).or_insert(sequence);
        }
        self.retired.extend(last.retired);
        self.refused += last.refused;
        self.last = last.last;
    }

    /// What is lower in these totals than in those left before.
    pub(crate) fn fallen_since(&self, before: &Self) -> Option<String> {
        let (before, now) = (before.last.as_ref()?, self.last.as_ref()?);
        let fallen = fallen(before, now);
        (!fallen.is_empty()).then(|| fallen.join("; "))
    }

    pub(crate) fn serves(&mut self, epoch: Epoch, now: Time) {
        self.serving.insert(epoch, now);
    }

    pub(crate) fn delivered(&mut self, worker: WorkerId, incarnation: u64, sequence: u64) {
        let newest = self.newest.entry((worker, incarnation)).or_default();
        *newest = sequence.max(*newest);
    }

    /// Steps of all ranks, as far as they were reported.
    fn rank_steps(&self, of: &Checks) -> u64 {
        let steps = |((worker, incarnation), sequence): (&(WorkerId, u64), &u64)| {
            of.reported.get(&(*worker, *incarnation, *sequence)).copied().unwrap_or_default()
        };
        self.newest.iter().map(steps).sum()
    }
}

impl World {
    /// A replica sends plans of its newest epoch only, step by step.
    pub(crate) fn check_plan(&mut self, replica: ReplicaId, message: &ToWorker) {
        if let ToWorker::Masks(masks) = message {
            return self.check_masks(replica, masks);
        }
        let ToWorker::Step(plan) = message else { return };
        let last = self.coordinator.checks.plans.get(&replica).copied();
        let fits = match last {
            Some((epoch, step)) if epoch == plan.epoch => {
                plan.step.0 == step || plan.step.0 == step + 1
            }
            Some((epoch, _)) => epoch < plan.epoch && plan.step.0 == 1,
            None => plan.step.0 == 1,
        };
        let owner = *self.coordinator.checks.epochs.entry(plan.epoch).or_insert(replica);
        if !fits || owner != replica {
            self.fail(format!("{replica} sends {} of {} after {last:?}", plan.step, plan.epoch));
        }
        self.coordinator.checks.plans.insert(replica, (plan.epoch, plan.step.0));
    }

    /// A replica sends masks only for steps that it has sent, step by step.
    fn check_masks(&mut self, replica: ReplicaId, masks: &StepMasks) {
        let checks = &mut self.coordinator.checks;
        let own = (masks.epoch, masks.step.0);
        let planned = checks.plans.get(&replica).copied();
        let before = checks.masks.insert(replica, own);
        if planned.is_none_or(|last| last.0 != own.0 || last < own) || before > Some(own) {
            let step = masks.step;
            self.fail(format!("{replica} sends masks of {step} behind {planned:?}, {before:?}"));
        }
    }

    /// Checks identities that hold at every moment.
    pub(crate) fn check_totals(&mut self) {
        let merged = self.coordinator.hub.merged();
        let mut wrong = Vec::new();
        let mut same = |what: &str, got: u64, expected: u64| {
            if got != expected {
                wrong.push(format!("{what}: {got}, not {expected}"));
            }
        };
        let (life, tally) = (self.coordinator.life, self.coordinator.tally.clone());
        same("accepted", merged.counter_sum(REQUESTS_ACCEPTED), tally.accepted);
        for reason in FinishedReason::ALL {
            let expected = tally.ended.get(reason).copied().unwrap_or_default();
            let got = merged.counter_sum_of(REQUEST_SUCCESS, *reason);
            same(reason.as_str(), got, expected);
        }
        for reason in RejectReason::ALL {
            // Front ends count full queues, and there are none in the simulation.
            let told = tally.rejected.get(reason).copied().unwrap_or_default();
            let expected = if *reason == RejectReason::QueueFull { 0 } else { told };
            let got = merged.counter_sum_of(REQUESTS_REJECTED, *reason);
            same(reason.as_str(), got, expected);
        }
        let in_flight = merged.gauge_sum(REQUESTS_IN_FLIGHT) as u64;
        same("in flight", in_flight, self.clients.in_flight(life));
        let placed = merged.gauge_sum(REQUESTS_RUNNING)
            + merged.gauge_sum(REQUESTS_WAITING)
            + merged.gauge_sum(REQUESTS_SWAPPED);
        same("running + waiting", placed as u64, in_flight);
        let generated = merged.counter_sum(GENERATION_TOKENS);
        same(
            "generated",
            generated,
            self.coordinator.tokens_before + self.clients.accepted_tokens(life),
        );
        let prompt = merged.counter_sum(PROMPT_TOKENS);
        let iterations = merged.histogram_sum(ITERATION_TOKENS);
        let cached = merged.counter_sum_of(PROMPT_TOKENS_BY_SOURCE, PromptSource::LocalCacheHit);
        let computed = merged.counter_sum_of(PROMPT_TOKENS_BY_SOURCE, PromptSource::LocalCompute);
        same("prompt tokens by source", cached + computed, prompt);
        same("iteration tokens", iterations.sum() as u64, computed + generated);
        let (looked_up, found) =
            (merged.counter_sum(PREFIX_CACHE_QUERIES), merged.counter_sum(PREFIX_CACHE_HITS));
        self.report.cached = cached;
        let drafted = merged.counter_sum(SPEC_DECODE_DRAFT_TOKENS);
        let accepted = merged.counter_sum(SPEC_DECODE_ACCEPTED_TOKENS);
        let (drafts, emitted) = (
            merged.counter_sum(SPEC_DECODE_DRAFTS),
            merged.counter_sum(SPEC_DECODE_EMITTED_TOKENS),
        );
        let emittable = merged.counter_sum(SPEC_DECODE_EMITTABLE_TOKENS);
        same("tokens that drafts could emit", emittable, drafted + drafts);
        let by_position = merged.counter_sum(SPEC_DECODE_ACCEPTED_PER_POSITION);
        same("accepted tokens by position", by_position, accepted);
        (self.report.drafted, self.report.accepted) = (drafted, accepted);
        same("iterations", iterations.count(), merged.counter_sum(ENGINE_STEPS));
        same(
            "refused reports",
            merged.counter_sum(REPORTS_REFUSED),
            self.coordinator.checks.refused,
        );
        let rank_steps = merged.histogram_sum(RANK_STEP).count();
        same("steps of ranks", rank_steps, self.coordinator.checks.rank_steps(&self.checks));
        if accepted > drafted
            || !(accepted..=accepted + drafts).contains(&emitted)
            || emitted > generated
        {
            wrong.push(format!("{accepted} of {drafted} tokens of {drafts} drafts emit {emitted}"));
        }
        // Sequences that were admitted before are not looked up again, but may still find
        // something.
        if found > looked_up || found > cached {
            wrong.push(format!("{found} of {looked_up} tokens found in the cache, {cached} used"));
        }
        let all_prompts = tally.prompts_of_finished + tally.prompts_of_others;
        if self.clients.in_flight(life) == 0
            && !(tally.prompts_of_finished..=all_prompts).contains(&prompt)
        {
            let least = tally.prompts_of_finished;
            wrong.push(format!("prompt tokens: {prompt}, not {least} to {all_prompts}"));
        }
        let used = merged.gauge_sum(KV_CACHE_BLOCKS_USED);
        if used > merged.gauge_sum(KV_CACHE_BLOCKS) {
            wrong.push(format!("{used} blocks are used, more than there are"));
        }
        if self.clients.in_flight(life) == 0 && used > 0.0 {
            wrong.push(format!("{used} blocks are used by nobody"));
        }
        if let Some(last) = &self.coordinator.checks.last {
            wrong.extend(fallen(last, &merged));
        }
        self.report.preemptions = merged.counter_sum(PREEMPTIONS);
        self.report.swapped = merged.counter_sum(PREEMPTIONS_SWAPPED);
        let blocks = |way| merged.counter_sum_of(KV_SWAPPED_BLOCKS, way);
        let (out, back) = (blocks(SwapDirection::Out), blocks(SwapDirection::In));
        let on_host = merged.gauge_sum(HOST_KV_CACHE_BLOCKS_USED);
        if back > out || on_host > merged.gauge_sum(HOST_KV_CACHE_BLOCKS) {
            wrong.push(format!(
                "{back} of {out} blocks came back from host memory, {on_host} are there"
            ));
        }
        if merged.gauge_sum(REQUESTS_SWAPPED) > on_host {
            wrong.push("requests are swapped that have nothing in host memory".to_owned());
        }
        if self.clients.in_flight(life) == 0 && on_host > 0.0 {
            wrong.push(format!("{on_host} blocks of host memory are used by nobody"));
        }
        self.report.fenced = merged.counter_sum(FENCED_FRAMES);
        self.coordinator.checks.last = Some(merged);
        if !wrong.is_empty() {
            self.fail(format!("totals: {}", wrong.join("; ")));
        }
    }

    /// A rank is reported as slow only if it is, or was a moment ago.
    pub(crate) fn check_pace(&mut self, worker: WorkerId, slow: bool) {
        if slow && self.slot_of(worker).is_some() && !self.was_slow(worker, 15 * S) {
            self.fail(format!("{worker} is said to be slow"));
        }
    }

    /// Whether a worker is slow, or was within this time.
    pub(crate) fn was_slow(&self, worker: WorkerId, within: Time) -> bool {
        let slow = |slot| self.checks.slow.get(&slot);
        self.slot_of(worker).and_then(slow).is_some_and(|(_, until)| *until + within >= self.now)
    }

    /// Slow ranks do not stay where there are spares.
    fn check_slow_ranks(&mut self) {
        let places = self.places();
        let core = &self.coordinator.core;
        // One that is aside or doubted, such as a process that hangs, is no better.
        let is_spare = |(worker, slot, epoch): &(WorkerId, usize, Option<Epoch>)| {
            epoch.is_none()
                && self.processes[*slot].alive
                && !self.checks.slow.contains_key(slot)
                && !core.is_aside(*worker)
                && core.doubt(*worker).is_none()
                && core.replicas().all(|it| it.phase == ReplicaPhase::Serving)
        };
        let spare = places.iter().any(is_spare);
        let since = self.coordinator.checks.spare_since.filter(|_| spare);
        let since = spare.then(|| since.unwrap_or(self.now));
        self.coordinator.checks.spare_since = since;
        let Some(spare_since) = since else { return };
        for (_, slot, epoch) in places {
            let (Some(epoch), Some((from, until))) = (epoch, self.checks.slow.get(&slot)) else {
                continue;
            };
            let serving = self.coordinator.checks.serving.get(&epoch).copied().unwrap_or(self.now);
            let since = spare_since.max(*from).max(serving);
            if self.processes[slot].slowed >= 8
                && self.now < *until
                && self.now > since + RELIEVED_WITHIN
            {
                let seconds = (self.now - since) / S;
                return self.fail(format!("slot {slot} is slow for {seconds} s, with a spare"));
            }
        }
    }

    /// No process stays with a coordinator that it knows has been replaced.
    pub(crate) fn check_followed(&mut self) {
        for slot in 0..self.processes.len() {
            let process = &self.processes[slot];
            let known = self.view(slot).and_then(View::destination);
            let stays = process.link.is_some() && known.is_some() && process.dialled != known;
            if stays && !process.frozen {
                let (dialled, known) = (process.dialled.clone(), known);
                self.fail(format!("slot {slot} stays with {dialled:?} although {known:?} leads"));
            }
        }
    }

    /// Checks that everything that must be noticed is noticed in time.
    pub(crate) fn check_bounds(&mut self) {
        self.check_paces();
        if !self.is_awake() {
            self.coordinator.checks.spare_since = None;
            self.coordinator.idling.forget();
            return;
        }
        if let Some(worker) = self.unnoticed_silence() {
            self.fail(format!("{worker} is silent and still connected"));
        }
        self.check_slow_ranks();
        self.check_idling();
        if let Some(index) = self.clients.unnoticed(self.coordinator.life, self.now) {
            self.fail(format!("req-{index} is held although its client has left"));
        }
        let timeout = self.scenario.limits.step_timeout.as_micros() as Time;
        for slot in 0..self.processes.len() {
            let process = &self.processes[slot];
            let here = process.link.is_some_and(|it| self.links[it].life == self.coordinator.life);
            let Some((epoch, began)) = process.step_under_way().filter(|_| here) else { continue };
            let serving = self
                .coordinator
                .core
                .replicas()
                .any(|it| it.epoch == epoch && it.phase == ReplicaPhase::Serving);
            if serving && self.now > began + timeout + 7 * S {
                self.fail(format!("{epoch} serves although slot {slot} has not finished a step"));
            }
        }
    }

    /// Checks what must hold at the end of a run without open faults.
    pub(crate) fn check_end(&mut self) {
        let now = self.time();
        let quiet = |load: &ReplicaLoad| now.saturating_sub(load.last_step().unwrap_or_default());
        let longest = self.coordinator.dispatch.serving().map(|load| quiet(load)).max();
        if let Some(longest) = longest.filter(|it| *it > Duration::from_secs(5)) {
            let ms = longest.as_millis();
            self.fail(format!("a replica serves and has finished no step for {ms} ms"));
        }
    }
}

/// Totals that are lower than before.
fn fallen(before: &Merged, after: &Merged) -> Vec<String> {
    let mut fallen = Vec::new();
    let mut families = after.families().peekable();
    for (definition, family) in before.families() {
        // Both are in the order of the catalogue, which is one table.
        while families.next_if(|(it, _)| std::ptr::from_ref(*it) < definition).is_some() {}
        let later = families.peek().filter(|(it, _)| std::ptr::eq(*it, definition));
        let mut later = later.into_iter().flat_map(|(_, family)| *family).peekable();
        for (labels, old) in family {
            while later.next_if(|(it, _)| *it < labels).is_some() {}
            let new = later.next_if(|(it, _)| *it == labels).map(|(_, value)| value);
            let fell = match (old, new) {
                (Value::Gauge(_), _) => false,
                (Value::Counter(old), Some(Value::Counter(new))) => new < old,
                (Value::Histogram(old), Some(Value::Histogram(new))) => {
                    new.sum_nanos < old.sum_nanos
                        || new.buckets.iter().zip(&old.buckets).any(|(new, old)| new < old)
                }
                _ => true,
            };
            if fell {
                fallen.push(format!("{} {labels:?} fell", definition.name));
            }
        }
    }
    fallen
}

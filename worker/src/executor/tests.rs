//! Epochs and order on the executor thread, with a rank that records its calls.
mod adapters;
mod masks;

use std::sync::{Arc, Condvar, Mutex, mpsc};

use kernels::collective::AbortHandle;
use shared::ids::{ReplicaId, SeqId, StepId};
use shared::model_config::ConfigOverrides;
use shared::model_identity::ModelIdentity;
use shared::protocol::{
    Adapter, AdapterChange, CollectiveSpec, Dtype, EngineConfig, KvCacheDtype, Lora, Quantization,
    SequenceOutput, StepTimings,
};

use super::*;
use crate::rank::{AdapterReading, FormError, RankReady};

/// Time limit that is generous enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Flag(Mutex<bool>, Condvar);

impl AbortHandle for Flag {
    fn abort(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }
}

/// A rank with scripted behaviour. Loading `large` takes long, and so does loading `growing`, which
/// goes on reporting progress. Step 13 hangs until it is aborted, as in a collective with a dead
/// peer. Step 17 computes until its sign is taken back, and then fails. Step 18 looks at the step
/// that is queued behind it, and then computes until it is aborted. Step 21 returns in its timings
/// which step is queued behind it. Step 24's result just fits into a frame, step 25's does not.
/// From step 28 on, each step asks for its masks and returns in its timings the last mask's token.
struct ScriptedRank {
    flag: Arc<Flag>,
    released: Arc<Mutex<u32>>,
    /// Set when step 13, 17 or one from 28 on begins, or 18 has seen the next; loading `large` or
    /// `growing` ends once it is set, and step 17 once it is taken back.
    sign: Arc<AtomicBool>,
}

impl ScriptedRank {
    fn wait_for_abort(&self) {
        let mut aborted = self.flag.0.lock().unwrap();
        while !*aborted {
            aborted = self.flag.1.wait(aborted).unwrap();
        }
    }

    /// Runs steps that do not use their source.
    fn run(
        &mut self,
        plan: &StepPlan,
        outputs: &mut Vec<SequenceOutput>,
    ) -> Result<StepTimings, String> {
        if plan.step == StepId(13) {
            self.sign.store(true, Ordering::Relaxed);
            self.wait_for_abort();
            return Err("the collective was aborted".into());
        }
        if plan.step == StepId(17) {
            self.sign.store(true, Ordering::Relaxed);
            while self.sign.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            return Err("the collective was aborted".into());
        }
        let numbers = match plan.step {
            StepId(24) => 4_100_000,
            StepId(25) => 4_200_000,
            _ => return Ok(StepTimings::default()),
        };
        outputs.push(SequenceOutput {
            seq: SeqId(1),
            position: 1,
            token: None,
            logprobs: None,
            prompt_logprobs: Vec::new(),
            prompt_start: 0,
            corrupted: false,
            embedding: vec![0.5; numbers],
        });
        Ok(StepTimings::default())
    }
}

impl Rank for ScriptedRank {
    fn form(
        &mut self,
        form: &Form,
        abort: &AbortSlot,
        observer: &mut dyn FormObserver,
    ) -> Result<RankReady, FormError> {
        if form.model == "corrupt" {
            return Err(FormError {
                message: "model.safetensors: truncated".into(),
                permanent: true,
            });
        }
        assert!(form.model != "panics", "as a defect would");
        if form.model == "large" {
            observer.progress(0, 10);
            while !self.sign.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        while form.model == "growing" && !self.sign.load(Ordering::Relaxed) {
            observer.progress(1, 10);
            std::thread::sleep(Duration::from_millis(1));
        }
        self.flag = Arc::new(Flag(Mutex::new(false), Condvar::new()));
        abort.set(form.epoch, self.flag.clone());
        observer.progress(10, 10);
        let identity = ModelIdentity(1);
        Ok(RankReady {
            kv_blocks: 5,
            host_blocks: 0,
            weight_bytes: 10,
            load_seconds: 0.1,
            identity,
            adapters: 0,
        })
    }

    fn start(&mut self, _num_blocks: u32, _host_blocks: u32) -> Result<(), String> {
        Ok(())
    }

    fn step(
        &mut self,
        plan: &StepPlan,
        source: &mut dyn StepSource,
        outputs: &mut Vec<SequenceOutput>,
    ) -> Result<StepTimings, String> {
        if plan.step > StepId(27) {
            self.sign.store(true, Ordering::Relaxed);
            let sample_us = match source.masks(plan.step)?.pop() {
                Some(Some(TokenMask::Only(tokens))) => tokens[0].into(),
                other => return Err(format!("{other:?}")),
            };
            return Ok(StepTimings { sample_us, ..StepTimings::default() });
        }
        if plan.step == StepId(18) {
            while source.peek().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.sign.store(true, Ordering::Relaxed);
            self.wait_for_abort();
            return Ok(StepTimings::default());
        }
        if plan.step != StepId(21) {
            return self.run(plan, outputs);
        }
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(300) {
            if let Some(next) = source.peek() {
                return Ok(StepTimings { sample_us: next.step.0, ..StepTimings::default() });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(StepTimings::default())
    }

    fn open_adapter(&mut self, _: &Adapter) -> Result<AdapterReading, String> {
        Ok(Box::new(adapters::fetched_for_ever))
    }

    fn digest(&self) -> u32 {
        0
    }

    fn release(&mut self) {
        *self.released.lock().unwrap() += 1;
    }
}

/// Passes on each message with its link.
struct ChannelOutbox(mpsc::Sender<(u64, FromWorker)>);

impl Outbox for ChannelOutbox {
    fn send(&mut self, link: u64, message: FromWorker) {
        let _ = self.0.send((link, message));
    }
    fn step_finished(&mut self, _plan: &StepPlan, _result: &StepResult) -> WorkerStats {
        WorkerStats { sequence: 1, snapshot: vec![7] }
    }
    fn loaded(&mut self, _form: &Form, _formed: &Formed) {}
    fn report(&mut self) -> WorkerStats {
        WorkerStats::default()
    }
}

fn executor() -> (Executor, mpsc::Receiver<(u64, FromWorker)>) {
    executor_with(Arc::default())
}

/// An executor whose rank uses `sign`.
fn executor_with(sign: Arc<AtomicBool>) -> (Executor, mpsc::Receiver<(u64, FromWorker)>) {
    let (sender, receiver) = mpsc::channel();
    let make = || ScriptedRank {
        flag: Arc::new(Flag(Mutex::new(false), Condvar::new())),
        released: Arc::new(Mutex::new(0)),
        sign,
    };
    (Executor::spawn(make, ChannelOutbox(sender)).unwrap(), receiver)
}

fn form(epoch: u64, model: &str) -> ExecutorCommand {
    ExecutorCommand::Form(Form {
        epoch: Epoch(epoch),
        replica: ReplicaId(0),
        rank: 0,
        world_size: 1,
        reduction_ranks: 1,
        config_overrides: ConfigOverrides::default(),
        dtype: Dtype::Auto,
        quantization: Quantization::None,
        lora: Lora::default(),
        draft_model: None,
        collective: CollectiveSpec::None,
        collective_timeout_ms: 1000,
        step_timeout_ms: 60_000,
        model: model.into(),
        engine: EngineConfig {
            block_size: 16,
            max_model_len: 64,
            max_num_seqs: 4,
            max_num_batched_tokens: 16,
            kv_cache_bytes: 1,
            swap_bytes: 0,
            kv_cache_dtype: KvCacheDtype::Auto,
            prefix_states: 0,
        },
    })
}

fn step(epoch: u64, step: u64) -> ExecutorCommand {
    let plan = StepPlan { epoch: Epoch(epoch), step: StepId(step), ..StepPlan::default() };
    ExecutorCommand::Step(plan)
}

fn next(receiver: &mpsc::Receiver<(u64, FromWorker)>) -> FromWorker {
    next_over(receiver).1
}

fn next_over(receiver: &mpsc::Receiver<(u64, FromWorker)>) -> (u64, FromWorker) {
    receiver.recv_timeout(PATIENCE).expect("a message in time")
}

/// Waits until the rank sets its sign, which it does when it `does` something.
fn wait_for(sign: &AtomicBool, does: &str) {
    let began = Instant::now();
    while !sign.load(Ordering::Relaxed) {
        assert!(began.elapsed() < PATIENCE, "it never {does}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn forms_starts_and_steps_with_stats_riding_along() {
    let (executor, messages) = executor();
    executor.command(form(1, "m")).unwrap();
    executor
        .command(ExecutorCommand::Start(Start { epoch: Epoch(1), num_blocks: 5, host_blocks: 0 }))
        .unwrap();
    executor.command(step(1, 1)).unwrap();
    assert!(matches!(next(&messages), FromWorker::Progress(_)));
    assert!(matches!(next(&messages), FromWorker::Formed(formed) if formed.kv_blocks == 5));
    assert!(matches!(next(&messages), FromWorker::Started(_)));
    let FromWorker::Step(result) = next(&messages) else { panic!("expected a result") };
    assert_eq!((result.step, result.stats.snapshot), (StepId(1), vec![7]));
}

/// Steps without sequences only show that a rank lives: between them it is as idle as before.
#[test]
fn a_sign_of_life_does_not_end_idle_time() {
    let (executor, messages) = executor();
    executor.command(form(1, "m")).unwrap();
    assert!(matches!(next(&messages), FromWorker::Progress(_)));
    assert!(matches!(next(&messages), FromWorker::Formed(_)));
    // Its idle time begins after that message, and before it answers another command.
    executor.report().unwrap();
    assert!(matches!(next(&messages), FromWorker::Stats(_)));
    let pause = Duration::from_millis(30);
    for count in 1..=3 {
        std::thread::sleep(pause);
        executor.command(step(1, count)).unwrap();
        let FromWorker::Step(result) = next(&messages) else { panic!("expected a result") };
        let idle = Duration::from_micros(result.timings.idle_us);
        assert!(idle >= pause * count as u32, "{idle:?} at step {count}");
    }
}

#[test]
fn results_that_no_frame_holds_fail_their_step_at_once() {
    let (executor, messages) = executor();
    executor.command(form(1, "m")).unwrap();
    executor.command(step(1, 24)).unwrap();
    executor.command(step(1, 25)).unwrap();
    executor.command(step(1, 26)).unwrap();
    assert!(matches!(next(&messages), FromWorker::Progress(_)));
    assert!(matches!(next(&messages), FromWorker::Formed(_)));
    let fits = next(&messages);
    assert!(codec::encode(&fits).unwrap().len() <= BODY_MAX as usize);
    assert!(matches!(fits, FromWorker::Step(result) if result.step == StepId(24)));
    let FromWorker::StepFailed(failed) = next(&messages) else { panic!("expected a failure") };
    assert_eq!((failed.epoch, failed.step), (Epoch(1), StepId(25)));
    assert!(failed.message.contains("16777216"), "{}", failed.message);
    // The epoch has ended: the step queued behind is not run.
    executor.command(form(2, "m")).unwrap();
    assert!(matches!(next(&messages), FromWorker::Progress(news) if news.epoch == Epoch(2)));
}

#[test]
fn an_abort_frees_a_hanging_step_and_the_next_epoch_works() {
    let sign = Arc::new(AtomicBool::new(false));
    let (executor, messages) = executor_with(sign.clone());
    executor.command(form(1, "m")).unwrap();
    executor.command(step(1, 13)).unwrap();
    assert!(matches!(next(&messages), FromWorker::Progress(_)));
    assert!(matches!(next(&messages), FromWorker::Formed(_)));
    // A step that has not begun would send nothing.
    wait_for(&sign, "begins");
    executor.abort(Epoch(1));
    assert!(matches!(next(&messages), FromWorker::StepFailed(f) if f.step == StepId(13)));
    executor.command(step(1, 14)).unwrap();
    executor.command(form(2, "m")).unwrap();
    executor.command(step(2, 1)).unwrap();
    assert!(matches!(next(&messages), FromWorker::Progress(_)), "step 14 of the old epoch is mute");
    assert!(matches!(next(&messages), FromWorker::Formed(f) if f.epoch == Epoch(2)));
    assert!(matches!(next(&messages), FromWorker::Step(r) if r.epoch == Epoch(2)));
}

/// A load cannot be interrupted, and the cluster does not wait for it.
#[test]
fn epochs_that_come_and_go_during_a_load_do_not_fill_the_queue() {
    let sign = Arc::new(AtomicBool::new(false));
    let (executor, messages) = executor_with(sign.clone());
    executor.command(form(1, "large")).unwrap();
    assert!(matches!(next(&messages), FromWorker::Progress(it) if it.bytes_done == 0));
    assert!(executor.report().is_ok());
    let last = 200;
    for epoch in 2..=last {
        executor.abort(Epoch(epoch - 1));
        executor.command(form(epoch, "m")).unwrap();
        executor
            .command(ExecutorCommand::Start(Start {
                epoch: Epoch(epoch),
                num_blocks: 5,
                host_blocks: 0,
            }))
            .unwrap();
        executor.command(step(epoch, 1)).unwrap();
        executor.command(step(epoch, 2)).unwrap();
    }
    // Commands of the current epoch are bounded as well: the form, the start and steps.
    let queued = (3..100).map(|id| executor.command(step(last, id)));
    assert_eq!(queued.filter(Result::is_ok).count(), 32 - 6, "beside five and the report");
    sign.store(true, Ordering::Relaxed);
    let mut said = Vec::new();
    while !matches!(said.last(), Some(FromWorker::Step(r)) if r.step == StepId(2)) {
        said.push(next(&messages));
    }
    let formed = |it: &FromWorker| matches!(it, FromWorker::Formed(f) if f.epoch == Epoch(last));
    assert!(said.iter().any(formed), "the last one is formed: {said:?}");
    assert!(said.iter().any(|it| matches!(it, FromWorker::Stats(_))), "a report is made");
    assert!(said.len() < 20, "the others are not: {said:?}");
}

#[test]
fn a_lost_link_ends_everything_and_a_new_coordinator_may_count_from_one() {
    let (executor, messages) = executor();
    executor.command(form(9, "m")).unwrap();
    assert!(matches!(next(&messages), FromWorker::Progress(_)));
    assert!(matches!(next(&messages), FromWorker::Formed(_)));
    executor.abort_all();
    executor.new_link();
    executor.command(form(1, "m")).unwrap();
    assert!(matches!(next(&messages), FromWorker::Stats(_)), "it has left epoch 9");
    assert!(matches!(next(&messages), FromWorker::Progress(_)));
    assert!(matches!(next(&messages), FromWorker::Formed(f) if f.epoch == Epoch(1)));
}

/// Whoever waits for a sign of it, since it was late with a step, learns that it does not hang.
#[test]
fn an_executor_that_leaves_an_epoch_between_steps_says_so_once() {
    let (executor, messages) = executor();
    let link = executor.new_link();
    executor.command(form(1, "m")).unwrap();
    assert!(matches!(next(&messages), FromWorker::Progress(_)));
    assert!(matches!(next(&messages), FromWorker::Formed(_)));
    executor.abort(Epoch(1));
    let (over, sign) = next_over(&messages);
    let is_empty = matches!(&sign, FromWorker::Stats(stats) if stats.snapshot.is_empty());
    assert!(over == link && is_empty, "{sign:?}");
    executor.abort(Epoch(1));
    executor.command(form(2, "m")).unwrap();
    assert!(matches!(next(&messages), FromWorker::Progress(it) if it.epoch == Epoch(2)));
}

#[test]
fn what_waits_when_the_link_is_lost_does_not_run_over_the_next() {
    let sign = Arc::new(AtomicBool::new(false));
    let (executor, messages) = executor_with(sign.clone());
    executor.command(form(8, "m")).unwrap();
    assert!(matches!(next(&messages), FromWorker::Progress(_)));
    assert!(matches!(next(&messages), FromWorker::Formed(_)));
    executor.command(step(8, 17)).unwrap();
    executor.command(form(9, "m")).unwrap();
    // A step that has not begun would not run at all.
    wait_for(&sign, "begins");
    executor.abort_all();
    let link = executor.new_link();
    executor.command(form(1, "m")).unwrap();
    // The old link's step fails only now, which must not affect this link's epochs.
    sign.store(false, Ordering::Relaxed);
    // Nor is it reported over this link, whose coordinator may have an epoch 8 as well.
    let (over, failed) = next_over(&messages);
    assert!(over < link && matches!(failed, FromWorker::StepFailed(f) if f.epoch == Epoch(8)));
    assert!(matches!(next(&messages), FromWorker::Progress(p) if p.epoch == Epoch(1)));
    let (over, formed) = next_over(&messages);
    assert!(over == link && matches!(formed, FromWorker::Formed(f) if f.epoch == Epoch(1)));
}

#[test]
fn reports_do_not_fill_the_queue_while_the_executor_is_busy() {
    let (executor, messages) = executor();
    executor.command(form(1, "m")).unwrap();
    assert!(matches!(next(&messages), FromWorker::Progress(_)));
    assert!(matches!(next(&messages), FromWorker::Formed(_)), "which would report itself");
    executor.command(step(1, 13)).unwrap();
    for _ in 0..2 * COMMANDS_MAX {
        executor.report().unwrap();
    }
    executor.command(form(2, "m")).unwrap();
    executor.abort(Epoch(1));
    let reports = std::iter::from_fn(|| Some(next(&messages)))
        .take_while(|message| !matches!(message, FromWorker::Formed(f) if f.epoch == Epoch(2)))
        .filter(|message| matches!(message, FromWorker::Stats(_)));
    assert_eq!(reports.count(), 1);
}

/// Loading takes minutes, and memory fills meanwhile.
#[test]
fn a_rank_that_is_being_formed_reports_its_stats() {
    let sign = Arc::new(AtomicBool::new(false));
    let (executor, messages) = executor_with(sign.clone());
    let first = executor.new_link();
    executor.command(form(1, "growing")).unwrap();
    // Asks for a report, and returns the link over which it comes.
    let reported = || {
        executor.report().unwrap();
        let began = Instant::now();
        loop {
            assert!(began.elapsed() < PATIENCE, "it does not report");
            if let (link, FromWorker::Stats(_)) = next_over(&messages) {
                return link;
            }
        }
    };
    assert_eq!((reported(), reported()), (first, first));
    // The load goes on although its epoch is over, and the next coordinator wants stats, too.
    executor.abort_all();
    let second = executor.new_link();
    assert_eq!(reported(), second);
    sign.store(true, Ordering::Relaxed);
    while !matches!(next(&messages), FromWorker::Formed(_)) {}
}

#[test]
fn commands_to_drop_adapters_leave_room_for_others_while_the_executor_is_busy() {
    let (executor, messages) = executor();
    executor.command(form(1, "m")).unwrap();
    executor.command(step(1, 13)).unwrap();
    for number in 0..64 {
        let drop = ChangeAdapter { epoch: Epoch(1), change: AdapterChange::Drop(number) };
        executor.command(ExecutorCommand::Adapter(drop)).unwrap();
    }
    executor.command(form(2, "m")).unwrap();
    executor.abort(Epoch(1));
    let is_formed = |it: FromWorker| matches!(it, FromWorker::Formed(f) if f.epoch == Epoch(2));
    while !is_formed(next(&messages)) {}
}

#[test]
fn a_form_failure_is_reported_and_later_steps_of_it_are_mute() {
    let (executor, messages) = executor();
    executor.command(form(1, "corrupt")).unwrap();
    executor.command(step(1, 1)).unwrap();
    executor.command(form(2, "m")).unwrap();
    assert!(matches!(next(&messages), FromWorker::FormFailed(f) if f.permanent));
    assert!(matches!(next(&messages), FromWorker::Progress(p) if p.epoch == Epoch(2)));
}

#[test]
fn dropping_the_executor_frees_a_hanging_step() {
    let (executor, messages) = executor();
    executor.command(form(1, "m")).unwrap();
    executor.command(step(1, 13)).unwrap();
    assert!(matches!(next(&messages), FromWorker::Progress(_)));
    drop(executor);
}

/// The next step is seen while the previous one runs, and is still run; commands of other epochs
/// are not seen.
#[test]
fn a_step_sees_the_next_of_its_epoch_and_no_other_command() {
    let sign = Arc::new(AtomicBool::new(false));
    let (executor, messages) = executor_with(sign.clone());
    // It is loading until all of them are queued.
    executor.command(form(1, "large")).unwrap();
    for command in [step(1, 21), step(1, 22), step(1, 21), step(2, 23), step(1, 21), form(3, "m")] {
        executor.command(command).unwrap();
    }
    sign.store(true, Ordering::Relaxed);
    let mut seen = Vec::new();
    loop {
        match next(&messages) {
            FromWorker::Step(result) => seen.push((result.step.0, result.timings.sample_us)),
            FromWorker::Formed(formed) if formed.epoch == Epoch(3) => break,
            _ => {}
        }
    }
    assert_eq!(seen, [(21, 22), (22, 0), (21, 0), (21, 0)]);
}

#[test]
fn a_step_that_was_looked_at_is_not_run_when_its_epoch_is_over() {
    let sign = Arc::new(AtomicBool::new(false));
    let (executor, messages) = executor_with(sign.clone());
    for command in [form(1, "m"), step(1, 18), step(1, 19)] {
        executor.command(command).unwrap();
    }
    wait_for(&sign, "looks");
    executor.abort(Epoch(1));
    executor.command(form(2, "m")).unwrap();
    let mut run = Vec::new();
    loop {
        match next(&messages) {
            FromWorker::Step(result) => run.push(result.step.0),
            FromWorker::Formed(formed) if formed.epoch == Epoch(2) => break,
            _ => {}
        }
    }
    assert_eq!(run, [18]);
}

#[test]
fn an_executor_that_does_not_leave_its_epoch_is_known_by_it() {
    let sign = Arc::new(AtomicBool::new(false));
    let (executor, messages) = executor_with(sign.clone());
    executor.command(form(1, "large")).unwrap();
    assert!(matches!(next(&messages), FromWorker::Progress(_)));
    assert_eq!(executor.leaving_for(), None, "nobody told it to");
    executor.abort(Epoch(1));
    std::thread::sleep(Duration::from_millis(60));
    executor.abort(Epoch(1));
    let lasts = executor.leaving_for().unwrap();
    assert!(lasts >= Duration::from_millis(60), "from the first time on: {lasts:?}");
    sign.store(true, Ordering::Relaxed);
    let began = Instant::now();
    while executor.leaving_for().is_some() {
        assert!(began.elapsed() < Duration::from_secs(20), "it has left, and hangs still");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_sign_of_getting_on_counts() {
    let (commands, receiver) = queue();
    commands.push(1, ExecutorCommand::Release(Epoch(1))).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let before = commands.leaving_for().unwrap();
    assert!(before >= Duration::from_millis(100));
    let told = Instant::now();
    receiver.record_progress();
    assert!(commands.leaving_for().unwrap() <= told.elapsed());
    assert!(receiver.take().is_some());
    assert!(commands.leaving_for().is_some(), "it is leaving");
    commands.push(1, ExecutorCommand::Report).unwrap();
    assert!(receiver.take().is_some());
    assert_eq!(commands.leaving_for(), None);
}

#[test]
fn whoever_asks_learns_that_the_thread_has_ended() {
    let (mut executor, _messages) = executor();
    let mut ended = executor.ended().unwrap();
    assert!(executor.ended().is_none(), "once");
    assert_eq!(ended.try_recv(), Err(oneshot::error::TryRecvError::Empty));
    executor.command(form(1, "panics")).unwrap();
    assert!(ended.blocking_recv().is_err());
    assert_eq!(executor.command(form(2, "m")), Err(ExecutorError::Ended));
}

#[test]
fn a_group_id_is_for_its_epoch_and_link() {
    let slot = AbortSlot::default();
    let link = slot.new_link();
    slot.enter(link);
    slot.tell_group_id(Epoch(3), vec![3]);
    assert_eq!(slot.wait_for_group_id(Epoch(2), Duration::ZERO), None);
    assert_eq!(slot.wait_for_group_id(Epoch(3), Duration::ZERO), Some(vec![3]));
    assert_eq!(slot.wait_for_group_id(Epoch(3), Duration::ZERO), None, "taken");
    slot.abort(Epoch(4));
    slot.tell_group_id(Epoch(4), vec![4]);
    assert_eq!(slot.wait_for_group_id(Epoch(4), Duration::ZERO), None, "its epoch is over");
    // Another coordinator counts from 1 again; the executor may lag behind.
    let next = slot.new_link();
    slot.tell_group_id(Epoch(1), vec![1]);
    assert_eq!(
        slot.wait_for_group_id(Epoch(1), Duration::ZERO),
        None,
        "the command is of the old link"
    );
    slot.enter(next);
    assert_eq!(slot.wait_for_group_id(Epoch(1), Duration::ZERO), Some(vec![1]));
}

#[test]
fn a_group_s_id_is_waited_for_until_it_comes_or_the_epoch_is_over() {
    for comes in [true, false] {
        let slot = AbortSlot::default();
        slot.enter(slot.new_link());
        let waiting = slot.clone();
        let began = Instant::now();
        let waiter = std::thread::spawn(move || {
            waiting.wait_for_group_id(Epoch(3), Duration::from_secs(60))
        });
        std::thread::sleep(Duration::from_millis(50));
        slot.tell_group_id(Epoch(2), vec![2]);
        match comes {
            true => slot.tell_group_id(Epoch(3), vec![3]),
            false => slot.abort(Epoch(3)),
        }
        assert_eq!(waiter.join().unwrap(), comes.then(|| vec![3]));
        assert!(began.elapsed() < Duration::from_secs(30));
    }
    let (slot, moment) = (AbortSlot::default(), Duration::from_millis(20));
    assert_eq!(slot.wait_for_group_id(Epoch(3), moment), None, "nobody tells it");
}

//! Masks bypass the queue, for the current step or the next, and for no other.
use shared::protocol::TokenMask;

use super::*;
use crate::rank::AbortSlot;

fn masks(epoch: u64, step: u64, token: u32) -> StepMasks {
    let masks = vec![None, Some(TokenMask::Only(vec![token]))];
    StepMasks { epoch: Epoch(epoch), step: StepId(step), masks }
}

/// Epoch and step of a result, and the token of the mask that the rank was given.
fn given(message: FromWorker) -> (u64, u64, u64) {
    let FromWorker::Step(StepResult { epoch, step, timings, .. }) = message else {
        panic!("{message:?} is no result");
    };
    (epoch.0, step.0, timings.sample_us)
}

fn formed(epoch: u64) -> (Executor, mpsc::Receiver<(u64, FromWorker)>) {
    let (executor, messages) = executor();
    form_again(&executor, &messages, epoch);
    (executor, messages)
}

fn form_again(executor: &Executor, messages: &mpsc::Receiver<(u64, FromWorker)>, epoch: u64) {
    executor.command(form(epoch, "m")).unwrap();
    assert!(matches!(next(messages), FromWorker::Progress(_)));
    assert!(matches!(next(messages), FromWorker::Formed(_)));
}

#[test]
fn they_are_there_when_they_are_asked_for_or_are_waited_for() {
    let (executor, messages) = formed(1);
    executor.tell_masks(masks(1, 29, 7));
    executor.command(step(1, 29)).unwrap();
    assert_eq!(given(next(&messages)), (1, 29, 7));
    executor.command(step(1, 30)).unwrap();
    // The next plan is queued before the masks come.
    executor.command(step(1, 31)).unwrap();
    assert!(messages.recv_timeout(Duration::from_millis(50)).is_err(), "it waits");
    executor.tell_masks(masks(1, 30, 8));
    assert_eq!(given(next(&messages)), (1, 30, 8));
    executor.tell_masks(masks(1, 31, 9));
    assert_eq!(given(next(&messages)), (1, 31, 9));
}

#[test]
fn those_of_another_step_epoch_or_link_are_not_taken() {
    let (executor, messages) = formed(1);
    executor.command(step(1, 29)).unwrap();
    for (epoch, step) in [(1, 30), (2, 29), (1, 28)] {
        executor.tell_masks(masks(epoch, step, 3));
    }
    assert!(messages.recv_timeout(Duration::from_millis(50)).is_err(), "it waits");
    executor.tell_masks(masks(1, 29, 4));
    assert_eq!(given(next(&messages)), (1, 29, 4));
    executor.command(step(1, 30)).unwrap();
    assert_eq!(given(next(&messages)), (1, 30, 3), "it was early");
    // Another coordinator uses the same epochs and steps.
    executor.tell_masks(masks(1, 31, 5));
    executor.abort_all();
    executor.new_link();
    assert!(matches!(next(&messages), FromWorker::Stats(_)), "it has left the epoch");
    form_again(&executor, &messages, 1);
    executor.command(step(1, 31)).unwrap();
    executor.tell_masks(masks(1, 31, 6));
    assert_eq!(given(next(&messages)), (1, 31, 6));
}

#[test]
fn waiting_for_them_ends_with_the_epoch_and_with_the_link() {
    let sign = Arc::new(AtomicBool::new(false));
    let (executor, messages) = executor_with(sign.clone());
    form_again(&executor, &messages, 1);
    let waits = |epoch: u64, number: u64| {
        sign.store(false, Ordering::Relaxed);
        executor.command(step(epoch, number)).unwrap();
        // One that has not begun would end without a word.
        wait_for(&sign, "begins");
        assert!(messages.recv_timeout(Duration::from_millis(50)).is_err(), "it waits");
    };
    let failed = |message: FromWorker| match message {
        FromWorker::StepFailed(failed) => {
            assert!(failed.message.contains("is over"), "{}", failed.message);
            (failed.epoch.0, failed.step.0)
        }
        other => panic!("{other:?}"),
    };
    waits(1, 29);
    let began = Instant::now();
    executor.abort(Epoch(1));
    assert_eq!(failed(next(&messages)), (1, 29));
    // Masks that come late are ignored.
    executor.tell_masks(masks(1, 29, 3));
    form_again(&executor, &messages, 2);
    waits(2, 29);
    executor.abort_all();
    assert_eq!(failed(next(&messages)), (2, 29));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[test]
fn they_are_waited_for_so_long_and_held_so_many() {
    let slot = AbortSlot::default();
    let patience = Duration::from_millis(20);
    let wait = |step| slot.wait_for_masks(Epoch(1), StepId(step), patience);
    let late = wait(1).unwrap_err();
    assert!(late.contains("step-1 did not come within 0.02 s"), "{late}");
    for step in 1..=6 {
        slot.tell_masks(masks(1, step, 1));
    }
    assert!(wait(2).is_err() && wait(3).is_ok() && wait(6).is_ok());
    assert!(wait(6).is_err(), "once");
    slot.forget_masks(Epoch(1), StepId(4));
    assert!(wait(4).is_err() && wait(5).is_ok());
}

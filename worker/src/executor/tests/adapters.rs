//! Adapters whose files are being fetched.
use super::*;
use crate::rank::AdapterSink;

/// A download that never ends by itself.
pub(super) fn fetched_for_ever(sink: &mut dyn AdapterSink) -> Result<ModelIdentity, String> {
    let mut bytes = 0;
    while sink.fetches(Some((bytes, 1 << 30))) {
        bytes += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    Err("called off".to_owned())
}

fn change(change: AdapterChange) -> ExecutorCommand {
    ExecutorCommand::Adapter(ChangeAdapter { epoch: Epoch(1), change })
}

fn load(number: u32) -> ExecutorCommand {
    let path = "hf://org/adapter".to_owned();
    let adapter = Adapter { number, name: format!("a{number}"), path, identity: None };
    change(AdapterChange::Load(adapter))
}

#[test]
fn a_dropped_adapter_is_no_longer_fetched_and_others_are() {
    let (executor, messages) = executor();
    executor.command(form(1, "m")).unwrap();
    for command in [load(1), load(2), change(AdapterChange::Drop(1))] {
        executor.command(command).unwrap();
    }
    let ended = |message| match message {
        FromWorker::Adapter(done) => Some((done.number, done.outcome)),
        _ => None,
    };
    let first = std::iter::from_fn(|| Some(next(&messages))).find_map(ended);
    assert_eq!(first, Some((1, Err("called off".to_owned()))));
    // The other one still is: only its own drop ends it.
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(messages.try_iter().find_map(|(_, message)| ended(message)), None);
    executor.command(change(AdapterChange::Drop(2))).unwrap();
    let second = std::iter::from_fn(|| Some(next(&messages))).find_map(ended);
    assert_eq!(second, Some((2, Err("called off".to_owned()))));
}

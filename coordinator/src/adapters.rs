//! The LoRA adapters that requests may name now, which of them requests use, and how commands to
//! load or unload one reach those who carry them out.
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Duration;

use shared::protocol::{Adapter, AdapterCommand, AdapterError};
use tokio::sync::{mpsc, oneshot};

/// Maximum number of commands on their way.
const ASKS_MAX: usize = 64;
/// How long whoever gave a command waits for its outcome: longer than an adapter takes to download.
const PATIENCE: Duration = Duration::from_secs(900);

/// The adapter that a request is computed with, or none. While it exists, the adapter keeps its
/// place on the workers, even if it is not served any more.
#[derive(Clone, Debug, Default)]
pub struct AdapterUse(Option<Arc<Adapter>>);

impl AdapterUse {
    /// The use of an adapter with this number, which has no other properties.
    #[must_use]
    pub fn numbered(number: u32) -> Self {
        let adapter =
            Adapter { number, name: number.to_string(), path: "-".into(), identity: None };
        Self((number > 0).then(|| Arc::new(adapter)))
    }

    /// Its number; 0 for none.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.0.as_ref().map_or(0, |adapter| adapter.number)
    }

    /// Its name, if there is an adapter.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.0.as_ref().map(|adapter| adapter.name.as_str())
    }
}

/// Tells whether requests use an adapter that is not served any more.
#[derive(Clone, Debug)]
pub struct Leaving {
    /// Its number.
    pub number: u32,
    uses: Weak<Adapter>,
}

impl Leaving {
    /// Whether no request uses it.
    #[must_use]
    pub fn is_unused(&self) -> bool {
        self.uses.strong_count() == 0
    }
}

/// The adapters that are served. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct ServedAdapters(Arc<RwLock<Vec<Arc<Adapter>>>>);

impl ServedAdapters {
    /// These adapters.
    #[must_use]
    pub fn of(adapters: &[Adapter]) -> Self {
        let served = Self::default();
        served.replace(adapters);
        served
    }

    /// Changes the list. Returns those that it does not have any more.
    pub fn replace(&self, adapters: &[Adapter]) -> Vec<Leaving> {
        let mut served = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let known = |new: &Adapter| {
            let same = |old: &&Arc<Adapter>| old.number == new.number && old.name == new.name;
            served.iter().find(same).cloned().unwrap_or_else(|| Arc::new(new.clone()))
        };
        let next: Vec<Arc<Adapter>> = adapters.iter().map(known).collect();
        let before = std::mem::replace(&mut *served, next);
        let is_gone = |old: &&Arc<Adapter>| !served.iter().any(|new| new.number == old.number);
        let leaving =
            |old: &Arc<Adapter>| Leaving { number: old.number, uses: Arc::downgrade(old) };
        before.iter().filter(is_gone).map(leaving).collect()
    }

    /// All of them, in the order of the list; these are no uses of them.
    #[must_use]
    pub fn all(&self) -> Vec<Adapter> {
        let served = self.0.read().unwrap_or_else(PoisonError::into_inner);
        served.iter().map(|adapter| (**adapter).clone()).collect()
    }

    /// The adapter of this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<AdapterUse> {
        self.first(|adapter| adapter.name == name)
    }

    /// The adapter of this number and name; none for number 0, which needs no adapter.
    #[must_use]
    pub fn numbered(&self, number: u32, name: &str) -> Option<AdapterUse> {
        match number {
            0 => Some(AdapterUse::default()),
            number => self.first(|adapter| adapter.number == number && adapter.name == name),
        }
    }

    fn first(&self, is_it: impl Fn(&Adapter) -> bool) -> Option<AdapterUse> {
        let served = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let found = served.iter().find(|adapter| is_it(adapter)).cloned();
        found.map(|adapter| AdapterUse(Some(adapter)))
    }
}

/// A command on its way, and where its outcome goes.
#[derive(Debug)]
pub struct AdapterAsk {
    /// The command.
    pub command: AdapterCommand,
    /// Receives the outcome.
    pub answer: oneshot::Sender<Result<(), AdapterError>>,
}

/// Takes commands about adapters to those who carry them out.
#[derive(Clone, Debug)]
pub struct AdapterChanges(mpsc::Sender<AdapterAsk>);

impl AdapterChanges {
    /// Makes both ends.
    #[must_use]
    pub fn channel() -> (Self, mpsc::Receiver<AdapterAsk>) {
        let (sender, receiver) = mpsc::channel(ASKS_MAX);
        (Self(sender), receiver)
    }

    /// Gives a command, and waits for its outcome.
    ///
    /// # Errors
    /// [`AdapterError`].
    pub async fn ask(&self, command: AdapterCommand) -> Result<(), AdapterError> {
        let (answer, outcome) = oneshot::channel();
        let sent = self.0.try_send(AdapterAsk { command, answer });
        sent.map_err(|error| {
            AdapterError::NotNow(match error {
                mpsc::error::TrySendError::Full(_) => {
                    format!("{ASKS_MAX} commands about adapters wait already")
                }
                mpsc::error::TrySendError::Closed(_) => "the server is stopping".to_owned(),
            })
        })?;
        let unknown = |why: &str| {
            AdapterError::NotNow(format!("{why}; GET /v1/models shows whether it was carried out"))
        };
        match tokio::time::timeout(PATIENCE, outcome).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(unknown("the server is stopping")),
            Err(_) => Err(unknown(&format!("there was no outcome in {} s", PATIENCE.as_secs()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter(number: u32, name: &str) -> Adapter {
        Adapter { number, name: name.into(), path: "/a".into(), identity: None }
    }

    #[test]
    fn an_adapter_that_is_not_served_any_more_is_in_use_until_its_last_request_ends() {
        let served = ServedAdapters::of(&[adapter(1, "a"), adapter(2, "b")]);
        let (a, b) = (served.find("a").unwrap(), served.find("b").unwrap());
        let again = a.clone();
        // The same name means another adapter now.
        let leaving = served.replace(&[adapter(2, "b"), adapter(9, "a")]);
        assert_eq!(leaving.iter().map(|it| it.number).collect::<Vec<_>>(), [1]);
        assert_eq!((a.number(), served.find("a").unwrap().number()), (1, 9));
        drop((a, b));
        assert!(!leaving[0].is_unused());
        drop(again);
        assert!(leaving[0].is_unused());
        assert!(served.replace(&[])[0].is_unused());
    }

    #[test]
    fn a_number_and_its_name_must_agree() {
        let served = ServedAdapters::of(&[adapter(3, "a")]);
        assert_eq!(served.numbered(3, "a").unwrap().name(), Some("a"));
        assert_eq!(served.numbered(0, "").unwrap().number(), 0);
        for (number, name) in [(3, "b"), (4, "a"), (3, "")] {
            assert!(served.numbered(number, name).is_none(), "{number} {name}");
        }
    }
}

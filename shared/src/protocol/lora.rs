//! LoRA adapters served beside the model, and changes of their list.
use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::ids::Epoch;
use crate::model_identity::ModelIdentity;

/// Maximum number of adapters of a model: the messages that list them all must fit their bounds.
pub const ADAPTERS_MAX: usize = 64;
/// Maximum length of an adapter's name, in bytes.
pub const ADAPTER_NAME_MAX: usize = 128;
/// Maximum length of the path of an adapter's folder, in bytes.
pub const ADAPTER_PATH_MAX: usize = 1024;

/// One LoRA adapter. Requests select it by name, in place of the model's; below HTTP it is
/// identified by its number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adapter {
    /// Identifies it from when it is loaded until it is unloaded; never used for another one, not
    /// even of the same name. At least 1: 0 is the base model alone.
    pub number: u32,
    /// Its name in the API.
    pub name: String,
    /// Its folder in PEFT's format, as a path on the worker's host, or an adapter on the hub, as
    /// [`HubModel`](crate::hub::HubModel) is written.
    pub path: String,
    /// What its folder must contain, if that is known.
    pub identity: Option<ModelIdentity>,
}

/// The adapters of a replica; every rank holds them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lora {
    /// The adapters.
    pub adapters: Vec<Adapter>,
    /// The largest LoRA rank of an adapter.
    pub max_rank: u32,
    /// For how many adapters of that rank there is room, so that they can be loaded and unloaded
    /// while the replica serves; 0 if the list never changes, and there is room for that only.
    pub places: u32,
}

/// A command about one adapter, to a rank of a replica that serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeAdapter {
    /// The replica's epoch.
    pub epoch: Epoch,
    /// What to do.
    pub change: AdapterChange,
}

/// What to do about an adapter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdapterChange {
    /// Load it beside the steps that run, and answer with [`AdapterDone`].
    Load(Adapter),
    /// Free the place of the adapter with this number, or give up loading it. No later plan uses
    /// it; there is no answer.
    Drop(u32),
}

/// A rank has loaded an adapter, or cannot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterDone {
    /// The epoch.
    pub epoch: Epoch,
    /// The adapter's number.
    pub number: u32,
    /// What its folder contains, or why it cannot be loaded, in one sentence.
    pub outcome: Result<ModelIdentity, String>,
}

/// A change of the adapters that are served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdapterCommand {
    /// Load one and serve it.
    Load {
        /// Its name in the API.
        name: String,
        /// As in [`Adapter::path`].
        path: String,
        /// Whether it takes the place of the one of that name, if there is one.
        replace: bool,
    },
    /// Serve it no longer.
    Unload {
        /// Its name in the API.
        name: String,
    },
}

/// Why such a change is not made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum AdapterError {
    /// Nothing has that name.
    #[error("The lora adapter '{0}' cannot be found.")]
    Unknown(String),
    /// An adapter has that name.
    #[error(
        "The lora adapter '{0}' has already been loaded. If you want to load the adapter in place, \
         set 'load_inplace' to True."
    )]
    Taken(String),
    /// The command cannot be carried out as it is.
    #[error("{0}")]
    Wrong(String),
    /// It may be possible later.
    #[error("{0}")]
    NotNow(String),
}

impl Adapter {
    /// Checks the bounds of name and path.
    ///
    /// # Errors
    /// One sentence naming the bound that is broken.
    pub fn check(name: &str, path: &str) -> Result<(), String> {
        if !(1..=ADAPTER_NAME_MAX).contains(&name.len()) || name.chars().any(char::is_control) {
            return Err(format!(
                "the adapter name {name:?} must have 1 to {ADAPTER_NAME_MAX} bytes, and no \
                 control characters"
            ));
        }
        if !(1..=ADAPTER_PATH_MAX).contains(&path.len()) {
            let len = path.len();
            return Err(format!(
                "the path of adapter {name} has {len} bytes, it must have 1 to {ADAPTER_PATH_MAX}"
            ));
        }
        Ok(())
    }
}

impl Lora {
    /// Adapters with these names and paths, numbered from 1, that never change.
    #[must_use]
    pub fn fixed(adapters: impl IntoIterator<Item = (String, String)>, max_rank: u32) -> Self {
        let numbered = (1..).zip(adapters);
        let adapter = |(number, (name, path))| Adapter { number, name, path, identity: None };
        Self { adapters: numbered.map(adapter).collect(), max_rank, places: 0 }
    }

    /// The same without the adapters, if there is room for others: what is common to all states of
    /// the list.
    #[must_use]
    pub fn lasting(&self) -> Self {
        let adapters = if self.places > 0 { Vec::new() } else { self.adapters.clone() };
        Self { adapters, ..*self }
    }

    /// Checks the bounds, and that each name is unique, also among the model's own names.
    ///
    /// # Errors
    /// One sentence naming the bound that is broken.
    pub fn check<'a>(&'a self, model_names: impl Iterator<Item = &'a str>) -> Result<(), String> {
        let count = self.adapters.len();
        if count > ADAPTERS_MAX {
            return Err(format!("{count} adapters, the limit is {ADAPTERS_MAX}"));
        }
        let mut names: BTreeSet<&str> = model_names.collect();
        let places = self.places as usize;
        if places > ADAPTERS_MAX {
            return Err(format!("room for {places} adapters, the limit is {ADAPTERS_MAX}"));
        }
        if places > 0 && count > places {
            return Err(format!("{count} adapters, but room for {places} (--max-loras)"));
        }
        for Adapter { name, path, .. } in &self.adapters {
            Adapter::check(name, path)?;
            if !names.insert(name) {
                return Err(format!(
                    "the name {name} is given twice; the model's own name counts, too"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lora(names: &[&str]) -> Lora {
        Lora::fixed(names.iter().map(|name| ((*name).to_owned(), "/a".to_owned())), 16)
    }

    #[test]
    fn names_mean_one_thing_and_bounds_are_named() {
        assert_eq!(lora(&["a", "org/b"]).check(["m"].into_iter()), Ok(()));
        let refused = |lora: Lora, words: &str| {
            let error = lora.check(["m", "n"].into_iter()).unwrap_err();
            assert!(error.contains(words), "{error}");
        };
        refused(lora(&["a", "a"]), "name a is given twice");
        refused(lora(&["a", "m"]), "name m is given twice");
        refused(lora(&["n"]), "name n is given twice");
        refused(lora(&[""]), "1 to 128 bytes");
        refused(lora(&["a\n"]), "no control characters");
        let many: Vec<String> = (0..=ADAPTERS_MAX).map(|n| n.to_string()).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        refused(lora(&many), "65 adapters, the limit is 64");
        let mut long = lora(&["a"]);
        long.adapters[0].path = "p".repeat(ADAPTER_PATH_MAX + 1);
        refused(long, "has 1025 bytes");
        refused(Lora { places: 65, ..lora(&["a"]) }, "room for 65 adapters, the limit is 64");
        refused(Lora { places: 1, ..lora(&["a", "b"]) }, "2 adapters, but room for 1");
        assert_eq!(Lora { places: 2, ..lora(&["a", "b"]) }.check([].into_iter()), Ok(()));
    }
}

//! LoRA adapters served beside the model.
use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// Maximum number of adapters of a model: the messages that list them all must fit their bounds.
pub const ADAPTERS_MAX: usize = 64;
/// Maximum length of an adapter's name, in bytes.
pub const ADAPTER_NAME_MAX: usize = 128;
/// Maximum length of the path of an adapter's folder, in bytes.
pub const ADAPTER_PATH_MAX: usize = 1024;

/// One LoRA adapter. Requests select it by name, in place of the model's; below HTTP it is
/// identified by its index in the list, from 1, and 0 is the base model alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adapter {
    /// Its name in the API.
    pub name: String,
    /// Its folder in PEFT's format, as a path on the worker's host, or an adapter on the hub, as
    /// [`HubModel`](crate::hub::HubModel) is written.
    pub path: String,
}

/// All adapters of a replica; every rank holds them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lora {
    /// The adapters, in the order of their numbers.
    pub adapters: Vec<Adapter>,
    /// The largest LoRA rank of an adapter.
    pub max_rank: u32,
}

impl Lora {
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
        for Adapter { name, path } in &self.adapters {
            if !(1..=ADAPTER_NAME_MAX).contains(&name.len()) || name.chars().any(char::is_control) {
                return Err(format!(
                    "the adapter name {name:?} must have 1 to {ADAPTER_NAME_MAX} bytes, and no \
                     control characters"
                ));
            }
            if !(1..=ADAPTER_PATH_MAX).contains(&path.len()) {
                let len = path.len();
                return Err(format!(
                    "the path of adapter {name} has {len} bytes, it must have 1 to \
                     {ADAPTER_PATH_MAX}"
                ));
            }
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
        let adapter = |name: &&str| Adapter { name: (*name).to_owned(), path: "/a".to_owned() };
        Lora { adapters: names.iter().map(adapter).collect(), max_rank: 16 }
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
    }
}

//! PURE: what a coordinator would serve if it led, and which secrets it accepts, as its record in
//! etcd says: a standby with other options than the leader's is noticed before it takes over.
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::model_identity::ModelIdentity;

/// See the module's documentation. Nothing in it reveals a secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Serves {
    /// Names of the model in the API, the first one first.
    pub names: Vec<String>,
    /// Contents of the model's folder; unknown where its weights are elsewhere.
    #[serde(default)]
    pub model: Option<ModelIdentity>,
    /// Fingerprint of the files that concern text, and of the options that go before them.
    pub text: u64,
    /// Maximum length of a sequence, in tokens.
    pub max_model_len: u32,
    /// Ranks per replica.
    pub tensor_parallel: u32,
    /// Data types of arithmetic, weights and KV cache.
    pub dtypes: String,
    /// [Fingerprints](crate::wire::auth::Secret::fingerprint) of the secrets; none without secrets.
    #[serde(default)]
    pub secrets: Vec<String>,
}

/// In what a coordinator differs from the one that leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// No secret of one is accepted by the other.
    Secret,
    /// Other contents of the model's folder.
    Model,
    /// Something else: what, then how it is here and at the leader.
    Option(&'static str, String, String),
}

impl Difference {
    /// What differs, in few words.
    #[must_use]
    pub fn what(&self) -> &'static str {
        match self {
            Self::Secret => "cluster secret",
            Self::Model => "model",
            Self::Option(what, ..) => what,
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "another {}", self.what())?;
        match self {
            Self::Option(_, own, its) => write!(f, " ({own}, there {its})"),
            Self::Secret | Self::Model => Ok(()),
        }
    }
}

impl Serves {
    /// Whether processes that know a secret of one can know one of the other.
    #[must_use]
    pub fn shares_secret(&self, other: &Self) -> bool {
        let none = self.secrets.is_empty() && other.secrets.is_empty();
        none || self.secrets.iter().any(|secret| other.secrets.contains(secret))
    }

    /// In what this differs from what the leader serves, the worst first; nothing if requests and
    /// processes of one can go on at the other.
    #[must_use]
    pub fn differences(&self, leader: &Self) -> Vec<Difference> {
        let mut found = Vec::new();
        if !self.shares_secret(leader) {
            found.push(Difference::Secret);
        }
        // One that does not have the weights is judged by the rest.
        let folders = matches!((self.model, leader.model), (Some(own), Some(its)) if own != its);
        if folders || self.text != leader.text {
            found.push(Difference::Model);
        }
        let mut compare = |what, own: String, its: String| {
            if own != its {
                found.push(Difference::Option(what, own, its));
            }
        };
        compare("served model name", self.names.join(","), leader.names.join(","));
        let degree = |it: &Self| it.tensor_parallel.to_string();
        compare("--tensor-parallel", degree(self), degree(leader));
        compare("data type", self.dtypes.clone(), leader.dtypes.clone());
        let length = |it: &Self| it.max_model_len.to_string();
        compare("--max-model-len", length(self), length(leader));
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serves() -> Serves {
        Serves {
            names: vec!["m".to_owned()],
            model: Some(ModelIdentity(1)),
            text: 2,
            max_model_len: 64,
            tensor_parallel: 1,
            dtypes: "bfloat16 none auto".to_owned(),
            secrets: vec!["a".to_owned()],
        }
    }

    #[test]
    fn each_difference_is_named_and_what_is_unknown_is_none() {
        let with = |change: &dyn Fn(&mut Serves)| {
            let mut other = serves();
            change(&mut other);
            let found = other.differences(&serves());
            found.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
        };
        assert_eq!(with(&|_| {}), "");
        assert_eq!(with(&|it| it.model = None), "", "its weights are elsewhere");
        assert_eq!(with(&|it| it.model = Some(ModelIdentity(7))), "another model");
        assert_eq!(with(&|it| it.text = 3), "another model");
        let names = with(&|it| it.names.push("n".to_owned()));
        assert_eq!(names, "another served model name (m,n, there m)");
        let degree = with(&|it| it.tensor_parallel = 2);
        assert_eq!(degree, "another --tensor-parallel (2, there 1)");
        assert!(with(&|it| it.dtypes = "float32".to_owned()).contains("another data type"));
        assert!(with(&|it| it.max_model_len = 8).contains("another --max-model-len (8"));
    }

    #[test]
    fn one_secret_in_common_is_enough() {
        let shares = |own: &[&str], its: &[&str]| {
            let of = |secrets: &[&str]| Serves {
                secrets: secrets.iter().map(|&it| it.to_owned()).collect(),
                ..serves()
            };
            let (own, its) = (of(own), of(its));
            assert_eq!(own.shares_secret(&its), own.differences(&its).is_empty());
            own.shares_secret(&its)
        };
        assert!(shares(&[], &[]) && shares(&["a"], &["a"]));
        assert!(shares(&["b", "a"], &["a"]) && shares(&["b"], &["a", "b"]), "it is replaced");
        assert!(!shares(&["b"], &["a"]) && !shares(&[], &["a"]) && !shares(&["a"], &[]));
    }
}

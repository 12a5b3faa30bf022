//! Models by their names on Hugging Face's hub: found in this host's cache or downloaded into it.
//!
//! The cache is the hub's own (`models--ORG--NAME/{blobs,refs,snapshots}`), so that it is shared
//! with transformers, vLLM and every other program that uses it. Nothing of what the hub answers is
//! trusted with a path: only files of known names are taken, and they lie where their names say.
//!
//! - [`name`]: PURE: names, revisions and commits, as users and processes write them
//! - [`settings`]: where the cache is, which hub is asked, with which token
//! - [`files`]: PURE: which files of a model are needed
//! - [`cache`]: the folders of the cache, and what is in them
//! - `checksum`: PURE: whether a content is what its name says
//! - `client`: one request to the hub, and its errors in words
//! - `download`: one file: resumed, verified, put in its place
//! - [`fetch`]: a whole model
pub mod cache;
mod checksum;
mod client;
mod download;
pub mod fetch;
pub mod files;
pub mod name;
pub mod settings;

pub use self::fetch::{DownloadHandle, FetchedModel, Hub};
pub use self::files::ModelPart;
pub use self::name::{HubModel, ModelArgument, RequestedModel};
pub use self::settings::HubSettings;

/// Why a model is not here and cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HubError {
    /// Somebody has to do something about it: one line says what.
    #[error("{0}")]
    Permanent(String),
    /// The hub or the way to it is at fault; later it may work.
    #[error("{0}")]
    Transient(String),
    /// It was called off.
    #[error("the download was called off")]
    Cancelled,
}

impl HubError {
    /// Whether trying again by itself may help.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Transient(_))
    }
}

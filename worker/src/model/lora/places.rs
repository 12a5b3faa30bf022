//! Adapters that come and go while steps run: another thread reads and lays out an adapter's
//! matrices, one site of a layer at a time, and the executor puts each piece into the adapter's
//! place between two steps. Rows of other adapters never read that place.
use std::path::Path;

use kernels::{Backend, KernelError};
use shared::mix::split_mix;
use shared::model_identity::ModelIdentity;
use shared::protocol::{Adapter, Lora};

use super::files::AdapterFiles;
use super::{Adapters, Held, Joint, Matrices, Places, RANK_STEP, Site, SiteStacks, host};
use crate::model::ModelError;
use crate::model::config::ModelConfig;
use crate::model::modules::Module;
use crate::model::shard::Shard;

/// An adapter whose files are being read.
#[derive(Debug)]
pub struct Reading {
    config: ModelConfig,
    joints: [Option<Joint>; Site::ALL.len()],
    places: Places,
    adapter: Adapter,
}

/// The matrices of one site of a layer.
pub struct Piece {
    layer: usize,
    site: Site,
    matrices: Matrices,
}

impl std::fmt::Debug for Piece {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { layer, site, .. } = self;
        f.debug_struct("Piece").field("layer", layer).field("site", site).finish_non_exhaustive()
    }
}

impl Places {
    /// The shapes of a site's matrices, with room for every module; `None` if the model has none.
    pub(super) fn joint(self, site: Site, config: &ModelConfig, shard: &Shard) -> Option<Joint> {
        let (rows, parts) = site.cut(config, shard);
        let layers = 0..config.num_layers;
        let is_there = |module: &&Module| layers.clone().any(|layer| module.is_in(config, layer));
        let modules = site.modules(config);
        let used: Vec<Module> = modules.iter().filter(is_there).copied().collect();
        let rank = self.max_rank.next_multiple_of(RANK_STEP);
        (!used.is_empty()).then_some(Joint { site, modules, used, rank, rows, parts })
    }
}

impl Reading {
    /// Reads the adapter's folder, and hands over its matrices piece by piece, until `take` wants
    /// no more. Returns what the folder contains.
    ///
    /// # Errors
    /// [`ModelError`]; one that says that it was called off if `take` returns false.
    pub fn run(self, mut take: impl FnMut(Piece) -> bool) -> Result<ModelIdentity, ModelError> {
        let Self { config, joints, places, adapter } = self;
        let files = AdapterFiles::open(&adapter, &config, places.max_rank)?;
        let unreadable = |message| ModelError::file(Path::new(&adapter.path), message);
        let identity = ModelIdentity::of_adapter(Path::new(&adapter.path)).map_err(unreadable)?;
        for layer in 0..config.num_layers {
            for joint in joints.iter().flatten().filter(|joint| joint.is_in(&config, layer)) {
                // What was in the place before is overwritten, be it with zeros.
                let matrices = joint.matrices(&files, &config, layer)?;
                let matrices = matrices.unwrap_or_else(|| joint.zeros());
                if !take(Piece { layer, site: joint.site, matrices }) {
                    return Err(unreadable("is no longer wanted".to_owned()));
                }
            }
        }
        Ok(identity)
    }
}

impl<B: Backend> Adapters<B> {
    /// Reserves a place for an adapter, and returns what reads it.
    ///
    /// # Errors
    /// One sentence if there is none.
    pub fn reserve(
        &mut self,
        adapter: &Adapter,
        config: &ModelConfig,
        shard: &Shard,
    ) -> Result<Reading, String> {
        let Some(places) = self.places else {
            return Err("there is no room for adapters to come and go (--max-loras)".to_owned());
        };
        if self.number(adapter.number).is_some() {
            return Err(format!("adapter {} is here already", adapter.name));
        }
        let Some(free) = self.held.iter_mut().find(|held| held.is_none()) else {
            let count = places.count;
            return Err(format!("all {count} places for adapters are taken (--max-loras)"));
        };
        *free = Some(Held { adapter: adapter.clone(), identity: None, is_whole: false });
        Ok(Reading {
            config: config.clone(),
            joints: Site::ALL.map(|site| places.joint(site, config, shard)),
            places,
            adapter: adapter.clone(),
        })
    }

    /// Puts a piece of an adapter into its place.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn put(&mut self, backend: &mut B, number: u32, piece: &Piece) -> Result<(), KernelError> {
        let Some(place) = self.number(number).filter(|place| !self.is_whole(*place)) else {
            let message = format!("adapter {number} is not being loaded");
            return Err(KernelError::Shape { op: "put", message });
        };
        let Piece { layer, site, matrices } = piece;
        let found = self.layers.get_mut(*layer).and_then(|sites| sites[*site as usize].as_mut());
        let Some(SiteStacks { downs, up, width }) = found else {
            let message = format!("layer {layer} has no room for {site:?}");
            return Err(KernelError::Shape { op: "put", message });
        };
        let width = *width;
        let of = |data: &[u8]| data.len() / size_of::<f32>() / width.max(1);
        for (stack, data) in downs.iter_mut().zip(&matrices.downs) {
            backend.replace_in_stack(stack, place, &host(data, (width, of(data))))?;
        }
        let data = &matrices.up;
        backend.replace_in_stack(up, place, &host(data, (of(data), width)))
    }

    /// All pieces of an adapter are in its place: rows may have it from now on.
    pub fn complete(&mut self, number: u32, identity: ModelIdentity) {
        if let Some(held) = self.number(number).and_then(|place| self.held[place].as_mut()) {
            (held.identity, held.is_whole) = (Some(identity), true);
        }
    }

    /// Frees the place of an adapter.
    pub fn remove(&mut self, number: u32) {
        if let Some(place) = self.number(number) {
            self.held[place] = None;
        }
    }

    /// Frees the places of adapters that are not in the list, or not whole. One whose folder has
    /// other contents by now is not the one in the list.
    pub fn retain(&mut self, lora: &Lora) {
        for place in &mut self.held {
            let stays = |held: &Held| {
                let same = |it: &&Adapter| it.number == held.adapter.number;
                let Some(listed) = lora.adapters.iter().find(same) else { return false };
                let found = ModelIdentity::of_adapter(Path::new(&listed.path)).ok();
                // Without its files, nothing suggests that others are wanted.
                let wanted = listed.identity.or(found).or(held.identity);
                held.is_whole && held.adapter.path == listed.path && wanted == held.identity
            };
            *place = place.take().filter(stays);
        }
    }

    /// The adapters of a list that are not here.
    #[must_use]
    pub fn missing(&self, lora: &Lora) -> Vec<Adapter> {
        let missing = |adapter: &&Adapter| self.number(adapter.number).is_none();
        lora.adapters.iter().filter(missing).cloned().collect()
    }

    /// Frees the places of adapters that are not whole.
    pub fn give_up(&mut self) {
        for place in &mut self.held {
            if place.as_ref().is_some_and(|held| !held.is_whole) {
                *place = None;
            }
        }
    }

    /// Tells sets of adapters and their contents apart, if they come and go; else 0.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        if self.places.is_none() {
            return 0;
        }
        let of = |held: &Held| {
            let contents = held.identity.map_or(0, |identity| identity.0);
            split_mix(contents, u64::from(held.adapter.number))
        };
        // Whatever their places are.
        self.held.iter().flatten().map(of).fold(0, u64::wrapping_add)
    }

    /// The place of an adapter, whole or not.
    fn number(&self, number: u32) -> Option<usize> {
        let is_it = |held: &Held| held.adapter.number == number;
        self.held.iter().position(|held| held.as_ref().is_some_and(is_it))
    }

    fn is_whole(&self, place: usize) -> bool {
        self.held[place].as_ref().is_some_and(|held| held.is_whole)
    }
}

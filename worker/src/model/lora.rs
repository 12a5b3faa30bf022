//! LoRA adapters beside the model: in some modules of a layer, `y += scale * B (A x)`, with the
//! matrices of each row's own adapter. Every rank always holds its part of all adapters of the
//! replica.
//!
//! Either the adapters never change, and their matrices take what they need; or there is a number
//! of places, with matrices for every module and for the largest rank, so that adapters come and go
//! without memory being allocated or moved while steps run.
//!
//! The adapters of a module form a stack of matrices of one shape, like the experts of a layer:
//! smaller ranks, and adapters that leave the module unchanged, are padded with zeros. Modules with
//! the same input are merged: q, k and v have one matrix A each, stacked vertically, and one
//! block-diagonal matrix B.
//!
//! An adapter's result is added where the model's own product is computed, so that the sums of a
//! row have the same order at every tensor-parallel degree. Column-parallel modules hold all of A
//! and their rows of B. Row-parallel modules hold all of B and, for each part of the model's own
//! sum, their columns of A, and add to that part.
//!
//! - `config`: `adapter_config.json`
//! - `files`: an adapter's matrices
//! - `joint`: the merged matrices of a site
//! - `places`: adapters that come and go
mod config;
mod files;
mod joint;
mod places;

use std::ops::Range;

use kernels::backend::{Buffer as _, DType, EXPERT_SLOTS, HostMatrix, Routing};
use kernels::{Backend, KernelError};
use shared::model_identity::ModelIdentity;
use shared::protocol::{Adapter, Lora};

pub use self::config::RANK_MAX;
use self::files::AdapterFiles;
use self::joint::{Joint, Matrices, host};
pub use self::places::{Piece, Reading};
use super::ModelError;
use super::config::ModelConfig;
use super::modules::Module;
use super::shard::Shard;

/// Ranks are padded to a multiple of this, the granularity of matrix products' inputs.
const RANK_STEP: usize = 8;

/// The places in a layer where adapters add something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Site {
    /// q, k and v, before the rotary embedding.
    Qkv,
    /// The attention's output projection.
    Output,
    /// Gate and up projections of a dense layer, before the activation; without a gate, the up
    /// projection alone.
    GateUp,
    /// The down projection of a dense layer.
    Down,
}

/// A site of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) layer: usize,
    pub(super) site: Site,
}

/// A part of the inputs of a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Index among the parts of the sum.
    pub(super) index: usize,
    /// Column of the product's input at which it begins.
    pub(super) first: usize,
}

impl Part {
    /// The only part.
    pub(super) const WHOLE: Self = Self { index: 0, first: 0 };
}

impl Site {
    const ALL: [Self; 4] = [Self::Qkv, Self::Output, Self::GateUp, Self::Down];

    fn modules(self, config: &ModelConfig) -> &'static [Module] {
        match self {
            Self::Qkv => &[Module::Q, Module::K, Module::V],
            Self::Output => &[Module::O],
            Self::GateUp if !config.is_gated() => &[Module::Up],
            Self::GateUp => &[Module::Gate, Module::Up],
            Self::Down => &[Module::Down],
        }
    }

    /// This rank's outputs of each module, and its inputs, split into the parts of the sum.
    fn cut(self, config: &ModelConfig, shard: &Shard) -> (Vec<Range<usize>>, Vec<Range<usize>>) {
        let hidden = 0..config.hidden_size;
        let scaled =
            |heads: &Range<usize>| heads.start * config.head_dim..heads.end * config.head_dim;
        let parts = |own: Range<usize>| -> Vec<Range<usize>> {
            let width = own.len() / shard.parts;
            let part = |i: usize| own.start + i * width..own.start + (i + 1) * width;
            (0..shard.parts).map(part).collect()
        };
        let (q, kv) = (scaled(&shard.heads), scaled(&shard.kv_heads));
        let inner = shard.intermediate.clone();
        match self {
            Self::Qkv => (vec![q, kv.clone(), kv], vec![hidden]),
            Self::Output => (vec![hidden], parts(q)),
            Self::GateUp => (vec![inner; self.modules(config).len()], vec![hidden]),
            Self::Down => (vec![hidden], parts(inner)),
        }
    }
}

/// The folders of all adapters, opened and checked.
#[derive(Debug, Default)]
pub struct LoraFiles {
    adapters: Vec<AdapterFiles>,
    /// Where adapters come and go.
    places: Option<Places>,
}

/// Room for adapters that come and go.
#[derive(Clone, Copy, Debug)]
struct Places {
    count: usize,
    /// The largest rank.
    max_rank: usize,
}

impl Places {
    fn of(lora: &Lora) -> Option<Self> {
        let count = lora.places as usize;
        (count > 0).then_some(Self { count, max_rank: largest_rank(lora) })
    }
}

fn largest_rank(lora: &Lora) -> usize {
    (lora.max_rank as usize).clamp(1, RANK_MAX)
}

impl LoraFiles {
    /// Opens and checks the adapters' folders.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn open(lora: &Lora, config: &ModelConfig) -> Result<Self, ModelError> {
        let is_linear = config.gates_attention || config.delta.is_some();
        let kind = match (config.latent, is_linear) {
            (Some(_), _) => Some("multi-head latent attention (DeepSeek's)"),
            (_, true) => Some("linear attention (Qwen3-Next, Qwen3.5, Granite 4.0 H)"),
            _ => None,
        };
        if let Some(kind) = kind.filter(|_| !(lora.adapters.is_empty() && lora.places == 0)) {
            let message = format!("LoRA adapters of models with {kind} are not supported");
            return Err(ModelError::Fit(message));
        }
        let max_rank = largest_rank(lora);
        let open = |adapter| AdapterFiles::open(adapter, config, max_rank);
        let adapters = lora.adapters.iter().map(open).collect::<Result<_, _>>()?;
        Ok(Self { adapters, places: Places::of(lora) })
    }

    /// For how many adapters there are matrices.
    fn count(&self) -> usize {
        self.places.map_or(0, |places| places.count).max(self.adapters.len())
    }

    /// Upper bound of the memory, in bytes, of this rank's part of all adapters and of the buffers
    /// for steps of `tokens_max` tokens.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn bytes(
        &self,
        config: &ModelConfig,
        shard: &Shard,
        tokens_max: usize,
    ) -> Result<(u64, u64), ModelError> {
        let (stacks, room) = self.sizes(config, shard, tokens_max)?;
        Ok((stacks.iter().sum(), room))
    }

    /// As [`Self::bytes`], with the size of each stack of matrices.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn sizes(
        &self,
        config: &ModelConfig,
        shard: &Shard,
        tokens_max: usize,
    ) -> Result<(Vec<u64>, u64), ModelError> {
        let (mut stacks, mut widths) = (Vec::new(), Vec::new());
        for site in Site::ALL {
            let Some(joint) = self.joint(site, config, shard)? else { continue };
            let (width, outputs) = (joint.width(), joint.outputs());
            let stack = |other: usize| (self.count() * width * other * 2) as u64;
            for _ in 0..self.layers_with(&joint, config) {
                stacks.extend(joint.parts.iter().map(|part| stack(part.len())));
                stacks.push(stack(outputs));
            }
            widths.push((width, outputs));
        }
        Ok((stacks, room_bytes(widths, tokens_max)))
    }

    /// Loads this rank's part of all adapters, with buffers for `tokens_max` tokens; `None` when
    /// there are no adapters.
    ///
    /// # Errors
    /// [`ModelError::Kernel`].
    pub fn load<B: Backend>(
        &self,
        backend: &mut B,
        config: &ModelConfig,
        shard: &Shard,
        tokens_max: usize,
    ) -> Result<Option<Adapters<B>>, ModelError> {
        let count = self.count();
        if count == 0 {
            return Ok(None);
        }
        let held = self.adapters.iter().map(|files| Some(Held::of(files, true)));
        let mut held: Vec<Option<Held>> = held.collect();
        held.resize_with(count, || None);
        let mut loaded = Adapters {
            held,
            places: self.places,
            layers: Vec::with_capacity(config.num_layers),
            routes: backend.new_routes(tokens_max, routing(count))?,
            rooms: [const { None }; Site::ALL.len()],
            bytes: 0,
        };
        let joints = Site::ALL.map(|site| self.joint(site, config, shard));
        let [qkv, output, gate_up, down] = joints;
        let joints = [qkv?, output?, gate_up?, down?];
        for (joint, room) in joints.iter().zip(&mut loaded.rooms) {
            if let Some(joint) = joint {
                *room = Some(Room::new(backend, tokens_max, (joint.width(), joint.outputs()))?);
            }
        }
        for layer in 0..config.num_layers {
            let mut sites = [const { None }; Site::ALL.len()];
            for (joint, stacks) in joints.iter().zip(&mut sites) {
                if let Some(joint) = joint {
                    *stacks = self.stacks(backend, config, joint, layer, &mut loaded.bytes)?;
                }
            }
            loaded.layers.push(sites);
        }
        Ok(Some(loaded))
    }

    /// Upper bound of the number of layers in which a site has matrices.
    fn layers_with(&self, joint: &Joint, config: &ModelConfig) -> usize {
        match self.places {
            Some(_) => (0..config.num_layers).filter(|layer| joint.is_in(config, *layer)).count(),
            None => config.num_layers,
        }
    }

    /// The shapes of a site's matrices; `None` when no adapter changes the site in any layer.
    fn joint(
        &self,
        site: Site,
        config: &ModelConfig,
        shard: &Shard,
    ) -> Result<Option<Joint>, ModelError> {
        if let Some(places) = self.places {
            return Ok(places.joint(site, config, shard));
        }
        let (rows, parts) = site.cut(config, shard);
        let (mut used, mut rank) = (Vec::new(), 0);
        let modules = site.modules(config);
        for module in modules {
            let mut most = None;
            for layer in 0..config.num_layers {
                for adapter in &self.adapters {
                    let found = adapter.factors(layer, *module, config)?;
                    most = most.max(found.map(|factors| factors.rank));
                }
            }
            if let Some(most) = most {
                used.push(*module);
                rank = rank.max(most.next_multiple_of(RANK_STEP));
            }
        }
        Ok((!used.is_empty()).then_some(Joint { site, modules, used, rank, rows, parts }))
    }

    /// The stacks of a site in one layer; `None` when no adapter changes the site there.
    fn stacks<B: Backend>(
        &self,
        backend: &mut B,
        config: &ModelConfig,
        joint: &Joint,
        layer: usize,
        bytes: &mut u64,
    ) -> Result<Option<SiteStacks<B::Stack>>, ModelError> {
        let made = self.adapters.iter().map(|adapter| joint.matrices(adapter, config, layer));
        let made: Vec<Option<Matrices>> = made.collect::<Result<_, _>>()?;
        let is_there = match self.places {
            Some(_) => joint.is_in(config, layer),
            None => made.iter().any(Option::is_some),
        };
        if !is_there {
            return Ok(None);
        }
        let none = joint.zeros();
        let made: Vec<&Matrices> = (0..self.count())
            .map(|index| made.get(index).and_then(Option::as_ref).unwrap_or(&none))
            .collect();
        let width = joint.width();
        let mut downs = Vec::with_capacity(joint.parts.len());
        for (index, part) in joint.parts.iter().enumerate() {
            let all: Vec<&[u8]> = made.iter().map(|made| &*made.downs[index]).collect();
            downs.push(stack(backend, &all, (width, part.len()), bytes)?);
        }
        let all: Vec<&[u8]> = made.iter().map(|made| &*made.up).collect();
        let up = stack(backend, &all, (joint.outputs(), width), bytes)?;
        Ok(Some(SiteStacks { downs, up, width }))
    }
}

/// Sends each row to one of `count` adapters.
fn routing(count: usize) -> Routing {
    Routing::softmax(count, 1, false)
}

/// Upper bound of the memory, in bytes, of the buffers for steps of `tokens_max` tokens, of sites
/// with so many (ranks, outputs).
fn room_bytes(sites: impl IntoIterator<Item = (usize, usize)>, tokens_max: usize) -> u64 {
    let (mut room, mut widest) = (0, 0);
    for (width, outputs) in sites {
        room += tokens_max * (width * 2 + outputs * 4);
        widest = widest.max(outputs);
    }
    // Products are first computed in scratch memory, for a limited number of rows at a time.
    (room + tokens_max.min(EXPERT_SLOTS) * widest * 4) as u64
}

/// Loads matrices of one shape, one per adapter.
fn stack<B: Backend>(
    backend: &mut B,
    matrices: &[&[u8]],
    (rows, cols): (usize, usize),
    bytes: &mut u64,
) -> Result<B::Stack, KernelError> {
    let hosts: Vec<HostMatrix<'_>> =
        matrices.iter().map(|matrix| host(matrix, (rows, cols))).collect();
    *bytes += (hosts.len() * rows * cols * DType::Bf16.bytes()) as u64;
    backend.load_stack(&hosts)
}

/// The stacks of one site in one layer: one matrix per adapter.
#[derive(Debug)]
struct SiteStacks<S> {
    /// A, `[ranks, inputs]`, for each part of the inputs.
    downs: Vec<S>,
    /// B, scaled, `[outputs, ranks]`.
    up: S,
    /// Number of ranks.
    width: usize,
}

/// Buffers for the products of a site.
struct Room<B: Backend> {
    /// `A x`, `[tokens, ranks]`
    ranks: B::Buffer,
    /// `B (A x)`, `[tokens, outputs]`
    out: B::Buffer,
}

impl<B: Backend> Room<B> {
    /// Numbers of ranks and of outputs.
    fn widths(&self) -> (usize, usize) {
        (self.ranks.width(), self.out.width())
    }

    fn new(
        backend: &mut B,
        tokens_max: usize,
        (width, outputs): (usize, usize),
    ) -> Result<Self, KernelError> {
        let ranks = backend.new_input_buffer(tokens_max, width)?;
        Ok(Self { ranks, out: backend.new_buffer(tokens_max, outputs)? })
    }
}

/// An adapter in a place.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Held {
    adapter: Adapter,
    /// What its folder contained.
    identity: Option<ModelIdentity>,
    /// Whether all of its matrices are there.
    is_whole: bool,
}

impl Held {
    fn of(files: &AdapterFiles, is_whole: bool) -> Self {
        Self { adapter: files.adapter().clone(), identity: files.identity(), is_whole }
    }
}

/// The matrices of all adapters on one rank, by layer and site.
pub struct Adapters<B: Backend> {
    /// Which adapter has which place in the stacks.
    held: Vec<Option<Held>>,
    /// Where adapters come and go.
    places: Option<Places>,
    layers: Vec<[Option<SiteStacks<B::Stack>>; Site::ALL.len()]>,
    /// The adapter of each row of the step.
    routes: B::Routes,
    rooms: [Option<Room<B>>; Site::ALL.len()],
    bytes: u64,
}

impl<B: Backend> std::fmt::Debug for Adapters<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Adapters").field("held", &self.held).finish_non_exhaustive()
    }
}

impl<B: Backend> Adapters<B> {
    /// The same adapters with buffers for steps of up to `tokens_max` tokens.
    pub(super) fn resized(self, backend: &mut B, tokens_max: usize) -> Result<Self, KernelError> {
        let Self { held, places, layers, routes, rooms, bytes } = self;
        let widths = rooms.map(|room| room.as_ref().map(Room::widths));
        drop(routes);
        let routes = backend.new_routes(tokens_max, routing(held.len()))?;
        let mut rooms = [const { None }; Site::ALL.len()];
        for (room, widths) in rooms.iter_mut().zip(widths) {
            let made = widths.map(|widths| Room::new(backend, tokens_max, widths));
            *room = made.transpose()?;
        }
        Ok(Self { held, places, layers, routes, rooms, bytes })
    }

    /// Number of adapters that there is room for.
    #[must_use]
    pub fn count(&self) -> u32 {
        u32::try_from(self.held.len()).unwrap_or(u32::MAX)
    }

    /// Returns the index in a stack for rows of requests with this adapter, which has all of its
    /// matrices.
    #[must_use]
    pub fn row_of(&self, number: u32) -> Option<u32> {
        let is_it = |held: &Held| held.is_whole && held.adapter.number == number;
        let place = self.held.iter().position(|held| held.as_ref().is_some_and(is_it))?;
        u32::try_from(place).ok()
    }

    /// Size of their matrices, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Upper bound of the memory of the buffers for steps of `tokens_max` tokens, in bytes.
    pub(super) fn room_bytes(&self, tokens_max: usize) -> u64 {
        room_bytes(self.rooms.iter().flatten().map(Room::widths), tokens_max)
    }

    /// Sets the adapters of this step's rows: [`Adapters::row_of`], or
    /// [`NOT_ASSIGNED`](kernels::backend::NOT_ASSIGNED).
    pub(super) fn begin(&mut self, backend: &mut B, rows: &[u32]) -> Result<(), KernelError> {
        backend.assign(rows, &mut self.routes)
    }

    /// Computes what to add at a place, for a part of its inputs.
    pub(super) fn addend(
        &mut self,
        backend: &mut B,
        Place { layer, site }: Place,
        Part { index, first }: Part,
        x: &B::Buffer,
    ) -> Result<Option<&B::Buffer>, KernelError> {
        let Self { layers, routes, rooms, .. } = self;
        let stacks = layers[layer][site as usize].as_ref();
        let (Some(SiteStacks { downs, up, .. }), Some(room)) = (stacks, &mut rooms[site as usize])
        else {
            return Ok(None);
        };
        backend.experts_down(x, first, &downs[index], None, routes, &mut room.ranks)?;
        backend.experts_down(&room.ranks, 0, up, None, routes, &mut room.out)?;
        Ok(Some(&room.out))
    }
}

//! The list of operations a device must offer. The decoder is written once over this trait.
//!
//! All activations are row-major `[rows, width]`, accumulated in f32. Weights are stored bf16 (or
//! as the file has them). `tokens` of all sequences of a step are concatenated along the rows.
//! Reductions run in an order that depends on the shapes of weights and of one sequence alone,
//! never on what else is in the batch (law 7).
//!
//! A backend is owned by one executor thread and owns its threads, streams and collective.
//!
//! # Steps as a whole
//! A device may run a step as one recorded graph instead of call by call. For that the caller
//! frames each step by [`Backend::begin_step`], which names everything that the step reads, and
//! [`Backend::end_step`]. Between them a backend is free to put work off: it may record the calls,
//! or only check that they are the ones it recorded for an earlier step of this kind and run its
//! record at the end. So until `sample`, `logprobs`, `read_buffer`, a collective operation or
//! `end_step` returns, no result needs to be there, and errors of a call may come from a later one.
//! Both hooks do nothing by default; without them every call stands for itself.
//! [`KernelError::Again`] from any of these calls means that the whole step, beginning with
//! `begin_step`, is to be called once more.
//!
//! # Masks
//! Which tokens a row may get may be known later than all else that its step reads. The step is
//! begun without masks ([`StepInputs::masked`]), [`Backend::launch_step`] has the device compute
//! what was called so far, and its rows are sampled when the masks are there; no other step is
//! begun before.
//!
//! # One step ahead
//! A device may also be given a step before the tokens of the one before are known, so that it
//! never waits for its host: [`Backend::queue_sample`] leaves the tokens on the device, the next
//! step names them by their rows ([`StepInputs::feed`]), and [`Backend::take_sampled`] fetches them
//! later, in the order of the steps. Two steps whose tokens are not fetched are under way at most;
//! those that sample nothing stand anywhere among them.
mod arguments;

pub use arguments::{
    Activation, AttentionShape, Batch, Choices, ExpertActivation, KvShape, NOT_ASSIGNED, NOT_FED,
    QkvWeights, RopeTable, Routing, SeqRows, StepInputs,
};

use crate::collective::Tally;
use crate::error::KernelError;
use crate::sampling::{SampleRow, Sampled};
use crate::weights::Int4Groups;
pub use crate::weights::{BlockScales, DType, HostMatrix, Scales};

/// Activations `[rows, width]` with room for more rows.
pub trait Buffer {
    /// Rows in use.
    fn rows(&self) -> usize;
    /// Elements per row.
    fn width(&self) -> usize;
    /// Uses the first `rows` rows. Contents of newly used rows are undefined.
    ///
    /// # Errors
    /// When `rows` exceeds the capacity given at creation.
    fn set_rows(&mut self, rows: usize) -> Result<(), KernelError>;
}

/// A device. Methods are called from its executor thread alone.
pub trait Backend {
    /// Activations.
    type Buffer: Buffer;
    /// A weight matrix `[out, in]`, in the device's packed layout.
    type Matrix;
    /// Weight matrices `[out, in]` of one shape, one behind the other: a layer's experts.
    type Stack;
    /// Which experts each row of a step goes to, and with what weights.
    type Routes;
    /// A vector in f32: norm weights, biases, RoPE tables.
    type Vector;
    /// A paged KV cache.
    type KvCache;
    /// KV blocks in host memory.
    type HostKv;

    /// What it runs on, for the log: `cpu avx512_bf16, 2 threads`.
    fn describe(&self) -> String;

    /// This rank.
    fn rank(&self) -> u32;

    /// Ranks.
    fn world_size(&self) -> u32;

    /// Makes a buffer of `rows_max` x `width`, zeroed.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn new_buffer(&mut self, rows_max: usize, width: usize) -> Result<Self::Buffer, KernelError>;

    /// Makes a buffer for the inputs of matrix products: a device may keep its elements in the type
    /// that its products take.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn new_input_buffer(
        &mut self,
        rows_max: usize,
        width: usize,
    ) -> Result<Self::Buffer, KernelError> {
        self.new_buffer(rows_max, width)
    }

    /// Packs the vertical concatenation of `parts` (equal `cols`); integers of 4 bits as they are
    /// where [`Backend::keeps_int4`] and [`crate::weights::int4_groups`] say so.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when a part's data is too short or widths differ.
    fn load_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<Self::Matrix, KernelError>;

    /// Whether it keeps a matrix of 4 bits in such groups, or a stack of them, in 4 bits: products
    /// take the integers less their zeros exactly, add them up in f32 for each group of inputs, and
    /// the groups' sums times their scales. Else weights become bf16.
    fn keeps_int4(&self, groups: &Int4Groups, is_stack: bool) -> bool {
        let _ = (groups, is_stack);
        false
    }

    /// As [`Backend::load_matrix`], quantised to int8 on the way ([`HostMatrix::row_int8`]):
    /// products take activations as they do otherwise, weights' integers exactly, and multiply each
    /// sum by its output's scale.
    ///
    /// # Errors
    /// As there.
    fn load_int8_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<Self::Matrix, KernelError>;

    /// Packs each of `matrices`, which have one shape, as [`Backend::load_matrix`] does.
    ///
    /// # Errors
    /// As there, and when shapes differ; [`KernelError::Unsupported`].
    fn load_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<Self::Stack, KernelError>;

    /// As [`Backend::load_stack`], quantised as [`Backend::load_int8_matrix`] does it.
    ///
    /// # Errors
    /// As there.
    fn load_int8_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<Self::Stack, KernelError>;

    /// Makes room for what up to `rows_max` rows choose.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when `routing` asks for what cannot be; [`KernelError::OutOfMemory`];
    /// [`KernelError::Unsupported`].
    fn new_routes(
        &mut self,
        rows_max: usize,
        routing: Routing,
    ) -> Result<Self::Routes, KernelError>;

    /// Uploads a vector.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn load_vector(&mut self, values: &[f32]) -> Result<Self::Vector, KernelError>;

    /// Makes a zeroed KV cache.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn new_kv_cache(&mut self, shape: KvShape) -> Result<Self::KvCache, KernelError>;

    /// Bytes that one block takes over all layers, K and V together.
    fn kv_block_bytes(&self, shape: &KvShape) -> u64;

    /// Makes room for `shape.num_blocks` KV blocks in host memory.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn new_host_kv(&mut self, shape: KvShape) -> Result<Self::HostKv, KernelError>;

    /// Copies blocks of the cache, with K and V of all layers, to host memory: (block, host block)
    /// pairs, no host block twice. Not within a step. Whatever is called later, and writes to those
    /// blocks of the cache, does so behind it.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when a block is not there or is written twice;
    /// [`KernelError::Device`].
    fn swap_out(
        &mut self,
        cache: &Self::KvCache,
        host: &mut Self::HostKv,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError>;

    /// Copies blocks from host memory to the cache: (block, host block) pairs, no block twice. Not
    /// within a step. Whatever is called later sees them.
    ///
    /// # Errors
    /// As [`Backend::swap_out`].
    fn swap_in(
        &mut self,
        cache: &mut Self::KvCache,
        host: &mut Self::HostKv,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError>;

    /// A step begins. What an earlier one left unfinished is dropped.
    ///
    /// # Errors
    /// [`KernelError::Shape`], [`KernelError::Device`].
    fn begin_step(&mut self, step: &StepInputs<'_>) -> Result<(), KernelError> {
        let _ = step;
        Ok(())
    }

    /// Hands what was called of the open step to the device, which computes it while its host waits
    /// for masks ([`StepInputs::masked`]).
    ///
    /// # Errors
    /// [`KernelError::Device`].
    fn launch_step(&mut self) -> Result<(), KernelError> {
        Ok(())
    }

    /// The step that began last is complete: all of its work has at least been handed to the
    /// device, in order.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    fn end_step(&mut self) -> Result<(), KernelError> {
        Ok(())
    }

    /// `out[i] = table[ids[i] - first_id] * scale`, or zeros when that row is not on this rank.
    /// `table: [vocab_local, hidden]`, `out: [ids.len(), hidden]` (its rows are set).
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn embed(
        &mut self,
        table: &Self::Matrix,
        ids: &[u32],
        first_id: u32,
        scale: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `residual += delta` (when given), then `out = residual / rms(residual) * weight`.
    /// All `[rows, hidden]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn add_rmsnorm(
        &mut self,
        residual: &mut Self::Buffer,
        delta: Option<&Self::Buffer>,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `residual += delta / rms(delta) * delta_weight`, then
    /// `out = residual / rms(residual) * weight`: what is added is normalised too. All
    /// `[rows, hidden]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn add_normed_rmsnorm(
        &mut self,
        residual: &mut Self::Buffer,
        delta: &Self::Buffer,
        delta_weight: &Self::Vector,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `qkv = x W^T + bias + addend`; RMSNorm per head of q and k where the model has it; RoPE on q
    /// and k; k and v written to the cache's `layer` at `batch.slots`; q to
    /// `q_out: [rows, num_heads * head_dim]`. `addend: [rows, W's rows]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    #[allow(clippy::too_many_arguments, reason = "one fused operation, one launch on a GPU")]
    fn qkv_rope_write(
        &mut self,
        x: &Self::Buffer,
        weights: &QkvWeights<Self::Matrix, Self::Vector>,
        addend: Option<&Self::Buffer>,
        rope: &RopeTable<Self::Vector>,
        shape: &AttentionShape,
        batch: &Batch<'_>,
        cache: &mut Self::KvCache,
        layer: usize,
        q_out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Causal attention of every row over its sequence's cached K and V, scaled by
    /// `1 / sqrt(head_dim)`. `q, out: [rows, num_heads * head_dim]`. `sinks: [num_heads]`:
    /// attention sinks, one unscaled logit per head that joins the softmax's denominator and has no
    /// V (gpt-oss).
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    #[allow(clippy::too_many_arguments, reason = "one fused operation, one launch on a GPU")]
    fn paged_attention(
        &mut self,
        q: &Self::Buffer,
        sinks: Option<&Self::Vector>,
        shape: &AttentionShape,
        batch: &Batch<'_>,
        cache: &Self::KvCache,
        layer: usize,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `out = x W^T + bias`. `x: [rows, in]`, `out: [rows, out]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn linear(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// The inputs that a matrix takes.
    fn columns(&self, matrix: &Self::Matrix) -> usize;

    /// `out = x[.., first..first + in] W^T + bias`: a product over some of the columns.
    /// `x: [rows, at least first + in]`, `out: [rows, out]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn linear_columns(
        &mut self,
        x: &Self::Buffer,
        first: usize,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `sum += other`. Both `[rows, width]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn add(&mut self, sum: &mut Self::Buffer, other: &Self::Buffer) -> Result<(), KernelError>;

    /// `out = activation(x Wg^T + bg + ag) * (x Wu^T + bu + au)`, with `weight: [2 * inner, in]` =
    /// gate rows, then up rows, and `bias` and the columns of `addend: [rows, 2 * inner]` likewise.
    /// `out: [rows, inner]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn gate_up(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        addend: Option<&Self::Buffer>,
        activation: Activation,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Every row chooses its experts: `p = softmax(x W^T + bias)` over all experts, in f32; the
    /// `top_k` experts of the largest p, largest first, of equal ones the lowest number first;
    /// their weights are their p, divided by their sum where [`Routing::normalise`].
    /// `x: [rows, in]`, `router: [num_experts, in]`, `bias: [num_experts]`; the rows of `routes`
    /// are set. Every rank chooses for itself, and has to choose alike: from the same bits come the
    /// same choices and weights on every CPU, whatever its instructions, and on every GPU of one
    /// compute capability, whatever else is in the batch.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn route(
        &mut self,
        x: &Self::Buffer,
        router: &Self::Matrix,
        bias: Option<&Self::Vector>,
        routes: &mut Self::Routes,
    ) -> Result<(), KernelError>;

    /// Row `i` goes to `experts[i]`, with weight 1, or to none ([`NOT_ASSIGNED`]): then what
    /// [`Backend::experts_down`] makes of it is zero. For routes whose `top_k` is 1; their rows are
    /// set.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when an expert is not there or there is no room for so many rows;
    /// [`KernelError::Unsupported`].
    fn assign(&mut self, experts: &[u32], routes: &mut Self::Routes) -> Result<(), KernelError> {
        let _ = (experts, routes);
        Err(KernelError::Unsupported("rows cannot be assigned to matrices here".to_owned()))
    }

    /// As [`Backend::gate_up`] for every expert that a row goes to: row `r * top_k + j` of `out` is
    /// of row `r` and its expert `j`. `x: [rows, in]`, `weight: 2 * num_experts` matrices
    /// `[inner, in]`, each expert's gate before its up, `bias: [2 * num_experts, inner]` likewise,
    /// `out: [rows * top_k, inner]` (its rows are set).
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn experts_gate_up(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Stack,
        bias: Option<&Self::Vector>,
        activation: ExpertActivation,
        routes: &Self::Routes,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// What a row's experts make of some of their columns, weighted and added up in the order in
    /// which the row chose them: `out[r] = sum over j of w(r, j) * (x[r * top_k + j, columns] W^T +
    /// bias)`, with columns `first..first + in`. `x: [rows * top_k, at least first + in]`,
    /// `weight: num_experts` matrices `[out, in]`, `bias: [num_experts, out]`, `out: [rows, out]`
    /// (its rows are set), which may be one of [`Backend::new_input_buffer`].
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn experts_down(
        &mut self,
        x: &Self::Buffer,
        first: usize,
        weight: &Self::Stack,
        bias: Option<&Self::Vector>,
        routes: &Self::Routes,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Logits of the rows named: `out[i] = x[rows[i]] W^T`. `out: [rows.len(), vocab_local]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn lm_head(
        &mut self,
        x: &Self::Buffer,
        rows: &[u32],
        weight: &Self::Matrix,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Sums `data` over all ranks, as a binary tree over the ranks in order: `(0 + 1) + (2 + 3)`.
    ///
    /// # Errors
    /// [`KernelError::Collective`].
    fn all_reduce(&mut self, data: &mut Self::Buffer) -> Result<(), KernelError>;

    /// [`Backend::all_reduce`] of `delta`, then [`Backend::add_rmsnorm`] with it, to the same bits;
    /// what `delta` holds then is undefined.
    ///
    /// # Errors
    /// As those two.
    fn all_reduce_add_rmsnorm(
        &mut self,
        delta: &mut Self::Buffer,
        residual: &mut Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        self.all_reduce(delta)?;
        self.add_rmsnorm(residual, Some(delta), weight, eps, out)
    }

    /// Collects `local: [rows, vocab_local]` of all ranks (equal widths) into rank 0's
    /// `full: [rows, world_size * vocab_local]`; other ranks' `full` is untouched, unless
    /// [`Backend::samples_everywhere`].
    ///
    /// # Errors
    /// [`KernelError::Collective`].
    fn gather_logits(
        &mut self,
        local: &Self::Buffer,
        full: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Whether [`Backend::samples_everywhere`] may become true: then every rank's buffers have room
    /// for what rank 0's have.
    fn may_sample_everywhere(&self) -> bool {
        false
    }

    /// Whether `gather_logits` gathers on every rank, so that each samples for itself, and finds
    /// what the others find.
    fn samples_everywhere(&self) -> bool {
        false
    }

    /// Leaves the open step's logits where they are, where that does: `sample` and `queue_sample`
    /// are then given this rank's own, whose first `count` columns are the tokens from `first_id`
    /// on, a part of the vocabulary that is not empty on any rank. False when they have to be
    /// gathered.
    fn keeps_logits_apart(&mut self, first_id: u32, count: usize) -> bool {
        let _ = (first_id, count);
        false
    }

    /// Overwrites `tokens` on every rank by rank 0's.
    ///
    /// # Errors
    /// [`KernelError::Collective`].
    fn broadcast_tokens(&mut self, tokens: &mut [u32]) -> Result<(), KernelError>;

    /// Samples row `first_row + i` of `logits` as `rows[i]` says; only the first `vocab` columns
    /// count (the rest is padding). Clears and fills `out`. A mask is always one of the whole
    /// vocabulary, also where logits are kept apart.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn sample(
        &mut self,
        logits: &Self::Buffer,
        vocab: usize,
        first_row: usize,
        rows: &[SampleRow<'_>],
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError>;

    /// Whether [`Backend::queue_sample`] and what belongs to it can be called.
    fn queues_samples(&self) -> bool {
        false
    }

    /// As `sample` for all rows, but the results stay on the device until `take_sampled`. Of a row
    /// that is fed ([`StepInputs::feed`]), the last token of [`SampleRow::output`] is the one that
    /// it is fed with, whatever stands there.
    ///
    /// # Errors
    /// [`KernelError::Shape`], [`KernelError::Unsupported`].
    fn queue_sample(
        &mut self,
        logits: &Self::Buffer,
        vocab: usize,
        rows: &[SampleRow<'_>],
    ) -> Result<(), KernelError> {
        let _ = (logits, vocab, rows);
        Err(KernelError::Unsupported("samples cannot be queued here".to_owned()))
    }

    /// Whether `take_sampled` would not have to wait; true when nothing is queued.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    fn is_sampled(&mut self) -> Result<bool, KernelError> {
        Ok(true)
    }

    /// Waits for what was queued first and not taken yet. Clears and fills `out`.
    ///
    /// # Errors
    /// [`KernelError::Device`]; [`KernelError::Shape`] when nothing is queued.
    fn take_sampled(&mut self, out: &mut Vec<Sampled>) -> Result<(), KernelError> {
        out.clear();
        Err(KernelError::Shape { op: "take_sampled", message: "nothing is queued".to_owned() })
    }

    /// Log-probability and rank of `targets[i]` in row `first_row + i` of `logits`, and the `top_n`
    /// most likely tokens there. Clears and fills `out`; `token` is the target.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn logprobs(
        &mut self,
        logits: &Self::Buffer,
        vocab: usize,
        first_row: usize,
        targets: &[u32],
        top_n: u32,
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError>;

    /// Copies a buffer's rows to the host: for tests and tools, not for the step path.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn read_buffer(&mut self, buffer: &Self::Buffer) -> Result<Vec<f32>, KernelError>;

    /// Copies some rows of a buffer to `out`, one range behind the other. `out` is cleared first.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when a row is not in use; [`KernelError::OutOfMemory`],
    /// [`KernelError::Device`].
    fn read_rows(
        &mut self,
        buffer: &Self::Buffer,
        rows: &[std::ops::Range<usize>],
        out: &mut Vec<f32>,
    ) -> Result<(), KernelError> {
        out.clear();
        let (all, width) = (self.read_buffer(buffer)?, buffer.width());
        for rows in rows {
            let values = all.get(rows.start * width..rows.end * width);
            let values = values.ok_or_else(|| KernelError::Shape {
                op: "read_rows",
                message: format!("rows {rows:?} are read, {} are in use", buffer.rows()),
            })?;
            out.extend_from_slice(values);
        }
        Ok(())
    }

    /// Copies what rows chose to the host: for tests and tools, not for the step path.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`], [`KernelError::Device`].
    fn read_routes(&mut self, routes: &Self::Routes) -> Result<Choices, KernelError>;

    /// Time spent in collectives since the last call, and resets it; zero where
    /// [`Backend::samples_everywhere`], since devices that exchange data by themselves do not tell.
    fn take_collective_time(&mut self) -> std::time::Duration;

    /// Bytes given to collectives since the last call, and resets them.
    fn take_exchanged(&mut self) -> Tally {
        Tally::default()
    }
}

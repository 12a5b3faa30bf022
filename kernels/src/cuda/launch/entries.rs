//! PURE: the names of all kernels.
use super::{FP8_HEAD_DIMS, HEAD_DIMS};
use crate::backend::KvStorage;

/// A kernel, by its index in [`NAMES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry(pub usize);

macro_rules! entries {
    ($($constant:ident: $name:literal,)*) => {
        /// Every kernel that is launched.
        pub const NAMES: &[&str] = &[$($name),*];
        /// Their indices.
        #[allow(non_camel_case_types, clippy::upper_case_acronyms, reason = "named as constants")]
        enum Index {
            $($constant),*
        }
        $(
            #[allow(dead_code, reason = "kernels of a family are found by their first")]
            pub(super) const $constant: Entry = Entry(Index::$constant as usize);
        )*
    };
}

entries! {
    EMBED: "tutti_embed",
    ADD_RMSNORM: "tutti_add_rmsnorm",
    ADD_RMSNORM_BF16: "tutti_add_rmsnorm_bf16",
    ADD_NORMED_RMSNORM: "tutti_add_normed_rmsnorm",
    ADD_NORMED: "tutti_add_normed",
    ACTIVATE_MUL: "tutti_activate_mul_f32",
    ACTIVATE: "tutti_activate_f32",
    ADD_LAYERNORM: "tutti_add_layernorm",
    QK_SQUARES: "tutti_qk_squares",
    QK_SCALE: "tutti_qk_scale",
    ADD_BIAS: "tutti_add_bias",
    CAP: "tutti_cap",
    SCALE_ADD_BIAS: "tutti_scale_add_bias",
    WIDEN_INT8: "tutti_widen_int8",
    WIDEN_FP8: "tutti_widen_fp8",
    WIDEN_INT4: "tutti_widen_int4",
    ADD: "tutti_add",
    NARROW_ROWS: "tutti_narrow_rows",
    WIDEN_ROWS: "tutti_widen_rows",
    GATHER_ROWS: "tutti_gather_rows",
    COPY_COLUMNS: "tutti_copy_columns",
    READ: "tutti_read",
    LATE: "tutti_late",
    QKV_FINISH: "tutti_qkv_finish",
    QKV_FINISH_FP8: "tutti_qkv_finish_fp8",
    PREFILL: "tutti_prefill_attention_16",
    PREFILL_32: "tutti_prefill_attention_32",
    PREFILL_64: "tutti_prefill_attention_64",
    PREFILL_96: "tutti_prefill_attention_96",
    PREFILL_128: "tutti_prefill_attention_128",
    PREFILL_256: "tutti_prefill_attention_256",
    PREFILL_FP8: "tutti_prefill_attention_fp8_64",
    PREFILL_FP8_96: "tutti_prefill_attention_fp8_96",
    PREFILL_FP8_128: "tutti_prefill_attention_fp8_128",
    PREFILL_FP8_256: "tutti_prefill_attention_fp8_256",
    DECODE: "tutti_decode_attention_16",
    DECODE_32: "tutti_decode_attention_32",
    DECODE_64: "tutti_decode_attention_64",
    DECODE_96: "tutti_decode_attention_96",
    DECODE_128: "tutti_decode_attention_128",
    DECODE_256: "tutti_decode_attention_256",
    DECODE_FP8: "tutti_decode_attention_fp8_64",
    DECODE_FP8_96: "tutti_decode_attention_fp8_96",
    DECODE_FP8_128: "tutti_decode_attention_fp8_128",
    DECODE_FP8_256: "tutti_decode_attention_fp8_256",
    DECODE_REDUCE: "tutti_decode_reduce",
    ATTENTION_ANY: "tutti_attention_any",
    ATTENTION_ANY_FP8: "tutti_attention_any_fp8",
    LATENT_FINISH: "tutti_latent_finish",
    LATENT_FINISH_FP8: "tutti_latent_finish_fp8",
    HEADS_PRODUCT: "tutti_heads_product_8",
    HEADS_PRODUCT_32: "tutti_heads_product_32",
    LATENT_ATTENTION: "tutti_latent_attention",
    LATENT_ATTENTION_FP8: "tutti_latent_attention_fp8",
    LATENT_DECODE: "tutti_latent_decode",
    LATENT_DECODE_FP8: "tutti_latent_decode_fp8",
    DELTA_MIX: "tutti_delta_mix",
    DELTA_UPDATE: "tutti_delta_update_32",
    DELTA_UPDATE_128: "tutti_delta_update_128",
    DELTA_UPDATE_256: "tutti_delta_update_256",
    DELTA_FINISH: "tutti_delta_finish",
    GATE: "tutti_gate",
    SKINNY_8: "tutti_skinny_8",
    SKINNY_16: "tutti_skinny_16",
    SKINNY_32: "tutti_skinny_32",
    SKINNY_64: "tutti_skinny_64",
    SKINNY_INT8: "tutti_skinny_int8_8",
    SKINNY_INT8_16: "tutti_skinny_int8_16",
    SKINNY_INT8_32: "tutti_skinny_int8_32",
    SKINNY_INT8_64: "tutti_skinny_int8_64",
    SKINNY_FP8: "tutti_skinny_fp8_8",
    SKINNY_FP8_16: "tutti_skinny_fp8_16",
    SKINNY_FP8_32: "tutti_skinny_fp8_32",
    SKINNY_INT4: "tutti_skinny_int4_8",
    SKINNY_INT4_16: "tutti_skinny_int4_16",
    SKINNY_INT4_32: "tutti_skinny_int4_32",
    GATE_UP_8: "tutti_skinny_gate_up_8",
    GATE_UP_16: "tutti_skinny_gate_up_16",
    GATE_UP_32: "tutti_skinny_gate_up_32",
    GATE_UP_64: "tutti_skinny_gate_up_64",
    GATE_UP_INT8: "tutti_skinny_gate_up_int8_8",
    GATE_UP_INT8_16: "tutti_skinny_gate_up_int8_16",
    GATE_UP_INT8_32: "tutti_skinny_gate_up_int8_32",
    GATE_UP_INT8_64: "tutti_skinny_gate_up_int8_64",
    GATE_UP_FP8: "tutti_skinny_gate_up_fp8_8",
    GATE_UP_FP8_16: "tutti_skinny_gate_up_fp8_16",
    GATE_UP_FP8_32: "tutti_skinny_gate_up_fp8_32",
    GATE_UP_INT4: "tutti_skinny_gate_up_int4_8",
    GATE_UP_INT4_16: "tutti_skinny_gate_up_int4_16",
    GATE_UP_INT4_32: "tutti_skinny_gate_up_int4_32",
    ROUTE: "tutti_route",
    GROUP_EXPERTS: "tutti_group_experts",
    EXPERTS_GATE_UP: "tutti_experts_gate_up_8",
    EXPERTS_GATE_UP_16: "tutti_experts_gate_up_16",
    EXPERTS_GATE_UP_32: "tutti_experts_gate_up_32",
    EXPERTS_GATE_UP_64: "tutti_experts_gate_up_64",
    EXPERTS_GATE_UP_INT8: "tutti_experts_gate_up_int8_8",
    EXPERTS_GATE_UP_INT8_16: "tutti_experts_gate_up_int8_16",
    EXPERTS_GATE_UP_INT8_32: "tutti_experts_gate_up_int8_32",
    EXPERTS_GATE_UP_INT8_64: "tutti_experts_gate_up_int8_64",
    EXPERTS_GATE_UP_FP8: "tutti_experts_gate_up_fp8_8",
    EXPERTS_GATE_UP_FP8_16: "tutti_experts_gate_up_fp8_16",
    EXPERTS_GATE_UP_FP8_32: "tutti_experts_gate_up_fp8_32",
    EXPERTS_DOWN: "tutti_experts_down_8",
    EXPERTS_DOWN_16: "tutti_experts_down_16",
    EXPERTS_DOWN_32: "tutti_experts_down_32",
    EXPERTS_DOWN_64: "tutti_experts_down_64",
    EXPERTS_DOWN_INT8: "tutti_experts_down_int8_8",
    EXPERTS_DOWN_INT8_16: "tutti_experts_down_int8_16",
    EXPERTS_DOWN_INT8_32: "tutti_experts_down_int8_32",
    EXPERTS_DOWN_INT8_64: "tutti_experts_down_int8_64",
    EXPERTS_DOWN_FP8: "tutti_experts_down_fp8_8",
    EXPERTS_DOWN_FP8_16: "tutti_experts_down_fp8_16",
    EXPERTS_DOWN_FP8_32: "tutti_experts_down_fp8_32",
    EXPERTS_SUM: "tutti_experts_sum",
    ASSIGNED_ROWS: "tutti_assigned_rows",
    ASSIGNED_ROWS_BF16: "tutti_assigned_rows_bf16",
    SAMPLE: "tutti_sample",
    LOGPROBS: "tutti_logprobs",
    ARGMAX: "tutti_argmax",
    INTERLEAVE: "tutti_interleave_ranks",
    PEER_SUM: "tutti_peer_sum",
    PEER_SUM_TWO_SHOT: "tutti_peer_sum_two_shot",
    PEER_SUM_ADD_RMSNORM: "tutti_peer_sum_add_rmsnorm",
    PEER_GATHER: "tutti_peer_gather",
    ARGMAX_MERGE: "tutti_argmax_merge",
    BEST_KEYS: "tutti_best_keys",
    DRAW_BEST: "tutti_draw_best",
    TREE_SUM: "tutti_tree_sum",
    BLOCKS_OUT: "tutti_blocks_out",
    BLOCKS_IN: "tutti_blocks_in",
}

/// Attention over latents.
const LATENT: [usize; 4] =
    [LATENT_ATTENTION.0, LATENT_ATTENTION_FP8.0, LATENT_DECODE.0, LATENT_DECODE_FP8.0];

impl Entry {
    /// Name of the kernel.
    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES[self.0]
    }

    /// Maximum dynamic shared memory that it is launched with.
    #[must_use]
    pub fn shared(self) -> u32 {
        let of = |first: Entry, dims: &[usize]| {
            self.0.checked_sub(first.0).and_then(|which| dims.get(which).copied())
        };
        match (of(PREFILL, &HEAD_DIMS), of(PREFILL_FP8, &FP8_HEAD_DIMS)) {
            (Some(head_dim), _) => prefill_shared(head_dim, KvStorage::AsTaken),
            (_, Some(head_dim)) => prefill_shared(head_dim, KvStorage::Fp8),
            _ if LATENT.contains(&self.0) => super::latent::SHARED,
            _ => 0,
        }
    }
}

pub(super) fn prefill_shared(head_dim: usize, storage: KvStorage) -> u32 {
    let rows = match storage {
        KvStorage::AsTaken => 320,
        KvStorage::Fp8 => 256,
    };
    rows * 2 * head_dim as u32
}

#!/usr/bin/env python3
"""Makes the variants with experts (mixtral, qwen2-moe, qwen3-moe, qwen3-moe-stacked, glm4-moe,
granite-moe, olmoe, minimax-m2, deepseek-v2, deepseek-v3, glm4-moe-lite, hy-v3, exaone-moe, dots1, solar-open,
qwen3-vl-moe, glm4v-moe, qwen3-next, qwen3_5-moe, granite-4-h-moe) and their golden.json.

Random weights, but for the routers: an expert is chosen by the direction that it has in the embedding,
and every token has the directions of as many experts as it is sent to. So no choice hangs on rounding:
golden.json says how small the gap between the last chosen and the first not chosen expert gets.
Those in BIASED have an expert that is chosen because of its bias, whatever the token.
DeepSeek's choose in groups: every token has an expert that would be chosen if its group were.
Needs torch and transformers 5; tokenizer and templates are those of the variant qwen3.
usage: make_experts.py OUT_DIR [NAME ..]        (SEEDS=12 seeds are tried for each)
"""
import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, DeepseekV2Config, DeepseekV3Config, Dots1Config, ExaoneMoeConfig,
    Glm4MoeConfig, Glm4MoeLiteConfig, Glm4vMoeConfig, GraniteMoeConfig,
    GraniteMoeHybridConfig, HYV3Config, MiniMaxM2Config, MixtralConfig,
    OlmoeConfig, Qwen2MoeConfig, Qwen3_5MoeConfig, Qwen3MoeConfig, Qwen3NextConfig, Qwen3VLMoeConfig,
    SolarOpenConfig,
)

import golden
import routing

HERE = Path(__file__).resolve().parent
# How much of what layers add in the routers' directions stays.
KEPT = 0.01
ROUTERS = ("mlp.gate", "block_sparse_moe.router")
BIASED = ("glm4_moe", "minimax_m2", "deepseek_v3", "glm4_moe_lite", "hy_v3", "exaone_moe", "dots1", "solar_open",
          "glm4v_moe_text")
# 1 is added to the weights of most norms.
OFFSET = ("qwen3_next", "qwen3_5_moe_text")
torch.set_num_threads(1)

BASE = dict(
    vocab_size=384, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0, hidden_act="silu",
)


def rope(theta):
    return {"rope_type": "default", "rope_theta": theta}


VARIANTS = {
    "mixtral": (
        MixtralConfig(
            **BASE, num_hidden_layers=2, intermediate_size=64, rms_norm_eps=1e-5,
            num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=False,
            sliding_window=None, rope_parameters=rope(1000000.0),
        ),
        {"old": True},
    ),
    # Its second layer is dense; experts of a width that is no multiple of a vector's.
    "qwen3-moe": (
        Qwen3MoeConfig(
            **BASE, num_hidden_layers=3, intermediate_size=128, moe_intermediate_size=40,
            head_dim=32, rms_norm_eps=1e-6, num_experts=10, num_experts_per_tok=4,
            norm_topk_prob=True, mlp_only_layers=[1], tie_word_embeddings=False,
            rope_parameters=rope(1000000.0),
        ),
        {"old": True},
    ),
    # A shared expert with a gate, twice as wide as the others; weights do not add up to one.
    "qwen2-moe": (
        Qwen2MoeConfig(
            **BASE, num_hidden_layers=2, intermediate_size=64, moe_intermediate_size=24,
            shared_expert_intermediate_size=48, rms_norm_eps=1e-6, num_experts=8,
            num_experts_per_tok=3, norm_topk_prob=False, tie_word_embeddings=False,
            rope_parameters=rope(1000000.0),
        ),
        {"old": True},
    ),
    # Sigmoids, a bias that changes choices, a shared expert without a gate, half of each head rotated.
    "glm4-moe": (
        Glm4MoeConfig(
            **BASE, num_hidden_layers=3, intermediate_size=96, moe_intermediate_size=32, head_dim=32,
            rms_norm_eps=1e-5, n_routed_experts=7, num_experts_per_tok=3, n_shared_experts=1,
            routed_scaling_factor=1.5, first_k_dense_replace=1, norm_topk_prob=True,
            use_qk_norm=True, attention_bias=True, tie_word_embeddings=False, num_mtp_layers=0,
            rope_parameters={**rope(10000.0), "partial_rotary_factor": 0.5},
        ),
        {"old": True},
    ),
    # Granite's factors; all experts of a layer in two tensors under names of their own.
    "granite-moe": (
        GraniteMoeConfig(
            **BASE, num_hidden_layers=2, intermediate_size=32, rms_norm_eps=1e-6,
            num_local_experts=6, num_experts_per_tok=2, embedding_multiplier=1.7,
            attention_multiplier=0.11, residual_multiplier=0.7, logits_scaling=1.3,
            tie_word_embeddings=False, rope_parameters=rope(10000.0),
        ),
        {"old": True},
    ),
    # The same beside a shared expert twice as wide, with Mamba 2 in two of three layers.
    "granite-4-h-moe": (
        GraniteMoeHybridConfig(
            **BASE, num_hidden_layers=3, intermediate_size=24, shared_intermediate_size=48, rms_norm_eps=1e-6,
            num_local_experts=6, num_experts_per_tok=2, embedding_multiplier=1.7, attention_multiplier=0.11,
            residual_multiplier=0.7, logits_scaling=1.3, tie_word_embeddings=False,
            layer_types=["linear_attention", "linear_attention", "full_attention"],
            position_embedding_type="nope", mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16,
            mamba_n_groups=1, mamba_d_conv=3, rope_parameters=rope(10000.0),
        ),
        {"old": True},
    ),
    # q and k normalised over all heads; weights do not add up to one.
    "olmoe": (
        OlmoeConfig(
            **BASE, num_hidden_layers=2, intermediate_size=32, rms_norm_eps=1e-5, num_experts=6,
            num_experts_per_tok=2, norm_topk_prob=False, tie_word_embeddings=False,
            rope_parameters=rope(10000.0),
        ),
        {"old": True},
    ),
    # The same norms, sigmoids, a bias that changes choices, Mixtral's names, half of each head rotated.
    "minimax-m2": (
        MiniMaxM2Config(
            **BASE, num_hidden_layers=2, intermediate_size=32, head_dim=32, rms_norm_eps=1e-6,
            num_local_experts=7, num_experts_per_tok=3, tie_word_embeddings=False,
            rope_parameters={**rope(10000.0), "partial_rotary_factor": 0.5},
        ),
        {"old": True},
    ),
    # Multi-head latent attention, with one projection for q; a softmax in groups, two shared experts.
    "deepseek-v2": (
        DeepseekV2Config(
            **{**BASE, "num_key_value_heads": 4}, num_hidden_layers=3, intermediate_size=96,
            moe_intermediate_size=32, rms_norm_eps=1e-6, q_lora_rank=None, kv_lora_rank=32,
            qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20, n_routed_experts=8, n_group=4,
            topk_group=2, topk_method="group_limited_greedy", num_experts_per_tok=3,
            n_shared_experts=2, routed_scaling_factor=1.5, first_k_dense_replace=1,
            norm_topk_prob=False, tie_word_embeddings=False, rope_parameters=rope(10000.0),
        ),
        {"old": True},
    ),
    # The same with two projections for q, sigmoids in groups, a bias that changes choices, and YaRN,
    # whose factors of all elements and of rotated ones differ.
    "deepseek-v3": (
        DeepseekV3Config(
            **{**BASE, "num_key_value_heads": 4}, num_hidden_layers=3, intermediate_size=96,
            moe_intermediate_size=32, rms_norm_eps=1e-5, q_lora_rank=40, kv_lora_rank=48,
            qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=24, n_routed_experts=8, n_group=4,
            topk_group=2, num_experts_per_tok=3, n_shared_experts=1, routed_scaling_factor=1.5,
            first_k_dense_replace=1, norm_topk_prob=True, tie_word_embeddings=False,
            num_mtp_layers=0,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32,
                "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.8,
                "original_max_position_embeddings": 128,
            },
        ),
        {"old": True},
    ),
    # Multi-head latent attention with a router in one group, pairs next to each other, a list of layers
    # with experts.
    "glm4-moe-lite": (
        Glm4MoeLiteConfig(
            **{**BASE, "num_key_value_heads": 4}, num_hidden_layers=3, intermediate_size=96,
            moe_intermediate_size=32, rms_norm_eps=1e-5, q_lora_rank=40, kv_lora_rank=48,
            qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=7,
            num_experts_per_tok=3, n_shared_experts=1, routed_scaling_factor=1.8,
            mlp_layer_types=["dense", "sparse", "sparse"], tie_word_embeddings=False,
            rope_parameters=rope(1000000.0),
        ),
        {"old": True},
    ),
    # Names of its own for the router, its bias and what is shared.
    "hy-v3": (
        HYV3Config(
            **BASE, num_hidden_layers=3, intermediate_size=96, moe_intermediate_size=32, head_dim=32,
            rms_norm_eps=1e-5, num_experts=7, num_experts_per_tok=3, num_shared_experts=1,
            router_scaling_factor=1.7, mlp_layer_types=["dense", "sparse", "sparse"],
            tie_word_embeddings=False, rope_parameters=rope(10000.0),
        ),
        {"old": True},
    ),
    # EXAONE 4's windows and norms of heads, Llama's norms of layers, two shared experts.
    "exaone-moe": (
        ExaoneMoeConfig(
            **BASE, num_hidden_layers=3, intermediate_size=96, moe_intermediate_size=32,
            rms_norm_eps=1e-5, num_experts=6, num_experts_per_tok=3, num_shared_experts=2, routed_scaling_factor=1.4, first_k_dense_replace=1,
            sliding_window=24, sliding_window_pattern=2,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            tie_word_embeddings=False, rope_parameters=rope(10000.0),
        ),
        {"old": True},
    ),
    # Norms of heads, biases of all of attention's projections, weights that do not add up to one.
    "dots1": (
        Dots1Config(
            **BASE, num_hidden_layers=3, intermediate_size=96, moe_intermediate_size=32,
            rms_norm_eps=1e-6, n_routed_experts=7, num_experts_per_tok=3, n_shared_experts=2,
            routed_scaling_factor=1.3, first_k_dense_replace=1, norm_topk_prob=False,
            attention_bias=True, sliding_window=24, max_window_layers=2, tie_word_embeddings=False,
            rope_parameters=rope(10000.0),
        ),
        {"old": True},
    ),
    # Experts in every layer.
    "solar-open": (
        SolarOpenConfig(
            **BASE, num_hidden_layers=2, intermediate_size=96, moe_intermediate_size=32, head_dim=32,
            rms_norm_eps=1e-5, n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=1,
            routed_scaling_factor=1.2, tie_word_embeddings=False, rope_parameters=rope(10000.0),
        ),
        {"old": True},
    ),
    # A text model beside a vision tower; all experts of a layer in two tensors, inputs before outputs.
    "qwen3-vl-moe": (
        Qwen3VLMoeConfig(
            text_config=dict(
                **BASE, num_hidden_layers=2, intermediate_size=64, moe_intermediate_size=24, head_dim=32,
                rms_norm_eps=1e-6, num_experts=6, num_experts_per_tok=3,
                rope_parameters={**rope(5000000.0), "mrope_section": [6, 5, 5], "mrope_interleaved": True},
            ),
            vision_config=dict(
                depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64,
                deepstack_visual_indexes=[0], patch_size=4, num_position_embeddings=16,
            ),
            tie_word_embeddings=False, image_token_id=380, video_token_id=381,
            vision_start_token_id=382, vision_end_token_id=383, bos_token_id=1, eos_token_id=2,
            pad_token_id=0,
        ),
        {"old": True},
    ),
    # Linear attention in three of four layers, gates in the other; a shared expert with a gate.
    "qwen3-next": (
        Qwen3NextConfig(
            **BASE, num_hidden_layers=4, intermediate_size=64, moe_intermediate_size=24, head_dim=32,
            shared_expert_intermediate_size=24, rms_norm_eps=1e-6, num_experts=6, num_experts_per_tok=3,
            norm_topk_prob=True, tie_word_embeddings=False, linear_num_key_heads=2, linear_num_value_heads=8,
            linear_key_head_dim=16, linear_value_head_dim=16, mlp_only_layers=[1],
            rope_parameters={**rope(10000000.0), "partial_rotary_factor": 0.25},
        ),
        {"old": True},
    ),
    # The same with projections of their own for what qwen3-next has in two.
    "qwen3_5-moe": (
        Qwen3_5MoeConfig(
            text_config=dict(
                **BASE, num_hidden_layers=4, moe_intermediate_size=24, head_dim=32,
                shared_expert_intermediate_size=24, rms_norm_eps=1e-6, num_experts=6, num_experts_per_tok=3,
                linear_num_key_heads=2, linear_num_value_heads=12, linear_key_head_dim=16,
                linear_value_head_dim=16, linear_conv_kernel_dim=3, layer_types=["linear_attention",
                "full_attention", "linear_attention", "linear_attention"],
                rope_parameters={**rope(10000000.0), "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
                                 "mrope_interleaved": True},
            ),
            vision_config=dict(
                depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64,
                patch_size=4, num_position_embeddings=16,
            ),
            tie_word_embeddings=False, image_token_id=380, video_token_id=381,
            vision_start_token_id=382, vision_end_token_id=383, bos_token_id=1, eos_token_id=2,
            pad_token_id=0,
        ),
        {"old": False},
    ),
    # As glm4-moe, without norms of heads.
    "glm4v-moe": (
        Glm4vMoeConfig(
            text_config=dict(
                **BASE, num_hidden_layers=3, intermediate_size=96, moe_intermediate_size=32, head_dim=32,
                rms_norm_eps=1e-5, n_routed_experts=7, num_experts_per_tok=3, n_shared_experts=1,
                routed_scaling_factor=1.5, first_k_dense_replace=1, norm_topk_prob=True,
                tie_word_embeddings=False,
                rope_parameters={**rope(10000.0), "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]},
            ),
            vision_config=dict(
                depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64,
                patch_size=4, image_size=16,
            ),
            tie_word_embeddings=False, image_token_id=380, video_token_id=381, image_start_token_id=376,
            image_end_token_id=377, video_start_token_id=378, video_end_token_id=379, bos_token_id=1,
            eos_token_id=2, pad_token_id=0,
        ),
        {"old": True},
    ),
    # Every second layer has experts, whose weights do not add up to one; saved as transformers 5
    # holds them, all experts in one tensor.
    "qwen3-moe-stacked": (
        Qwen3MoeConfig(
            **BASE, num_hidden_layers=4, intermediate_size=128, moe_intermediate_size=32,
            head_dim=16, rms_norm_eps=1e-6, num_experts=6, num_experts_per_tok=3,
            norm_topk_prob=False, decoder_sparse_step=2, tie_word_embeddings=False,
            rope_parameters=rope(10000.0),
        ),
        {"old": False},
    ),
}
PROMPTS = [
    ("one", "A"),
    ("short", "Hello, world!"),
    ("mid", "The quick brown fox jumps over the lazy dog. 0123456789"),
    ("long", "One morning the bear and the owl went to the river to look for a lost key. " * 3),
    ("unicode", "\u00e9\u4f60\U0001f98a"),
    ("chat", [{"role": "user", "content": "Hi!"}]),
]


def strengths(config, tokens, experts, biased, chosen):
    """How much every token has of every expert's direction."""
    strength = torch.zeros(tokens, experts)
    groups = getattr(config, "n_group", None) or 1
    if groups == 1:
        sent = biased + torch.rand(tokens, experts - biased).argsort(1)[:, :chosen]
        return strength.scatter_(1, sent, 1.6 + 0.8 * torch.rand(tokens, chosen))
    # Of each group, the first two of its experts that are not biased, in random order. A sigmoid's
    # groups go by two experts, so the second group has one that repels; a softmax's, by the best.
    size = experts // groups
    parts = [[2.0, 0.6], [1.2, -1.2]] if biased else [[2.0, 0.7], [1.6, -0.3], [1.3, 0.0]]
    order = biased + torch.rand(tokens, groups - biased).argsort(1)
    for token in range(tokens):
        for group, part in zip(order[token], parts):
            own = group * size + torch.randperm(size)[:2]
            strength[token, own] = torch.tensor(part)
    return strength + 0.1 * torch.rand(tokens, experts)


def kind(config):
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def initialised(config, seed):
    torch.manual_seed(seed)
    model = kind(config).from_config(config, dtype=torch.float32)
    config = config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    # The first is chosen by its bias, not by tokens.
    biased = int(config.model_type in BIASED)
    chosen = config.num_experts_per_tok - biased
    # Where the strengths of directions are compared, nothing else has a part in them.
    is_grouped = (getattr(config, "n_group", None) or 1) > 1
    directions = torch.linalg.qr(torch.randn(config.hidden_size, experts))[0].T
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "visual" in name:
                continue
            if name.endswith("norm.weight"):
                # Routers read the one after attention.
                spread = 0.002 if is_grouped and "post_attention" in name else 0.04
                is_offset = config.model_type in OFFSET and "linear_attn" not in name
                p.copy_((0 if is_offset else 1) + spread * torch.randn_like(p))
            elif golden.initialise_delta(name, p):
                pass
            elif "embed_tokens" in name:
                strength = strengths(config, p.shape[0], experts, biased, chosen)
                noise = 0.2 * torch.randn_like(p)
                if is_grouped:
                    noise -= noise @ directions.T @ directions
                p.copy_(noise + strength @ directions)
            elif "lm_head" in name:
                # Rounding to bf16 moves the hidden states of those with groups more, by transformers'
                # own computation; 0.35 would take their logits beyond the tests' tolerance.
                p.copy_((0.2 if is_grouped else 0.35) * torch.randn_like(p))
            elif name.removesuffix(".weight").endswith(ROUTERS):
                p.copy_(0.8 * directions if is_grouped else 0.8 * directions + 0.01 * torch.randn_like(p))
            elif "o_proj" in name or "out_proj" in name or "down_proj" in name:
                # Little of what layers add to the residual stream lies in the routers' directions.
                # A norm follows linear attention, which makes much of the rounding of what is small.
                scale = 0.4 if "linear_attn" in name or "mamba" in name else 1.6
                made = scale * torch.randn_like(p) / p.shape[-1] ** 0.5
                kept = 0 if is_grouped else KEPT
                p.copy_(made - (1 - kept) * directions.T @ (directions @ made))
            else:
                p.copy_(1.1 * torch.randn_like(p) / p.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer[0] = 0.6
    return model.to(torch.bfloat16)


def goldens(folder, kind):
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def load(dtype):
        model = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        return model.eval()

    routing.write(
        folder / "golden.json", PROMPTS, tokenizer, load(torch.float32), load(torch.bfloat16), ROUTERS
    )


def turn(path):
    """Stacks of experts as published for Qwen3-VL: inputs before outputs."""
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, path, {"format": "pt"})


def rename_for_transformers_4(path):
    """Key names as in most published checkpoints."""
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    if "partial_rotary_factor" in parameters:
        config["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    config["rope_theta"], kind = parameters.pop("rope_theta"), parameters.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **parameters}
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "qwen3_moe" and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    config["transformers_version"] = "4.51.0"
    path.write_text(json.dumps(config, indent=2, sort_keys=True))


def main():
    out = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(HERE / "qwen3")
    only = sys.argv[2:]
    for name, (config, how) in VARIANTS.items():
        if only and name not in only:
            continue
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        seeds = range(int(os.environ.get("SEEDS", "12")))
        best, seed = max(
            (routing.quality(PROMPTS, tokenizer, initialised(config, seed).float().eval(), ROUTERS), seed)
            for seed in seeds
        )
        model = initialised(config, seed)
        model.generation_config.update(eos_token_id=[2, 6], bos_token_id=1, pad_token_id=0)
        # The original format is that of published checkpoints: a tensor for each expert's projection.
        model.save_pretrained(folder, save_original_format=how["old"])
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(HERE / "qwen3" / file, folder / file)
        if how["old"] and kind(config) is AutoModelForCausalLM:
            rename_for_transformers_4(folder / "config.json")
        print(name, "seed", seed, "quality", round(best, 5), flush=True)
        goldens(folder, kind(config))
        if name == "qwen3-vl-moe":
            turn(folder / "model.safetensors")


main()

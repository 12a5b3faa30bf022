#!/usr/bin/env python3
"""Makes the variants phi3, phi4-mini, qwen3-yarn, smollm3, mistral3, granite, seed-oss, glm4, exaone4,
ernie4_5, olmo2, olmo3, cohere, cohere2, starcoder2, nemotron, stablelm, ministral3, granite-4, granite-4-h, qwen2_5-vl,
qwen3-vl, glm4v and qwen3_5 with their golden.json, and tests/parity/rope.json: what transformers makes of scaled rotary embeddings.

Random weights, in bf16; of some seeds the one whose greedy choices are the clearest. Sets of LongRoPE's
divisors are chosen by the served length here, not by how long a sequence has become: golden.json is of
the long ones, golden-short.json, which phi3 has beside it, of the short ones.
Needs torch and transformers 5; tokenizer and templates are those of the variant qwen3.
usage: make_llamas.py OUT_DIR ROPE_JSON [NAME ..]        (SEEDS=12 seeds are tried for each)
"""
import json
import os
import shutil
import sys
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer, Cohere2Config, Cohere2ForCausalLM, CohereConfig, CohereForCausalLM, Ernie4_5Config,
    Ernie4_5ForCausalLM, Exaone4Config, Exaone4ForCausalLM, Glm4Config, Glm4ForCausalLM, Glm4vConfig,
    Glm4vForConditionalGeneration, GraniteConfig,
    GraniteForCausalLM, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, LlamaConfig,
    Ministral3Config, Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, NemotronConfig,
    NemotronForCausalLM, Olmo2Config, Olmo2ForCausalLM, Olmo3Config, Olmo3ForCausalLM,
    Phi3Config, Phi3ForCausalLM, PixtralVisionConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM, Qwen3VLConfig, Qwen3VLForConditionalGeneration, SeedOssConfig,
    SeedOssForCausalLM, SmolLM3Config, SmolLM3ForCausalLM, StableLmConfig, StableLmForCausalLM,
    Starcoder2Config, Starcoder2ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import golden

HERE = Path(__file__).resolve().parent
torch.set_num_threads(1)

IDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
BASE = dict(vocab_size=384, hidden_size=64, intermediate_size=128, hidden_act="silu", **IDS)
SHORT = [1.0, 1.02, 1.05, 1.1, 1.15, 1.3, 1.6, 1.9]
LONG = [1.05, 1.3, 1.9, 2.6, 3.4, 5.0, 6.5, 8.0]


def longrope(divisors, theta, **more):
    return {"rope_type": "longrope", "rope_theta": theta, "short_factor": SHORT[:divisors],
            "long_factor": LONG[:divisors], **more}


VARIANTS = {
    # A window, the newer dialect.
    "phi3": (Phi3ForCausalLM, lambda: Phi3Config(
        **BASE, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
        max_position_embeddings=1024, original_max_position_embeddings=256, sliding_window=100,
        tie_word_embeddings=False, rope_parameters=longrope(8, 10000.0))),
    # Three quarters of a head are rotated, four heads for one KV head; the older dialect.
    "phi4-mini": (Phi3ForCausalLM, lambda: Phi3Config(
        **BASE, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, rms_norm_eps=1e-5,
        max_position_embeddings=1024, original_max_position_embeddings=64, sliding_window=None,
        tie_word_embeddings=True, partial_rotary_factor=0.75,
        rope_parameters=longrope(6, 10000.0, partial_rotary_factor=0.75))),
    # The length that is said is the one before it is stretched.
    "qwen3-yarn": (Qwen3ForCausalLM, lambda: Qwen3Config(
        **BASE, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        rms_norm_eps=1e-6, max_position_embeddings=128, tie_word_embeddings=False,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                         "original_max_position_embeddings": 128})),
    # Every second layer tells no positions, and slides.
    "smollm3": (SmolLM3ForCausalLM, lambda: SmolLM3Config(
        **BASE, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6,
        max_position_embeddings=512, no_rope_layer_interval=2, use_sliding_window=True,
        sliding_window=24, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0})),
    # All four factors, none of which bf16 has exactly; the older dialect, as published.
    "granite": (GraniteForCausalLM, lambda: GraniteConfig(
        **BASE, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
        max_position_embeddings=512, embedding_multiplier=0.6, attention_multiplier=0.11,
        residual_multiplier=0.7, logits_scaling=1.3, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    # Biases of q, k and v and of the MLP, none of attention's output.
    "seed-oss": (SeedOssForCausalLM, lambda: SeedOssConfig(
        **BASE, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        rms_norm_eps=1e-6, max_position_embeddings=512, attention_bias=True, attention_out_bias=False,
        mlp_bias=True, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    # Pairs next to each other on half of each head, norms before and after, gate and up in one tensor.
    "glm4": (Glm4ForCausalLM, lambda: Glm4Config(
        **BASE, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        rms_norm_eps=1e-5, max_position_embeddings=512, attention_bias=True,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5})),
    # Norms only after attention and MLP; the second layer neither slides nor tells positions.
    "exaone4": (Exaone4ForCausalLM, lambda: Exaone4Config(
        **BASE, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
        max_position_embeddings=512, sliding_window=24, sliding_window_pattern=2,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    # Pairs next to each other on whole heads, biases everywhere.
    "ernie4_5": (Ernie4_5ForCausalLM, lambda: Ernie4_5Config(
        **BASE, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        rms_norm_eps=1e-5, max_position_embeddings=512, use_bias=True, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    # q and k normalised over all heads; norms only after attention and MLP.
    "olmo2": (Olmo2ForCausalLM, lambda: Olmo2Config(
        **BASE, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6,
        max_position_embeddings=512, attention_bias=False, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    # The same with windows; only the layers without one have a scaled rotary embedding.
    "olmo3": (Olmo3ForCausalLM, lambda: Olmo3Config(
        **BASE, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=1e-6,
        max_position_embeddings=512, sliding_window=24, tie_word_embeddings=False,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                               "original_max_position_embeddings": 128, "attention_factor": 1.2,
                               "beta_fast": 32.0, "beta_slow": 1.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}})),
    # LayerNorms without biases, attention beside the MLP, a factor of the logits, pairs next to
    # each other.
    "cohere": (CohereForCausalLM, lambda: CohereConfig(
        **BASE, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, layer_norm_eps=1e-5,
        max_position_embeddings=512, logit_scale=0.4, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    # The same with windows; the layer without one has no positions.
    "cohere2": (Cohere2ForCausalLM, lambda: Cohere2Config(
        **BASE, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, layer_norm_eps=1e-5,
        max_position_embeddings=512, logit_scale=0.25, sliding_window=24, tie_word_embeddings=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0})),
    # LayerNorms with biases, biases everywhere, GELU without a gate.
    "starcoder2": (Starcoder2ForCausalLM, lambda: Starcoder2Config(
        **{**BASE, "hidden_act": "gelu_pytorch_tanh"}, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, norm_epsilon=1e-5, max_position_embeddings=512, use_bias=True,
        sliding_window=24, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    # 1 is added to the LayerNorms' weights; a squared ReLU without a gate, half of each head rotated.
    "nemotron": (NemotronForCausalLM, lambda: NemotronConfig(
        **{**BASE, "hidden_act": "relu2"}, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, norm_eps=1e-5, max_position_embeddings=512,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5})),
    # LayerNorms with biases and gated MLPs, a quarter of each head rotated.
    "stablelm": (StableLmForCausalLM, lambda: StableLmConfig(
        **BASE, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, layer_norm_eps=1e-5,
        max_position_embeddings=512, use_qkv_bias=True, use_parallel_residual=False,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25})),
    # A text model beside a (tiny) vision tower.
    "mistral3": (Mistral3ForConditionalGeneration, lambda: Mistral3Config(
        text_config=MistralConfig(
            **BASE, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            rms_norm_eps=1e-5, max_position_embeddings=512, sliding_window=None,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
        vision_config=PixtralVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            image_size=16, patch_size=8),
        tie_word_embeddings=False, **IDS)),
    # The same with the text model of Ministral 3, whose q grow from the original length on.
    "ministral3": (Mistral3ForConditionalGeneration, lambda: Mistral3Config(
        text_config=Ministral3Config(
            **BASE, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            rms_norm_eps=1e-5, max_position_embeddings=1024, tie_word_embeddings=False,
            rope_parameters={"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
                             "original_max_position_embeddings": 64, "beta_fast": 32.0,
                             "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                             "llama_4_scaling_beta": 0.3}),
        vision_config=PixtralVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            image_size=16, patch_size=8),
        tie_word_embeddings=False, **IDS)),
    # Granite's factors; gate and up in one tensor under names of their own.
    "granite-4": (GraniteMoeHybridForCausalLM, lambda: GraniteMoeHybridConfig(
        **{**BASE, "intermediate_size": 8}, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=512,
        shared_intermediate_size=128, num_local_experts=0, num_experts_per_tok=0,
        layer_types=["attention"] * 3, position_embedding_type="rope", mamba_n_heads=8,
        mamba_d_head=16, embedding_multiplier=0.6, attention_multiplier=0.11,
        residual_multiplier=0.7, logits_scaling=1.3, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    # Mamba 2 in two of three layers, no positions in the other; the dialect of published files.
    "granite-4-h": (GraniteMoeHybridForCausalLM, lambda: GraniteMoeHybridConfig(
        **{**BASE, "intermediate_size": 8}, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=512,
        shared_intermediate_size=128, num_local_experts=0, num_experts_per_tok=0,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        position_embedding_type="nope", mamba_n_heads=8, mamba_d_head=16, mamba_d_state=24,
        mamba_n_groups=1, embedding_multiplier=0.6, attention_multiplier=0.11, residual_multiplier=0.7,
        logits_scaling=1.3, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    # A text model beside a vision tower; its keys are beside the others in published files.
    "qwen2_5-vl": (Qwen2_5_VLForConditionalGeneration, lambda: Qwen2_5_VLConfig(
        text_config=dict(
            **BASE, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            rms_norm_eps=1e-6, max_position_embeddings=512, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0,
                             "mrope_section": [2, 3, 3]}),
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64,
                           fullatt_block_indexes=[0], patch_size=4),
        tie_word_embeddings=False, image_token_id=380, video_token_id=381, vision_start_token_id=382,
        vision_end_token_id=383, **IDS)),
    "qwen3-vl": (Qwen3VLForConditionalGeneration, lambda: Qwen3VLConfig(
        text_config=dict(
            **BASE, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            rms_norm_eps=1e-6, max_position_embeddings=512, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 5000000.0,
                             "mrope_section": [6, 5, 5], "mrope_interleaved": True}),
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64,
                           deepstack_visual_indexes=[0], patch_size=4, num_position_embeddings=16),
        tie_word_embeddings=True, image_token_id=380, video_token_id=381, vision_start_token_id=382,
        vision_end_token_id=383, **IDS)),
    # As glm4, with biases of q, k and v although its key says otherwise.
    "glm4v": (Glm4vForConditionalGeneration, lambda: Glm4vConfig(
        text_config=dict(
            **BASE, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
            max_position_embeddings=512, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                             "mrope_section": [1, 1, 2]}),
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64,
                           patch_size=4, image_size=16),
        tie_word_embeddings=False, image_token_id=380, video_token_id=381, image_start_token_id=376,
        image_end_token_id=377, video_start_token_id=378, video_end_token_id=379, **IDS)),
    # Linear attention in three of four layers; gates and a partly rotated head in the other.
    "qwen3_5": (Qwen3_5ForConditionalGeneration, lambda: Qwen3_5Config(
        text_config=dict(
            **BASE, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            rms_norm_eps=1e-6, max_position_embeddings=512, tie_word_embeddings=True,
            linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=16,
            linear_value_head_dim=32, attn_output_gate=True,
            rope_parameters={"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.25,
                             "mrope_section": [2, 1, 1], "mrope_interleaved": True}),
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64,
                           patch_size=4, num_position_embeddings=16),
        tie_word_embeddings=True, image_token_id=380, video_token_id=381, vision_start_token_id=382,
        vision_end_token_id=383, **IDS)),
}
LAYER_NORMS = ("cohere", "cohere2", "starcoder2", "nemotron", "stablelm")
PROMPTS = [
    ("one", "A"),
    ("short", "Hello, world!"),
    ("mid", "The quick brown fox jumps over the lazy dog. 0123456789"),
    ("long", "One morning the bear and the owl went to the river to look for a lost key. " * 3),
    ("unicode", "\u00e9\u4f60\U0001f98a"),
    ("chat", [{"role": "user", "content": "Hi!"}]),
]


def initialised(name, seed):
    torch.manual_seed(seed)
    kind, config = VARIANTS[name]
    model = kind(config())
    with torch.no_grad():
        for parameter, p in model.named_parameters():
            if parameter.endswith("norm.weight"):
                is_offset = name in ("nemotron", "qwen3_5") and "linear_attn" not in parameter
                p.copy_((0 if is_offset else 1) + 0.04 * torch.randn_like(p))
            elif golden.initialise_delta(parameter, p):
                pass
            elif parameter.endswith("bias"):
                p.copy_(0.1 * torch.randn_like(p))
            elif "embed" in parameter:
                p.copy_((0.3 if model.config.get_text_config().tie_word_embeddings else 1) * torch.randn_like(p))
                # A mean other than 0, which LayerNorms take away.
                if name in LAYER_NORMS:
                    p.add_(0.5)
            elif "lm_head" in parameter:
                p.copy_(0.35 * torch.randn_like(p))
            else:
                # A norm follows linear attention, which makes much of the rounding of what is small.
                is_normed = parameter.endswith(("linear_attn.out_proj.weight", "mamba.out_proj.weight"))
                scale = 0.2 if is_normed else 1.1
                p.copy_(scale * torch.randn_like(p) / p.shape[-1] ** 0.5)
            # The frequencies, which are no parameters, are to stay what they are.
            p.copy_(p.to(torch.bfloat16))
    return model


def keep(model, long):
    """One set of divisors for all sequences."""
    rotary = model.get_decoder().rotary_emb
    config = model.config.get_text_config()
    # Without positions there is none.
    if rotary is not None and rotary.rope_type == "longrope":
        length = config.max_position_embeddings if long else None
        made, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=length)
        rotary.register_buffer("inv_freq", made, persistent=False)
        rotary.original_inv_freq, rotary.attention_scaling = made, scaling
        # No longer by length.
        rotary.rope_type = "default"
    return model.eval()


def robust(model, tokenizer):
    model = keep(model, True)

    def run(prompt):
        new, _, gaps, _ = golden.greedy(model, golden.prompt_ids(tokenizer, prompt)[1])
        return new, min(gaps)

    return golden.quality(PROMPTS, run)


def goldens(folder, kind, long, file):
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def load(dtype):
        return keep(kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager"), long)

    model, rounded = load(torch.float32), load(torch.bfloat16)
    cases, errors = [], []
    for name, prompt in PROMPTS:
        entry, logprobs = golden.case(tokenizer, name, prompt, model)
        entry["bf16_compute_agree_prefix"] = golden.agree_prefix(entry, rounded)
        cases.append(entry)
        ids = entry["prompt_ids"]
        others = torch.log_softmax(golden.logits_of(rounded, ids), -1)
        errors += [abs(float(logprobs[i, t] - others[i, t])) for i, t in enumerate(ids[1:])]
    golden.write(folder / file, model, cases)
    print("bf16 error", round(max(errors), 3), round(sum(errors) / len(errors), 4), flush=True)


def rename_for_transformers_4(path, version):
    """Key names as in most published checkpoints."""
    config = json.loads(path.read_text())
    for part in [config] + [config[key] for key in ("text_config",) if key in config]:
        parameters = part.pop("rope_parameters", None)
        if parameters is not None:
            part["rope_theta"] = parameters.pop("rope_theta")
            if "partial_rotary_factor" in parameters:
                part["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
            parameters.pop("original_max_position_embeddings", None)
            kind = parameters.pop("rope_type")
            part["rope_scaling"] = {"type": kind, **parameters} if kind != "default" or parameters else None
        if "dtype" in part:
            part["torch_dtype"] = part.pop("dtype")
    config["transformers_version"] = version
    path.write_text(json.dumps(config, indent=2, sort_keys=True))


def name_as_published(path):
    """Kinds of layers, and a number that JSON does not have, as in published checkpoints of Granite 4."""
    config = json.loads(path.read_text())
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    config["layer_types"] = [names[kind] for kind in config["layer_types"]]
    config["time_step_limit"] = [0.0, float("inf")]
    path.write_text(json.dumps(config, indent=2, sort_keys=True))


def flatten(path):
    """The text model's keys beside the others, as in published checkpoints of Qwen2-VL and 2.5-VL."""
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    text["rope_scaling"]["type"] = "mrope"
    text.pop("model_type")
    path.write_text(json.dumps({**text, **config}, indent=2, sort_keys=True))


def ropes():
    """Frequencies and factors of many configurations, by transformers."""
    base = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=384,
                intermediate_size=128, rms_norm_eps=1e-5)
    yarn = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
            "original_max_position_embeddings": 32768}
    cases = [
        (128, 32768, 32768, yarn),
        (128, 40960, 131072, {**yarn, "attention_factor": 1.25, "beta_fast": 64, "beta_slow": 2}),
        (64, 163840, 163840, {**yarn, "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0,
                              "mscale_all_dim": 0.5, "original_max_position_embeddings": 4096}),
        (64, 131072, 131072, {**yarn, "rope_theta": 150000.0, "factor": 32.0, "truncate": False,
                              "original_max_position_embeddings": 4096}),
        (16, 128, 512, {**yarn, "rope_theta": 10000.0, "original_max_position_embeddings": 128}),
        (64, 8192, 8192, {**yarn, "factor": 1.0, "original_max_position_embeddings": 8192}),
        (64, 8192, 8192, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}),
        (64, 8192, 8192, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}),
        (128, 131072, 131072, {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
                               "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                               "original_max_position_embeddings": 8192}),
        (16, 1024, 256, longrope(8, 10000.0, original_max_position_embeddings=256)),
        (16, 1024, 257, longrope(8, 10000.0, original_max_position_embeddings=256)),
        (16, 1024, 1024, longrope(8, 10000.0, original_max_position_embeddings=256,
                                  attention_factor=1.5)),
        (16, 1024, 1024, longrope(8, 10000.0, original_max_position_embeddings=256, factor=16.0)),
        (16, 256, 256, longrope(8, 10000.0, original_max_position_embeddings=256)),
    ]
    out = []
    for head_dim, most, served, parameters in cases:
        config = LlamaConfig(**base, head_dim=head_dim, max_position_embeddings=most,
                             rope_parameters=dict(parameters))
        made, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None, seq_len=served)
        out.append({
            "head_dim": head_dim, "max_position_embeddings": most, "served": served,
            "rope_parameters": parameters, "inverse_frequencies": made.tolist(),
            "attention_factor": float(factor),
        })
    return out


def main():
    out, only = Path(sys.argv[1]), sys.argv[3:]
    lines = ",\n".join(json.dumps(case) for case in ropes())
    Path(sys.argv[2]).write_text("[\n" + lines + "\n]\n")
    tokenizer = AutoTokenizer.from_pretrained(HERE / "qwen3")
    for name, (kind, _) in VARIANTS.items():
        if only and name not in only:
            continue
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        seeds = range(int(os.environ.get("SEEDS", "12")))
        best, seed = max((robust(initialised(name, seed), tokenizer), seed) for seed in seeds)
        model = initialised(name, seed).to(torch.bfloat16)
        model.generation_config.update(eos_token_id=[2, 6], bos_token_id=1, pad_token_id=0)
        model.save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(HERE / "qwen3" / file, folder / file)
        print(name, "seed", seed, "quality", round(best, 5), flush=True)
        goldens(folder, kind, True, "golden.json")
        if name == "phi3":
            goldens(folder, kind, False, "golden-short.json")
        if name in ("phi4-mini", "mistral3", "granite", "glm4", "ernie4_5", "cohere", "starcoder2", "stablelm",
                    "qwen2_5-vl", "qwen3-vl", "granite-4-h"):
            rename_for_transformers_4(folder / "config.json", "4.51.0")
        if name == "granite-4-h":
            name_as_published(folder / "config.json")
        if name == "qwen2_5-vl":
            flatten(folder / "config.json")


main()

#!/usr/bin/env python3
"""Makes the quantised variants from others, and their golden.json.

Weights are quantised here by the formats' definitions, with none of the libraries that read or write
such checkpoints. What the written numbers stand for (number x scale; of integers, the bf16 of that) is
put into transformers' model of the variant it was made from, whose float32 results are the golden values.
Needs torch, transformers 5 and safetensors.
usage: make_quantised.py OUT_DIR
"""
import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
torch.set_num_threads(1)
FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def group(kind, strategy):
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False,
               "group_size": None, "block_structure": None, "actorder": None, "observer": "minmax"}
    inputs = dict(weights, strategy="token", dynamic=True)
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs,
                        "output_activations": None}}


def compressed(kind, strategy, form):
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
            "config_groups": group(kind, strategy), "ignore": ["lm_head", "re:.*mlp.gate$"], "kv_cache_scheme": None,
            "global_compression_ratio": None}


def per_tensor(weight):
    scale = (weight.abs().max() / FP8_MAX).float()
    return {"weight": (weight / scale).to(FP8), "weight_scale": scale,
            "input_scale": torch.tensor(0.02)}, scale


def per_channel(weight):
    scale = (weight.abs().amax(1, keepdim=True) / FP8_MAX).to(torch.bfloat16)
    return {"weight": (weight / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(FP8),
            "weight_scale": scale}, scale.float()


def integers(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().clamp(-128, 127).to(torch.int8),
            "weight_scale": scale}, scale


# No multiples of what a rank takes, so that blocks begin and end anywhere in it.
BLOCK = (48, 40)


def blocks(weight, block=BLOCK):
    rows, cols = weight.shape
    scale = torch.zeros(-(-rows // block[0]), -(-cols // block[1]))
    spread = torch.zeros_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scale[i, j] = weight[at].abs().max() / FP8_MAX
            spread[at] = scale[i, j]
    return {"weight": (weight / spread).to(FP8), "weight_scale_inv": scale}, spread


VARIANTS = {
    "qwen2-fp8": ("qwen2", per_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "qwen3-fp8-blocks": ("qwen3", blocks, {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
        "weight_block_size": list(BLOCK)}),
    "qwen3-moe-fp8": ("qwen3-moe", per_channel, compressed("float", "channel", "float-quantized")),
    "llama-int8": ("llama-mha-bias", integers, compressed("int", "channel", "int-quantized")),
}


def log_probabilities(model, ids):
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0], -1)


def goldens(source, model, tokenizer, folder, weights="bf16 of number x scale"):
    cases = []
    for known in json.loads((source / "golden.json").read_text())["prompts"]:
        ids = known["prompt_ids"]
        logprobs = log_probabilities(model, ids)
        tokens, new_logprobs, gaps = list(ids), [], []
        for _ in range(32):
            values, best = log_probabilities(model, tokens)[-1].topk(2)
            tokens.append(int(best[0]))
            new_logprobs.append(round(float(values[0]), 5))
            gaps.append(round(float(values[0] - values[1]), 5))
        new = tokens[len(ids):]
        case = {key: known[key] for key in ("name", "kind", "text", "messages", "rendered",
                                            "add_special_tokens", "prompt_ids") if key in known}
        ends = (2, 6)
        case.update(
            prompt_logprobs=[None] + [round(float(logprobs[i, t]), 5) for i, t in enumerate(ids[1:])],
            greedy_ids=new,
            greedy_logprobs=new_logprobs,
            greedy_text=tokenizer.decode(new, skip_special_tokens=False),
            greedy_stop_index=next((i for i, t in enumerate(new) if t in ends), None),
            greedy_top1_top2_gap=gaps,
        )
        cases.append(case)
    meta = {"transformers": transformers.__version__, "torch": torch.__version__,
            "compute": f"float32, eager attention, weights: {weights}, as float32",
            "made_from": source.name}
    text = json.dumps({"meta": meta, "prompts": cases}, indent=1, ensure_ascii=True)
    (folder / "golden.json").write_text(text)
    print(folder.name, "min gap", min(min(c["greedy_top1_top2_gap"]) for c in cases), flush=True)


def write(source, folder, stored, meant, method, *note):
    """Writes a variant's folder: its tensors, and what transformers makes of those that they stand for."""
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / file, folder / file)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = method
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    meant_dir = folder / "meant"
    meant_dir.mkdir(exist_ok=True)
    save_file(meant, meant_dir / "model.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, meant_dir / file)
    model = AutoModelForCausalLM.from_pretrained(
        meant_dir, dtype=torch.float32, attn_implementation="eager").eval()
    goldens(source, model, AutoTokenizer.from_pretrained(meant_dir), folder, *note)
    shutil.rmtree(meant_dir)


def main():
    for name, (base, quantise, method) in VARIANTS.items():
        source, folder = HERE / base, Path(sys.argv[1]) / name
        folder.mkdir(parents=True, exist_ok=True)
        stored, meant = {}, {}
        for key, tensor in load_file(source / "model.safetensors").items():
            if key.split(".")[-1] == "weight" and key.split(".")[-2] in LAYERS:
                tensors, scale = quantise(tensor.float())
                stem = key.removesuffix("weight")
                stored.update({stem + part: value.contiguous() for part, value in tensors.items()})
                meant[key] = tensors["weight"].float() * scale
                if tensors["weight"].dtype != FP8:
                    meant[key] = meant[key].to(torch.bfloat16)
            else:
                stored[key] = meant[key] = tensor
        write(source, folder, stored, meant, method, *(["number x scale"] if "fp8" in name else []))


if __name__ == "__main__":
    main()

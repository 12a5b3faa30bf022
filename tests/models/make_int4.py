#!/usr/bin/env python3
"""Makes the variants whose weights are integers in words of 32 bits, and their golden.json.

Weights are quantised and packed here by the formats' definitions, with none of the libraries that read
or write such checkpoints. What the written numbers stand for, (integer - zero) x scale in float32, is put
into transformers' model of the variant it was made from, whose float32 results are the golden values;
where Tutti has bf16 of such a number (8 bits, groups in the order of activations), so has the model.
Needs numpy, torch, transformers 5 and safetensors.
usage: make_int4.py OUT_DIR
"""
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from make_quantised import HERE, LAYERS, write


def quantise(weight, bits, group, symmetric, scale_type, order=None):
    """Integers [out, in] from 0, zeros and scales [out, groups], each input's group."""
    rows, cols = weight.shape
    group = group if group > 0 else cols
    groups = -(-cols // group)
    of = np.arange(cols) // group
    if order is not None:
        listed = np.empty(cols, dtype=np.int64)
        listed[order] = of
        of = listed
    most = 2 ** bits - 1
    zeros = np.zeros((rows, groups), dtype=np.int64)
    scales = np.zeros((rows, groups), dtype=np.float32)
    for g in range(groups):
        part = weight[:, of == g]
        if symmetric:
            zeros[:, g] = 2 ** (bits - 1)
            scale = np.abs(part).max(1) / (2 ** (bits - 1) - 1)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / most
        # Rounded as it is written, before anything is divided by it.
        scales[:, g] = torch.from_numpy(np.maximum(scale, 1e-8)).to(scale_type).float().numpy()
        if not symmetric:
            zeros[:, g] = np.clip(np.round(-low / scales[:, g]), 0, most)
    integers = np.round(weight / scales[:, of]).astype(np.int64) + zeros[:, of]
    return np.clip(integers, 0, most), zeros, scales, of


def words(numbers, bits, places=None):
    """The last axis in words, the first number lowest, or at its place; filled up with zeros."""
    each = 32 // bits
    short = -numbers.shape[-1] % each
    numbers = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, short)])
    numbers = numbers.reshape(*numbers.shape[:-1], -1, each).astype(np.uint64)
    packed = np.zeros(numbers.shape[:-1], dtype=np.uint64)
    for i in range(each):
        place = i if places is None else places[i]
        packed |= (numbers[..., i] & np.uint64(2 ** bits - 1)) << np.uint64(place * bits)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32).copy())


def gptq(bits, group, symmetric, less, ordered):
    def make(weight, random):
        order = random.permutation(weight.shape[1]) if ordered else None
        integers, zeros, scales, of = quantise(weight, bits, group, symmetric, torch.float16, order)
        return {
            "qweight": words(integers, bits).T.contiguous(),
            "qzeros": words((zeros - less).T % 2 ** bits, bits),
            "scales": torch.from_numpy(scales.T.copy()).to(torch.float16),
            "g_idx": torch.from_numpy(of.astype(np.int32)),
        }, (integers - zeros[:, of]).astype(np.float32) * scales[:, of]
    form = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": ordered,
            "checkpoint_format": "gptq" if less else "gptq_v2", "lm_head": False, "damp_percent": 0.01,
            "true_sequential": True}
    return make, form


# The output that is at each place of a word.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(group, others):
    places = [AWQ_ORDER.index(i) for i in range(8)]

    def make(weight, random):
        integers, zeros, scales, of = quantise(weight, 4, group, False, torch.float16)
        return {
            "qweight": words(integers.T, 4, places),
            "qzeros": words(zeros.T, 4, places),
            "scales": torch.from_numpy(scales.T.copy()).to(torch.float16),
        }, (integers - zeros[:, of]).astype(np.float32) * scales[:, of]
    form = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True,
            "modules_to_not_convert": others}
    return make, form


def compressed(group, symmetric):
    def make(weight, random):
        integers, zeros, scales, of = quantise(weight, 4, group, symmetric, torch.bfloat16)
        tensors = {
            "weight_packed": words(integers, 4),
            "weight_scale": torch.from_numpy(scales).to(torch.bfloat16),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, 4).T.contiguous()
        return tensors, (integers - zeros[:, of]).astype(np.float32) * scales[:, of]
    weights = {"num_bits": 4, "type": "int", "strategy": "group" if group > 0 else "channel",
               "group_size": group if group > 0 else None, "symmetric": symmetric, "dynamic": False,
               "actorder": None, "block_structure": None, "observer": "minmax"}
    form = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None,
                                          "output_activations": None}},
            "ignore": ["lm_head", "re:.*mlp.gate$"], "kv_cache_scheme": None, "global_compression_ratio": None}
    return make, form


VARIANTS = {
    "llama-gptq": ("llama-gqa", gptq(4, 32, True, 1, False), (), False),
    "qwen2-gptq-order": ("qwen2", gptq(4, 16, False, 1, True), (), True),
    "mistral-gptq-8": ("mistral-swa", gptq(8, -1, False, 0, False), (), True),
    "qwen3-awq": ("qwen3", awq(16, ["o_proj"]), ("o_proj",), False),
    "llama-w4a16": ("llama-mha-bias", compressed(32, True), (), False),
    "qwen3-moe-w4a16": ("qwen3-moe", compressed(-1, False), (), False),
}


def main():
    random = np.random.default_rng(1)
    for name, (base, (make, method), others, rounds) in VARIANTS.items():
        source, folder = HERE / base, Path(sys.argv[1]) / name
        folder.mkdir(parents=True, exist_ok=True)
        stored, meant = {}, {}
        for key, tensor in sorted(load_file(source / "model.safetensors").items()):
            *_, layer, part = key.split(".")
            if part == "weight" and layer in LAYERS and layer not in others:
                tensors, numbers = make(tensor.float().numpy(), random)
                stem = key.removesuffix("weight")
                stored.update({stem + part: value for part, value in tensors.items()})
                numbers = torch.from_numpy(numbers)
                meant[key] = numbers.to(torch.bfloat16).float() if rounds else numbers
            else:
                stored[key] = tensor
                meant[key] = tensor.float()
        write(source, folder, stored, meant, method,
              "(integer - zero) x scale" + (", rounded to bf16" if rounds else ""))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""A model's layers in 4 bits or in FP8, rounded to nearest: for measuring, not for use.

    tests/bench/quantise.py MODEL OUT gptq
    tests/bench/quantise.py MODEL OUT awq
    tests/bench/quantise.py MODEL OUT fp8
    tests/bench/quantise.py MODEL OUT fp8-blocks

GPTQ's files without zeros, AWQ's with zeros, groups of 128 inputs, as tests/models/make_int4.py defines
them; what real GPTQ and AWQ do to choose better integers does not matter for speed. FP8 has a scale per channel
(compressed-tensors) or per block of 128 x 128 (as DeepSeek's and Qwen's files). Weights in one file;
needs numpy, torch and safetensors.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
from make_int4 import awq, gptq  # noqa: E402
from make_quantised import LAYERS, blocks, compressed, per_channel  # noqa: E402

GROUP = 128
BLOCK = (128, 128)
FORMATS = {
    "gptq": gptq(4, GROUP, True, 1, False),
    "awq": awq(GROUP, []),
    "fp8": (lambda weight, _: per_channel(torch.from_numpy(weight)),
            compressed("float", "channel", "float-quantized")),
    "fp8-blocks": (lambda weight, _: blocks(torch.from_numpy(weight), BLOCK),
                   {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}),
}


def main():
    """Makes the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="model folder with one file of weights")
    parser.add_argument("out", type=Path, help="folder that is made")
    parser.add_argument("format", choices=FORMATS)
    args = parser.parse_args()
    make, form = FORMATS[args.format]
    random = np.random.default_rng(0)
    stored = {}
    for name, tensor in load_file(args.model / "model.safetensors").items():
        *_, layer, part = name.split(".")
        if part == "weight" and layer in LAYERS:
            tensors, _ = make(tensor.float().numpy(), random)
            stem = name.removesuffix("weight")
            stored.update({stem + key: value.contiguous() for key, value in tensors.items()})
        else:
            stored[name] = tensor
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(args.model / name, args.out)
    config = json.loads((args.model / "config.json").read_text())
    (args.out / "config.json").write_text(json.dumps(config | {"quantization_config": form}, indent=1) + "\n")
    save_file(stored, args.out / "model.safetensors")


if __name__ == "__main__":
    main()

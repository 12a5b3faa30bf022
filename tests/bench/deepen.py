#!/usr/bin/env python3
"""Models that generate what another one does at a different cost, to measure speculative decoding.

    tests/bench/deepen.py models/demo DEEP --layers 48
    tests/bench/deepen.py models/demo COARSE --mantissa-bits 3

The first has that many layers: each of the model's own layers is followed by the same number of layers
whose output projections are zero, so that they add nothing. Its text is the model's, for many times the
work. The second is the model with its layers' weights rounded to that many bits behind the leading one: it is
as fast as the model, and agrees with it in part. Together they stand for a large model and a draft
model that is right as often as the rounding allows. They say nothing about a trained pair. Weights are
written in bf16 to one file. Needs only the standard library.
"""

import argparse
import array
import json
import shutil
import struct
from pathlib import Path

WEIGHTS = "model.safetensors"
ZERO = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def parse_args():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="model folder with one file of weights")
    parser.add_argument("out", type=Path, help="folder that is made")
    parser.add_argument("--layers", type=int, help="layers that the new model has")
    parser.add_argument("--mantissa-bits", type=int, default=7, help="bits that are kept, of 7")
    return parser.parse_args()


def read(file):
    """Tensors of a safetensors file: name to (type, shape, bytes)."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + length :]
    return {
        name: (it["dtype"], it["shape"], bytes(body[slice(*it["data_offsets"])]))
        for name, it in header.items()
    }


def write(file, tensors):
    """Writes tensors as they are read."""
    header, at = {}, 0
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            out.write(data)


def rounded(tensor, bits):
    """A tensor in bf16 with so many bits of its mantissas."""
    kind, shape, data = tensor
    if kind != "BF16":
        raise SystemExit(f"weights are {kind}, only BF16 is rounded")
    step = 1 << (7 - bits)
    words = array.array("H", data)
    # To the nearest; what overflows goes into the exponent, as it should.
    words = array.array("H", ((word + step // 2) & ~(step - 1) & 0xFFFF for word in words))
    return kind, shape, words.tobytes()


def main():
    """Makes the folder."""
    args = parse_args()
    shutil.copytree(args.model, args.out)
    config = json.loads((args.out / "config.json").read_text())
    tensors = read(args.out / WEIGHTS)
    own = config["num_hidden_layers"]
    layers = args.layers or own
    if layers % own:
        raise SystemExit(f"--layers must be a multiple of the model's {own}")
    made = {name: it for name, it in tensors.items() if not name.startswith("model.layers.")}
    for layer in range(layers):
        source, copy = divmod(layer, layers // own)
        prefix = f"model.layers.{source}."
        for name, tensor in tensors.items():
            if not name.startswith(prefix):
                continue
            rest = name.removeprefix(prefix)
            if args.mantissa_bits < 7:
                tensor = rounded(tensor, args.mantissa_bits)
            if copy > 0 and rest in ZERO:
                tensor = (*tensor[:2], bytes(len(tensor[2])))
            made[f"model.layers.{layer}.{rest}"] = tensor
    config["num_hidden_layers"] = layers
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write(args.out / WEIGHTS, made)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""A Llama with random weights: the shape that docs/benchmarks.md measures, or another.

    tests/bench/make_model.py OUT
    tests/bench/make_model.py OUT --hidden 2048 --layers 16 --heads 32 --kv-heads 8 --intermediate 8192

Weights are bf16, normal with a deviation of 0.02, and the same for the same shape. Tokenizer and chat
template are the demo model's, with words for the rest of the vocabulary: every token is text, so that a
stream has an event for each. Only the standard library is needed; a minute for a billion weights.
"""

import argparse
import array
import json
import random
import shutil
import statistics
import struct
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
DEVIATION = 0.02
# Weights are written in pieces of so many.
PIECE = 1 << 22


def parse_args():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder that is made")
    for name, value in [("hidden", 768), ("layers", 12), ("heads", 12), ("kv-heads", 4)]:
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in [("intermediate", 2048), ("vocab", 32000), ("positions", 2048)]:
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def bf16(value):
    """The bits of the nearest bf16."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def tensors(args):
    """Name and shape of every tensor."""
    head = args.hidden // args.heads
    rows = {"q": args.heads * head, "k": args.kv_heads * head, "v": args.kv_heads * head}
    yield "model.embed_tokens.weight", (args.vocab, args.hidden)
    for layer in range(args.layers):
        prefix = f"model.layers.{layer}"
        for name, count in rows.items():
            yield f"{prefix}.self_attn.{name}_proj.weight", (count, args.hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (args.hidden, rows["q"])
        for name in ["gate", "up"]:
            yield f"{prefix}.mlp.{name}_proj.weight", (args.intermediate, args.hidden)
        yield f"{prefix}.mlp.down_proj.weight", (args.hidden, args.intermediate)
        for name in ["input_layernorm", "post_attention_layernorm"]:
            yield f"{prefix}.{name}.weight", (args.hidden,)
    yield "model.norm.weight", (args.hidden,)
    yield "lm_head.weight", (args.vocab, args.hidden)


def config(args):
    """The model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.hidden // args.heads,
        "intermediate_size": args.intermediate,
        "vocab_size": args.vocab,
        "max_position_embeddings": args.positions,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def write_weights(args, file):
    """Writes model.safetensors."""
    header, end = {}, 0
    for name, shape in tensors(args):
        start, count = end, 1
        for size in shape:
            count *= size
        end = start + 2 * count
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    # Every two random bytes are a weight: quantiles of the normal distribution.
    normal = statistics.NormalDist(0, DEVIATION)
    weight = [bf16(normal.inv_cdf((at + 0.5) / 65536)) for at in range(65536)]
    draw = random.Random(0)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(words)) + words)
        for entry in header.values():
            start, end = entry["data_offsets"]
            left = (end - start) // 2
            if len(entry["shape"]) == 1:
                out.write(struct.pack("<H", bf16(1.0)) * left)
                continue
            while left > 0:
                count = min(left, PIECE)
                drawn = memoryview(draw.randbytes(2 * count)).cast("H")
                out.write(array.array("H", map(weight.__getitem__, drawn)).tobytes())
                left -= count


def tokenizer(vocabulary):
    """The demo model's tokenizer, with a word for each token that it does not have."""
    made = json.loads((DEMO / "tokenizer.json").read_text())
    known = made["model"]["vocab"]
    first = 1 + max([*known.values(), *(token["id"] for token in made["added_tokens"])])
    # U+0120 is a space in the alphabet of byte-level BPE.
    known.update({f"\u0120w{number}": number for number in range(first, vocabulary)})
    return made


def main():
    """Makes the folder."""
    args = parse_args()
    if args.hidden % args.heads or args.heads % args.kv_heads:
        raise SystemExit("--hidden is a multiple of --heads, and --heads of --kv-heads")
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.copy(DEMO / "tokenizer_config.json", args.out)
    words = json.dumps(tokenizer(args.vocab), ensure_ascii=False)
    (args.out / "tokenizer.json").write_text(words, encoding="utf-8")
    (args.out / "config.json").write_text(json.dumps(config(args), indent=1) + "\n")
    write_weights(args, args.out / "model.safetensors")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes embeddings.json: what transformers' float32 makes of some of golden.json's prompts.

For each prompt the final norm's output at the last token (`last`), at the first (`first`) and its mean
over all tokens (`mean`), each divided by its length. Needs torch and transformers 5.
usage: make_embeddings.py MODEL_DIR ...
"""
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModel

PROMPTS_MAX = 8
torch.set_num_threads(1)


def unit(vector):
    return [round(value, 7) for value in (vector / vector.norm()).tolist()]


def main():
    for folder in map(Path, sys.argv[1:]):
        model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        model.eval()
        prompts = json.loads((folder / "golden.json").read_text())["prompts"]
        # The longest is there: it is computed in several steps.
        longest = max(prompts, key=lambda prompt: len(prompt["prompt_ids"]))
        chosen = [longest] + [prompt for prompt in prompts if prompt is not longest]
        cases = []
        for prompt in chosen[:PROMPTS_MAX]:
            with torch.no_grad():
                hidden = model(torch.tensor([prompt["prompt_ids"]])).last_hidden_state[0]
            cases.append({
                "name": prompt["name"], "prompt_ids": prompt["prompt_ids"],
                "last": unit(hidden[-1]), "first": unit(hidden[0]), "mean": unit(hidden.mean(0)),
            })
        lines = ",\n".join(json.dumps(case) for case in cases)
        (folder / "embeddings.json").write_text('{"prompts": [\n' + lines + "\n]}\n")
        print(folder.name, [len(case["prompt_ids"]) for case in cases], len(cases[0]["last"]))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Makes LoRA adapters with PEFT, and golden values of what PEFT and transformers' float32 make with them.

Each folder has adapter_config.json and adapter_model.safetensors as PEFT saves them, and golden.json as
the models have it, for some of the model's prompts. Numbers are made up, and multiples of 1/512 of few
bits, so that they are the same in every type. Needs torch, transformers 5 and peft.
usage: make_adapters.py OUT_DIR
"""
import json
import random
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
PROMPTS = 5
TOKENS = 16
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    # Ranks and scales of their own for some modules.
    "llama-gqa-all": ("llama-gqa", torch.float32, {
        "r": 8, "lora_alpha": 16, "target_modules": ALL,
        "rank_pattern": {"v_proj": 4, "layers.1.mlp.down_proj": 2},
        "alpha_pattern": {"v_proj": 16, "layers.1.mlp.down_proj": 8},
    }),
    # Few modules, a rank-stabilised scale, bf16.
    "llama-gqa-qv": ("llama-gqa", torch.bfloat16, {
        "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True,
    }),
    # Biases beside it, and a layer that it leaves alone.
    "qwen2-mlp": ("qwen2", torch.float16, {
        "r": 16, "lora_alpha": 16, "target_modules": ["gate_proj", "down_proj", "o_proj"],
        "layers_to_transform": [1], "layers_pattern": "layers",
    }),
}
torch.set_num_threads(1)


def fill(model, seed):
    numbers = random.Random(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            values = [numbers.randint(-63, 63) / 512 for _ in range(parameter.numel())]
            parameter.data = torch.tensor(values).view_as(parameter)


def logprobs_of(model, ids):
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)


def golden(model, prompt):
    ids = list(prompt["prompt_ids"])
    rows = logprobs_of(model, ids)
    prompt_logprobs = [None] + [rows[i, ids[i + 1]].item() for i in range(len(ids) - 1)]
    greedy, logprobs, gaps = [], [], []
    for _ in range(TOKENS):
        best = logprobs_of(model, ids)[-1].topk(2)
        greedy.append(best.indices[0].item())
        logprobs.append(best.values[0].item())
        gaps.append((best.values[0] - best.values[1]).item())
        ids.append(greedy[-1])
    return {
        "name": prompt["name"], "prompt_ids": prompt["prompt_ids"],
        "prompt_logprobs": prompt_logprobs, "greedy_ids": greedy, "greedy_logprobs": logprobs,
        "greedy_text": "", "greedy_stop_index": None, "greedy_top1_top2_gap": gaps,
    }


def main():
    out = Path(sys.argv[1])
    for seed, (name, (base, dtype, options)) in enumerate(ADAPTERS.items()):
        model = AutoModelForCausalLM.from_pretrained(
            HERE / base, dtype=torch.float32, attn_implementation="eager")
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).eval()
        fill(model, seed)
        prompts = json.loads((HERE / base / "golden.json").read_text())["prompts"]
        cases = [golden(model, prompt) for prompt in prompts[:PROMPTS]]
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        model.save_pretrained(out / name)
        (out / name / "README.md").unlink(missing_ok=True)
        config = out / name / "adapter_config.json"
        kept = json.loads(config.read_text()) | {"base_model_name_or_path": base}
        config.write_text(json.dumps(kept, indent=1) + "\n")
        lines = ",\n".join(json.dumps(case) for case in cases)
        (out / name / "golden.json").write_text('{"prompts": [\n' + lines + "\n]}\n")
        print(name, sum(len(case["prompt_ids"]) for case in cases))


if __name__ == "__main__":
    main()

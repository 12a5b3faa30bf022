"""What the scripts that make variants have in common: greedy texts of a model, how far rounding is from
changing them, and golden.json.
"""
import json

import torch
import transformers

STEPS = 32


def initialise_delta(name, p):
    """Parameters of linear attention that are no projections; whether this is one. What is kept of a state
    from token to token is between almost nothing and almost all."""
    if name.endswith("A_log"):
        p.copy_((0.05 + 1.5 * torch.rand_like(p)).log())
    elif name.endswith("dt_bias"):
        p.copy_(0.5 * torch.randn_like(p))
    elif name.endswith("conv1d.weight"):
        p.copy_(1.5 * torch.randn_like(p))
    elif name.endswith(("conv1d.bias", "mamba.D")):
        p.copy_(0.7 * torch.randn_like(p))
    else:
        return False
    return True


def logits_of(model, ids):
    """Logits of every position."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def greedy(model, ids, look=logits_of):
    """New tokens, their log-probabilities, gaps to the second best, the first step's five best."""
    ids = list(ids)
    new, logprobs, gaps, top5 = [], [], [], None
    for _ in range(STEPS):
        values, tokens = torch.log_softmax(look(model, ids)[-1], -1).topk(5)
        if top5 is None:
            top5 = [(int(t), round(float(v), 5)) for v, t in zip(values, tokens)]
        new.append(int(tokens[0]))
        logprobs.append(round(float(values[0]), 5))
        gaps.append(round(float(values[0] - values[1]), 5))
        ids.append(new[-1])
    return new, logprobs, gaps, top5


def prompt_ids(tokenizer, prompt):
    """The rendered text of a chat, and tokens."""
    if isinstance(prompt, str):
        return None, tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return text, tokenizer(text, add_special_tokens=False)["input_ids"]


def quality(prompts, run):
    """How far rounding is from changing a choice; nothing for a model that only repeats itself. `run`
    gives a prompt's new tokens and its smallest gap."""
    worst, varied = 9.0, 0
    for _, prompt in prompts:
        new, gap = run(prompt)
        worst = min(worst, gap)
        varied += len(set(new))
        if worst < 0.004:
            return worst
    return worst if varied / len(prompts) > 10 else worst * 1e-3


def case(tokenizer, name, prompt, model, look=logits_of):
    """One prompt's entry, and the log-probabilities of all its positions."""
    rendered, ids = prompt_ids(tokenizer, prompt)
    if rendered is None:
        entry = {"name": name, "kind": "text", "text": prompt, "add_special_tokens": True}
    else:
        entry = {"name": name, "kind": "chat", "messages": prompt, "rendered": rendered,
                 "add_special_tokens": False}
    end = model.generation_config.eos_token_id
    logprobs = torch.log_softmax(logits_of(model, ids), -1)
    new, greedy_logprobs, gaps, top5 = greedy(model, ids, look)
    first = [{"id": t, "token": tokenizer.convert_ids_to_tokens(t), "logprob": v} for t, v in top5]
    entry.update(
        prompt_ids=ids,
        prompt_logprobs=[None] + [round(float(logprobs[i, t]), 5) for i, t in enumerate(ids[1:])],
        first_step_top5=first,
        greedy_ids=new,
        greedy_logprobs=greedy_logprobs,
        greedy_text=tokenizer.decode(new, skip_special_tokens=False),
        greedy_stop_index=next((i for i, t in enumerate(new) if t in end), None),
        greedy_top1_top2_gap=gaps,
        min_gap=min(gaps),
    )
    return entry, logprobs


def agree_prefix(entry, rounded):
    """How many tokens are the same where activations are bf16, too."""
    other, new = greedy(rounded, entry["prompt_ids"])[0], entry["greedy_ids"]
    return next((i for i in range(STEPS) if other[i] != new[i]), STEPS)


def cache_agrees(entry, model, **more):
    """Whether transformers' own loop, which has a cache, gives the same tokens."""
    ids = entry["prompt_ids"]
    cached = model.generate(
        input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=STEPS, do_sample=False, temperature=None, top_p=None, eos_token_id=None,
        pad_token_id=0, **more,
    )[0, len(ids):].tolist()
    return cached == entry["greedy_ids"]


def write(file, model, cases, compute="", **more):
    """golden.json."""
    meta = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "compute": "float32, eager attention, weights as stored (bf16) widened to float32" + compute,
        "decoding": "greedy, 32 new tokens, end tokens NOT stopping; greedy_stop_index is the first "
                    "end token in greedy_ids (null: none)",
        "eos_token_ids": model.generation_config.eos_token_id,
        "prompt_logprobs": "entry i is log p(prompt_ids[i] | prompt_ids[:i]); entry 0 is null",
        "min_gap": "smallest top1-top2 log-probability gap over the 32 steps",
        **more,
    }
    text = json.dumps({"meta": meta, "prompts": cases}, indent=1, ensure_ascii=True)
    file.write_text(text)
    print(file.parent.name, file.name, "min gap", min(c["min_gap"] for c in cases), "bf16 prefix",
          [c["bf16_compute_agree_prefix"] for c in cases], flush=True)

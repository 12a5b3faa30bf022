"""What the scripts that make variants with experts have in common: greedy texts, and how close the
choices of experts were in them.
"""
import torch

import golden


def in_groups(module, keys):
    """What experts are sorted by, where a router chooses in groups, and the gap between the last group
    kept and the first not kept."""
    groups, kept = module.num_group, module.topk_group
    grouped = keys.view(len(keys), groups, -1)
    # With a bias, a group goes by its two best experts.
    counted = 2 if hasattr(module, "e_score_correction_bias") else 1
    scores = grouped.topk(counted, -1).values.sum(-1)
    ordered = scores.sort(-1, descending=True)
    inside = torch.zeros_like(scores).scatter_(1, ordered.indices[:, :kept], 1.0)
    masked = grouped.masked_fill(inside[:, :, None] == 0, float("-inf")).flatten(1)
    return masked, ordered.values[:, kept - 1] - ordered.values[:, kept]


def logits_and_gaps(model, ids, router):
    """Logits of every position, and each position's smallest gap of router logits over the layers.
    `router` is what the names of the modules that choose end with."""
    top = model.config.get_text_config().num_experts_per_tok
    gaps, hooks = [], []

    def look(module, inputs, outputs):
        keys = outputs[0].float()
        # MiniMax's routers are given the bias.
        bias = getattr(module, "e_score_correction_bias", inputs[1] if len(inputs) > 1 else None)
        if bias is not None:
            keys = keys.sigmoid() + bias
        spread = keys.std(-1)
        if (getattr(module, "num_group", None) or 1) > 1:
            keys, gap = in_groups(module, keys)
            gaps.append(gap / spread)
        ordered = keys.sort(-1, descending=True).values
        gaps.append((ordered[:, top - 1] - ordered[:, top]) / spread)

    for name, module in model.named_modules():
        if name.endswith(router):
            hooks.append(module.register_forward_hook(look))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(gaps).min(0).values


def looking(gaps, router):
    """Logits as greedy texts need them, which leave each step's smallest gap in `gaps`."""
    def look(model, ids):
        logits, routed = logits_and_gaps(model, ids, router)
        gaps.append(float(routed.min()))
        return logits

    return look


def quality(prompts, tokenizer, model, router):
    """How far rounding is from changing a token or a choice of experts."""
    def run(prompt):
        gaps_of_choices = []
        ids = golden.prompt_ids(tokenizer, prompt)[1]
        new, _, gaps, _ = golden.greedy(model, ids, looking(gaps_of_choices, router))
        return new, min(min(gaps), min(gaps_of_choices) / 20)

    return golden.quality(prompts, run)


def write(file, prompts, tokenizer, model, rounded, router, compute=""):
    """golden.json of a model as float32 and `rounded` to bf16."""
    cases = []
    for name, prompt in prompts:
        gaps = []
        entry, _ = golden.case(tokenizer, name, prompt, model, looking(gaps, router))
        entry["min_routing_gap"] = round(min(gaps), 5)
        entry["bf16_compute_agree_prefix"] = golden.agree_prefix(entry, rounded)
        entry["generate_with_cache_agrees"] = golden.cache_agrees(entry, model)
        cases.append(entry)
    golden.write(
        file, model, cases, compute,
        min_routing_gap="smallest gap between the router logits of the last expert chosen and the "
                        "first not chosen, over all layers and positions, in standard deviations",
    )
    print("min routing gap", min(c["min_routing_gap"] for c in cases), flush=True)

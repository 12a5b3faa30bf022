#!/usr/bin/env python3
"""Makes llama-classes (three classes) and qwen3-reranker (one, for pairs of texts) of the variants
llama-gqa and qwen3, with a random matrix of classes, and classes.json in these four folders: the numbers
that transformers' float32 makes of some of golden.json's prompts, before any activation.

In the folders of generating models they are what vLLM's `classifier_from_token` means: the logit of the
second of two tokens, less that of the first. In qwen3-reranker also the tokens of pairs of texts: as the
tokenizer joins them, one text behind the other, and rendered with score.jinja, which is there.
Needs torch and transformers 5.
usage: make_classes.py
"""
import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

HERE = Path(__file__).resolve().parent
PROMPTS_MAX = 6
# Words of the tokenizer, which all these folders share.
TOKENS = ["o", "e"]
LABELS = ["good", "bad", "neither"]
PAIRS = [
    ("What is a fox?", "A fox is a small animal with a red tail."),
    ("What is a fox?", "It rained all day."),
    ("Wer singt?", "Ein Vogel — im Café."),
]
torch.set_num_threads(1)


def numbers_of(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits.float()


def rounded(values):
    return [round(float(value), 6) for value in values]


def make(folder, base, labels, seed):
    torch.manual_seed(seed)
    names = dict(enumerate(labels))
    model = AutoModelForSequenceClassification.from_pretrained(
        HERE / base, dtype=torch.bfloat16, num_labels=len(labels), id2label=names,
        label2id={name: index for index, name in names.items()},
    )
    with torch.no_grad():
        model.score.weight.normal_(0.0, 0.25)
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy2(HERE / base / name, folder / name)


def prompts_of(base):
    prompts = json.loads((HERE / base / "golden.json").read_text())["prompts"]
    # The longest is there: it is computed in several steps.
    prompts.sort(key=lambda prompt: -len(prompt["prompt_ids"]))
    return [prompt["prompt_ids"] for prompt in prompts[:PROMPTS_MAX]]


def write(folder, **fields):
    (folder / "classes.json").write_text(json.dumps(fields, indent=1) + "\n")


def of_classes(name, base):
    folder = HERE / name
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager").eval()
    cases = [{"prompt_ids": ids, "numbers": rounded(numbers_of(model, ids)[0])} for ids in prompts_of(base)]
    pairs = []
    if (folder / "score.jinja").exists():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        template = (folder / "score.jinja").read_text()
        for query, document in PAIRS:
            turns = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            text = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False)
            forms = {
                "joined": tokenizer(query, document)["input_ids"],
                "following": tokenizer(query + document)["input_ids"],
                "templated": tokenizer(text)["input_ids"],
            }
            numbers = {form: rounded(numbers_of(model, ids)[0])[0] for form, ids in forms.items()}
            pairs.append({"query": query, "document": document, "ids": forms, "numbers": numbers})
    write(folder, prompts=cases, pairs=pairs)
    print(name, [case["numbers"] for case in cases], [pair["numbers"] for pair in pairs])


def of_tokens(base):
    model = AutoModelForCausalLM.from_pretrained(
        HERE / base, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(HERE / base)
    no, yes = tokenizer.convert_tokens_to_ids(TOKENS)
    assert tokenizer.unk_token_id not in (no, yes)
    cases = []
    for ids in prompts_of(base):
        last = numbers_of(model, ids)[0, -1]
        cases.append({"prompt_ids": ids, "numbers": rounded([last[yes] - last[no]])})
    write(HERE / base, tokens=TOKENS, prompts=cases, pairs=[])
    print(base, [case["numbers"] for case in cases])


def main():
    make(HERE / "llama-classes", "llama-gqa", LABELS, 11)
    make(HERE / "qwen3-reranker", "qwen3", ["relevant"], 12)
    of_classes("llama-classes", "llama-gqa")
    of_classes("qwen3-reranker", "qwen3")
    of_tokens("llama-gqa")
    of_tokens("qwen3")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Drives `/v1/embeddings` of a running Tutti server with OpenAI's own Python client.

Expected vectors come from models/demo/embeddings.json, which Hugging Face transformers wrote.

    TUTTI_BASE_URL=http://127.0.0.1:8000/v1 python tests/openai/test_embeddings.py

The server must serve models/demo. Exits 1 with the failed check on the first failure.
"""

import asyncio
import base64
import json
import math
import os
import struct
import sys
import urllib.request

import openai
from openai.types import CreateEmbeddingResponse

import test_openai_client as base
from test_openai_client import GOLDEN, CheckFailed, check, equal, expect_error

# The reference is float32; the server may compute in bf16.
COSINE = 0.999
CONCURRENT = 16


def cosine(one, other):
    length = math.sqrt(sum(x * x for x in one)) * math.sqrt(sum(x * x for x in other))
    return sum(x * y for x, y in zip(one, other)) / length


def is_like(vector, expected, what):
    """Checks a vector: its length is 1, and its direction the reference's."""
    equal(len(vector), len(expected), f"{what}: numbers")
    check(abs(math.sqrt(sum(x * x for x in vector)) - 1) < 1e-4, f"{what}: it is not of length 1")
    check(cosine(vector, expected) > COSINE, f"{what}: cosine {cosine(vector, expected)}")


def load():
    """Text prompts with their vectors."""
    prompts = json.loads((GOLDEN.parent / "golden.json").read_text(encoding="utf-8"))["prompts"]
    texts = {prompt["name"]: prompt.get("text") for prompt in prompts}
    cases = json.loads((GOLDEN.parent / "embeddings.json").read_text(encoding="utf-8"))["prompts"]
    if len(cases) < 4:
        raise CheckFailed(f"only {len(cases)} reference embeddings")
    return [(texts[case["name"]], case["prompt_ids"], case["last"]) for case in cases]


def raw(base_url, body):
    """What travels: the client decodes base64 by itself, and asks for it by itself."""
    request = urllib.request.Request(
        f"{base_url}/embeddings", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def check_vectors(client, base_url, model, cases):
    for text, ids, expected in cases:
        answer = client.embeddings.create(model=model, input=ids, encoding_format="float")
        is_like(answer.data[0].embedding, expected, f"tokens of {text!r}")
        equal(answer.usage.prompt_tokens, len(ids), "prompt_tokens")
        equal(answer.usage.total_tokens, len(ids), "total_tokens")
        if text:
            # In base64, which the client asks for.
            answer = client.embeddings.create(model=model, input=text)
            CreateEmbeddingResponse.model_validate(answer.to_dict())
            is_like(answer.data[0].embedding, expected, f"{text!r}")
    texts = [(text, expected) for text, _, expected in cases if text]
    answer = client.embeddings.create(model=model, input=[text for text, _ in texts] * 40)
    equal([entry.index for entry in answer.data], list(range(len(texts) * 40)), "order")
    for entry, (text, expected) in zip(answer.data, texts * 40):
        is_like(entry.embedding, expected, f"{text!r} among others")
    answer = client.embeddings.create(model=model, input=[ids for _, ids, _ in cases])
    for entry, (_, _, expected) in zip(answer.data, cases):
        is_like(entry.embedding, expected, "lists of tokens")

    text, expected = texts[0]
    floats = raw(base_url, {"input": text})["data"][0]["embedding"]
    encoded = raw(base_url, {"input": text, "encoding_format": "base64"})["data"][0]["embedding"]
    bytes_ = base64.b64decode(encoded, validate=True)
    equal(list(struct.unpack(f"<{len(bytes_) // 4}f", bytes_)),
          [struct.unpack("<f", struct.pack("<f", x))[0] for x in floats], "float and base64")
    few = client.embeddings.create(model=model, input=text, dimensions=16).data[0].embedding
    is_like(few, expected[:16], "dimensions=16")
    answer = client.embeddings.create(
        model=model, input="word " * 5000, extra_body={"truncate_prompt_tokens": 10}
    )
    equal(answer.usage.prompt_tokens, 10, "truncate_prompt_tokens")


def check_errors(client, model):
    def embed(**changes):
        return lambda: client.embeddings.create(**({"model": model, "input": "x"} | changes))

    bad = openai.BadRequestError
    expect_error(bad, embed(input=[]), "no input", "input", 400)
    expect_error(bad, embed(input=[[]]), "an empty list of tokens", "input", 400)
    expect_error(bad, embed(dimensions=100_000), "dimensions", "dimensions", 400)
    expect_error(bad, embed(input="word " * 5000), "a text beyond the model's length", "input", 400)
    expect_error(openai.NotFoundError, embed(model="other"), "unknown model", "model", 404)


async def check_beside_others(base_url, model, cases, texts):
    """Embeddings and completions at once: each as alone."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

        async def embed(case):
            answer = await client.embeddings.create(model=model, input=[case[1]] * 8)
            for entry in answer.data:
                is_like(entry.embedding, case[2], "beside completions")

        async def complete(golden):
            answer = await client.completions.create(
                model=model, prompt=golden.case["text"], max_tokens=base.MAX_TOKENS, temperature=0
            )
            equal(answer.choices[0].text, golden.text, "a completion beside embeddings")

        jobs = [embed(cases[i % len(cases)]) for i in range(CONCURRENT)]
        jobs += [complete(texts[i % len(texts)]) for i in range(CONCURRENT)]
        await asyncio.gather(*jobs)


def main():
    base_url = os.environ.get("TUTTI_BASE_URL")
    if not base_url:
        print("embeddings: set TUTTI_BASE_URL, such as http://127.0.0.1:8000/v1")
        return 2
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    try:
        cases = load()
        texts, _ = base.load_golden()
        model = next(iter(client.models.list())).id
        check_vectors(client, base_url, model, cases)
        check_errors(client, model)
        asyncio.run(check_beside_others(base_url, model, cases, texts))
    except CheckFailed as failure:
        print(f"embeddings: FAILED after {base.passed} checks: {failure}")
        return 1
    except openai.OpenAIError as error:
        print(f"embeddings: FAILED after {base.passed} checks: {type(error).__name__}: {error}")
        return 1
    print(f"embeddings: {base.passed} checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

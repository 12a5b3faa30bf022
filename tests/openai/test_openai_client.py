#!/usr/bin/env python3
"""Drives a running Tutti server with OpenAI's own Python client, the one that users have.

It checks the API as that client sees it: types it can parse, errors it raises, streams it ends.
Expected texts come from models/demo/golden.json, which Hugging Face transformers wrote.

    TUTTI_BASE_URL=http://127.0.0.1:8000/v1 python tests/openai/test_openai_client.py

The server must serve models/demo. Exits 1 with the failed check on the first failure.
"""

import asyncio
import json
import math
import os
import sys
import threading
import time
from enum import Enum
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Literal, Optional, Union

import jsonschema
import openai
from pydantic import BaseModel, Field

GOLDEN = Path(__file__).resolve().parents[2] / "models" / "demo" / "golden.json"
MAX_TOKENS = 32  # the length of the golden outputs
CONCURRENT = 16
# golden.json has log-probabilities of a float32 run; the server may compute in bf16.
LOGPROB_TOLERANCE = 0.1

passed = 0


class CheckFailed(Exception):
    """A check that did not hold."""


def check(condition, message):
    """Counts a check, or ends the run with `message`."""
    global passed
    if not condition:
        raise CheckFailed(message)
    passed += 1


def equal(actual, expected, what):
    """Checks that two values are the same, and shows both if not."""
    check(actual == expected, f"{what}\n  expected: {expected!r}\n  actual:   {actual!r}")


class Golden:
    """One prompt of golden.json with the answer that the API must give to it."""

    def __init__(self, case, specials):
        self.name = case["name"]
        self.case = case
        stop = case["greedy_stop_index"]
        text = case["greedy_text"]
        if stop is None:
            self.finish_reason = "length"
            self.completion_tokens = MAX_TOKENS
        else:
            # The end token counts as generated, and is not part of the text.
            self.finish_reason = "stop"
            self.completion_tokens = stop + 1
            text = text[: min(text.index(s) for s in specials if s in text)]
        self.text = text
        self.prompt_tokens = len(case["prompt_ids"])

    def usage(self, usage, what):
        """Checks a usage object."""
        equal(usage.prompt_tokens, self.prompt_tokens, f"{what}: prompt_tokens")
        equal(usage.completion_tokens, self.completion_tokens, f"{what}: completion_tokens")
        total = self.prompt_tokens + self.completion_tokens
        equal(usage.total_tokens, total, f"{what}: total_tokens")


def load_golden():
    """Prompts whose best token leads clearly at each step, so that the precision of the server's
    arithmetic cannot change the text: parity has its own test."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    tokenizer = json.loads((GOLDEN.parent / "tokenizer.json").read_text(encoding="utf-8"))
    specials = [token["content"] for token in tokenizer["added_tokens"] if token["special"]]
    clear = [
        case
        for case in golden["prompts"]
        if case["bf16_compute_agree_prefix"] == MAX_TOKENS
        # An API prompt has text, and an output that begins with a special token has lost it.
        and case.get("text") != ""
    ]
    texts = [Golden(case, specials) for case in clear if case["kind"] == "text"]
    chats = [Golden(case, specials) for case in clear if case["kind"] == "chat"]
    if len(texts) < 4 or len(chats) < 4:
        raise CheckFailed(f"{GOLDEN}: only {len(texts)} text and {len(chats)} chat prompts")
    return texts, chats


def check_models(client):
    """Lists models, looks one up, and returns its name."""
    models = list(client.models.list())
    check(len(models) >= 1, "GET /models lists no model")
    name = models[0].id
    equal(models[0].object, "model", "models.list: object")
    equal(client.models.retrieve(name).id, name, "models.retrieve: id")
    expect_error(
        openai.NotFoundError, lambda: client.models.retrieve("no-such-model"), "models.retrieve"
    )
    return name


def check_completions(client, model, texts):
    """Greedy completions, whole and streamed."""
    for golden in texts:
        what = f"completions, prompt {golden.name}"
        request = {
            "model": model,
            "prompt": golden.case["text"],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        answer = client.completions.create(**request)
        equal(answer.object, "text_completion", f"{what}: object")
        equal(answer.model, model, f"{what}: model")
        equal(len(answer.choices), 1, f"{what}: number of choices")
        equal(answer.choices[0].text, golden.text, what)
        equal(answer.choices[0].finish_reason, golden.finish_reason, f"{what}: finish_reason")
        golden.usage(answer.usage, what)

        what = f"streamed {what}"
        chunks = list(client.completions.create(**request, stream=True))
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        equal("".join(choice.text for choice in choices), golden.text, what)
        reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
        equal(reasons, [golden.finish_reason], f"{what}: finish_reason, once")
        equal(len({chunk.id for chunk in chunks}), 1, f"{what}: one id")
        check(len(chunks) > 2, f"{what}: all text came in {len(chunks)} chunk(s)")

    # Several prompts in one request, as text and as tokens: choices in the order of prompts.
    pair = texts[:2]
    answer = client.completions.create(
        model=model, prompt=[g.case["text"] for g in pair], max_tokens=MAX_TOKENS, temperature=0
    )
    by_index = [c.text for c in sorted(answer.choices, key=lambda choice: choice.index)]
    equal(by_index, [g.text for g in pair], "completions, a list of prompts")
    answer = client.completions.create(
        model=model, prompt=pair[0].case["prompt_ids"], max_tokens=MAX_TOKENS, temperature=0
    )
    equal(answer.choices[0].text, pair[0].text, "completions, a prompt of token ids")


def check_chat(client, model, chats):
    """Greedy chat, whole and streamed with usage."""
    for golden in chats:
        what = f"chat, conversation {golden.name}"
        request = {
            "model": model,
            "messages": golden.case["messages"],
            "max_completion_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        answer = client.chat.completions.create(**request)
        equal(answer.object, "chat.completion", f"{what}: object")
        equal(answer.choices[0].message.role, "assistant", f"{what}: role")
        equal(answer.choices[0].message.content, golden.text, what)
        equal(answer.choices[0].finish_reason, golden.finish_reason, f"{what}: finish_reason")
        golden.usage(answer.usage, what)

        what = f"streamed {what}"
        options = {"include_usage": True}
        chunks = list(client.chat.completions.create(**request, stream=True, stream_options=options))
        equal({chunk.object for chunk in chunks}, {"chat.completion.chunk"}, f"{what}: object")
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        equal(choices[0].delta.role, "assistant", f"{what}: the first delta names the role")
        equal("".join(choice.delta.content or "" for choice in choices), golden.text, what)
        reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
        equal(reasons, [golden.finish_reason], f"{what}: finish_reason, once")
        equal(chunks[-1].choices, [], f"{what}: the last chunk is the usage")
        golden.usage(chunks[-1].usage, what)
        check(all(chunk.usage is None for chunk in chunks[:-1]), f"{what}: usage only at the end")

        what = f"{what}, usage in every chunk"
        options["continuous_usage_stats"] = True
        chunks = list(client.chat.completions.create(**request, stream=True, stream_options=options))
        golden.usage(chunks[-1].usage, what)
        used = [chunk.usage.completion_tokens for chunk in chunks]
        check(used == sorted(used) and used[0] == 0, f"{what}: {used} grow from nothing")
        equal({chunk.usage.prompt_tokens for chunk in chunks}, {golden.prompt_tokens}, what)


def check_choices_and_seed(client, model, texts):
    """n, seed: same seed same text, other seed other text, choices that differ."""
    request = {
        "model": model,
        "prompt": texts[0].case["text"],
        "max_tokens": 24,
        "temperature": 1.0,
        "top_p": 1.0,
    }

    def sample(seed, n=1):
        answer = client.completions.create(**request, seed=seed, n=n)
        return [c.text for c in sorted(answer.choices, key=lambda choice: choice.index)]

    first = sample(7, n=2)
    equal(len(first), 2, "n=2: number of choices")
    check(first[0] != first[1], f"n=2: both choices are {first[0]!r}")
    equal(sample(7, n=2), first, "n=2, same seed: same texts")
    equal(sample(7), first[:1], "choice 0 does not depend on n")
    others = {sample(seed)[0] for seed in range(100, 104)}
    check(len(others) > 1, f"four seeds, one text: {others}")

    answer = client.completions.create(
        model=model, prompt=request["prompt"], max_tokens=8, temperature=0, n=2
    )
    equal({choice.index for choice in answer.choices}, {0, 1}, "greedy n=2: indices")
    equal(len({choice.text for choice in answer.choices}), 1, "greedy n=2: equal texts")
    equal(answer.usage.completion_tokens, 16, "greedy n=2: completion_tokens of both choices")
    equal(answer.usage.prompt_tokens, texts[0].prompt_tokens, "greedy n=2: the prompt counts once")


def check_stop(client, model, texts):
    """A stop string ends the text before it, whole and streamed; it never shows."""
    golden = next(golden for golden in texts if golden.finish_reason == "length")
    # A piece from the middle of the expected text.
    middle = len(golden.text) // 2
    stop = golden.text[middle : middle + 5]
    expected = golden.text[: golden.text.index(stop)]
    request = {
        "model": model,
        "prompt": golden.case["text"],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stop": [stop, "never in the text"],
    }
    answer = client.completions.create(**request)
    equal(answer.choices[0].text, expected, f"stop {stop!r}")
    equal(answer.choices[0].finish_reason, "stop", f"stop {stop!r}: finish_reason")
    check(
        answer.usage.completion_tokens < golden.completion_tokens,
        f"stop {stop!r}: {answer.usage.completion_tokens} tokens, as many as without it",
    )
    chunks = list(client.completions.create(**request, stream=True))
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    equal(text, expected, f"streamed stop {stop!r}")


def check_tools(client, model):
    """Calls that must be made are there, whole and streamed, with arguments that their schema allows."""
    weather = {
        "type": "object",
        "properties": {
            "city": {"enum": ["Rome", "Oslo"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": weather}},
        {"type": "function", "function": {"name": "now"}},
    ]
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    named = {"type": "function", "function": {"name": "weather"}}
    for seed in range(3):
        request = {"model": model, "messages": messages, "tools": tools, "tool_choice": named}
        request |= {"seed": seed, "temperature": 1.0, "max_tokens": 100}
        choice = client.chat.completions.create(**request).choices[0]
        equal(choice.message.content, None, "content beside a call")
        (call,) = choice.message.tool_calls
        equal((call.type, call.function.name), ("function", "weather"), "the call")
        arguments = json.loads(call.function.arguments)
        check(arguments["city"] in ("Rome", "Oslo"), f"city of {arguments}")
        check(1 <= arguments["days"] <= 9, f"days of {arguments}")
        name, streamed = None, ""
        for chunk in client.chat.completions.create(stream=True, **request):
            for delta in chunk.choices[0].delta.tool_calls or []:
                name = delta.function.name or name
                streamed += delta.function.arguments or ""
        equal((name, streamed), ("weather", call.function.arguments), "the call in a stream")
    # With its answer the conversation goes on.
    answer = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    more = [*messages, choice.message.model_dump(exclude_none=True), answer]
    client.chat.completions.create(
        model=model, messages=more, tools=tools, tool_choice="none", max_tokens=4
    )


def check_logprobs(client, model, texts, chats):
    """Log-probabilities: shapes, and values near the reference."""
    golden = texts[0]
    answer = client.completions.create(
        model=model, prompt=golden.case["text"], max_tokens=8, temperature=0, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    check(logprobs is not None, "completions logprobs=3: none came")
    equal("".join(logprobs.tokens), answer.choices[0].text, "completions logprobs: tokens")
    equal(len(logprobs.token_logprobs), 8, "completions logprobs: one per token")
    for index, (value, expected) in enumerate(
        zip(logprobs.token_logprobs, golden.case["greedy_logprobs"])
    ):
        check(
            math.isclose(value, expected, abs_tol=LOGPROB_TOLERANCE),
            f"completions logprobs: token {index}: {value}, reference {expected}",
        )
    for index, top in enumerate(logprobs.top_logprobs):
        check(3 <= len(top) <= 4, f"completions logprobs=3: {len(top)} at token {index}")
        best = max(top.values())
        check(
            math.isclose(best, logprobs.token_logprobs[index], abs_tol=1e-4),
            f"completions logprobs: the greedy token {index} is not the best of its top",
        )
    equal(logprobs.text_offset[0], 0, "completions logprobs: text_offset begins at 0")

    golden = next(golden for golden in chats if golden.completion_tokens > 4)
    answer = client.chat.completions.create(
        model=model,
        messages=golden.case["messages"],
        max_completion_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    content = answer.choices[0].logprobs.content
    equal(len(content), 4, "chat logprobs: one entry per token")
    joined = b"".join(bytes(entry.bytes) for entry in content).decode()
    equal(joined, answer.choices[0].message.content, "chat logprobs: bytes")
    for index, entry in enumerate(content):
        check(
            math.isclose(
                entry.logprob, golden.case["greedy_logprobs"][index], abs_tol=LOGPROB_TOLERANCE
            ),
            f"chat logprobs: token {index}: {entry.logprob}",
        )
        equal(len(entry.top_logprobs), 2, f"chat top_logprobs=2 at token {index}")
        check(
            entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob,
            f"chat top_logprobs at token {index} are not in order",
        )


def expect_error(kind, call, what, param=None, status=None):
    """Checks that `call` raises the client's error class `kind`, naming `param`."""
    try:
        call()
    except openai.APIStatusError as error:
        check(
            isinstance(error, kind),
            f"{what}: expected {kind.__name__}, got {type(error).__name__}: {error}",
        )
        check(bool(error.body and error.body.get("message")), f"{what}: no message: {error.body}")
        if param is not None:
            equal(error.param, param, f"{what}: param")
        if status is not None:
            equal(error.status_code, status, f"{what}: status")
        return
    raise CheckFailed(f"{what}: expected {kind.__name__}, but the call succeeded")


def check_errors(client, model):
    """Bad requests raise the class that the client documents, and name the field."""

    def complete(**changes):
        request = {"model": model, "prompt": "Once", "max_tokens": 2} | changes
        return lambda: client.completions.create(**request)

    bad = openai.BadRequestError
    expect_error(bad, complete(temperature=-1), "temperature=-1", "temperature", 400)
    expect_error(bad, complete(temperature=101), "temperature=101", "temperature", 400)
    expect_error(bad, complete(top_p=0), "top_p=0", "top_p", 400)
    expect_error(bad, complete(n=0), "n=0", "n", 400)
    expect_error(bad, complete(prompt="long " * 4000), "a prompt beyond the model's length")
    expect_error(openai.NotFoundError, complete(model="no-such-model"), "unknown model", "model", 404)
    expect_error(
        bad,
        lambda: client.chat.completions.create(model=model, messages=[]),
        "chat without messages",
        "messages",
        400,
    )
    # The connection and the server survive all of that.
    check(complete()().choices[0].finish_reason, "a good request after bad ones")


class Mood(str, Enum):
    glad = "glad"
    sad = "sad"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: list[Literal["sit", "roll"]] = Field(max_length=3)


class Sparrow(BaseModel):
    kind: Literal["sparrow"]
    sings: bool


class Salmon(BaseModel):
    kind: Literal["salmon"]
    rivers: int = Field(ge=0, le=9)


class Zoo(BaseModel):
    """A tagged union: `oneOf` of references, as pydantic writes it."""

    animal: Union[Sparrow, Salmon] = Field(discriminator="kind")


class Story(BaseModel):
    """What `parse` makes a schema of: references, unions, things that may be null."""

    title: str = Field(max_length=20)
    mood: Optional[Mood]
    pets: list[Union[Cat, Dog]] = Field(min_length=1, max_length=2)
    rating: float = Field(ge=0, le=5)


# Schemas whose every text is short, each with what it is about.
SCHEMAS = {
    "types": {"type": "array", "minItems": 2, "maxItems": 3,
              "items": {"type": ["null", "boolean", "integer"], "minimum": -9, "maximum": 9}},
    "pattern": {"type": "string", "pattern": "^[a-z]{2}-[0-9]{2,3}$"},
    "format": {"type": "object", "properties": {"day": {"type": "string", "format": "date"}},
               "required": ["day"], "additionalProperties": False},
    "optional": {"type": "object", "additionalProperties": False, "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 7}, "b": {"const": "b"},
        "c": {"enum": [1, "two", None, [3]]}}},
    "any of": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"},
                         {"type": "object", "properties": {"x": {"type": "null"}},
                          "required": ["x"], "additionalProperties": False}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 10}, {"maximum": 12}]},
    "tree": {"$ref": "#/$defs/tree", "$defs": {"tree": {
        "type": "object", "additionalProperties": False, "required": ["v", "of"],
        "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 3},
                       "of": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/tree"}}}}}},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["a", "b"]}],
              "items": False, "minItems": 2},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
}


def check_structured(client, model):
    """What the output must be: schemas by another implementation's judgement, pydantic's models."""
    ask = [{"role": "user", "content": "Tell me a story about a fox."}]
    whole = 0
    for name, schema in SCHEMAS.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        for seed in range(4):
            answer = client.chat.completions.create(
                model=model, messages=ask, seed=seed, temperature=1.3, max_tokens=200,
                response_format={"type": "json_schema", "json_schema": {
                    "name": "answer", "strict": True, "schema": schema}},
            ).choices[0]
            # A tree may be of any depth.
            if answer.finish_reason == "length" and name == "tree":
                continue
            equal(answer.finish_reason, "stop", f"schema of {name}, seed {seed}")
            text = answer.message.content
            try:
                jsonschema.validate(json.loads(text), schema)
            except (ValueError, jsonschema.ValidationError) as error:
                raise CheckFailed(f"schema of {name}: {text!r}: {error}") from error
            whole += 1
    check(whole >= 4 * (len(SCHEMAS) - 1), f"{whole} whole answers")
    for seed in range(3):
        parsed = client.chat.completions.parse(
            model=model, messages=ask, seed=seed, max_tokens=400, response_format=Story
        ).choices[0].message.parsed
        check(isinstance(parsed, Story) and 1 <= len(parsed.pets) <= 2, f"parse: {parsed!r}")
    schema = {"name": "zoo", "schema": Zoo.model_json_schema()}
    check("oneOf" in json.dumps(schema), "pydantic writes a tagged union as oneOf")
    kinds = set()
    for seed in range(6):
        format = Zoo if seed % 2 else {"type": "json_schema", "json_schema": schema}
        answer = client.chat.completions.create if seed % 2 == 0 else client.chat.completions.parse
        answer = answer(model=model, messages=ask, seed=seed, temperature=1.3, max_tokens=100,
                        response_format=format).choices[0].message.content
        zoo = json.loads(answer)
        # Nobody said that there may be other properties.
        equal(len(zoo["animal"]), 2, f"tagged union: {answer}")
        kinds.add(Zoo.model_validate(zoo).animal.kind)
    check(kinds <= {"sparrow", "salmon"} and kinds, f"tagged union: {kinds}")
    with client.chat.completions.stream(
        model=model, messages=ask, seed=1, max_tokens=400, response_format=Story
    ) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    again = client.chat.completions.parse(
        model=model, messages=ask, seed=1, max_tokens=400, response_format=Story
    ).choices[0].message.parsed
    equal(streamed, again, "streamed and whole")
    # vLLM's fields travel in `extra_body`.
    for extra, fits in [
        ({"structured_outputs": {"choice": ["red", "green"]}}, lambda it: it in ("red", "green")),
        ({"guided_regex": "[ab]{3}[0-9]"}, lambda it: len(it) == 4 and it[3].isdigit()),
        ({"structured_outputs": {"json_object": True}, "stop": ["}"]}, lambda it: it[0] == "{"),
        ({"response_format": {"type": "structural_tag", "format": {
            "type": "triggered_tags", "triggers": ["<"], "at_least_one": True,
            "stop_after_first": True, "tags": [{"begin": "<n>", "end": "</n>", "content": {
                "type": "json_schema",
                "json_schema": {"type": "integer", "minimum": 1, "maximum": 9}}}]}}},
         lambda it: len(it) == 8 and it[:3] + it[4:] == "<n></n>" and it[3] in "123456789"),
    ]:
        text = client.chat.completions.create(
            model=model, messages=ask, max_tokens=100, extra_body=extra
        ).choices[0].message.content
        check(fits(text), f"{extra}: {text!r}")
    bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "thing"}}}
    expect_error(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=model, messages=ask, response_format=bad),
        "a schema that is none",
        "response_format",
        400,
    )


class Silent(BaseHTTPRequestHandler):
    """Answers with a stream that has silences: empty lines, as Tutti fills them, in reads of their
    own."""

    def do_POST(self):  # the name that http.server calls
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for piece in ["\n", self.event("a"), "\n", "\n", self.event("b"), "\n", "data: [DONE]\n\n"]:
            self.wfile.write(piece.encode())
            self.wfile.flush()
            time.sleep(0.02)

    @staticmethod
    def event(text):
        choice = {"index": 0, "text": text, "finish_reason": None, "logprobs": None}
        return "data: " + json.dumps({"id": "x", "object": "text_completion", "created": 1,
                                      "model": "m", "choices": [choice]}) + "\n\n"

    def log_message(self, *_):
        pass


def check_silence():
    """The client takes empty lines for nothing."""
    server = HTTPServer(("127.0.0.1", 0), Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")
    stream = client.completions.create(model="m", prompt="x", stream=True)
    equal([chunk.choices[0].text for chunk in stream], ["a", "b"], "a stream with silences")
    server.shutdown()


async def check_concurrent(base_url, model, texts, chats):
    """Requests of both kinds at once give the texts that they give alone."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

        async def complete(golden):
            stream = await client.completions.create(
                model=model,
                prompt=golden.case["text"],
                max_tokens=MAX_TOKENS,
                temperature=0,
                stream=True,
            )
            return "".join([c.choices[0].text async for c in stream if c.choices])

        async def chat(golden):
            answer = await client.chat.completions.create(
                model=model,
                messages=golden.case["messages"],
                max_completion_tokens=MAX_TOKENS,
                temperature=0,
            )
            return answer.choices[0].message.content

        half = CONCURRENT // 2
        jobs = [(complete, texts[i % len(texts)]) for i in range(half)]
        jobs += [(chat, chats[i % len(chats)]) for i in range(half)]
        answers = await asyncio.gather(*(call(golden) for call, golden in jobs))
    for (_, golden), answer in zip(jobs, answers):
        equal(answer, golden.text, f"{CONCURRENT} at once, prompt {golden.name}")


def main():
    base_url = os.environ.get("TUTTI_BASE_URL")
    if not base_url:
        print("openai client: set TUTTI_BASE_URL, such as http://127.0.0.1:8000/v1")
        return 2
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    try:
        texts, chats = load_golden()
        model = check_models(client)
        check_completions(client, model, texts)
        check_chat(client, model, chats)
        check_choices_and_seed(client, model, texts)
        check_stop(client, model, texts)
        check_tools(client, model)
        check_logprobs(client, model, texts, chats)
        check_errors(client, model)
        check_structured(client, model)
        check_silence()
        asyncio.run(check_concurrent(base_url, model, texts, chats))
    except CheckFailed as failure:
        print(f"openai client: FAILED after {passed} checks: {failure}")
        return 1
    except openai.OpenAIError as error:
        print(f"openai client: FAILED after {passed} checks: {type(error).__name__}: {error}")
        return 1
    print(f"openai client: {passed} checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Drives `/v1/messages` of a running Tutti server with Anthropic's own Python client.

Every event and every message is checked against the client's own types, strictly, which the client
itself does not do.

    TUTTI_BASE_URL=http://127.0.0.1:8000/v1 python tests/openai/test_messages.py

The server must serve models/demo. Exits 1 with the failed check on the first failure.
"""

import asyncio
import json
import os
import sys
from typing import Literal

import anthropic
import jsonschema
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter

import test_openai_client as base
from test_openai_client import MAX_TOKENS, CheckFailed, check, equal

EVENT = TypeAdapter(RawMessageStreamEvent)
WEATHER = {
    "name": "weather",
    "description": "Says how the weather is.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}


def request_of(golden):
    """A golden conversation: instructions stand beside the messages here."""
    messages = [dict(message) for message in golden.case["messages"]]
    # The client has no such argument any more; others still send it.
    request = {"max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}
    if messages[0]["role"] == "system":
        request["system"] = messages.pop(0)["content"]
    return request | {"messages": messages}


def strict(message, what):
    """The message, if it is one by the client's types."""
    check(isinstance(message, Message), f"{what}: {type(message).__name__}")
    return Message.model_validate(message.to_dict(), strict=True)


def check_order(events, what):
    """The order that the API's documentation describes."""
    names = [event.type for event in events]
    equal((names[0], names[-2:]), ("message_start", ["message_delta", "message_stop"]), what)
    is_open, blocks = False, 0
    for event in events[1:-2]:
        check(event.index == blocks, f"{what}: {event.type} of block {event.index}, not {blocks}")
        is_start = event.type == "content_block_start"
        check(is_start != is_open, f"{what}: {event.type} out of order")
        is_open = event.type != "content_block_stop"
        blocks += not is_open
    check(not is_open and blocks > 0, f"{what}: the last block is not closed")


def check_texts(client, model, chats):
    """Greedy answers, whole, as events and through the client's helper."""
    for golden in chats:
        what = f"messages, conversation {golden.name}"
        request = request_of(golden) | {"model": model}
        message = strict(client.messages.create(**request), what)
        equal([block.text for block in message.content], [golden.text], what)
        reason = {"stop": "end_turn", "length": "max_tokens"}[golden.finish_reason]
        equal((message.stop_reason, message.stop_sequence), (reason, None), f"{what}: stop_reason")
        usage = message.usage
        total = usage.input_tokens + usage.cache_read_input_tokens
        equal(total, golden.prompt_tokens, f"{what}: tokens of the prompt")
        equal(usage.output_tokens, golden.completion_tokens, f"{what}: output_tokens")
        counted = client.messages.count_tokens(model=model, **{
            name: value for name, value in request.items() if name in ("system", "messages")})
        check(isinstance(counted, MessageTokensCount), f"{what}: {counted}")
        equal(counted.input_tokens, golden.prompt_tokens, f"{what}: count_tokens")

        what = f"streamed {what}"
        events = list(client.messages.create(**request, stream=True))
        events = [EVENT.validate_python(event.to_dict(), strict=True) for event in events]
        check_order(events, what)
        deltas = [event.delta for event in events if event.type == "content_block_delta"]
        equal("".join(delta.text for delta in deltas), golden.text, what)
        check(len(deltas) > 2, f"{what}: all text came in {len(deltas)} event(s)")
        with client.messages.stream(**request) as stream:
            text = "".join(stream.text_stream)
            final = strict(stream.get_final_message(), what)
        equal((text, final.content[0].text), (golden.text, golden.text), f"{what}: the helper's")
        equal(final.stop_reason, reason, f"{what}: stop_reason")
        equal(final.usage.output_tokens, golden.completion_tokens, f"{what}: output_tokens")

        stop = golden.text[len(golden.text) // 2 :][:4]
        stopped = client.messages.create(**request, stop_sequences=[stop])
        equal(stopped.stop_reason, "stop_sequence", f"{what}: stop_reason of {stop!r}")
        equal(stopped.stop_sequence, stop, f"{what}: stop_sequence")
        equal(stopped.content[0].text, golden.text[: golden.text.index(stop)], f"{what}: stopped")


def check_cache(client, model):
    """What the cache had of a prompt is told apart."""
    story = "Once upon a time there was a little fox named Pip who lived by the river. " * 4
    request = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": story}]}
    client.messages.create(**request)
    again = client.messages.create(**request).usage
    check(again.cache_read_input_tokens > 0, f"the second time nothing is cached: {again}")
    counted = client.messages.count_tokens(model=model, messages=request["messages"])
    both = again.input_tokens + again.cache_read_input_tokens
    equal(both, counted.input_tokens, "cached and new tokens")
    with client.messages.stream(**request) as stream:
        streamed = stream.get_final_message().usage
    equal(streamed.input_tokens, again.input_tokens, "streamed: input_tokens")
    equal(streamed.cache_read_input_tokens, again.cache_read_input_tokens, "streamed: cached")


def check_tools(client, model):
    """Calls that must be made, and their results."""
    ask = [{"role": "user", "content": "How is the weather in Rome?"}]
    for choice in ({"type": "any", "disable_parallel_tool_use": True},
                   {"type": "tool", "name": "weather"}):
        for seed in range(3):
            what = f"tool_choice {choice['type']}, seed {seed}"
            request = {"model": model, "max_tokens": 300, "messages": ask,
                       "tools": [WEATHER, NOW], "tool_choice": choice,
                       "extra_body": {"seed": seed}}
            message = strict(client.messages.create(**request), what)
            (call,) = message.content
            equal((call.type, message.stop_reason), ("tool_use", "tool_use"), what)
            tool = {"weather": WEATHER, "now": NOW}[call.name]
            jsonschema.validate(call.input, tool["input_schema"])
            with client.messages.stream(**request) as stream:
                parts = [event.partial_json for event in stream if event.type == "input_json"]
                final = stream.get_final_message()
            equal(final.content[0].input, call.input, f"{what}: streamed")
            equal(json.loads("".join(parts)), call.input, f"{what}: events")
    more = ask + [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}]},
    ]
    answer = client.messages.create(
        model=model, max_tokens=4, messages=more, tools=[WEATHER, NOW],
        tool_choice={"type": "none"},
    )
    equal(answer.stop_reason, "max_tokens", "an answer after a result")
    schema = {"type": "object", "properties": {"days": {"type": "integer", "maximum": 99,
              "minimum": 0}}, "required": ["days"], "additionalProperties": False}
    answer = client.messages.create(
        model=model, max_tokens=100, messages=ask,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    jsonschema.validate(json.loads(answer.content[0].text), schema)
    check(answer.stop_reason == "end_turn", f"structured output: {answer.stop_reason}")


def check_tool_runner(client, model):
    """The client's own loop of calls and results. It asks the server to keep the conversation, and
    sends all of it when it is told that no server here does."""
    called = []

    @anthropic.beta_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """Says how the weather is.

        Args:
            city: Where.
        """
        called.append(city)
        return "Sunny."

    request = {
        "model": model, "max_tokens": 100, "tools": [weather],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
    }
    for stream in (False, True):
        called.clear()
        used = []
        runner = client.beta.messages.tool_runner(**request, stream=stream, max_iterations=2)
        for turn in runner:
            message = turn.get_final_message() if stream else turn
            equal(message.stop_reason, "tool_use", f"turn {len(used)} of a runner")
            used.append(message.usage.input_tokens + message.usage.cache_read_input_tokens)
        check(called and set(called) <= {"Rome", "Oslo"}, f"the runner called {called}")
        equal(len(used), 2, "turns of a runner")
        check(used[1] > used[0], f"the second turn has the first, too: {used}")


def check_errors(client, model):
    """What the client raises."""
    good = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    for wrong, kind, says in [
        ({"model": "claude-sonnet-4-5"}, anthropic.NotFoundError, "claude-sonnet-4-5"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": [{"role": "user", "content": [image]}]}, anthropic.BadRequestError,
         "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "a b c " * 2000}]},
         anthropic.BadRequestError, "prompt is too long"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, anthropic.BadRequestError,
         "bash_20250124"),
    ]:
        for stream in (False, True):
            try:
                client.messages.create(**(good | wrong), stream=stream)
            except kind as error:
                equal(error.body["type"], "error", f"{wrong}: the body")
                check(says in error.body["error"]["message"], f"{wrong}: {error.body}")
                check(error.request_id == error.body["request_id"], f"{wrong}: the request's id")
            else:
                raise CheckFailed(f"{wrong} is no error")
    raw = client.messages.with_raw_response.create(**good)
    check(raw.headers["request-id"] in raw.parse().id, "the id of a request is its message's")


async def check_async(base_url, model, chats):
    """Many at a time, with the asynchronous client and a key in the other header."""
    client = anthropic.AsyncAnthropic(base_url=base_url, auth_token="none", max_retries=0)

    async def one(golden):
        async with client.messages.stream(**request_of(golden), model=model) as stream:
            return await stream.get_final_text()

    texts = await asyncio.gather(*[one(golden) for golden in chats])
    equal(texts, [golden.text for golden in chats], "texts of many at a time")
    await client.close()


def main():
    base_url = os.environ.get("TUTTI_BASE_URL")
    if not base_url:
        print("messages: set TUTTI_BASE_URL, such as http://127.0.0.1:8000/v1")
        return 2
    # Anthropic's client says `/v1` itself.
    base_url = base_url.removesuffix("/v1")
    client = anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    try:
        _, chats = base.load_golden()
        model = "demo"
        check_texts(client, model, chats)
        check_cache(client, model)
        check_tools(client, model)
        check_tool_runner(client, model)
        check_errors(client, model)
        asyncio.run(check_async(base_url, model, chats))
    except CheckFailed as failure:
        print(f"messages: FAILED after {base.passed} checks: {failure}")
        return 1
    except anthropic.AnthropicError as error:
        print(f"messages: FAILED after {base.passed} checks: {type(error).__name__}: {error}")
        return 1
    print(f"messages: {base.passed} checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

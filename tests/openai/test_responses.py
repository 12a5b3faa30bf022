#!/usr/bin/env python3
"""Drives `/v1/responses` of a running Tutti server with OpenAI's own Python client.

Every event and every response is checked against the client's own types, strictly, which the client
itself does not do.

    TUTTI_BASE_URL=http://127.0.0.1:8000/v1 python tests/openai/test_responses.py

The server must serve models/demo. Exits 1 with the failed check on the first failure.
"""

import json
import math
import os
import sys
import urllib.request

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

import test_openai_client as base
from test_openai_client import CheckFailed, Story, check, equal, expect_error

EVENT = TypeAdapter(ResponseStreamEvent)
PARTS = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
}


def items_of(messages):
    """A golden conversation as the items of an input."""
    return [{"role": it["role"], "content": it["content"]} for it in messages]


def raw_events(base_url, body):
    """A stream as it travels: (name, parsed event) pairs; the client hides names and unknown fields."""
    request = urllib.request.Request(
        f"{base_url}/responses",
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer none"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        equal(response.headers["Content-Type"], "text/event-stream; charset=utf-8", "the stream's type")
        text = response.read().decode()
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        equal(len(lines), 2, f"lines of an event: {lines}")
        check(lines[0].startswith("event: ") and lines[1].startswith("data: "), f"{lines}")
        yield lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))


def check_order(events, what):
    """The state machine that the API's documentation describes."""
    names = [name for name, _ in events]
    equal(names[:2], ["response.created", "response.in_progress"], f"{what}: beginning")
    ends = {"response.completed", "response.incomplete"}
    check(names[-1] in ends and not ends & set(names[:-1]), f"{what}: end {names[-1]}")
    current, text, has_part, done_text = None, "", False, False
    output = []
    for number, (name, event) in enumerate(events):
        equal(event["type"], name, f"{what}: name of event {number}")
        equal(event["sequence_number"], number, f"{what}: number of {name}")
        EVENT.validate_python(event)
        if number in (0, 1, len(events) - 1):
            Response.model_validate(event["response"])
            continue
        equal(event["output_index"], len(output), f"{what}: index of {name}")
        if name == "response.output_item.added":
            check(current is None, f"{what}: an item within another")
            current, text, has_part, done_text = event["item"], "", False, False
            equal(current["status"], "in_progress", f"{what}: status of a new item")
            continue
        prefix, key = PARTS[current["type"]]
        if "item_id" in event:
            equal(event["item_id"], current["id"], f"{what}: id at {name}")
        if name == "response.content_part.added":
            has_part = True
        elif name == f"{prefix}.delta":
            check(has_part or key == "arguments", f"{what}: text outside a part")
            check(not done_text and event["delta"], f"{what}: delta {event}")
            text += event["delta"]
        elif name == f"{prefix}.done":
            equal(event[key], text, f"{what}: text at {name}")
            done_text = True
        elif name == "response.content_part.done":
            equal(event["part"]["text"], text, f"{what}: text of a part")
            has_part = False
        elif name == "response.output_item.done":
            check(done_text and not has_part, f"{what}: {name} before its parts")
            item = event["item"]
            equal((item["id"], item["type"]), (current["id"], current["type"]), f"{what}: {name}")
            output.append(item)
            current = None
        else:
            raise CheckFailed(f"{what}: {name} in an item of {current['type']}")
    check(current is None, f"{what}: an item without an end")
    equal(events[-1][1]["response"]["output"], output, f"{what}: output")
    return events[-1][1]["response"]


def check_texts(client, base_url, model, chats):
    """Greedy responses, whole, as events and through the client's own stream."""
    for golden in chats:
        what = f"responses, prompt {golden.name}"
        request = {
            "model": model,
            "input": items_of(golden.case["messages"]),
            "max_output_tokens": base.MAX_TOKENS,
            "temperature": 0,
            "store": False,
        }
        answer = client.responses.create(**request)
        Response.model_validate(answer.to_dict())
        equal(answer.output_text, golden.text, what)
        is_cut = golden.finish_reason == "length"
        equal(answer.status, "incomplete" if is_cut else "completed", f"{what}: status")
        reason = answer.incomplete_details and answer.incomplete_details.reason
        equal(reason, "max_output_tokens" if is_cut else None, f"{what}: incomplete_details")
        usage = answer.usage
        equal(usage.input_tokens, golden.prompt_tokens, f"{what}: input_tokens")
        equal(usage.output_tokens, golden.completion_tokens, f"{what}: output_tokens")
        total = golden.prompt_tokens + golden.completion_tokens
        equal(usage.total_tokens, total, f"{what}: total_tokens")

        response = check_order(list(raw_events(base_url, request)), what)
        equal(response["output"][0]["content"][0]["text"], golden.text, f"{what}: streamed")
        pieces, last = [], None
        for event in client.responses.create(**request, stream=True):
            if event.type == "response.output_text.delta":
                pieces.append(event.delta)
            last = event
        equal("".join(pieces), golden.text, f"{what}: streamed by the client")
        equal(last.response.output_text, golden.text, f"{what}: the last event")
    for golden in [golden for golden in chats if golden.finish_reason == "stop"][:1]:
        with client.responses.stream(
            model=model, input=items_of(golden.case["messages"]), temperature=0
        ) as stream:
            equal(stream.get_final_response().output_text, golden.text, "responses.stream")
    text = client.responses.create(
        model=model, input="Once upon a time", instructions="Be brief.", max_output_tokens=4,
        metadata={"purpose": "test"}, truncation="auto", user="somebody",
        include=["reasoning.encrypted_content"], reasoning={"effort": "low"},
    )
    equal(text.instructions, "Be brief.", "instructions are repeated")
    equal(text.metadata, {"purpose": "test"}, "metadata are repeated")
    equal(text.store, False, "nothing is kept")


class Weather(BaseModel):
    """Says the weather of a city."""

    city: str
    days: int


def check_tools(client, base_url, model):
    """Calls that must be made, and the conversation that goes on behind them."""
    tool = openai.pydantic_function_tool(Weather)["function"]
    tool["parameters"]["properties"]["city"]["maxLength"] = 12
    tool["parameters"]["properties"]["days"] |= {"minimum": 1, "maximum": 9}
    tools = [{"type": "function", **tool}, {"type": "function", "name": "now", "parameters": None,
                                            "strict": False}]
    ask = [{"role": "user", "content": "What is the weather in Rome?"}]
    for choice in ({"type": "function", "name": "Weather"}, "required"):
        for seed in range(3):
            request = {"model": model, "input": ask, "tools": tools, "tool_choice": choice,
                       "max_output_tokens": 300, "parallel_tool_calls": False}
            answer = client.responses.create(**request, extra_body={"seed": seed})
            Response.model_validate(answer.to_dict())
            (call,) = answer.output
            equal(call.type, "function_call", f"tool_choice {choice}: the item")
            arguments = json.loads(call.arguments)
            if call.name == "Weather":
                check(1 <= arguments["days"] <= 9, f"days of {arguments}")
            response = check_order(
                list(raw_events(base_url, request | {"seed": seed})), f"tool_choice {choice}"
            )
            equal(response["output"][0]["arguments"], call.arguments, "the call in a stream")
    with client.responses.stream(
        **(request | {"tool_choice": {"type": "function", "name": "Weather"}})
    ) as stream:
        final = stream.get_final_response()
        check(json.loads(final.output[0].arguments), "the call of responses.stream")
    # What the model said goes back as it came, with the function's answer behind it.
    more = ask + [item.to_dict() for item in answer.output]
    more.append({"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."})
    again = client.responses.create(
        model=model, input=more, tools=tools, tool_choice="none", max_output_tokens=4
    )
    check(again.usage.input_tokens > answer.usage.input_tokens, "the call is part of the prompt")


def check_groups(client, base_url, model):
    """Tools of a group, and tools whose input is text."""
    city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"], "additionalProperties": False}
    search = {"type": "function", "name": "search", "parameters": city, "strict": True}
    note = {"type": "custom", "name": "note", "description": "Writes it down."}
    group = {"type": "namespace", "name": "mcp__docs__", "description": "Docs", "tools": [search]}
    request = {"model": model, "input": "What is the weather in Rome?", "tools": [note, group],
               "max_output_tokens": 200}
    items = []
    for kind, choice in (("function_call", {"type": "function", "name": "search"}),
                         ("custom_tool_call", {"type": "custom", "name": "note"})):
        asked = request | {"tool_choice": choice}
        answer = client.responses.create(**asked, extra_body={"seed": 1})
        Response.model_validate(answer.to_dict())
        (call,) = answer.output
        equal(call.type, kind, f"{choice}: the item")
        events = list(client.responses.create(**asked, stream=True, extra_body={"seed": 1}))
        (streamed,) = events[-1].response.output
        items += [call.to_dict(), {"type": f"{kind}_output", "call_id": call.call_id, "output": "So."}]
        if kind == "function_call":
            equal((call.namespace, call.name), ("mcp__docs__", "search"), "the tool of a group")
            check(json.loads(call.arguments)["city"] is not None, "its arguments")
            equal(streamed.arguments, call.arguments, "the arguments in a stream")
        else:
            equal((call.namespace, call.name), (None, "note"), "the tool that takes text")
            check(call.input, "its input, which may be cut")
            equal(streamed.input, call.input, "the input in a stream")
            deltas = [it for it in events if it.type == "response.custom_tool_call_input.delta"]
            equal("".join(it.delta for it in deltas), call.input, "the deltas of the input")
    more = [{"role": "user", "content": "And now?"}]
    request |= {"input": items + more, "tool_choice": "none", "max_output_tokens": 4}
    again = client.responses.create(**request)
    check(again.usage.input_tokens > answer.usage.input_tokens, "the calls are part of the prompt")


def check_structured(client, base_url, model):
    """What the text must be: a schema, pydantic's models."""
    ask = "Tell me a story about a fox."
    for seed in range(3):
        parsed = client.responses.parse(
            model=model, input=ask, text_format=Story, max_output_tokens=400,
            extra_body={"seed": seed},
        ).output_parsed
        check(isinstance(parsed, Story) and 1 <= len(parsed.pets) <= 2, f"parse: {parsed!r}")
    with client.responses.stream(
        model=model, input=ask, text_format=Story, max_output_tokens=400, extra_body={"seed": 2}
    ) as stream:
        equal(stream.get_final_response().output_parsed, parsed, "streamed and whole")
    text = client.responses.create(
        model=model, input=ask, text={"format": {"type": "json_object"}}, max_output_tokens=60,
        extra_body={"stop": ["}"]},
    ).output_text
    check(text.startswith("{"), f"json_object: {text!r}")


def check_logprobs(client, base_url, model, chats):
    """Log-probabilities near the reference's, of the text's tokens alone."""
    golden = next(golden for golden in chats if golden.completion_tokens > 4)
    request = {
        "model": model, "input": items_of(golden.case["messages"]), "max_output_tokens": 4,
        "temperature": 0, "top_logprobs": 2, "include": ["message.output_text.logprobs"],
    }
    part = client.responses.create(**request).output[0].content[0]
    equal(len(part.logprobs), 4, "logprobs: one entry per token")
    joined = b"".join(bytes(entry.bytes) for entry in part.logprobs).decode()
    equal(joined, part.text, "logprobs: bytes")
    for entry, expected in zip(part.logprobs, golden.case["greedy_logprobs"]):
        check(math.isclose(entry.logprob, expected, abs_tol=base.LOGPROB_TOLERANCE), f"{entry}")
        equal(len(entry.top_logprobs), 2, "top_logprobs=2")
    response = check_order(list(raw_events(base_url, request)), "logprobs")
    streamed = response["output"][0]["content"][0]["logprobs"]
    equal(len(streamed), 4, "streamed logprobs")


def check_errors(client, model):
    """Bad requests raise the class that the client documents, and name the field."""

    def respond(**changes):
        request = {"model": model, "input": "Once", "max_output_tokens": 2} | changes
        return lambda: client.responses.create(**request)

    bad = openai.BadRequestError
    expect_error(bad, respond(temperature=-1), "temperature=-1", "temperature", 400)
    expect_error(bad, respond(input=[]), "no input", "input", 400)
    expect_error(bad, respond(background=True), "background", "background", 400)
    expect_error(
        bad, respond(previous_response_id="resp_1"), "a kept response", "previous_response_id", 400
    )
    respond(tools=[{"type": "web_search"}])()
    built_in = {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search_preview"}}
    expect_error(bad, respond(**built_in), "a built-in tool", "tool_choice", 400)
    expect_error(bad, respond(input="long " * 4000), "an input beyond the model's length", "input")
    expect_error(openai.NotFoundError, respond(model="no-such-model"), "unknown model", "model", 404)
    expect_error(
        openai.NotFoundError, lambda: client.responses.retrieve("resp_1"), "a response that was"
    )
    check(respond()().output_text is not None, "a good request after bad ones")


def main():
    base_url = os.environ.get("TUTTI_BASE_URL")
    if not base_url:
        print("responses: set TUTTI_BASE_URL, such as http://127.0.0.1:8000/v1")
        return 2
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    try:
        _, chats = base.load_golden()
        model = next(iter(client.models.list())).id
        check_texts(client, base_url, model, chats)
        check_tools(client, base_url, model)
        check_groups(client, base_url, model)
        check_structured(client, base_url, model)
        check_logprobs(client, base_url, model, chats)
        check_errors(client, model)
    except CheckFailed as failure:
        print(f"responses: FAILED after {base.passed} checks: {failure}")
        return 1
    except openai.OpenAIError as error:
        print(f"responses: FAILED after {base.passed} checks: {type(error).__name__}: {error}")
        return 1
    print(f"responses: {base.passed} checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

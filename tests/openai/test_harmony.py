#!/usr/bin/env python3
"""Drives servers of a model that answers in harmony, gpt-oss' format, with OpenAI's own Python client.

What the models say is fixed: one calls `weather`, behind reasoning and a word to the user, the other
answers with JSON. `tests/http/harmony.rs` starts both and says where they are.

    TUTTI_CALLING_URL=http://../v1 TUTTI_ANSWERING_URL=http://../v1 python tests/openai/test_harmony.py
"""

import os
import sys

import openai
from openai.types.responses import Response
from pydantic import BaseModel

import test_openai_client as base
from test_openai_client import CheckFailed, check, equal
from test_responses import check_order, raw_events

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS, "strict": True}
ASKED = [{"role": "user", "content": "Is it warm in Rome?"}]
CALLED = ("weather", '{"city": "Rome"}')


class Sum(BaseModel):
    sum: int


def check_calls(client, model):
    """A chat in which a tool is called, and goes on with what it says."""
    request = {
        "model": model, "messages": ASKED, "reasoning_effort": "low",
        "tools": [{"type": "function", "function": WEATHER}],
    }
    choice = client.chat.completions.create(**request).choices[0]
    equal(choice.finish_reason, "tool_calls", "reason of a call")
    message = choice.message
    equal((message.content, message.reasoning), ("I look.", "Need it."), "before a call")
    equal([(it.function.name, it.function.arguments) for it in message.tool_calls], [CALLED], "call")
    with client.chat.completions.stream(**request) as stream:
        names = [it.name for it in stream if it.type == "tool_calls.function.arguments.done"]
        equal(names, ["weather"], "events of a call")
        streamed = stream.get_final_completion().choices[0]
    equal(streamed.finish_reason, "tool_calls", "reason of a streamed call")
    function = streamed.message.tool_calls[0].function
    equal((function.name, function.arguments), CALLED, "streamed call")
    equal(function.parsed_arguments, {"city": "Rome"}, "parsed arguments")
    # As clients send it again, with all that they know.
    said = message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "25"}
    again = client.chat.completions.create(**request | {"messages": [*ASKED, said, result]})
    check(again.usage.prompt_tokens > 0, "a conversation goes on")
    forced = client.chat.completions.create(**request, tool_choice="required").choices[0]
    equal(forced.message.tool_calls[0].function.name, "weather", "a call that must be made")


def check_answers(client, model):
    """Reasoning and a typed answer, whole and streamed."""
    request = {"model": model, "messages": ASKED, "reasoning_effort": "high"}
    parsed = client.chat.completions.parse(**request, response_format=Sum).choices[0].message
    equal((parsed.parsed, parsed.reasoning), (Sum(sum=4), "Simple."), "a typed answer")
    content, reasoning = "", ""
    for chunk in client.chat.completions.create(**request, stream=True, n=2):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning", None) or ""
    equal(sorted(content), sorted('{"sum": 4}' * 2), "streamed answers")
    equal(sorted(reasoning), sorted("Simple." * 2), "streamed reasoning")


def check_responses(client, base_url, model):
    """The items of a response, and its events in their order."""
    request = {
        "model": model, "input": "Is it warm in Rome?", "reasoning": {"effort": "medium"},
        "tools": [{"type": "function"} | WEATHER],
    }
    answer = client.responses.create(**request)
    Response.model_validate(answer.to_dict())
    equal([it.type for it in answer.output], ["reasoning", "message", "function_call"], "items")
    equal((answer.output[2].name, answer.output[2].arguments), CALLED, "a response's call")
    check(answer.usage.output_tokens_details.reasoning_tokens > 0, "reasoning is counted")
    response = check_order(list(raw_events(base_url, request)), "harmony")
    equal([it["type"] for it in response["output"]], [it.type for it in answer.output], "events")
    output = {"type": "function_call_output", "call_id": answer.output[2].call_id, "output": "25"}
    items = [*(it.to_dict() for it in answer.output), output]
    again = client.responses.create(**request | {"input": [*ASKED, *items]})
    equal(again.status, "completed", "a response to its result")


def main():
    urls = [os.environ.get(name) for name in ("TUTTI_CALLING_URL", "TUTTI_ANSWERING_URL")]
    if not all(urls):
        print("openai client, harmony: set TUTTI_CALLING_URL and TUTTI_ANSWERING_URL")
        return 2
    calling, answering = (
        openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) for url in urls
    )
    try:
        model = calling.models.list().data[0].id
        check_calls(calling, model)
        check_answers(answering, model)
        check_responses(calling, urls[0], model)
    except (CheckFailed, openai.OpenAIError) as failure:
        name = type(failure).__name__
        print(f"openai client, harmony: FAILED after {base.passed} checks: {name}: {failure}")
        return 1
    print(f"openai client, harmony: {base.passed} checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

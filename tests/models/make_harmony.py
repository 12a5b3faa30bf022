#!/usr/bin/env python3
"""Makes harmony.json: what conversations become with a chat template in OpenAI's harmony format, by
transformers, on 28 June 2025. The template, harmony.jinja beside this file, is no published one; it
uses what that of gpt-oss uses.
Needs transformers 5.
usage: make_harmony.py              (make_harmony.py TEMPLATE OUT of another template)
"""
import datetime
import json
import sys
from pathlib import Path

from transformers.utils import chat_template_utils

HERE = Path(__file__).parent


class ThatDay(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2025, 6, 28, 12, 0, 0)


def function(name, **more):
    return {"type": "function", "function": {"name": name, **more}}


def properties(**of):
    return {"type": "object", "properties": of}


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def call(function_name, **arguments):
    function = {"name": function_name, "arguments": arguments}
    return {"id": "1", "type": "function", "function": function}


def result(content):
    return {"role": "tool", "tool_call_id": "1", "content": content}


WEATHER = properties(
    location={"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
    format={"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
) | {"required": ["location"]}
EVERY_KIND = properties(
    a={"type": "array", "items": {"type": "string"}, "description": "strings"},
    b={"type": "array", "items": {"type": "integer"}, "nullable": True},
    c={"type": "array", "items": properties(x={"type": "number"})},
    d={"type": "array"},
    e={"type": ["string", "null"], "description": "either"},
    f={"oneOf": [{"type": "string", "description": "s"}, {"type": "number", "default": 1.5}], "default": "q"},
    g={"oneOf": [{"type": "object"}, {"type": "array"}]},
    h={"type": "string", "nullable": True, "default": None},
    i={"type": "boolean", "default": True},
    j=properties(k={"type": "string"}, l={"type": "object"}) | {"required": ["k"]},
    m={"anyOf": [{"type": "string"}]},
    n={"type": ["object"]},
    o={"type": "integer", "default": 3},
    p={"type": "number", "default": 0.5},
    q={"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}},
) | {"required": ["a", "j"]}
TOOLS = [
    function("get_location", description="Gets the location of the user.", parameters=properties()),
    function("get_current_weather", description="Gets the current weather.", parameters=WEATHER),
    function("none", description="Nothing."),
    function("all_of_it", description="Every kind: <b> & 'x' é.", parameters=EVERY_KIND),
]
CALLED = say(
    "assistant", "", thinking="Need the weather.",
    tool_calls=[call("get_current_weather", location="Rom é", n=[1, 2.5, None, True])],
)
ASKED = say("user", "Weather?")
ANSWERED = say("assistant", "Hello th")
CASES = {
    "plain": dict(messages=[say("user", "What is 2 + 2?")]),
    "system": dict(messages=[say("system", "Be brief."), ASKED], reasoning_effort="high"),
    "developer": dict(
        messages=[say("developer", "Be brief."), ASKED], reasoning_effort="low",
        model_identity="You are Tutti.",
    ),
    "past": dict(
        messages=[say("user", "2 + 2?"), say("assistant", "4", thinking="Simple."), say("user", "9 / 2?")],
    ),
    "tools": dict(messages=[say("system", "Use a friendly tone."), ASKED], tools=TOOLS),
    "tools alone": dict(messages=[ASKED], tools=TOOLS[:1]),
    "called": dict(messages=[ASKED, CALLED, result('{"sunny": true}')], tools=TOOLS[:2]),
    "called, with content": dict(
        messages=[ASKED, say("assistant", "I look.", tool_calls=[call("f")]), result("x")],
        tools=TOOLS[:2],
    ),
    "called twice": dict(
        messages=[
            ASKED, CALLED, result("a"),
            say("assistant", "", thinking="More.", tool_calls=[call("get_location")]),
            result('b\n"c"'),
        ],
        tools=TOOLS[:2],
    ),
    "answered": dict(
        messages=[
            ASKED, CALLED, result("a"), say("assistant", "Sunny.", thinking="So."),
            say("user", "And now?"),
        ],
        tools=TOOLS[:2],
    ),
    "builtin": dict(messages=[ASKED], builtin_tools=["browser", "python"]),
    "python": dict(messages=[ASKED], builtin_tools=["python"], tools=TOOLS[:1]),
    "training": dict(
        messages=[ASKED, say("assistant", "Hello", thinking="Greet.")], add_generation_prompt=False,
    ),
    "continued": dict(
        messages=[ASKED, ANSWERED], add_generation_prompt=False, continue_final_message=True,
    ),
    "continued behind reasoning": dict(
        messages=[ASKED, ANSWERED | {"thinking": "Greet."}],
        add_generation_prompt=False, continue_final_message=True,
    ),
    "raises: no call": dict(messages=[ASKED, result("x")]),
    "raises: marks": dict(
        messages=[ASKED, say("assistant", "<|channel|>final<|message|>x"), say("user", "y")],
    ),
    "raises: both": dict(
        messages=[ASKED, say("assistant", "x", thinking="y", tool_calls=[call("f")]), result("z")],
    ),
}


def rendered(name, source, case):
    given = {"add_generation_prompt": True, **case}
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            [given.pop("messages")], tools=given.pop("tools", None), chat_template=source, **given
        )
    except Exception as error:
        if not name.startswith("raises"):
            raise
        return {"raises": str(error)}
    return {"rendered": texts[0]}


def main():
    template, out = (Path(it) for it in sys.argv[1:] or (HERE / "harmony.jinja", HERE / "harmony.json"))
    chat_template_utils.datetime = ThatDay
    source = template.read_text()
    cases = [{"name": name, **case, **rendered(name, source, case)} for name, case in CASES.items()]
    out.write_text(json.dumps(cases, ensure_ascii=False, indent=1) + "\n")


main()

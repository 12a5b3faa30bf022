"""Clients: seeded requests whose undisturbed answers are known."""
import http.client
import json
import random
import socket
import threading
import time
import urllib.parse

SECRET_WORD = "zyzzyva"
NAMES = ["Pip", "Clover", "Bramble", "Moss", "Wren", "Hazel", "Otis", "Juniper"]
ANIMALS = ["fox", "rabbit", "mouse", "hen", "cat", "dog", "bear", "owl"]
SCHEMA = {"type": "object", "additionalProperties": False, "required": ["name", "age", "tags"],
          "properties": {"name": {"type": "string", "maxLength": 12},
                         "age": {"type": "integer", "minimum": 0, "maximum": 99},
                         "tags": {"type": "array", "maxItems": 3,
                                  "items": {"enum": ["red", "green", "blue"]}}}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


def bodies(seed, count):
    """Requests of all kinds, each different."""
    rng = random.Random(seed)
    for at in range(count):
        name, animal = rng.choice(NAMES), rng.choice(ANIMALS)
        opening = f"Once upon a time, there was a little {animal} named {name}."
        if rng.random() < 0.2:
            opening += f" {name} liked to play." * rng.randrange(10, 60)
        if rng.random() < 0.1:
            opening += f" {SECRET_WORD}"
        sampling = {"seed": at, "temperature": rng.choice([0, 0.7, 1.0]), "top_p": 0.95,
                    "max_tokens": rng.choice([8, 24, 60, 120, 200])}
        kind = at % 10
        if kind in (0, 1, 2):
            path, body = "/v1/completions", {"prompt": opening}
        elif kind == 3:
            path, body = "/v1/completions", {"prompt": opening, "n": 2}
        elif kind == 4:
            path, body = "/v1/completions", {"prompt": opening, "stop": ["day", name + " l"]}
        elif kind == 5:
            path, body = "/v1/completions", {"prompt": opening, "logprobs": 3}
        elif kind == 6:
            path, body = "/v1/chat/completions", {"messages": [
                {"role": "user", "content": f"Tell me a story about a {animal} named {name}."}]}
        elif kind == 7:
            path, body = "/v1/chat/completions", {
                "messages": [{"role": "user", "content": opening}],
                "response_format": {"type": "json_schema", "json_schema": {
                    "name": "who", "strict": True, "schema": SCHEMA}}}
            sampling["max_tokens"] = 120
        elif kind == 8:
            path, body = "/v1/chat/completions", {
                "messages": [{"role": "user", "content": opening}], "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "look_up"}}}
            sampling["max_tokens"] = 120
        else:
            path, body = "/v1/chat/completions", {
                "messages": [{"role": "user", "content": opening}], "logprobs": True,
                "top_logprobs": 2, "n": rng.choice([1, 2])}
        yield path, {"model": "demo", **body, **sampling}


class Broken(Exception):
    """The connection ended before the answer did."""


def connect(url, receive=None, timeout=70.0):
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
    if receive:
        plain = connection._create_connection

        def small(address, timeout, source):
            made = plain(address, timeout, source)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
            return made
        connection._create_connection = small
    return connection


def ask(url, path, body, how="plain", rng=random):
    """One request. Answers (status, what it said, pieces)."""
    headers = {"content-type": "application/json",
               "authorization": "Bearer key-that-no-log-may-show"}
    streamed = how != "plain"
    body = dict(body, **({"stream": True, "stream_options": {"include_usage": True}}
                         if streamed else {}))
    connection = connect(url, 4096 if how == "slow" else None)
    try:
        connection.request("POST", path, json.dumps(body), headers)
        reply = connection.getresponse()
        if reply.status != 200 or not streamed:
            said = reply.read()
            try:
                return reply.status, json.loads(said), 0
            except ValueError:
                return reply.status, {"not json": said.decode(errors="replace")[:300]}, 0
        events, leave = [], rng.randrange(1, 20) if how == "cancel" else None
        while True:
            line = reply.readline()
            if not line:
                raise Broken(f"the stream ended after {len(events)} events")
            line = line.decode().strip()
            if how == "slow" and rng.random() < 0.1:
                time.sleep(0.3)
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                return 200, gather(events), len(events)
            event = json.loads(data)
            if "error" in event:
                return 200, {"error": event["error"]}, len(events)
            events.append(event)
            if leave is not None and len(events) >= leave:
                return 200, {"left": True}, len(events)
    finally:
        connection.close()


def gather(events):
    """What a stream's events amount to, in the form of an answer in one piece."""
    choices, usage = {}, None
    for event in events:
        usage = event.get("usage") or usage
        for part in event["choices"]:
            whole = choices.setdefault(part["index"], {"index": part["index"]})
            if "delta" in part:
                message = whole.setdefault("message", {"role": "assistant", "content": None})
                delta = part["delta"]
                if delta.get("content") is not None:
                    message["content"] = (message["content"] or "") + delta["content"]
                for call in delta.get("tool_calls") or []:
                    calls = message.setdefault("tool_calls", [])
                    while len(calls) <= call["index"]:
                        calls.append({"function": {"name": "", "arguments": ""}})
                    made = calls[call["index"]]["function"]
                    for key, value in call.get("function", {}).items():
                        made[key] = made[key] + (value or "")
            if "text" in part:
                whole["text"] = whole.get("text", "") + part["text"]
            for key, values in (part.get("logprobs") or {}).items():
                if isinstance(values, list):
                    whole.setdefault("logprobs", {}).setdefault(key, []).extend(values)
            if part.get("finish_reason"):
                whole["finish_reason"] = part["finish_reason"]
    return {"choices": [choices[at] for at in sorted(choices)], "usage": usage}


def essence(said):
    """What must be equal in all answers to one request."""
    choices = []
    for choice in sorted(said["choices"], key=lambda choice: choice["index"]):
        message = choice.get("message") or {}
        logprobs = choice.get("logprobs") or {}
        calls = [call["function"] for call in message.get("tool_calls") or []]
        choices.append({
            "text": choice.get("text", message.get("content") or ""),
            "calls": [(call["name"], call["arguments"]) for call in calls],
            "finish": choice.get("finish_reason"),
            "tokens": logprobs.get("tokens") or logprobs.get("content"),
            "logprobs": logprobs.get("token_logprobs")})
    usage = said.get("usage") or {}
    return {"choices": choices,
            "usage": [usage.get("prompt_tokens"), usage.get("completion_tokens")]}


def difference(want, got):
    """Where they differ, or nothing."""
    want, got = (json.dumps(it, sort_keys=True) for it in (want, got))
    if want == got:
        return None
    at = next((at for at, (a, b) in enumerate(zip(want, got)) if a != b), min(len(want), len(got)))
    return f"wanted ..{want[max(0, at - 40):at + 60]}.., got ..{got[max(0, at - 40):at + 60]}.."


def record(url, seed, count):
    """Requests with their answers, as an undisturbed server gives them."""
    known = []
    for path, body in bodies(seed, count):
        status, said, _ = ask(url, path, body)
        if status != 200:
            raise RuntimeError(f"{path} {body}: {status} {said}")
        known.append((path, body, essence(said)))
    return known


class Clients:
    """Threads that ask for ever, and judge what they get."""

    def __init__(self, fleet, known, seed, count, rest):
        self.fleet, self.known, self.seed, self.rest = fleet, known, seed, rest
        self.counts, self.lock, self.going = {}, threading.Lock(), True
        self.paused = threading.Event()
        self.busy = 0
        targets = [p.name for p in fleet.of("frontend") + fleet.of("coordinator")]
        self.threads = [threading.Thread(target=self.run, args=(at, targets), daemon=True)
                        for at in range(count)]

    def start(self):
        for thread in self.threads:
            thread.start()

    def count(self, target, outcome):
        with self.lock:
            self.counts[target, outcome] = self.counts.get((target, outcome), 0) + 1

    def run(self, at, targets):
        rng = random.Random(f"{self.seed}-{at}")
        while self.going:
            while self.paused.is_set() and self.going:
                time.sleep(0.1)
            target = rng.choice(targets)
            with self.lock:
                self.busy += 1
            try:
                self.one(rng, target)
            except Exception as error:  # A bug here must not end a client silently.
                self.fleet.violation("client", error=repr(error))
            finally:
                with self.lock:
                    self.busy -= 1
            time.sleep(rng.random() * self.rest)

    def one(self, rng, target):
        path, body, want = rng.choice(self.known)
        how = rng.choices(["plain", "stream", "cancel", "slow"], [4, 6, 1, 1])[0]
        began, wall = time.monotonic(), round(time.time() - self.fleet.began, 2)
        status, said, pieces, outcome = None, None, 0, None
        try:
            status, said, pieces = ask(self.fleet.url(target), path, body, how, rng)
        except (OSError, Broken, http.client.HTTPException, ValueError) as error:
            outcome, said = "broken", repr(error)
        took = time.monotonic() - began
        if outcome is None and status == 200 and "error" in said:
            outcome = "error event"
        elif outcome is None and status == 200 and "left" in said:
            outcome = "left"
        elif outcome is None and status == 200:
            wrong = difference(want, essence(said))
            outcome = "wrong" if wrong else "equal"
            if wrong:
                self.fleet.violation("answer", target=target, how=how, path=path, body=body,
                                     difference=wrong)
        elif outcome is None:
            outcome = str(status)
            # 408: the request's head was late, on a bad network.
            if status not in (408, 429, 503):
                self.fleet.violation("status", target=target, status=status, said=said, body=body)
        self.count(target, outcome)
        if outcome not in ("equal", "left"):
            self.fleet.note("answer", target=target, outcome=outcome, how=how, began=wall,
                            took=round(took, 2), said=str(said)[:300], pieces=pieces)
        if took > 150 and how != "slow":
            self.fleet.violation("slow answer", target=target, took=took, outcome=outcome)

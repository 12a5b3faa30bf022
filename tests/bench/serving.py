#!/usr/bin/env python3
"""Compares servers as their users meet them: over HTTP, on the same weights, in turns.

    tests/bench/serving.py --model DIR --server 'NAME=COMMAND' [--server ...] [--rounds 3]

A COMMAND serves OpenAI's API for the model under the name `m`; `{port}` and `{model}` in it are
filled in. It is started by a shell and ended, with all of its children, by this program. In each
round every server is started once, in turn, and meets the same clients, all of this one process:

- start: from the start of its command to the first token of a completion
- memory: of all of its processes after the loads (what they share is counted once)
- loads: N clients at a time, each of which streams completions one after the other, of prompts of
  random tokens, never the same twice. Time to the first token, time between tokens, and all
  clients' tokens together per second. With --output-spread 0.5 each asks for half as many tokens
  to half as many more: otherwise clients that begin together end together, all their prompts meet
  in a few steps, and gaps between tokens are rare and long.
- with --long TOKENS: a prompt of so many tokens alone; then again with another client that sends
  prompts of 32 tokens, one after the other, until the long one has its first token. Times to the
  first token of all three.
- with --kill NAME=REGEX: while one client streams, the first process of the server whose command
  line matches is killed (SIGKILL). Whether that stream ends whole, with the tokens it had without
  a kill, its longest silence, and when the server answers the next request.

Prints the medians over rounds as Markdown tables. Only the standard library, and Linux's /proc,
are needed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

START_MAX = 600.0  # seconds that a server may take to its first token


def parse_args():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model folder in Hugging Face format")
    parser.add_argument("--server", action="append", required=True, help="NAME=COMMAND")
    parser.add_argument("--kill", action="append", default=[], help="NAME=REGEX of a process")
    parser.add_argument("--long", type=int, help="tokens of a long prompt beside short ones")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", default="1,8,16", help="clients at a time")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--output-spread", type=float, default=0.0, help="0.5: 50 %% less to more")
    parser.add_argument("--requests", type=int, default=4, help="of each client")
    parser.add_argument("--vocabulary", type=int, help="token ids below it; from config.json else")
    return parser.parse_args()


def quiet_cores():
    """Cores that all processes of the machine used within the last second."""
    def busy():
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]
        ticks = [int(field) for field in fields]
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")

    before = busy()
    time.sleep(1)
    return busy() - before


def free_port():
    """A port nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def processes(root):
    """A process and all of its descendants, as folders of /proc."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(status.read_text().rsplit(")", 1)[1].split()[1])
            parents.setdefault(parent, []).append(int(status.parent.name))
    found, todo = [], [root]
    while todo:
        found.append(todo.pop())
        todo += parents.get(found[-1], [])
    return [Path(f"/proc/{pid}") for pid in sorted(found)]


def memory(root):
    """MiB of a process and its descendants, pages that they share counted once."""
    total = 0
    for process in processes(root):
        with contextlib.suppress(OSError):
            rollup = (process / "smaps_rollup").read_text()
            line = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
            total += int(line.split()[1])
    return total / 1024


class Failed(Exception):
    """A request was not answered as it should be."""


async def completion(port, prompt, tokens):
    """Streams one completion; returns when it was sent, when each token came, and the text."""
    body = json.dumps(
        {
            "model": "m",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        sent = time.monotonic()
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise Failed(status.decode(errors="replace").strip())
        times, text = [], []
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                break
            # One event for each token, also where its text is empty or held back; the last
            # event of some servers has no more than the reason, or the usage.
            if b'"choices":[{' in line:
                times.append(time.monotonic())
                text.append(line[6:])
        else:
            raise Failed(f"the stream ended after {len(times)} events")
        # Decoded last, so that it does not disturb the times of other clients.
        return sent, times, "".join(json.loads(line)["choices"][0]["text"] for line in text)
    finally:
        writer.close()


async def load(port, clients, args, vocabulary, seed):
    """All clients' requests; returns tokens per second, and times in seconds."""
    source = random.Random(seed)
    prompt = lambda: [source.randrange(10, vocabulary) for _ in range(args.prompt_tokens)]
    spread = lambda: 1 + source.uniform(-args.output_spread, args.output_spread)
    output = lambda: round(args.output_tokens * spread())
    requests = [[(prompt(), output()) for _ in range(args.requests)] for _ in range(clients)]
    first, between = [], []

    async def client(own):
        count = 0
        for each, wanted in own:
            sent, times, _ = await completion(port, each, wanted)
            if not times:
                raise Failed("no token")
            first.append(times[0] - sent)
            between.extend(after - before for before, after in zip(times, times[1:]))
            count += wanted
        return count

    begun = time.monotonic()
    tokens = sum(await asyncio.gather(*(client(own) for own in requests)))
    return {
        "tokens/s": tokens / (time.monotonic() - begun),
        "first p50": percentile(first, 50),
        "first p99": percentile(first, 99),
        "between p50": percentile(between, 50),
        "between p99": percentile(between, 99),
        "between max": max(between),
    }


async def beside(port, length, vocabulary, seed):
    """First tokens of a long prompt, alone and beside short ones, and of those."""
    source = random.Random(seed)
    prompt = lambda tokens: [source.randrange(10, vocabulary) for _ in range(tokens)]
    sent, times, _ = await completion(port, prompt(length), 1)
    alone, short = times[0] - sent, []
    long = asyncio.create_task(completion(port, prompt(length), 1))
    # The long prompt is under way when the first short one comes.
    await asyncio.sleep(alone / 10)
    while not long.done():
        sent, times, _ = await completion(port, prompt(32), 1)
        short.append(times[0] - sent)
    sent, times, _ = await long
    if not short:
        raise Failed(f"a prompt of {length} tokens is too short to have others beside it")
    return {
        "alone": alone,
        "beside": times[0] - sent,
        "short p50": percentile(short, 50),
        "short most": max(short),
        "shorts": len(short),
    }


def percentile(values, percent):
    """The nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


async def first_token(port, process, vocabulary):
    """Waits until a completion is answered."""
    end = time.monotonic() + START_MAX
    while time.monotonic() < end:
        if process.poll() is not None:
            raise Failed(f"the server ended with {process.returncode}")
        with contextlib.suppress(OSError, Failed, asyncio.IncompleteReadError):
            _, times, _ = await completion(port, [vocabulary - 1] * 4, 1)
            if times:
                return times[0]
        await asyncio.sleep(0.01)
    raise Failed(f"no token within {START_MAX:.0f} s")


async def killed(port, process, pattern, vocabulary):
    """What one client sees when a process is killed under it."""
    prompt, tokens = [vocabulary // 2, 17, 18, 19], 400
    _, _, whole = await completion(port, prompt, tokens)
    stream = asyncio.create_task(completion(port, prompt, tokens))
    await asyncio.sleep(0.5)
    for folder in processes(process.pid):
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        if re.search(pattern, words):
            os.kill(int(folder.name), signal.SIGKILL)
            break
    else:
        raise Failed(f"no process is like {pattern}")
    answered = asyncio.create_task(next_answer(port, process, prompt))
    seen = {"silence": ""}
    try:
        _, times, text = await asyncio.wait_for(stream, 120)
        if len(times) >= tokens:
            seen["stream"] = "whole, the same text" if text == whole else "whole, another text"
            longest = max(after - before for before, after in zip(times, times[1:]))
            seen["silence"] = f"{longest:.2f} s"
        else:
            seen["stream"] = f"ended after {len(times)} of {tokens} tokens"
    except (Failed, OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
        seen["stream"] = f"lost: {error or type(error).__name__}"
    seen["next"] = await answered
    return seen


async def next_answer(port, process, prompt):
    """How long it takes until a request that is made now, and again and again, is answered."""
    begun = time.monotonic()
    while time.monotonic() < begun + 120:
        with contextlib.suppress(OSError, Failed, asyncio.IncompleteReadError, ValueError):
            sent, times, _ = await asyncio.wait_for(completion(port, prompt, 1), 10)
            if times:
                return f"{times[0] - begun:.2f} s"
        if process.poll() is not None:
            return "never: the server has ended"
        await asyncio.sleep(0.02)
    return "not within 120 s"


def measure(name, command, args, vocabulary, seed):
    """One server's life: a row of figures for its start and for each load."""
    port = free_port()
    command = command.replace("{port}", str(port)).replace("{model}", args.model)
    log = Path(f"/tmp/serving-{name.replace('/', '-').replace(' ', '-')}.log")
    begun = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, shell=True, stdout=output, stderr=output, start_new_session=True
        )
    try:
        ready = asyncio.run(first_token(port, process, vocabulary))
        rows = {"start": {"s": ready - begun}}
        # A warm-up: what is made at the first use (compiled kernels, memory caches) must not count.
        asyncio.run(load(port, 2, args, vocabulary, seed - 1))
        for clients in map(int, args.clients.split(",")):
            rows[clients] = asyncio.run(load(port, clients, args, vocabulary, seed + clients))
        if args.long:
            rows["long"] = asyncio.run(beside(port, args.long, vocabulary, seed))
        rows["start"]["MiB"] = memory(process.pid)
        if pattern := dict(kill.split("=", 1) for kill in args.kill).get(name):
            rows["killed"] = asyncio.run(killed(port, process, pattern, vocabulary))
        return rows
    except Failed as error:
        sys.exit(f"{name}: {error}; see {log}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def median(rounds, row, column):
    """Of all rounds."""
    return statistics.median(each[row][column] for each in rounds)


def main():
    """Runs all rounds, prints the tables."""
    args = parse_args()
    config = json.loads((Path(args.model) / "config.json").read_text(encoding="utf-8"))
    vocabulary = args.vocabulary or config["vocab_size"]
    servers = dict(server.split("=", 1) for server in args.server)
    rounds = {name: [] for name in servers}
    for number in range(args.rounds):
        for name, command in servers.items():
            others = quiet_cores()
            rounds[name].append(measure(name, command, args, vocabulary, 1000 * (number + 1)))
            print(f"round {number + 1} {name}: {others:.2f} cores busy before", file=sys.stderr)
            print(json.dumps(rounds[name][-1]), file=sys.stderr)
    print("| server | start to first token | memory |\n| --- | ---: | ---: |")
    for name, each in rounds.items():
        start, memory = median(each, "start", "s"), median(each, "start", "MiB")
        print(f"| {name} | {start:.2f} s | {memory:.0f} MiB |")
    if args.long:
        print("\n| server | long alone | beside short ones | short p50 | longest | short ones |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        for name, each in rounds.items():
            columns = ("alone", "beside", "short p50", "short most")
            cells = [f"{median(each, 'long', column):.2f} s" for column in columns]
            print(f"| {name} | {' | '.join(cells)} | {median(each, 'long', 'shorts'):.0f} |")
    if any("killed" in each[0] for each in rounds.values()):
        print("\n| server | stream of a killed rank | longest silence | next answer |")
        print("| --- | --- | ---: | ---: |")
        for name, each in rounds.items():
            for seen in (row["killed"] for row in each if "killed" in row):
                print(f"| {name} | {seen['stream']} | {seen['silence']} | {seen['next']} |")
    print("\n| clients | server | tokens/s | first token p50 | p99 | between tokens p50 | p99 | max |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for clients in map(int, args.clients.split(",")):
        for name, each in rounds.items():
            cells = [f"{median(each, clients, 'tokens/s'):.0f}"]
            columns = ("first p50", "first p99", "between p50", "between p99", "between max")
            for column in columns:
                cells.append(f"{1000 * median(each, clients, column):.1f} ms")
            print(f"| {clients} | {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

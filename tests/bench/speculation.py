#!/usr/bin/env python3
"""The gain of speculative decoding where a text repeats itself, and its cost where none does.

    tests/bench/speculation.py --tutti target/release/tutti --model DIR [--rounds 5] [--clients 1,8]
        [--config JSON] [--tutti-args='...']

Starts two servers, one with --speculative-config and one without, and requests the same completions
from them in turns. `loops` are greedy and go on until the model repeats itself, which small models soon
do. `plain` are sampled at temperature 1; a model with random weights then repeats nothing. Prints tokens
per second of all clients together as medians over rounds, the share of drafted tokens that were
accepted, and the processor time of all of a server's processes with drafts relative to that without,
which depends less on other load on the machine. The answers of both servers must be equal. Needs only
the standard library.
"""

import argparse
import concurrent.futures
import json
import os
import shlex
import socket
import statistics
import subprocess
import time
import urllib.request
from pathlib import Path

CONFIG = '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2}'
START_MAX = 120.0  # seconds that a server may take to be ready
SAMPLING = {"loops": {"temperature": 0}, "plain": {"temperature": 1}}


def parse_args():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tutti", required=True, help="the program")
    parser.add_argument("--model", required=True, help="model folder in Hugging Face format")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", default="1,8", help="completions at a time")
    parser.add_argument("--output-tokens", type=int, default=400)
    parser.add_argument("--config", default=CONFIG, help="of the server that speculates")
    parser.add_argument("--tutti-args", default="--tensor-parallel 1 --workers 1")
    return parser.parse_args()


class Server:
    """One `tutti up`."""

    def __init__(self, args, more):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        command = [args.tutti, "up", "--listen", self.base.removeprefix("http://"), "--model", args.model]
        command += ["--served-model-name", "m", *shlex.split(args.tutti_args), *more]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + START_MAX
        while not self.is_ready():
            if time.monotonic() > until or self.process.poll() is not None:
                raise SystemExit(f"it does not become ready: {shlex.join(command)}")
            time.sleep(0.05)

    def is_ready(self):
        """Whether it answers."""
        try:
            return urllib.request.urlopen(self.base + "/ready", timeout=5).status == 200
        except OSError:
            return False

    def ask(self, case, seed, tokens):
        """The text of one completion."""
        body = {"model": "m", "prompt": [seed % 97 + 5, 8, 13], "max_tokens": tokens}
        body |= {"ignore_eos": True, "seed": seed} | SAMPLING[case]
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(
            self.base + "/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)["choices"][0]["text"]

    def load(self, case, clients, tokens):
        """Texts of so many completions at a time, and tokens per second."""
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            began = time.monotonic()
            texts = list(pool.map(lambda seed: self.ask(case, seed, tokens), range(clients)))
            return texts, clients * tokens / (time.monotonic() - began)

    def processor_time(self):
        """Of the server and its workers, in ticks."""
        pids = [str(self.process.pid)]
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            pids += (task / "children").read_text().split()
        stats = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
        return sum(int(fields[11]) + int(fields[12]) for fields in stats)

    def drafted(self):
        """Tokens drafted and accepted so far."""
        page = urllib.request.urlopen(self.base + "/metrics").read().decode()
        names = [f"tutti_spec_decode_{what}_tokens_total" for what in ("draft", "accepted")]
        lines = page.splitlines()
        return [
            sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in names
        ]


def main():
    """Asks in turns and prints a table."""
    args = parse_args()
    with_drafts = Server(args, ["--speculative-config", args.config])
    without = Server(args, [])
    try:
        print(f"load average before: {os.getloadavg()[0]:.1f}")
        print("| case | clients | without | with | ratio | processor time | of the drafted accepted |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for case in SAMPLING:
            for clients in (int(clients) for clients in args.clients.split(",")):
                speeds, ratios = ([], []), []
                before = with_drafts.drafted()
                times = without.processor_time(), with_drafts.processor_time()
                for turn in range(args.rounds + 1):
                    first, second = without.load(case, clients, args.output_tokens), None
                    second = with_drafts.load(case, clients, args.output_tokens)
                    if first[0] != second[0]:
                        raise SystemExit(f"{case}, {clients} clients: the texts differ")
                    if turn > 0:  # the first warms up
                        speeds[0].append(first[1])
                        speeds[1].append(second[1])
                        ratios.append(second[1] / first[1])
                drafted, accepted = (now - was for now, was in zip(with_drafts.drafted(), before))
                share = f"{accepted / drafted:.0%} of {drafted:.0f}" if drafted else "none drafted"
                used = [now.processor_time() - was for now, was in zip((without, with_drafts), times)]
                plain, fast = (statistics.median(speed) for speed in speeds)
                ratio = statistics.median(ratios)
                speed = f"{plain:.0f} | {fast:.0f} | {ratio:.2f} | {used[1] / used[0]:.2f}"
                print(f"| {case} | {clients} | {speed} | {share} |")
        print(f"load average after: {os.getloadavg()[0]:.1f}")
    finally:
        for server in (with_drafts, without):
            server.process.terminate()
            server.process.wait()


if __name__ == "__main__":
    main()

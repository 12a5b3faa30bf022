#!/usr/bin/env python3
"""What metrics cost a serving cluster: the same load with metrics on and off, in turns.

    tests/bench/metrics.py --tutti target/release/tutti [--model DIR] [--rounds 5] [--batch 32]

Each round starts `tutti up` with one worker, sends BATCH requests at once that all run to their
last token, and notes tokens per second and, where `perf` may count them, instructions per token of
all its processes. Prints medians.
"""
import argparse
import json
import re
import statistics
import subprocess
import threading
import time
import urllib.request


def post(base, body):
    request = urllib.request.Request(
        base + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)["usage"]["completion_tokens"]


def load(base, batch, tokens):
    counts = []
    def one(seed):
        body = {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "seed": seed}
        counts.append(post(base, body))
    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(batch)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts), time.monotonic() - began


def children(pid):
    listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    return [int(child) for child in listed.split()]


def once(options, on):
    command = [options.tutti, "up", "--listen", "127.0.0.1:0", "--workers", "1", "--threads", "1",
               "--tensor-parallel", "1", "--log-level", "error"]
    command += ["--model", options.model] if options.model else []
    command += [] if on else ["--disable-metrics"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        base = None
        for line in process.stdout:
            if found := re.search(r"ready: (http://\S+)", line):
                base = found[1]
                break
        load(base, options.batch, 20)
        pids = ",".join(str(pid) for pid in [process.pid, *children(process.pid)])
        try:
            perf = subprocess.Popen(
                ["perf", "stat", "-x", ",", "-e", "instructions:u", "-p", pids],
                stderr=subprocess.PIPE, text=True)
            time.sleep(0.3)
        except FileNotFoundError:
            perf = None
        tokens, seconds = load(base, options.batch, options.tokens)
        instructions = None
        if perf:
            perf.send_signal(2)
            counted = re.search(r"^(\d+),", perf.communicate()[1], re.M)
            instructions = int(counted[1]) / tokens if counted else None
        return tokens / seconds, instructions
    finally:
        process.send_signal(2)
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tutti", default="target/release/tutti")
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    speeds, counts = {True: [], False: []}, {True: [], False: []}
    for _ in range(options.rounds):
        for on in (True, False):
            speed, instructions = once(options, on)
            speeds[on].append(speed)
            if instructions:
                counts[on].append(instructions)
    for on in (True, False):
        name = "on " if on else "off"
        line = f"metrics {name}: {statistics.median(speeds[on]):9.1f} tokens/s"
        if counts[on]:
            line += f", {statistics.median(counts[on]):12.0f} instructions per token"
        print(line, "of", [round(speed) for speed in speeds[on]])


if __name__ == "__main__":
    main()

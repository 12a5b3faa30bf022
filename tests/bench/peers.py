#!/usr/bin/env python3
"""Compares Tutti with llama.cpp on this machine's CPU, on the same weights, in interleaved runs.

    tests/bench/peers.py --tutti target/release/tutti --model DIR \\
        --llama-bench LLAMA_CPP/bin/llama-bench --gguf FILE [--threads 1,2] [--rounds 5]

Each round runs every engine once per thread count, so that a drift of the machine (heat, other
work) meets all of them. Prints the medians as a Markdown table. See README.md beside this file.

Only the standard library, and Linux's /proc, are needed.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

PREFILL_TOKENS = 512  # one prompt of this length
DECODE_CONTEXT = 32  # tokens in the cache of each sequence when decoding begins
DECODE_TOKENS = 128  # tokens decoded per sequence
# CPU time of other processes, in cores, above which a run says little about the engine.
FOREIGN_MAX = 0.10


def cpu_seconds():
    """CPU seconds that this machine spent on anything but idling."""
    fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]
    ticks = [int(field) for field in fields]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def children_seconds():
    """CPU seconds of the processes that this one started and that ended."""
    times = os.times()
    return times.children_user + times.children_system


def run(command):
    """Runs a command; returns its stdout and the cores that others used meanwhile."""
    before = cpu_seconds(), children_seconds(), os.times().elapsed
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nexit code {done.returncode}\n{done.stderr[-2000:]}")
    machine, own, elapsed = cpu_seconds(), children_seconds(), os.times().elapsed
    foreign = (machine - before[0]) - (own - before[1])
    return done.stdout, max(0.0, foreign / max(elapsed - before[2], 1e-3))


def json_lines(text):
    """The JSON objects among the lines of a program's output."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def bench_tutti(args, threads):
    """One run of `tutti bench`: tokens per second by case."""
    command = [args.tutti, "bench", "--model", args.model, "--threads", str(threads)]
    out, foreign = run(command)
    lines = json_lines(out)
    if not lines:
        sys.exit(f"{' '.join(command)} printed no JSON line:\n{out[-2000:]}")
    result = lines[-1]
    if result.get("threads") != threads:
        sys.exit(f"asked tutti for {threads} threads, it used {result.get('threads')}")
    return {case: result[case] for case in args.cases if case in result}, foreign


def bench_llama_cpp(args, threads):
    """The same cases by llama-bench and, for batches, llama-batched-bench."""
    results, foreign_most = {}, 0.0
    common = ["-m", args.gguf, "-t", str(threads), "-ngl", "0"]
    for case in args.cases:
        batch = int(case.removeprefix("decode_b")) if case.startswith("decode_b") else 0
        if batch <= 1:
            tokens = (
                ["-p", str(PREFILL_TOKENS), "-n", "0"]
                if batch == 0
                else ["-p", "0", "-n", str(DECODE_TOKENS), "-d", str(DECODE_CONTEXT)]
            )
            out, foreign = run([args.llama_bench, *common, "-r", "1", "-o", "json", *tokens])
            results[case] = json.loads(out)[0]["avg_ts"]
        else:
            cells = (DECODE_CONTEXT + DECODE_TOKENS) * batch + 64
            out, foreign = run(
                [args.llama_batched_bench, *common, "-tb", str(threads), "-c", str(cells)]
                + ["-b", "2048", "-ub", "512", "-npp", str(DECODE_CONTEXT)]
                + ["-ntg", str(DECODE_TOKENS), "-npl", str(batch), "--output-format", "jsonl"]
            )
            results[case] = json_lines(out)[-1]["speed_tg"]
        foreign_most = max(foreign_most, foreign)
    return results, foreign_most


def cpu_name():
    """The processor, as the kernel calls it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def spread(values):
    """Half the range of the values, in percent of their median."""
    return 50 * (max(values) - min(values)) / statistics.median(values)


def table(samples, threads, cases):
    """Medians as Markdown; `*` marks figures of runs that were disturbed."""
    lines = [
        "| case | threads | tutti tok/s | llama.cpp tok/s | ratio |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for case in cases:
        for count in threads:
            cells, medians = [], []
            for engine in ("tutti", "llama.cpp"):
                runs = samples.get((engine, count, case), [])
                if not runs:
                    cells.append("-")
                    continue
                # Prefer undisturbed runs; where there is none, say so.
                quiet = [value for value, foreign in runs if foreign <= FOREIGN_MAX]
                values = quiet or [value for value, _ in runs]
                medians.append(statistics.median(values))
                mark = "" if quiet else " *"
                cells.append(f"{medians[-1]:.1f} ± {spread(values):.0f} %{mark}")
            ratio = f"{medians[0] / medians[1]:.2f}" if len(medians) == 2 else "-"
            lines.append(f"| {case} | {count} | {cells[0]} | {cells[1]} | {ratio} |")
    return "\n".join(lines)


def parse_args():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tutti", required=True, help="the program, built with --release")
    parser.add_argument("--model", required=True, help="model folder in Hugging Face format")
    parser.add_argument("--llama-bench", required=True, help="llama.cpp's llama-bench")
    parser.add_argument("--llama-batched-bench", help="[default: beside llama-bench]")
    parser.add_argument("--gguf", required=True, help="the same weights, converted to bf16 GGUF")
    parser.add_argument("--threads", default="1,2", help="thread counts [default: 1,2]")
    parser.add_argument("--rounds", type=int, default=5, help="[default: 5]")
    parser.add_argument("--cases", default="prefill512,decode_b1,decode_b8")
    args = parser.parse_args()
    if args.llama_batched_bench is None:
        args.llama_batched_bench = str(Path(args.llama_bench).with_name("llama-batched-bench"))
    args.threads = [int(count) for count in args.threads.split(",")]
    args.cases = args.cases.split(",")
    if args.rounds < 1 or min(args.threads) < 1:
        parser.error("--rounds and --threads must be at least 1")
    return args


def main():
    args = parse_args()
    engines = {"tutti": bench_tutti, "llama.cpp": bench_llama_cpp}
    samples = {}
    for index in range(args.rounds):
        for threads in args.threads:
            # The order turns, so that no engine always runs on the hotter machine.
            order = list(engines.items())
            for engine, bench in order if index % 2 == 0 else reversed(order):
                results, foreign = bench(args, threads)
                for case, value in results.items():
                    samples.setdefault((engine, threads, case), []).append((value, foreign))
                shown = ", ".join(f"{case} {value:.1f}" for case, value in results.items())
                print(
                    f"round {index + 1}/{args.rounds} {engine} {threads} thread(s): {shown}"
                    f" (others used {foreign:.2f} cores)",
                    file=sys.stderr,
                )
    print(f"{cpu_name()}, {os.cpu_count()} CPUs; medians of {args.rounds} interleaved rounds\n")
    print(table(samples, args.threads, args.cases))
    if any(foreign > FOREIGN_MAX for runs in samples.values() for _, foreign in runs):
        print(f"\n`*`: in every run others used more than {FOREIGN_MAX} cores. Disturbed runs", end=" ")
        print("are left out where a quiet one exists.")


if __name__ == "__main__":
    main()

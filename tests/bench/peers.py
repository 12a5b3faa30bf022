#!/usr/bin/env python3
"""Compares Tutti with llama.cpp and vLLM on this machine's CPU, on the same weights, in turns.

    tests/bench/peers.py --tutti target/release/tutti --model DIR \\
        [--llama-bench LLAMA_CPP/bin/llama-bench --gguf FILE] [--vllm-python VENV/bin/python] \\
        [--threads 1,2] [--rounds 5]

Each round runs every engine once per thread count, so that a drift of the machine (heat, other
work) meets all of them. Prints the medians as a Markdown table. See README.md beside this file.

Only the standard library, and Linux's /proc, are needed.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
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


def wait_quiet(limit):
    """Waits until others leave the machine alone for a second, at most `limit` seconds."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        before = cpu_seconds()
        time.sleep(1)
        if cpu_seconds() - before <= FOREIGN_MAX:
            break


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


def case_batch(case):
    """Sequences of a decode case; 0 for the prefill case."""
    return int(case.removeprefix("decode_b")) if case.startswith("decode_b") else 0


def json_lines(text):
    """The JSON objects among the lines of a program's output."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def bench_tutti(args, threads):
    """One run of `tutti bench`: tokens per second by case."""
    batches = [str(case_batch(case)) for case in args.cases if case_batch(case)]
    command = [args.tutti, "bench", "--model", args.model, "--threads", str(threads)]
    command += ["--device", "cpu", "--prompt-tokens", str(PREFILL_TOKENS)]
    # It measures at least one batch; one that no case asks for is left out below.
    command += ["--decode-steps", str(DECODE_TOKENS), "--batches", ",".join(batches) or "1"]
    out, foreign = run(command + args.tutti_args)
    lines = json_lines(out)
    if not lines:
        sys.exit(f"{' '.join(command)} printed no JSON line:\n{out[-2000:]}")
    result = lines[-1]
    if result.get("threads") != threads:
        sys.exit(f"asked tutti for {threads} threads, it used {result.get('threads')}")
    if missing := [case for case in args.cases if case not in result]:
        sys.exit(f"tutti measured no {', '.join(missing)}: {lines[-1]}")
    return {case: result[case] for case in args.cases}, foreign


def bench_llama_cpp(args, threads):
    """The same cases by llama-bench and, for batches, llama-batched-bench."""
    results, foreign_most = {}, 0.0
    common = ["-m", args.gguf, "-t", str(threads), "-ngl", "0"]
    for case in args.cases:
        batch = case_batch(case)
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


def session_seconds(session):
    """CPU seconds of the processes of a session, and of their children that ended."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            stat = (process / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # ended meanwhile
            continue
        fields = stat.rpartition(")")[2].split()
        if int(fields[3]) == session:
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


class Vllm:
    """Processes of vllm_cpu.py, one per thread count: loading takes longer than a round.

    All are stopped but the one whose turn it is: an idle engine's threads may spin.
    """

    def __init__(self):
        self.processes = {}

    def start(self, args, threads):
        """Starts the process of a thread count and waits until its model is loaded."""
        most = max(1, *(case_batch(case) for case in args.cases))
        longest = max(PREFILL_TOKENS + 4, DECODE_CONTEXT + DECODE_TOKENS + 1)
        command = [args.vllm_python, str(Path(__file__).with_name("vllm_cpu.py"))]
        command += ["--model", args.model, "--threads", str(threads)]
        command += ["--sequences", str(most), "--tokens", str(longest)]
        command += ["--batch-tokens", str(max(longest, most * DECODE_CONTEXT))]
        environment = dict(os.environ)
        if args.vllm_preload:
            environment["LD_PRELOAD"] = ":".join(args.vllm_preload)
        log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,  # so that it can be stopped with all that it starts
        )
        self.processes[threads] = process, log
        version = self.answer(threads)["version"]
        os.killpg(process.pid, signal.SIGSTOP)
        return version

    def answer(self, threads):
        """The next line of a process, which ends this program if it has ended."""
        process, log = self.processes[threads]
        line = process.stdout.readline()
        if not line:
            log.seek(0)
            sys.exit(f"vLLM ended, exit code {process.wait()}\n{log.read()[-2000:]}")
        return json.loads(line)

    def bench(self, args, threads):
        """One round of all cases: tokens per second by case."""
        process, _ = self.processes[threads]
        results = {}
        before = cpu_seconds(), session_seconds(process.pid), os.times().elapsed
        os.killpg(process.pid, signal.SIGCONT)
        for case in args.cases:
            batch = case_batch(case)
            prompt, steps = (DECODE_CONTEXT, DECODE_TOKENS) if batch else (PREFILL_TOKENS, 0)
            asked = {"sequences": batch or 1, "prompt": prompt, "steps": steps}
            with contextlib.suppress(BrokenPipeError):  # has ended: `answer` tells how
                process.stdin.write(json.dumps(asked) + "\n")
                process.stdin.flush()
            results[case] = (batch * steps or prompt) / self.answer(threads)["seconds"]
        os.killpg(process.pid, signal.SIGSTOP)
        machine, own, elapsed = cpu_seconds(), session_seconds(process.pid), os.times().elapsed
        foreign = (machine - before[0]) - (own - before[1])
        return results, max(0.0, foreign / max(elapsed - before[2], 1e-3))

    def end(self):
        """Ends all processes, stopped ones, too."""
        for process, log in self.processes.values():
            with contextlib.suppress(ProcessLookupError):  # ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.close()


def cpu_name():
    """The processor, as the kernel calls it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def spread(values):
    """Half the range of the values, in percent of their median."""
    return 50 * (max(values) - min(values)) / statistics.median(values)


def cell(runs):
    """The median of (tokens per second, foreign cores) pairs, and how it is shown."""
    if not runs:
        return None, "-"
    # Prefer undisturbed runs; where there is none, say so.
    quiet = [value for value, foreign in runs if foreign <= FOREIGN_MAX]
    values = quiet or [value for value, _ in runs]
    median = statistics.median(values)
    return median, f"{median:.1f} ± {spread(values):.0f} %{'' if quiet else ' *'}"


def table(samples, engines, threads, cases):
    """Medians as Markdown; `*` marks figures of runs that were disturbed.

    The first engine is the one that the others are compared with.
    """
    names = [f"{engine} tok/s" for engine in engines]
    titles = ["case", "threads", names[0]]
    titles += [title for name in names[1:] for title in (name, "ratio")]
    lines = [f"| {' | '.join(titles)} |", f"| --- |{' ---: |' * (len(titles) - 1)}"]
    for case in cases:
        for count in threads:
            own, shown = cell(samples.get((engines[0], count, case), []))
            row = [case, str(count), shown]
            for engine in engines[1:]:
                other, shown = cell(samples.get((engine, count, case), []))
                row += [shown, f"{own / other:.2f}" if own and other else "-"]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def parse_args():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tutti", required=True, help="the program, built with --release")
    parser.add_argument("--tutti-args", default="", help="more options of `tutti bench`")
    parser.add_argument("--model", required=True, help="model folder in Hugging Face format")
    parser.add_argument("--llama-bench", help="llama.cpp's llama-bench")
    parser.add_argument("--llama-batched-bench", help="[default: beside llama-bench]")
    parser.add_argument("--gguf", help="the same weights, converted to bf16 GGUF")
    parser.add_argument("--vllm-python", help="the interpreter that has vLLM's CPU build")
    parser.add_argument("--vllm-preload", help="LD_PRELOAD of vLLM: its allocator and OpenMP")
    parser.add_argument("--threads", default="1,2", help="thread counts [default: 1,2]")
    parser.add_argument("--rounds", type=int, default=5, help="[default: 5]")
    parser.add_argument(
        "--wait", type=float, default=30, help="seconds to wait for a quiet machine [default: 30]"
    )
    parser.add_argument("--cases", default="prefill512,decode_b1,decode_b8,decode_b16")
    args = parser.parse_args()
    if bool(args.llama_bench) != bool(args.gguf):
        parser.error("--llama-bench and --gguf belong together")
    if not args.llama_bench and not args.vllm_python:
        parser.error("nothing to compare with: give --llama-bench and --gguf, or --vllm-python")
    if args.llama_bench and args.llama_batched_bench is None:
        args.llama_batched_bench = str(Path(args.llama_bench).with_name("llama-batched-bench"))
    # The loader only warns of libraries that are not there, and vLLM would be slow.
    libraries = args.vllm_preload.split(":") if args.vllm_preload else []
    args.vllm_preload = [str(Path(library).resolve()) for library in libraries]
    for library in args.vllm_preload:
        if not Path(library).is_file():
            parser.error(f"--vllm-preload: no file {library}")
    args.threads = [int(count) for count in args.threads.split(",")]
    args.tutti_args = shlex.split(args.tutti_args)
    args.cases = args.cases.split(",")
    for case in args.cases:
        if not re.fullmatch(rf"prefill{PREFILL_TOKENS}|decode_b[1-9][0-9]*", case):
            parser.error(f"--cases: {case!r} is neither prefill{PREFILL_TOKENS} nor decode_bN")
    if args.rounds < 1 or min(args.threads) < 1:
        parser.error("--rounds and --threads must be at least 1")
    return args


def measure(args, engines):
    """All rounds: (tokens per second, foreign cores) by (engine, threads, case)."""
    samples = {}
    for index in range(args.rounds):
        for threads in args.threads:
            # The order turns, so that no engine always runs on the hotter machine.
            first = index % len(engines)
            order = list(engines.items())
            for engine, bench in order[first:] + order[:first]:
                wait_quiet(args.wait)
                results, foreign = bench(args, threads)
                for case, value in results.items():
                    samples.setdefault((engine, threads, case), []).append((value, foreign))
                shown = ", ".join(f"{case} {value:.1f}" for case, value in results.items())
                print(
                    f"round {index + 1}/{args.rounds} {engine} {threads} thread(s): {shown}"
                    f" (others used {foreign:.2f} cores)",
                    file=sys.stderr,
                )
    return samples


def main():
    args = parse_args()
    engines = {"tutti": bench_tutti}
    if args.llama_bench:
        engines["llama.cpp"] = bench_llama_cpp
    vllm = Vllm()
    try:
        if args.vllm_python:
            engines["vLLM"] = vllm.bench
            for threads in args.threads:
                print(f"{vllm.start(args, threads)}: {threads} thread(s) ready", file=sys.stderr)
        samples = measure(args, engines)
    finally:
        vllm.end()
    print(f"{cpu_name()}, {os.cpu_count()} CPUs; medians of {args.rounds} interleaved rounds\n")
    print(table(samples, list(engines), args.threads, args.cases))
    if any(foreign > FOREIGN_MAX for runs in samples.values() for _, foreign in runs):
        print(f"\n`*`: in every run others used more than {FOREIGN_MAX} cores. Disturbed runs", end=" ")
        print("are left out where a quiet one exists.")


if __name__ == "__main__":
    main()

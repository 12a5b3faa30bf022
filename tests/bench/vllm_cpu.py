#!/usr/bin/env python3
"""vLLM's CPU backend as a process that peers.py asks for one case at a time.

    VENV/bin/python tests/bench/vllm_cpu.py --model DIR --threads N --sequences N --tokens N

Loads the model once: that takes longer than a round of all cases. Prints {"version": ...} when it
is ready. Then reads one JSON line per case, {"sequences": N, "prompt": TOKENS, "steps": N}, and
answers {"seconds": ...}: of the prefill with its first token where `steps` is 0, else of that many
decode steps alone. Ends at the end of its input, and when peers.py dies.

The interpreter that runs this has vLLM; peers.py needs none.
"""

import argparse
import ctypes
import json
import os
import random
import signal
import sys
import time

KV_CACHE_BYTES = 1 << 30
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def parse_args():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model folder in Hugging Face format")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--sequences", type=int, required=True, help="most in any case")
    parser.add_argument("--tokens", type=int, required=True, help="longest sequence of any case")
    parser.add_argument("--batch-tokens", type=int, required=True, help="longest prefill step")
    return parser.parse_args()


def confine(threads):
    """Holds this process to `threads` cores. Comes before importing torch, which reads it once."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    if len(cores) < threads:
        sys.exit(f"{threads} threads asked for, this process may use {len(cores)} cores")
    # vLLM's own binding alone left an engine of one thread on two cores.
    os.sched_setaffinity(0, cores)
    listed = ",".join(str(core) for core in cores)
    os.environ.update(
        CUDA_VISIBLE_DEVICES="",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
        VLLM_CPU_NUM_OF_RESERVED_CPU="0",
        VLLM_CPU_OMP_THREADS_BIND=listed,
        # The engine runs in this process, which then is all there is to stop between turns.
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_HOST_IP="127.0.0.1",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
        VLLM_TARGET_DEVICE="cpu",
        # What vLLM sets for the worker processes that it would start otherwise.
        KMP_AFFINITY=f"granularity=fine,explicit,proclist=[{listed}]",
        KMP_BLOCKTIME="5",
        KMP_TPAUSE="0",
        OMP_NUM_THREADS=str(threads),
    )


def load(args):
    """Loads the model: a function that times requests, and what computes them, in words."""
    import torch
    import vllm

    engine = vllm.LLM(
        args.model,
        disable_log_stats=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        max_model_len=args.tokens,
        max_num_batched_tokens=args.batch_tokens,
        max_num_seqs=args.sequences,
    )
    vocabulary = engine.llm_engine.model_config.get_vocab_size()

    def generate(sequences, prompt, tokens):
        """Seconds from the request to the last token of `sequences` random prompts."""
        prompts = [
            {"prompt_token_ids": [random.randrange(vocabulary) for _ in range(prompt)]}
            for _ in range(sequences)
        ]
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        elapsed = time.perf_counter() - began
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        if counts != [tokens] * sequences:
            sys.exit(f"asked vLLM for {sequences} x {tokens} tokens, it returned {counts}")
        return elapsed

    return generate, f"vLLM {vllm.__version__}, torch {torch.__version__}"


def measure(generate, case):
    """Seconds of one case, after a short run of the same shape, as the other engines do."""
    sequences, prompt, steps = case["sequences"], case["prompt"], case["steps"]
    generate(sequences, prompt, 4)
    first = generate(sequences, prompt, 1)
    if steps == 0:
        return first
    return generate(sequences, prompt, 1 + steps) - first


def main():
    # peers.py stops this process between its turns: it could not notice the end of its input.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    args = parse_args()
    confine(args.threads)
    # Answers go where stdout led; whatever vLLM and its libraries print goes to stderr.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    generate, version = load(args)
    print(json.dumps({"version": version}), file=answers)
    for line in sys.stdin:
        print(json.dumps({"seconds": measure(generate, json.loads(line))}), file=answers)


if __name__ == "__main__":
    main()

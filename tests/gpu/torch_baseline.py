"""What torch does with the same shapes on the same GPU, to compare Tutti's figures with.

- decode: a plain Llama of random bf16 weights, whose step (embedding to arg-max, with a KV cache and
  scaled-dot-product attention) is captured as one CUDA graph and replayed;
- products: `x @ w.T` in bf16, which is cuBLAS, over matrices that no cache holds all of.

Prints a row for each, as the parts of the GPU check do: state, name, figures, separated by tabs.
Usage: torch_baseline.py SHAPES, which is JSON: name, sizes, batches, context, steps, products' rows.
"""
import json
import sys
import time

import torch
import torch.nn.functional as F


def row(state, name, words):
    print(f"@row {state}\t{name}\t{words}", flush=True)


class Clock:
    """Time on the device."""

    def __init__(self, device):
        self.device = device

    def settle(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, call, times):
        call()
        self.settle()
        began = time.perf_counter()
        for _ in range(times):
            call()
        self.settle()
        return (time.perf_counter() - began) / times


class Llama:
    """A decode step: one token of each sequence, all at the same position."""

    def __init__(self, shape, batch, room, device):
        make = {"device": device, "dtype": torch.bfloat16}
        self.shape, self.batch, self.device = shape, batch, device
        hidden, inner, dim = shape["hidden"], shape["inner"], shape["head_dim"]
        q, kv = shape["heads"] * dim, shape["kv_heads"] * dim

        def matrix(rows, columns):
            return torch.empty(rows, columns, **make).normal_(0, columns**-0.5)

        self.embedding = matrix(shape["vocab"], hidden)
        self.head = self.embedding if shape["tied"] else matrix(shape["vocab"], hidden)
        self.layers = [
            {
                "qkv": matrix(q + 2 * kv, hidden),
                "output": matrix(hidden, q),
                "gate_up": matrix(2 * inner, hidden),
                "down": matrix(hidden, inner),
                "norms": torch.ones(2, hidden, **make),
            }
            for _ in range(shape["layers"])
        ]
        cache = (batch, shape["kv_heads"], room, dim)
        self.caches = [
            (torch.zeros(cache, **make), torch.zeros(cache, **make)) for _ in self.layers
        ]
        self.tokens = torch.zeros(batch, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        angles = torch.outer(torch.arange(room), 5e5 ** (-torch.arange(0, dim, 2) / dim))
        self.cos = torch.cat([angles.cos()] * 2, -1).to(**make)
        self.sin = torch.cat([angles.sin()] * 2, -1).to(**make)
        self.places = torch.arange(room, device=device)

    def rope(self, x):
        cos, sin = self.cos[self.position], self.sin[self.position]
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def step(self):
        shape, batch = self.shape, self.batch
        heads, kv_heads, dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
        hidden = (shape["hidden"],)
        x = self.embedding[self.tokens]
        mask = (self.places <= self.position).view(1, 1, 1, -1)
        for layer, (keys, values) in zip(self.layers, self.caches):
            y = F.rms_norm(x, hidden, layer["norms"][0], 1e-5) @ layer["qkv"].T
            q, k, v = y.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
            q = self.rope(q.view(batch, heads, 1, dim))
            keys.index_copy_(2, self.position, self.rope(k.view(batch, kv_heads, 1, dim)))
            values.index_copy_(2, self.position, v.view(batch, kv_heads, 1, dim))
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
            x = x + y.reshape(batch, heads * dim) @ layer["output"].T
            y = F.rms_norm(x, hidden, layer["norms"][1], 1e-5) @ layer["gate_up"].T
            gate, up = y.chunk(2, -1)
            x = x + (F.silu(gate) * up) @ layer["down"].T
        logits = F.rms_norm(x, hidden) @ self.head.T
        self.tokens.copy_(logits.argmax(-1))
        self.position.add_(1)

    def replayed(self):
        """The step as a CUDA graph, where there is CUDA."""
        if self.device != "cuda":
            return self.step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


def decode(shape, device):
    for batch in shape["batches"]:
        name = f"torch, {shape['name']} decode, batch {batch}"
        try:
            context, steps = shape["context"], shape["steps"]
            model = Llama(shape, batch, context + steps + 16, device)
            step = model.replayed()
            model.position.fill_(context)
            took = Clock(device).seconds(step, steps)
            row("ok", name, f"{batch / took:.0f} tokens/s, step {took * 1e3:.3f} ms")
        except (RuntimeError, TypeError, AttributeError) as error:
            row("FAILED", name, " ".join(str(error).split())[:300])
        finally:
            model = step = None
            if device == "cuda":
                torch.cuda.empty_cache()


def products(shape, device):
    make = {"device": device, "dtype": torch.bfloat16}
    for what, n, k in shape["matrices"]:
        # So many that none is in a cache when its turn comes again.
        count = max(1, min(16, shape["cold_bytes"] // (2 * n * k)))
        try:
            matrices = [torch.empty(n, k, **make).normal_(0, k**-0.5) for _ in range(count)]
            for rows in shape["rows"]:
                x = torch.empty(rows, k, **make).normal_()

                def all_of_them():
                    for matrix in matrices:
                        torch.matmul(x, matrix.T)

                took = Clock(device).seconds(all_of_them, 8) / count
                rate, flops = 2 * n * k / took / 1e12, 2 * n * k * rows / took / 1e12
                words = f"{took * 1e6:.1f} us {rate:.2f} TB/s {flops:.0f} TFLOP/s"
                row("ok", f"torch, {shape['name']} {what} {n} x {k}, {rows} rows", words)
        except RuntimeError as error:
            row("FAILED", f"torch, {shape['name']} {what}", " ".join(str(error).split())[:300])


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = json.loads(sys.argv[1])
    if device == "cpu" and wanted["needs_gpu"]:
        row("ok", "torch", f"not available here: torch {torch.__version__} finds no GPU")
        return
    with torch.inference_mode():
        for shape in wanted["shapes"]:
            decode(shape, device)
            if shape["rows"]:
                products(shape, device)


main()

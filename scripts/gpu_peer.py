#!/usr/bin/env python3
"""PyTorch on the GPU benchmarks of `examples/bench`: the same work, measured the same way, JSON lines on stdout."""

import argparse
import json
import math
import statistics
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LAUNCHES, TIMES = 20, 5
WARMUP, STEPS = 3, 20
VOCABULARY, CONTEXT, LAYERS, HEADS, WIDTH, BATCH = 50304, 1024, 12, 12, 768, 64
PEER = "torch"


def emit(workload, metric, value, unit):
    row = {"peer": PEER, "workload": workload, "metric": metric, "value": round(float(value), 5), "unit": unit}
    print(json.dumps(row), flush=True)


# ---- Single operations ----


def row(name, amount, unit, f):
    """Milliseconds of many launches between two waits, and what that makes of bytes or operations a second."""
    f(), f()
    torch.cuda.synchronize()
    times = []
    for _ in range(TIMES):
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            f()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / LAUNCHES)
    ms = statistics.median(times)
    emit("gpu-ops", name, ms, "ms")
    emit("gpu-ops", name, amount / ms / (1e6 if unit == "GB/s" else 1e9), unit)


def passes(name, amounts, unit, inputs, f):
    leaves = [x.detach().requires_grad_() for x in inputs]
    ones = torch.ones_like(f(*leaves))

    def forward():
        with torch.no_grad():
            f(*leaves)

    row(f"{name}/fwd", amounts[0], unit, forward)
    row(f"{name}/fwd+bwd", amounts[1], unit, lambda: torch.autograd.grad(f(*leaves), leaves, ones))


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda").to(dtype)


def ops():
    size = 256 << 20
    for dtype, name in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
        x = random(size // 1024 // dtype.itemsize, 1024, dtype=dtype)
        w, b = random(1024, dtype=dtype), random(1024, dtype=dtype)
        row(f"copy_{name}", 2 * size, "GB/s", lambda: x.clone())
        bytes_moved = (2 * size, 5 * size)
        passes(f"gelu_{name}", bytes_moved, "GB/s", [x], lambda x: F.gelu(x, approximate="tanh"))
        passes(f"layer_norm_{name}", bytes_moved, "GB/s", [x, w, b], lambda x, w, b: F.layer_norm(x, (1024,), w, b))
        passes(f"softmax_{name}", bytes_moved, "GB/s", [x], lambda x: x.softmax(-1))
    del x
    for dtype, name, n in ((torch.bfloat16, "bf16", 8192), (torch.bfloat16, "bf16", 4096), (torch.float32, "f32", 4096)):
        a, b = random(n, n, dtype=dtype), random(n, n, dtype=dtype)
        row(f"matmul_{name}_{n}", 2 * n**3, "TFLOP/s", lambda: a @ b)
    for batch, tokens in ((64, 1024), (16, 4096)):
        q = [random(batch, HEADS, tokens, 64, dtype=torch.bfloat16) for _ in range(3)]
        flops = 2 * 2 * batch * HEADS * tokens * tokens * 64 / 2
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
            passes(f"attention_{tokens}", (flops, 3.5 * flops), "TFLOP/s", q, attend)
    parameters = [random(16 << 20).requires_grad_() for _ in range(8)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    adam = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    row("adamw", 7 * 4 * 8 * (16 << 20), "GB/s", adam.step)


# ---- Training ----


def hash64(seed, start, count):
    """Numbers of the splitmix64 stream that begins at seed (Steele, Lea, Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def uniform(seed, shape, bound):
    z = (hash64(seed, 0, math.prod(shape)) >> np.uint64(40)).astype(np.float32)
    return torch.from_numpy((z * np.float32(2**-23) - np.float32(1)) * np.float32(bound)).view(shape)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.attn(self.ln1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.lnf = nn.LayerNorm(WIDTH)
        self.reset()

    @torch.no_grad()
    def reset(self):
        """Matrix number n takes stream n; biases are 0 and gains 1."""
        bound = 0.02 * math.sqrt(3.0)
        residual = bound / math.sqrt(2.0 * LAYERS)
        matrices = [(self.wte.weight, bound), (self.wpe.weight, bound)]
        for b in self.blocks:
            matrices += [(b.attn.weight, bound), (b.proj.weight, residual), (b.fc.weight, bound), (b.out.weight, residual)]
            for linear in (b.attn, b.proj, b.fc, b.out):
                linear.bias.zero_()
        for n, (matrix, limit) in enumerate(matrices):
            matrix.copy_(uniform(n, matrix.shape, limit))

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.lnf(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(path):
    text = torch.from_numpy(np.fromfile(path, dtype=np.uint8).astype(np.int64))
    model = Gpt().cuda()
    adam = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    step_of = torch.compile(model) if PEER == "torch-compile" else model
    times, losses = [], []
    for step in range(WARMUP + STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        at = hash64(1337, step * BATCH, BATCH) % np.uint64(len(text) - CONTEXT)
        rows = torch.stack([text[int(a) : int(a) + CONTEXT + 1] for a in at]).cuda()
        adam.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            loss = step_of(rows[:, :-1], rows[:, 1:])
        loss.backward()
        adam.step()
        losses.append(loss.item())
        times.append((time.perf_counter() - start) * 1e3)
    ms = statistics.median(times[WARMUP:])
    emit("gpt2-124m", "step", ms, "ms")
    emit("gpt2-124m", "throughput", BATCH * CONTEXT / ms * 1e3, "tokens/s")
    for n, loss in enumerate(losses[:20]):
        emit("gpt2-124m", f"loss{n}", loss, "nat")
    emit("gpt2-124m", "device_peak", torch.cuda.max_memory_allocated() / 2**20, "MiB")


def main():
    global PEER
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=["gpu-ops", "gpt2-124m"])
    parser.add_argument("--data", required=True)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if args.compile:
        PEER = "torch-compile"
    torch.set_float32_matmul_precision("highest")
    ops() if args.workload == "gpu-ops" else train(args.data)


if __name__ == "__main__":
    main()

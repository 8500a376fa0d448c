#!/usr/bin/env python3
"""The models of `bench models` in PyTorch: the same layers, initial weights, batches and optimizers.

    cargo run --release --example bench -- models --only resnet18 >> ours.jsonl    # one model a process: memory is a peak
    scripts/models_peer.py run --only resnet18 --threads 2 >> theirs.jsonl
    scripts/models_peer.py compare ours.jsonl theirs.jsonl   # times and peak memory, ours over PyTorch's
"""

import argparse
import json
import math
import resource
import statistics
import sys
import time

WARMUP, STEPS = 3, 15


def uniform(seed, shape, bound):
    """Uniform in [-bound, bound) by splitmix64, 24 random bits each."""
    z = hash64(seed, math.prod(shape)) >> np.uint64(40)
    unit = z.astype(np.float32) * np.float32(2**-23) - np.float32(1)
    return torch.from_numpy(unit * np.float32(bound)).view(shape)


def ids(seed, shape, end):
    found = hash64(seed, math.prod(shape)) % np.uint64(end)
    return torch.from_numpy(found.astype(np.int64)).view(shape)


def hash64(seed, count):
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def layers():
    """A function for each model, and its batches: input shape, vocabulary or None, classes, targets' shape, AdamW or SGD."""
    nn = torch.nn

    def conv(i, o, kernel, stride=1, groups=1):
        return nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=False)

    class Residual(nn.Module):
        def __init__(self, f, shortcut=None):
            super().__init__()
            self.f, self.shortcut = f, shortcut

        def forward(self, x):
            return self.f(x) + (self.shortcut(x) if self.shortcut else x)

    def basic(i, o, stride):
        f = [conv(i, o, 3, stride), nn.BatchNorm2d(o), nn.ReLU(True), conv(o, o, 3), nn.BatchNorm2d(o)]
        shortcut = nn.Sequential(conv(i, o, 1, stride), nn.BatchNorm2d(o)) if stride != 1 or i != o else None
        return [Residual(nn.Sequential(*f), shortcut), nn.ReLU(True)]

    def resnet18():
        made, i = [conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)], 64
        for o, stride in (64, 1), (128, 2), (256, 2), (512, 2):
            made += basic(i, o, stride) + basic(o, o, 1)
            i = o
        return nn.Sequential(*made, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 200))

    def inverted(i, o, stride, wider):
        inner = i * wider
        widened = [conv(i, inner, 1), nn.BatchNorm2d(inner), nn.ReLU6(True)] if wider != 1 else []
        depthwise = [conv(inner, inner, 3, stride, inner), nn.BatchNorm2d(inner), nn.ReLU6(True)]
        return nn.Sequential(*widened, *depthwise, conv(inner, o, 1), nn.BatchNorm2d(o))

    def mobilenet():
        made, i = [conv(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU6(True)], 32
        stages = (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)
        for wider, o, count, stride in stages:
            made.append(inverted(i, o, stride, wider))
            made += [Residual(inverted(o, o, 1, wider)) for _ in range(count - 1)]
            i = o
        made += [conv(320, 1280, 1), nn.BatchNorm2d(1280), nn.ReLU6(True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*made, nn.Linear(1280, 200))

    def twice(i, o):
        made = [conv(i, o, 3), nn.BatchNorm2d(o), nn.ReLU(True), conv(o, o, 3), nn.BatchNorm2d(o), nn.ReLU(True)]
        return nn.Sequential(*made)

    class Level(nn.Module):
        def __init__(self, i, width, depth):
            super().__init__()
            inside = Level(width, 2 * width, depth - 1) if depth > 1 else twice(width, 2 * width)
            self.before = twice(i, width)
            self.below = nn.Sequential(nn.MaxPool2d(2), inside, nn.ConvTranspose2d(2 * width, width, 2, 2))
            self.after = twice(2 * width, width)

        def forward(self, x):
            x = self.before(x)
            return self.after(torch.cat([x, self.below(x)], 1))

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(256, 512, 2, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0].flatten(0, 1)

    class Patches(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.projection = nn.Conv2d(3, width, 8, 8)
            self.positions = nn.Parameter(torch.zeros(64, width))

        def forward(self, x):
            return self.projection(x).flatten(2).transpose(1, 2) + self.positions

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(1)

    def vit(width=192):
        layer = lambda: nn.TransformerEncoderLayer(width, 3, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        made = [Patches(width), *(layer() for _ in range(6)), nn.LayerNorm(width), Mean(), nn.Linear(width, 200)]
        return nn.Sequential(*made)

    images = [32, 3, 64, 64]
    return {
        "resnet18": (resnet18, images, None, 200, [32], False),
        "mobilenet": (mobilenet, images, None, 200, [32], False),
        "unet": (lambda: nn.Sequential(Level(3, 32, 4), nn.Conv2d(32, 21, 1)), [4, 3, 128, 128], None, 21, [4, 128, 128], False),
        "lstm": (
            lambda: nn.Sequential(nn.Embedding(10_000, 256), Recurrent(), nn.Linear(512, 10_000)),
            [20, 35], 10_000, 100, [700], True,
        ),
        "vit": (vit, images, None, 200, [32], True),
    }  # fmt: skip


def peak_rss():
    """This process's in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(only, threads):
    torch.set_num_threads(threads)
    exact = any(only == name + suffix for name in layers() for suffix in ("", "-bf16"))
    for name, (make, shape, vocabulary, classes, answers, adam) in layers().items():
        for dtype, suffix in (torch.float32, ""), (torch.bfloat16, "-bf16"):
            if only == name + suffix or not exact and only in name + suffix:
                model = make()
                with torch.no_grad():
                    for stream, (path, parameter) in enumerate(model.named_parameters()):
                        if parameter.dim() == 1:
                            parameter.fill_(1.0 if path.endswith("weight") else 0.0)
                        else:
                            bound = 1 / math.sqrt(math.prod(parameter.shape[1:]))
                            parameter.copy_(uniform(stream, parameter.shape, bound))
                train(name + suffix, model.to(dtype), shape, vocabulary, classes, answers, adam)


def train(workload, model, shape, vocabulary, classes, answers, adam):
    def emit(metric, value, unit):
        row = dict(peer="torch", workload=workload, metric=metric, value=round(value, 5), unit=unit)
        print(json.dumps(row | {"threads": torch.get_num_threads()}), flush=True)

    parameters = list(model.parameters())
    dtype = parameters[0].dtype
    emit("rss_before", peak_rss(), "MiB")
    # bf16 weights have f32 masters, as ours do.
    masters = parameters if dtype == torch.float32 else [p.detach().float() for p in parameters]
    optimizer = torch.optim.AdamW(masters, 1e-3, weight_decay=0.0) if adam else torch.optim.SGD(masters, 1e-4, 0.9)
    times, losses = [], []
    for n in range(WARMUP + STEPS):
        seed = 1000 + 2 * n
        x = ids(seed, shape, vocabulary) if vocabulary else uniform(seed, shape, 1.0).to(dtype)
        y = ids(seed + 1, answers, classes)
        start = time.perf_counter()
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        if masters is not parameters:
            for master, parameter in zip(masters, parameters):
                master.grad = parameter.grad.float()
        optimizer.step()
        if masters is not parameters:
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
        losses.append(loss.item())
        times.append((time.perf_counter() - start) * 1e3)
    emit("step", statistics.median(times[WARMUP:]), "ms")
    emit("peak_rss", peak_rss(), "MiB")
    for n, loss in enumerate(losses[:5]):
        emit(f"loss{n}", loss, "nat")


def compare(ours, theirs):
    rows = [{(r["workload"], r["metric"]): r["value"] for r in map(json.loads, open(path)) if "workload" in r} for path in (ours, theirs)]
    for workload, metric in rows[0]:
        if metric == "step" and (workload, metric) in rows[1]:
            a, b = rows[0][workload, metric], rows[1][workload, metric]
            memory = [r[workload, "peak_rss"] - r[workload, "rss_before"] for r in rows]
            apart = max(abs(rows[0][workload, f"loss{n}"] / rows[1][workload, f"loss{n}"] - 1) for n in range(5))
            print(f"{workload:16} {a:8.1f} ms {b:8.1f} ms {a / b:5.2f}   MiB above the start {memory[0]:.0f} {memory[1]:.0f}   losses apart by {apart:.0e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--only", default="")
    runs.add_argument("--threads", type=int, default=2)
    against = commands.add_parser("compare")
    against.add_argument("ours")
    against.add_argument("theirs")
    given = parser.parse_args()
    if given.command == "compare":
        sys.exit(compare(given.ours, given.theirs))
    try:
        import numpy as np
        import torch
    except ImportError as error:
        sys.exit(f"PyTorch cannot be loaded: {error}")
    run(given.only, given.threads)

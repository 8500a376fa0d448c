#!/usr/bin/env python3
"""Makes a golden set: inputs, outputs and gradients of operators, evaluated by PyTorch in float64.

    generate.py OUT [--cases N] [--seed S] [--only OP] [--sizes small|borders]

N cases an operator over random shapes (odd, empty, single), dtypes, permuted inputs and attributes. The set in `data/`
was made with the defaults. `--sizes borders` takes sizes around warps, blocks and tiles. Needs torch, numpy and safetensors.
"""

import argparse
import json
import math
import os
import random

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
          "i64": torch.int64, "i32": torch.int32, "u8": torch.uint8, "bool": torch.bool}
NAMES = {v: k for k, v in DTYPES.items()}
RTOL = {"f64": 1e-10, "f32": 1e-5, "f16": 4e-3, "bf16": 3.2e-2}
ATOL = {"f64": 1e-11, "f32": 2e-6, "f16": 2e-3, "bf16": 1.6e-2}
R = random.Random()


# Sizes, rarer ones, and how many times the elements of a small set a tensor may have.
SIZES = {"small": ([0, 1, 1, 2, 3, 3, 4, 5, 7, 8, 9, 17, 33], [65], 1),
         "borders": ([0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129], [255, 256, 257, 513, 1025, 4099], 40)}
KIND = "small"


def size(least=0):
    often, rarely, _ = SIZES[KIND]
    if R.random() < 0.9:
        return max(least, R.choice(often))
    return max(least, R.choice(rarely) if rarely[1:] else rarely[0])  # a choice of one would draw, too


def shape(rank=None, least=0, most=700):
    rank = R.choice([0, 1, 1, 2, 2, 3, 4]) if rank is None else rank
    most *= SIZES[KIND][2]
    while True:
        s = [size(least) for _ in range(rank)]
        if math.prod(s) <= most:
            return s


def floats(s, low=-2.0, high=2.0):
    return torch.rand(s, dtype=torch.float64) * (high - low) + low


def dim_of(rank):
    return R.randrange(-rank, rank) if rank else R.choice([0, -1])


def broadcastable(s):
    """A shape that broadcasts to s."""
    s = [1 if R.random() < 0.25 else n for n in s]
    return s[R.choice([0, 0, 0, 1]):]


class Arg:
    def __init__(self, name, value, dtype=None, grad=None):
        self.name, self.value, self.dtype, self.grad = name, value, dtype, grad


# ---- the operators: each returns (arguments, attributes, function of the arguments by name) -----------------------

OPS = {}


def op(*names, family, dtypes=("f32", "f32", "f64", "f16", "bf16"), exact=False):
    def register(make):
        for name in names:
            OPS[name] = (family, dtypes, exact, make)
        return make
    return register


UNARY = {
    "neg": (torch.neg, -3, 3), "abs": (torch.abs, -3, 3), "exp": (torch.exp, -5, 4), "log": (torch.log, 0.01, 9),
    "sqrt": (torch.sqrt, 0.01, 9), "rsqrt": (torch.rsqrt, 0.05, 9), "sin": (torch.sin, -9, 9), "cos": (torch.cos, -9, 9),
    "tanh": (torch.tanh, -4, 4), "sigmoid": (torch.sigmoid, -9, 9), "relu": (torch.relu, -3, 3), "silu": (F.silu, -6, 6),
    "erf": (torch.erf, -3, 3), "reciprocal": (torch.reciprocal, 0.2, 4), "square": (torch.square, -3, 3),
}


@op(*UNARY, family="unary")
def unary(name):
    f, low, high = UNARY[name]
    return [Arg("input", floats(shape(), low, high))], {}, lambda a: f(a["input"])


@op("gelu", family="unary")
def gelu(_):
    attrs = {"approximate": R.choice(["none", "tanh"])}
    return [Arg("input", floats(shape(), -5, 5))], attrs, lambda a: F.gelu(a["input"], **attrs)


@op("softplus", "leaky_relu", "elu", family="unary")
def parametric(name):
    attrs = {"softplus": lambda: {"beta": R.choice([0.5, 1.0, 2.0]), "threshold": R.choice([2.0, 20.0])},
             "leaky_relu": lambda: {"negative_slope": R.choice([0.01, 0.3])},
             "elu": lambda: {"alpha": R.choice([1.0, 0.7])}}[name]()
    return [Arg("input", floats(shape(), -4, 4))], attrs, lambda a: getattr(F, name)(a["input"], **attrs)


@op("add", "sub", "mul", "div", "maximum", "minimum", "pow", family="binary")
def binary(name):
    s = shape()
    low, high = (0.3, 2.5) if name == "pow" else (-3, 3)
    a, b = Arg("input", floats(s, low, high)), Arg("other", floats(broadcastable(s), low, high))
    f = getattr(torch, name)
    if name == "div":
        b.value = b.value.sign() * (b.value.abs() + 0.3) + (b.value == 0)
    if name == "pow":
        b.name = "exponent"
        b.value = floats(b.value.shape, -2, 2)
        if R.random() < 0.3:
            p = R.choice([2, 3, 0, -1, 0.5, 1.5])
            return [a], {"exponent": p}, lambda x: torch.pow(x["input"], p)
        return [a, b], {}, lambda x: f(x["input"], x["exponent"])
    if name in ("add", "sub", "mul", "div") and R.random() < 0.3:
        k = R.choice([2, -1.5, 0.5, 3])
        if name in ("sub", "div") and R.random() < 0.5:
            a.name, a.value = "other", a.value.sign() * (a.value.abs() + 0.3) + (a.value == 0)
            return [a], {"self": k}, lambda x: f(torch.tensor(float(k), dtype=torch.float64), x["other"])
        return [a], {"other": k}, lambda x: f(x["input"], k)
    if R.random() < 0.3:
        a, b = Arg("input", b.value), Arg("other", a.value)
        if name == "div":
            b.value = b.value.sign() * (b.value.abs() + 0.3) + (b.value == 0)
    return [a, b], {}, lambda x: f(x["input"], x["other"])


@op("eq", "ne", "lt", "le", "gt", "ge", family="compare", dtypes=("f32", "f64", "bf16", "i64"), exact=True)
def compare(name):
    s = shape()
    values = lambda s: torch.randint(-2, 3, s).double()
    return [Arg("input", values(s), grad=False), Arg("other", values(broadcastable(s)), grad=False)], {}, \
        lambda x: getattr(torch, name)(x["input"], x["other"])


@op("where", family="binary", exact=True)
def where(_):
    s = shape()
    args = [Arg("condition", torch.rand(broadcastable(s)) < 0.5, "bool"), Arg("input", floats(s)), Arg("other", floats(broadcastable(s)))]
    return args, {}, lambda x: torch.where(x["condition"], x["input"], x["other"])


@op("clamp", family="unary")
def clamp(_):
    attrs = R.choice([{"min": -0.5}, {"max": 0.7}, {"min": -0.5, "max": 0.7}, {"min": 1.0, "max": -1.0}])
    return [Arg("input", floats(shape()))], attrs, lambda x: torch.clamp(x["input"], **attrs)


def reduction_args(least=0, rank=None):
    s = shape(rank, least)
    attrs = {}
    if s and R.random() < 0.8:
        count = R.randrange(1, len(s) + 1)
        dims = R.sample(range(len(s)), count)
        attrs["dim"] = [d - len(s) if R.random() < 0.5 else d for d in dims]
    if "dim" in attrs and R.random() < 0.5:
        attrs["keepdim"] = True
    return s, attrs


@op("sum", "mean", "amax", "amin", "logsumexp", "var", "norm", family="reduce")
def reduction(name):
    least = 1 if name in ("amax", "amin", "norm", "logsumexp", "var") else 0
    s, attrs = reduction_args(least)
    if name in ("logsumexp", "norm", "amax", "amin") and "dim" not in attrs:
        if name == "logsumexp":
            attrs["dim"] = list(range(len(s)))
    f = getattr(torch, name)
    if name == "var":
        attrs["correction"] = R.choice([0, 1, 1])
        dims = attrs.get("dim") or list(range(len(s)))
        if math.prod(s[d] for d in dims) <= attrs["correction"] + 1:
            return None
        call = lambda x: f(x["input"], dim=attrs.get("dim"), correction=attrs["correction"], keepdim=attrs.get("keepdim", False))
    elif name == "norm":
        attrs["p"] = R.choice([1.0, 2.0, 3.0, 0.5, "inf"])
        p = math.inf if attrs["p"] == "inf" else attrs["p"]
        call = lambda x: torch.linalg.vector_norm(x["input"], p, dim=attrs.get("dim"), keepdim=attrs.get("keepdim", False))
    else:
        call = lambda x: f(x["input"], **attrs) if attrs else f(x["input"])
        if name in ("amax", "amin"):
            call = lambda x: f(x["input"], **({"dim": ()} | attrs))
    return [Arg("input", floats(s))], attrs, call


@op("prod", "max", "min", "argmax", "argmin", family="reduce")
def along(name):
    s = shape(least=0 if name == "prod" else 1)
    attrs = {}
    if s and R.random() < 0.75:
        attrs = {"dim": dim_of(len(s)), "keepdim": R.random() < 0.5}
    x = floats(s, -1.5, 1.5)
    if name == "prod":
        x[torch.rand(s) < 0.05] = 0.0
    grad = None if not name.startswith("arg") else False
    return [Arg("input", x, grad=grad)], attrs, lambda a: getattr(torch, name)(a["input"], **attrs)


@op("cumsum", family="scan")
def cumsum(_):
    s = shape()
    attrs = {"dim": dim_of(len(s))}
    return [Arg("input", floats(s))], attrs, lambda a: torch.cumsum(a["input"], **attrs)


@op("sort", family="scan", dtypes=("f32", "f64", "bf16"), exact=True)
def sort(_):
    s = shape(R.choice([1, 2, 3]))
    attrs = {"dim": dim_of(len(s)), "descending": R.random() < 0.5}
    x = torch.randint(-5, 6, s).double()
    return [Arg("input", x)], attrs, lambda a: torch.sort(a["input"], stable=True, **attrs)


@op("topk", family="scan", dtypes=("f32", "f64"), exact=True)
def topk(_):
    s = shape(R.choice([1, 2, 3]), least=1)
    d = dim_of(len(s))
    attrs = {"k": R.randrange(0, s[d] + 1), "dim": d, "largest": R.random() < 0.5}
    x = torch.randperm(max(1, math.prod(s))).double()[: math.prod(s)].reshape(s)
    return [Arg("input", x)], attrs, lambda a: torch.topk(a["input"], sorted=True, **attrs)


@op("matmul", family="matmul")
def matmul(_):
    m, k, n = size(), size(), size()
    kind = R.randrange(7)
    a, b = [([k], [k]), ([m, k], [k]), ([k], [k, n]), ([m, k], [k, n]), ([3, m, k], [k, n]), ([2, 1, m, k], [3, k, n]), ([k], [3, k, n])][kind]
    return [Arg("input", floats(a)), Arg("other", floats(b))], {}, lambda x: torch.matmul(x["input"], x["other"])


@op("linear", family="matmul")
def linear(_):
    i, o = size(), size()
    args = [Arg("input", floats(shape(R.choice([0, 1, 2]), most=60) + [i])), Arg("weight", floats([o, i]))]
    if R.random() < 0.7:
        args.append(Arg("bias", floats([o])))
    return args, {}, lambda x: F.linear(x["input"], x["weight"], x.get("bias"))


@op("einsum", family="matmul", dtypes=("f32", "f64"))
def einsum(_):
    equations = ["ij,jk->ik", "ij,jk", "bij,bjk->bik", "ii->i", "ii", "...ij->...ji", "i,j->ij", "ij->", "bhqd,bhkd->bhqk",
                 "...i,...i->...", "ij,ij->i", "ijk,jil->kl", "ij,kj,kl->il", "i...,i...->i", "ijj->i", " i j , j -> i "]
    equation = R.choice(equations)
    sizes = {c: size() for c in "ijklbhqd"}
    rest = shape(R.choice([0, 1, 2]), most=12)
    args = []
    for n, term in enumerate(equation.replace(" ", "").split("->")[0].split(",")):
        s = []
        for piece in term.replace("...", ".").strip():
            s += rest if piece == "." else [sizes[piece]]
        args.append(Arg(f"operands.{n}", floats(s, -1, 1)))
    return args, {"equation": equation}, lambda x: torch.einsum(equation, *x.values())


@op("permute", "transpose", "expand", "repeat", "squeeze", "unsqueeze", "flatten", "reshape", "narrow", "slice", "split", "chunk",
    "flip", "roll", "pad", "tril", "triu", family="layout", exact=True)
def layout(name):
    s = shape(R.choice([2, 3, 4]) if name in ("tril", "triu") else R.choice([1, 2, 3, 4]), least=0)
    r, d = len(s), dim_of(len(s))
    if name == "permute":
        attrs = {"dims": R.sample(range(r), r)}
        f = lambda x: x.permute(attrs["dims"])
    elif name == "transpose":
        attrs = {"dim0": d, "dim1": dim_of(r)}
        f = lambda x: x.transpose(**attrs)
    elif name == "expand":
        s = [1 if R.random() < 0.5 else n for n in s]
        attrs = {"size": [R.choice([2, 3])] + [R.choice([1, 3]) if n == 1 else R.choice([-1, n]) for n in s]}
        f = lambda x: x.expand(attrs["size"])
    elif name == "repeat":
        attrs = {"repeats": [R.choice([0, 1, 2, 3]) for _ in range(r + R.choice([0, 1]))]}
        f = lambda x: x.repeat(attrs["repeats"])
    elif name == "squeeze":
        s = [1 if R.random() < 0.5 else n for n in s]
        attrs = R.choice([{}, {"dim": [d]}, {"dim": R.sample(range(r), R.randrange(1, r + 1))}])
        f = lambda x: x.squeeze(tuple(attrs["dim"])) if attrs else x.squeeze()
    elif name == "unsqueeze":
        attrs = {"dim": R.randrange(-r - 1, r + 1)}
        f = lambda x: x.unsqueeze(**attrs)
    elif name == "flatten":
        a, b = sorted([R.randrange(r), R.randrange(r)])
        attrs = {"start_dim": a - r if R.random() < 0.5 else a, "end_dim": b}
        f = lambda x: x.flatten(**attrs)
    elif name == "reshape":
        n = math.prod(s)
        attrs = {"shape": R.choice([[n], s[::-1], [-1] if n else [0], [1, n, 1]])}
        f = lambda x: x.reshape(attrs["shape"])
    elif name == "narrow":
        start = R.randrange(s[d] + 1)
        attrs = {"dim": d, "start": start, "length": R.randrange(s[d] - start + 1)}
        f = lambda x: x.narrow(**attrs)
    elif name == "slice":
        attrs = {"dim": d, "start": R.choice([0, 1, -3, None]), "end": R.choice([2, -1, 100, None]), "step": R.choice([1, 2, 3])}
        attrs = {k: v for k, v in attrs.items() if v is not None}
        key = slice(attrs.get("start"), attrs.get("end"), attrs["step"])
        f = lambda x: x[tuple([slice(None)] * (d % r) + [key])]
    elif name == "split":
        if R.random() < 0.5 and s[d] > 0:
            attrs = {"split_size": R.randrange(1, s[d] + 2), "dim": d}
            f = lambda x: x.split(attrs["split_size"], d)
        else:
            a = R.randrange(s[d] + 1)
            attrs = {"split_sizes": [a, s[d] - a], "dim": d}
            f = lambda x: x.split(attrs["split_sizes"], d)
    elif name == "chunk":
        attrs = {"chunks": R.randrange(1, 5), "dim": d}
        f = lambda x: x.chunk(**attrs)
    elif name == "flip":
        attrs = {"dims": R.sample(range(r), R.randrange(1, r + 1))}
        f = lambda x: x.flip(attrs["dims"])
    elif name == "roll":
        dims = R.sample(range(r), R.randrange(1, r + 1))
        attrs = R.choice([{"shifts": [R.randrange(-9, 9)]}, {"shifts": [R.randrange(-9, 9) for _ in dims], "dims": dims}])
        f = lambda x: torch.roll(x, attrs["shifts"], attrs.get("dims"))
    elif name == "pad":
        attrs = {"pad": [R.choice([0, 1, 2]) for _ in range(2 * R.randrange(1, r + 1))], "mode": "constant", "value": R.choice([0.0, 1.5])}
        if s[-1] > 2:
            attrs["pad"][0] = -1
        f = lambda x: F.pad(x, **attrs)
    else:
        attrs = {"diagonal": R.randrange(-3, 4)}
        f = lambda x: getattr(torch, name)(x, **attrs)
    return [Arg("input", floats(s))], attrs, lambda a: f(a["input"])


@op("cat", "stack", family="layout", exact=True)
def join(name):
    s = shape(R.choice([1, 2, 3]))
    d = dim_of(len(s)) if name == "cat" else R.randrange(-len(s) - 1, len(s) + 1)
    args = []
    for n in range(R.choice([1, 2, 3])):
        t = list(s)
        if name == "cat":
            t[d] = size()
        args.append(Arg(f"tensors.{n}", floats(t)))
    return args, {"dim": d}, lambda x: getattr(torch, name)(list(x.values()), d)


@op("gather", "scatter_add", "index_select", "index_add", family="index")
def indexing(name):
    s = shape(R.choice([1, 2, 3]), least=1)
    d = dim_of(len(s))
    if name in ("gather", "scatter_add"):
        t = [R.randrange(n + 1) for n in s]
        t[d] = size()
        index = Arg("index", torch.randint(0, s[d], t), "i64")
        if name == "gather":
            return [Arg("input", floats(s)), index], {"dim": d}, lambda x: torch.gather(x["input"], d, x["index"])
        return [Arg("input", floats(s)), index, Arg("src", floats(t))], {"dim": d}, \
            lambda x: torch.scatter_add(x["input"], d, x["index"], x["src"])
    index = Arg("index", torch.randint(0, s[d], [size()]), "i64")
    if name == "index_select":
        return [Arg("input", floats(s)), index], {"dim": d}, lambda x: torch.index_select(x["input"], d, x["index"])
    t = list(s)
    t[d] = len(index.value)
    attrs = {"dim": d, "alpha": R.choice([1, 2.5])}
    return [Arg("input", floats(s)), index, Arg("source", floats(t))], attrs, \
        lambda x: torch.index_add(x["input"], d, x["index"], x["source"], alpha=attrs["alpha"])


@op("masked_fill", family="index", exact=True)
def masked_fill(_):
    s = shape()
    return [Arg("input", floats(s)), Arg("mask", torch.rand(broadcastable(s)) < 0.4, "bool")], {"value": -3.5}, \
        lambda x: x["input"].masked_fill(x["mask"], -3.5)


@op("embedding", family="index")
def embedding(_):
    rows, width = size(1), size()
    attrs = {"padding_idx": R.randrange(-rows, rows)} if R.random() < 0.5 else {}
    return [Arg("input", torch.randint(0, rows, shape(R.choice([0, 1, 2]))), "i64"), Arg("weight", floats([rows, width]))], attrs, \
        lambda x: F.embedding(x["input"], x["weight"], **attrs)


@op("softmax", "log_softmax", family="norm")
def softmax(name):
    s = shape()
    attrs = {"dim": dim_of(len(s))}
    return [Arg("input", floats(s, -6, 6))], attrs, lambda x: getattr(F, name)(x["input"], **attrs)


@op("layer_norm", "rms_norm", family="norm")
def norms(name):
    s = shape(R.choice([1, 2, 3]), least=1)
    tail = s[R.randrange(len(s)):]
    attrs = {"normalized_shape": tail, "eps": 1e-5}
    args = [Arg("input", floats(s))]
    if R.random() < 0.7:
        args.append(Arg("weight", floats(tail)))
    if name == "layer_norm" and R.random() < 0.7:
        args.append(Arg("bias", floats(tail)))
    if name == "rms_norm":
        return args, attrs, lambda x: F.rms_norm(x["input"], tail, x.get("weight"), 1e-5)
    return args, attrs, lambda x: F.layer_norm(x["input"], tail, x.get("weight"), x.get("bias"), 1e-5)


@op("group_norm", family="norm", dtypes=("f32", "f64"))
def group_norm(_):
    groups, per = R.choice([1, 2, 3]), R.choice([1, 2, 4])
    args = [Arg("input", floats([size(1), groups * per] + shape(R.choice([0, 1, 2]), 1, 40)))]
    if R.random() < 0.7:
        args += [Arg("weight", floats([groups * per])), Arg("bias", floats([groups * per]))]
    if args[0].value[0].numel() == groups:
        return None
    attrs = {"num_groups": groups, "eps": 1e-5}
    return args, attrs, lambda x: F.group_norm(x["input"], groups, x.get("weight"), x.get("bias"), 1e-5)


@op("batch_norm", family="norm", dtypes=("f32", "f64"))
def batch_norm(_):
    c = size(1)
    s = [R.choice([2, 3, 5]), c] + shape(R.choice([0, 1, 2]), 1, 30)
    attrs = {"training": R.random() < 0.6, "momentum": R.choice([0.1, 0.3]), "eps": 1e-5}
    args = [Arg("input", floats(s))]
    if not attrs["training"] or R.random() < 0.7:
        args += [Arg("running_mean", floats([c]), grad=False), Arg("running_var", floats([c], 0.5, 2), grad=False)]
    if R.random() < 0.7:
        args += [Arg("weight", floats([c])), Arg("bias", floats([c]))]

    def f(x):
        mean, var = (None if x.get(n) is None else x[n].clone() for n in ("running_mean", "running_var"))
        y = F.batch_norm(x["input"], mean, var, x.get("weight"), x.get("bias"), **attrs)
        return [y, mean, var] if attrs["training"] and mean is not None else y
    return args, attrs, f


@op("conv1d", "conv2d", "conv_transpose2d", family="conv", dtypes=("f32", "f32", "f64", "bf16"))
def conv(name):
    n = 1 if name == "conv1d" else 2
    groups, i, o = R.choice([1, 1, 2]), R.choice([1, 2, 3]), R.choice([1, 2, 3])
    pick = lambda choices: [R.choice(choices) for _ in range(n)]
    attrs = {"stride": pick([1, 2]), "padding": pick([0, 1, 2]), "dilation": pick([1, 2]), "groups": groups}
    k = pick([1, 2, 3])
    x = Arg("input", floats([R.choice([1, 2, 3]), groups * i] + pick([5, 7, 8])))
    if name == "conv_transpose2d":
        w = [groups * i, o] + k
        attrs["output_padding"] = [R.randrange(max(s, d)) for s, d in zip(attrs["stride"], attrs["dilation"])]
    else:
        w = [groups * o, i] + k
    args = [x, Arg("weight", floats(w))] + ([Arg("bias", floats([groups * o]))] if R.random() < 0.6 else [])
    return args, attrs, lambda a: getattr(F, name)(a["input"], a["weight"], a.get("bias"), **attrs)


@op("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", family="pool", dtypes=("f32", "f64"))
def pool(name):
    s = [R.choice([1, 2]), R.choice([1, 3]), R.choice([5, 6, 8]), R.choice([5, 7, 9])]
    x = torch.randperm(math.prod(s)).double().reshape(s) * 0.01
    if name == "adaptive_avg_pool2d":
        attrs = {"output_size": [R.randrange(1, 6), R.randrange(1, 6)]}
    else:
        k = [R.choice([2, 3]), R.choice([2, 3])]
        attrs = {"kernel_size": k, "stride": [R.choice([1, 2]), R.choice([1, 2, 3])], "padding": [R.choice([0, 1]) for _ in k],
                 "ceil_mode": R.random() < 0.5}
        attrs |= {"dilation": [R.choice([1, 2]) for _ in k]} if name == "max_pool2d" else {"count_include_pad": R.random() < 0.5}
    return [Arg("input", x)], attrs, lambda a: getattr(F, name)(a["input"], **attrs)


@op("cross_entropy", "nll_loss", family="loss", dtypes=("f32", "f64", "bf16"))
def classes(name):
    c = size(2)
    rest = shape(R.choice([0, 1, 2]), 1, 20)
    x = floats([size(1), c] + rest, -3, 3)
    if name == "nll_loss":
        x = F.log_softmax(x, 1)
    target = torch.randint(0, c, [x.shape[0]] + rest)
    attrs = {"ignore_index": R.choice([-100, 0]), "reduction": R.choice(["mean", "sum", "none"])}
    if attrs["ignore_index"] == -100:
        target[torch.rand(target.shape) < 0.2] = -100
    if name == "cross_entropy":
        attrs["label_smoothing"] = R.choice([0.0, 0.1])
    args = [Arg("input", x), Arg("target", target, "i64")]
    if R.random() < 0.5:
        args.append(Arg("weight", floats([c], 0.2, 2), grad=False))
    return args, attrs, lambda a: getattr(F, name)(a["input"], a["target"], a.get("weight"), **attrs)


@op("mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "binary_cross_entropy_with_logits", family="loss", dtypes=("f32", "f64", "bf16"))
def losses(name):
    s = shape(least=1)
    attrs = {"reduction": R.choice(["mean", "sum", "none"])}
    x, t = floats(s), floats(s)
    args = [Arg("input", x), Arg("target", t)]
    if name == "smooth_l1_loss":
        attrs["beta"] = R.choice([1.0, 0.5])
    if name == "kl_div":
        attrs["log_target"] = R.random() < 0.5
        args = [Arg("input", x), Arg("target", t if attrs["log_target"] else t.abs(), grad=False)]
    if name == "binary_cross_entropy_with_logits":
        args = [Arg("input", x * 3), Arg("target", t.abs() / 2, grad=False)]
        if R.random() < 0.5:
            args += [Arg("weight", floats(broadcastable(s), 0.1, 2), grad=False)]
        if s and R.random() < 0.5:
            args += [Arg("pos_weight", floats(s[-1:], 0.1, 2), grad=False)]
    return args, attrs, lambda a: getattr(F, name)(*[a[n] for n in ("input", "target")], **attrs, **{k: a[k] for k in ("weight", "pos_weight") if k in a})


@op("scaled_dot_product_attention", family="attention", dtypes=("f32", "f32", "f64", "bf16"))
def attention(_):
    b, h, t, s, d, dv = R.choice([1, 2]), R.choice([1, 2, 4]), size(1), size(1), size(1), size(1)
    attrs, kv = {}, h
    if R.random() < 0.3 and h > 1:
        kv = h // 2
        attrs["enable_gqa"] = True
    q, k, v = Arg("query", floats([b, h, t, d])), Arg("key", floats([b, kv, s, d])), Arg("value", floats([b, kv, s, dv]))
    args = [q, k, v]
    kind = R.randrange(4)
    if kind == 1:
        attrs["is_causal"] = True
    elif kind == 2:
        mask = torch.rand([t, s]) < 0.7
        mask[:, 0] = True
        args.append(Arg("attn_mask", mask, "bool"))
    elif kind == 3:
        args.append(Arg("attn_mask", floats([R.choice([1, b]), 1, t, s])))
    if R.random() < 0.3:
        attrs["scale"] = 0.3

    def f(a):
        kk, vv = a["key"], a["value"]
        if attrs.get("enable_gqa"):
            kk, vv = (x.repeat_interleave(2, 1) for x in (kk, vv))
        scores = a["query"] @ kk.transpose(-1, -2) * attrs.get("scale", 1 / math.sqrt(d))
        if attrs.get("is_causal"):
            scores = scores.masked_fill(~torch.ones(t, s).bool().tril(), -math.inf)
        if "attn_mask" in a:
            m = a["attn_mask"]
            scores = scores.masked_fill(~m, -math.inf) if m.dtype == torch.bool else scores + m
        return scores.softmax(-1) @ vv
    return args, attrs, f


@op("rope", family="attention", dtypes=("f32", "f64", "bf16"))
def rope(_):
    b, h, t, d = R.choice([1, 2]), R.choice([1, 3]), size(1), 2 * size(1)
    attrs = {"base": R.choice([10000.0, 500.0]), "offset": R.choice([0, 5, 1000])}
    args = [Arg("input", floats([b, h, t, d]))]
    if R.random() < 0.4:
        args.append(Arg("position_ids", torch.randint(0, 2000, [b, t]), "i64"))
        attrs["offset"] = 0

    def f(a):
        x = a["input"]
        pos = a["position_ids"].double()[:, None] if "position_ids" in a else torch.arange(t).double() + attrs["offset"]
        angle = pos[..., None] * attrs["base"] ** (-2 * torch.arange(d // 2).double() / d)
        u, w = x.chunk(2, -1)
        return torch.cat([u * angle.cos() - w * angle.sin(), w * angle.cos() + u * angle.sin()], -1)
    return args, attrs, f


@op("to", family="cast", exact=True, dtypes=("f64", "f32", "f16", "bf16", "i64", "i32", "u8", "bool"))
def to(_):
    attrs = {"dtype": R.choice(list(DTYPES))}
    return [Arg("input", floats(shape(), 0, 60).round() / 4)], attrs, lambda x: x["input"]


# Names in torch.optim, with settings.
OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.01, "alpha": 0.9, "momentum": 0.5, "centered": True},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1},
    "Adadelta": {"lr": 0.5, "rho": 0.8, "eps": 1e-3, "weight_decay": 0.1},
    "Adamax": {"lr": 0.01, "weight_decay": 0.1},
}


@op(*(f"optim:{name}" for name in OPTIMIZERS), family="optim", dtypes=("f32", "f64"))
def optimizer(op_name):
    name, steps, sizes = op_name.removeprefix("optim:"), range(3), enumerate([7, 33])
    names = [(f"{what}.{i}", n) for i, n in sizes for what in ["params", *(f"grads.{t}" for t in steps)]]

    def run(a):
        params = [a[f"params.{i}"].clone() for i in range(2)]
        after, rule = [], getattr(torch.optim, name)(params, **OPTIMIZERS[name])
        for t in steps:
            for i, param in enumerate(params):
                param.grad = a[f"grads.{t}.{i}"]
            rule.step()
            after += [param.clone() for param in params]
        return after

    return [Arg(what, floats([n]), grad=False) for what, n in names], OPTIMIZERS[name] | {"steps": len(steps)}, run


# ---- a case ---------------------------------------------------------------------------------------------------


def quantize(arg, dtype):
    """The stored tensor: rounded to the case's dtype, perhaps to be permuted by the reader."""
    name = arg.dtype or dtype
    value = arg.value.to(DTYPES[name])
    permute = None
    if value.dim() > 1 and R.random() < 0.3:
        permute = R.sample(range(value.dim()), value.dim())
        value = value.permute([permute.index(i) for i in range(value.dim())])
    return name, value.contiguous(), permute


def make(name, number, files):
    family, dtypes, exact, spec = OPS[name]
    made = None
    while made is None:
        made = spec(name)
    args, attrs, f = made
    dtype, case = R.choice(dtypes), f"{name}.{number:02}"
    store = files.setdefault(family, {})
    entry = {"name": case, "op": name, "file": family + ".safetensors", "attrs": attrs, "inputs": [], "outputs": [],
             "cotangents": [], "grads": [], "rtol": 0.0 if exact else RTOL[dtype], "atol": 0.0}
    leaves, given = [], {}
    for arg in args:
        kind, value, permute = quantize(arg, dtype)
        floating = DTYPES[kind].is_floating_point
        grad = floating if arg.grad is None else arg.grad
        key = f"{case}/{arg.name}"
        store[key] = value
        entry["inputs"].append({"name": arg.name, "key": key, "dtype": kind, "requires_grad": grad} | ({"permute": permute} if permute else {}))
        leaf = value.double().requires_grad_(grad) if floating else value.clone()
        leaves.append(leaf if grad else None)
        given[arg.name] = leaf.permute(permute) if permute else leaf
    if name == "to":
        source = given["input"]
        with torch.no_grad():
            cast = store[f"{case}/input"]
            cast = (cast.permute(permute) if permute else cast).to(DTYPES[attrs["dtype"]])
        outputs = [source if cast.is_floating_point() and source.is_floating_point() else cast]
        out_dtypes = [DTYPES[attrs["dtype"]]]
    else:
        outputs = f(given)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        out_dtypes = [DTYPES[dtype] if o.is_floating_point() else o.dtype for o in outputs]
    scale = max([1.0] + [o.detach().abs().max().item() for o in outputs if o.is_floating_point() and o.numel() and o.isfinite().all()])
    flowing = [o for o in outputs if o.is_floating_point() and o.requires_grad]
    for i, (o, d) in enumerate(zip(outputs, out_dtypes)):
        entry["outputs"].append(f"{case}/out.{i}")
        store[f"{case}/out.{i}"] = o.detach().to(d).contiguous().clone()
    if flowing and any(l is not None for l in leaves):
        cots = [floats(o.shape, -1, 1).to(d) for o, d in zip(outputs, out_dtypes) if o.is_floating_point() and o.requires_grad]
        for i, cot in enumerate(cots):
            entry["cotangents"].append(f"{case}/cot.{i}")
            store[f"{case}/cot.{i}"] = cot
        wanted = [l for l in leaves if l is not None]
        grads = iter(torch.autograd.grad(flowing, wanted, [c.double() for c in cots], allow_unused=True))
        for i, leaf in enumerate(leaves):
            if leaf is None:
                entry["grads"].append(None)
                continue
            g = next(grads)
            g = torch.zeros_like(leaf) if g is None else g
            scale = max(scale, g.abs().max().item() if g.numel() and g.isfinite().all() else 0)
            entry["grads"].append(f"{case}/grad.{i}")
            store[f"{case}/grad.{i}"] = g.to(DTYPES[entry["inputs"][i]["dtype"]]).contiguous().clone()
    else:
        entry["grads"] = [None] * len(args)
    if not exact:
        entry["atol"] = ATOL[dtype] * scale * 2
    elif any(i["requires_grad"] for i in entry["inputs"]) and dtype in RTOL:
        # Moving data is exact, but its gradient may be a sum.
        entry["rtol"], entry["atol"] = RTOL[dtype], ATOL[dtype] * scale
    return entry


def make_one(name, number, files):
    """A case that PyTorch can evaluate: it refuses a few layouts itself."""
    for _ in range(20):
        try:
            return make(name, number, files)
        except RuntimeError as error:
            print(f"{name}: {error}; drawn again")
    raise SystemExit(f"{name}: PyTorch evaluates none of its cases")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--cases", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only")
    parser.add_argument("--sizes", choices=list(SIZES), default="small")
    args = parser.parse_args()
    global KIND
    KIND = args.sizes
    R.seed(args.seed)
    torch.manual_seed(args.seed)
    files, cases = {}, []
    for name in OPS:
        if args.only in (None, name):
            cases += [make_one(name, n, files) for n in range(args.cases)]
    os.makedirs(args.out, exist_ok=True)
    for family, tensors in files.items():
        save_file(tensors, os.path.join(args.out, family + ".safetensors"))
    index = {"format": 1, "generator": f"torch {torch.__version__.split('+')[0]}", "profile": "own", "cases": cases}
    with open(os.path.join(args.out, "index.json"), "w") as file:
        file.write(json.dumps(index).replace('{"name": "', '\n{"name": "', 0))
    print(len(cases), "cases")


if __name__ == "__main__":
    main()

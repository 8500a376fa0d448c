#!/usr/bin/env python3
"""The products of `bench sweep` by PyTorch, into outputs that exist; and how two systems' times compare.

    cargo run --release --example bench -- sweep > ours.jsonl
    scripts/sweep_peer.py run ours.jsonl > theirs.jsonl       # the same shapes
    scripts/sweep_peer.py compare ours.jsonl theirs.jsonl ... # ours over the fastest of the others
"""

import argparse
import json
import math
import statistics
import sys
import time

SPAN_US, TIMES = 200.0, 15


def rows(path):
    """The sweep's rows in a file of JSON lines, by name."""
    try:
        with open(path) as lines:
            found = [json.loads(line) for line in lines if line.startswith("{")]
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: {error}")
    named = {row["metric"]: row for row in found if row.get("workload") == "sweep"}
    return named or sys.exit(f"{path}: no rows of the sweep")


def run(path):
    wanted = rows(path)
    try:
        import torch
    except ImportError as error:
        sys.exit(f"PyTorch cannot be loaded: {error}")
    threads = next(iter(wanted.values()))["threads"]
    torch.set_num_threads(threads)
    for name in wanted:
        shape, ways = name.split("_")
        m, k, n = map(int, shape.split("x"))
        operand = lambda rows, cols, way: torch.rand(cols, rows).t() if way == "t" else torch.rand(rows, cols)
        a, b, c = operand(m, k, ways[0]), operand(k, n, ways[1]), torch.empty(m, n)

        def many(count):
            start = time.perf_counter()
            for _ in range(count):
                torch.mm(a, b, out=c)
            return (time.perf_counter() - start) * 1e6

        with torch.no_grad():
            many(2)
            count = int(min(max(SPAN_US / max(many(1), 1e-3), 1), 1e4))
            us = statistics.median(many(count) / count for _ in range(TIMES))
        row = {"peer": "torch", "workload": "sweep", "metric": name, "value": us, "unit": "us", "threads": threads}
        print(json.dumps(row), flush=True)


def compare(ours, *others):
    ours, others = rows(ours), [rows(path) for path in others]
    for name in ours:
        if any(name not in other for other in others):
            sys.exit(f"{name} was not measured by all")
    ratios = {name: row["value"] / min(other[name]["value"] for other in others) for name, row in ours.items()}
    worst = sorted(ratios, key=ratios.get, reverse=True)
    print(f"geometric mean {math.exp(statistics.fmean(map(math.log, ratios.values()))):.3f} of {len(ratios)}")
    for name in worst[:20]:
        print(f"{ratios[name]:6.2f}  {name}  {ours[name]['value']:.2f} us")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run").add_argument("ours")
    against = commands.add_parser("compare")
    against.add_argument("ours")
    against.add_argument("theirs", nargs="+")
    given = parser.parse_args()
    if given.command == "run":
        run(given.ours)
    else:
        compare(given.ours, *given.theirs)


if __name__ == "__main__":
    main()

"""The stages of `gpu-check`: what is run on a GPU, how long it may take, and what is kept of it."""

import glob
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The whole run. A stage may take its own limit, and leaves as much as the second to each one after it.
SECONDS_MAX, SECONDS_KEPT = 540, 12
# Each stage and its limit in seconds.
STAGES = {
    "facts": 150,
    "smoke": 60,
    "golden": 120,
    "kernels": 150,
    "gpt2": 240,
    "sweep": 200,
    "nccl": 60,
    "traces": 60,
    "training": 300,
}
EMULATED = os.environ.get("PHALANX_CUDA") == "emulator"
# All products by our own kernels, whose bits no number of rows changes.
OWN_PRODUCTS = {"PHALANX_CUDA_ALGORITHMS": "own"}

# Each against one rank; the losses of all steps have to agree.
LAYOUTS = [
    ["--dp", "2"],
    ["--dp", "2", "--zero", "3"],
    ["--dp", "2", "--zero", "3", "--offload", "parameters", "--offload-activations"],
    ["--tp", "2"],
    ["--pp", "2", "--micro-batches", "4"],
    ["--dp", "2", "--tp", "2", "--zero", "1"],
    ["--pp", "2", "--schedule", "zb-h1", "--micro-batches", "4", "--recompute", "always"],
]
SMALL = "--layers 4 --heads 4 --width 128 --context 128 --batch 8 --steps 8 --seed 3 --quiet".split()
TINY = "--layers 2 --heads 2 --width 64 --context 16 --batch 4 --steps 2 --seed 3 --quiet".split()


def take_only(words):
    """A command line without its `--only STAGE`, and these stages, or all of them, in their order."""
    left, only = [], []
    words = iter(words)
    for word in words:
        flag, _, value = word.partition("=")
        if flag != "--only":
            left.append(word)
            continue
        stage = value or next(words, "")
        if stage not in STAGES:
            sys.exit(f"gpu-check: --only is {stage or 'nothing'}, wanted one of {', '.join(STAGES)}")
        only.append(stage)
    return left, [stage for stage in STAGES if stage in only]


def libraries():
    """Folders of the CUDA libraries that Python's packages have brought."""
    found = [os.environ.get("PHALANX_CUDA_LIBRARIES", "")]
    for base in sys.path:
        found += sorted(glob.glob(f"{glob.escape(base)}/nvidia/*/lib")) if base else []
    return os.pathsep.join(f for f in found if f)


# What a Python that is asked says of PyTorch; a process of its own, since libraries may hang or crash.
TORCH = """
import json, torch
print(json.dumps({"torch": f"{torch.__version__}, CUDA {torch.version.cuda}", "gpus": torch.cuda.device_count()}))
"""


class Check:
    def __init__(self, folder, work, cache, out, needs, begin):
        self.folder, self.work, self.cache, self.out, self.needs = folder, work, cache, out, needs
        self.env = dict(os.environ, PHALANX_CUDA_LIBRARIES=libraries(), PHALANX_KERNEL_CACHE=str(cache))
        self.end = begin + float(os.environ.get("GPU_CHECK_SECONDS", SECONDS_MAX))
        self.until, self.named, self.doctor = self.end, "", ""
        self.stage, self.kept, self.compiled, self.wanted = None, {}, 0, None
        (self.out / "gpu-check.log").unlink(missing_ok=True)
        for stage in STAGES:
            (self.out / f"{stage}.json").unlink(missing_ok=True)

    def all(self, only):
        """The stages, in the order of what is wanted most, as long as there is a driver."""
        if not self.driver():
            return
        chosen = only or list(STAGES)
        kept = min(SECONDS_KEPT, (self.end - time.time()) / len(chosen) / 2)
        for at, stage in enumerate(chosen):
            self.begin_stage(stage)
            limit = time.time() + STAGES[stage] * (2 if EMULATED else 1)
            self.until = min(limit, self.end - kept * (len(chosen) - 1 - at))
            try:
                getattr(self, stage)()
            except Exception as error:  # one stage's trouble, of whatever kind, is not the others'
                self.add(stage, False, f"{type(error).__name__}: {error}")
            self.write()

    def outcome(self):
        """What the whole of it ends with."""
        if not self.named or "emulat" in self.named:
            print(f"\nno GPU's own driver served this{': ' if self.named else ''}{self.named}")
            return 2
        return 1 if any(check["passed"] is False for stage in self.kept.values() for check in stage["checks"]) else 0

    # ---- What is kept ----

    def begin_stage(self, name):
        about = {"commit": self.needs.get("commit"), "driver": self.named, "date": time.strftime("%Y-%m-%d")}
        self.stage = {"stage": name, **about, "begun": time.time(), "facts": {}, "checks": [], "rows": []}
        self.kept[name] = self.stage

    def write(self):
        """Keeps all that is known so far: the file of the stage, and that of all stages."""
        self.stage["seconds"] = round(time.time() - self.stage["begun"], 1)
        result = list(self.kept.values())
        for name, what in ((self.stage["stage"], self.stage), ("gpu-check", result)):
            written = self.out / f"{name}.json.new"
            written.write_text(json.dumps(what, indent=1))
            written.replace(self.out / f"{name}.json")
        return result

    def add(self, name, passed, detail):
        """Notes a check: passed, failed, or None for what could not be tried; with the kernels compiled since the last one."""
        kept = len(list(self.cache.glob("*.bin")))
        new, self.compiled = kept - self.compiled, kept
        print(f"{ {True: 'ok  ', False: 'FAIL', None: 'skip'}[passed] } {name}: {detail} ({new} kernels compiled)", flush=True)
        self.stage["checks"].append({"name": name, "passed": passed, "detail": detail, "compiled": new})
        self.write()

    # ---- Programs ----

    def call(self, command, **env):
        """Runs a program of the bundle: `(exit code, all that it printed)`."""
        return self.run([self.work / "programs" / command[0], *command[1:]], self.env | env)

    def run(self, command, env):
        """Runs a command until it ends or its time is over, with all that it has started; the log gets what it prints."""
        command = list(map(str, command))
        with open(self.out / "gpu-check.log", "a+b") as log:
            log.write(f"\n== {' '.join(command)}\n".encode())
            log.flush()
            start, seconds = log.seek(0, os.SEEK_END), self.until - time.time()
            said = ""
            if seconds <= 0:
                return 124, "not run: the time was over"
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            try:
                task = subprocess.Popen(command, env=env, start_new_session=True, **streams)
            except OSError as error:
                return 126, str(error)
            try:
                code = task.wait(seconds)
            except subprocess.TimeoutExpired:
                code, said = 124, f"\nstopped after {seconds:.0f} s"
                os.killpg(task.pid, signal.SIGKILL)
                try:
                    task.wait(5)
                except subprocess.TimeoutExpired:
                    said += ", but it does not end"
            log.seek(start)
            return code, log.read().decode(errors="replace") + said

    def judge(self, name, code, text, passed, detail):
        """Notes a check that is a program's run. An emulator that steps in where a GPU was wanted is a failure."""
        stand_in = not EMULATED and "emulat" in text
        if (code == 124 and last(text) not in detail) or stand_in:
            detail = f"{'an emulator served it' if stand_in else last(text)}; {detail}"
        self.add(name, code == 0 and passed and not stand_in, detail)
        words = ("FAILED", "unsupported ", "spills", "panicked", "was not freed")
        wrong = [line for line in text.splitlines() if any(word in line for word in words)]
        for line in wrong[:20]:
            print("    " + line[:300])
        if wrong[20:]:
            print(f"    and {len(wrong) - 20} more, in the log")

    def tests(self, name, command, **env):
        """A program that says of each of its tests whether it passed."""
        code, text = self.call(command, **env)
        told = [line for line in text.splitlines() if " ... " in line]
        detail = f"{sum(' ... ok' in line for line in told)} of {len(told)} passed" if told else last(text)
        self.judge(name, code, text, bool(told), detail)

    def cases(self, name, chosen, **env):
        """Cases of kernels against the CPU's operations."""
        code, text = self.call(["kernels", *chosen], **env)
        self.judge(name, code, text, "skipped" not in text, last(text))

    def data(self):
        return ["--data", self.folder / "text.txt"]

    # ---- Stages ----

    def driver(self):
        """Whether a driver serves, and which; what the libraries are."""
        self.compiled = len(list(self.cache.glob("*.bin")))
        self.until = min(time.time() + 60, self.end)
        self.doctor = self.call(["gpt", "doctor"])[1]
        print(self.doctor.strip())
        code, text = self.call(["bench", "gpu-ops", "--device", "cuda", "--only", "nothing"])
        named = re.search(r"^cuda:0 .*$", text, re.M)
        if code or not named:
            self.begin_stage("facts")
            self.add("driver", False, last(text))
            return False
        self.named = named.group(0)
        print(f"{self.named}\n{self.compiled} compiled kernels were brought", flush=True)
        return True

    def facts(self):
        facts = self.stage["facts"]
        facts |= {"doctor": self.doctor.splitlines(), "python": platform.python_version()}
        self.compiler()
        lacks = re.search(r"^NCCL [\d.]+: .*$", self.doctor, re.M)
        if lacks:
            self.add("NCCL", None, lacks.group(0))
        code, text = self.run([sys.executable, "-c", TORCH], dict(os.environ))
        found = (lines(text) or [{}])[-1]
        facts |= found
        self.add("PyTorch", True if found.get("gpus") else None, json.dumps(found) if code == 0 else last(text))

    def compiler(self):
        """Whether the compiler is the one whose kernels were brought."""
        wanted, there = self.needs.get("nvrtc", []), version(self.doctor, "NVRTC")
        if not wanted:
            return self.add("compiler", None, f"no kernels were brought; NVRTC {there or 'is not there'}")
        if there in wanted:
            return self.add("compiler", True, f"NVRTC {there}, as for the kernels that were brought")
        remedy = f"pip install nvidia-cuda-nvrtc=={wanted[-1]}.*"
        what = f"NVRTC {there} is there: all kernels are compiled anew" if there else "no NVRTC is there: only they run"
        self.add("compiler", None, f"the kernels that were brought want NVRTC {' or '.join(wanted)}, {what}; {remedy}")

    def smoke(self):
        self.cases("a kernel of each kind", ["smoke"])
        self.tests("a captured step", ["training", "a captured step"])

    def golden(self):
        for data in sorted(self.folder.glob("golden-*")):
            code, text = self.call(["golden"], PHALANX_GOLDEN=str(data), PHALANX_GOLDEN_DEVICE="cuda")
            self.judge(data.name, code, text, True, last(text))

    def kernels(self):
        self.cases("kernel cases", ["gelu"] * EMULATED)
        if not EMULATED:
            self.cases("our own products", ["product "], **OWN_PRODUCTS)

    def gpt2(self):
        self.benchmark("gpt2-124m")
        if not EMULATED:
            self.benchmark("gpt2-124m", " with timed algorithms", PHALANX_CUDA_ALGORITHMS="timed")
        self.peer("gpt2-124m", "--compile")
        self.peer("gpt2-124m")

    def sweep(self):
        self.benchmark("gpu-ops")
        if not EMULATED:
            self.benchmark("gpu-ops", " with our own products", **OWN_PRODUCTS)
        self.peer("gpu-ops")

    def bench(self, workload, **env):
        more = ["--small"] * EMULATED + (self.data() if workload == "gpt2-124m" else [])
        return self.call(["bench", workload, "--device", "cuda", *more], **env)

    def benchmark(self, workload, way="", **env):
        code, text = self.bench(workload, **env)
        rows = [row | {"peer": row["peer"] + way} for row in lines(text)]
        self.stage["rows"] += rows
        self.judge(f"benchmark {workload}{way}", code, text, bool(rows), f"{len(rows)} rows" if code == 0 else last(text))

    def peer(self, *words):
        """PyTorch at the same work. That it is not there, or fails, is no fault of ours, but it is said."""
        name = "peer " + " ".join(words)
        if EMULATED:
            return self.add(name, None, "no GPU's own driver serves")
        code, text = self.run([sys.executable, self.folder / "gpu_peer.py", *words, *self.data()], dict(os.environ))
        rows = lines(text)
        self.stage["rows"] += rows
        self.add(name, True if code == 0 and rows else None, f"{len(rows)} rows" if code == 0 else last(text))

    def nccl(self):
        there, gpus = version(self.doctor, "NCCL"), len(re.findall(r"^GPU \d", self.doctor, re.M))
        if not there:
            return self.add("ranks over NCCL", None, "there is no NCCL")
        if [int(n) for n in there.split(".")] < [2, 30] and gpus < 2:
            return self.add("ranks over NCCL", None, f"NCCL {there} does not put several ranks on a GPU, as 2.30 does")
        # Its own kernels are loaded before any of them waits for another rank's, and are small enough to run side by side.
        env = {"CUDA_MODULE_LOADING": "EAGER", "NCCL_MAX_CTAS": "4"}
        self.tests("ranks over NCCL", ["ranks", "NCCL's own" if EMULATED else "NCCL"], **env)

    def traces(self):
        """The times of kernels, by the driver's events: of a run's steps, and of GPT-2's beside what was predicted."""
        trace = self.out / "trace.json"
        trace.unlink(missing_ok=True)
        losses, why = self.losses("cuda", ["--no-capture"], PHALANX_CUDA_TRACE=str(trace))
        if losses is None:
            self.add("trace", False, why)
        else:
            detail = f"{trace.stat().st_size} bytes" if trace.exists() else "these programs write none"
            self.add("trace", True if trace.exists() else None, detail)
        with tempfile.TemporaryDirectory() as work:
            trace = Path(work) / "trace.json"
            code, text = self.bench("gpt2-124m", PHALANX_CUDA_TRACE=str(trace))
            times = kernel_times(json.loads(trace.read_text())) if code == 0 and trace.exists() else {}
        predicted = self.folder / "predicted.txt"
        peers = {"phalanx": times}
        if times and predicted.exists() and not EMULATED:
            peers |= predictions(predicted.read_text())
        # Without what takes less than a hundredth of a millisecond.
        self.stage["rows"] += [
            {"peer": peer, "workload": "a step of gpt2-124m", "metric": work, "value": round(ms, 3), "unit": "ms"}
            for peer, known in peers.items()
            for work, ms in sorted(known.items(), key=lambda row: -row[1])
            if ms >= 0.01
        ]
        self.judge("trace of gpt2-124m", code, text, bool(times), f"{sum(times.values()):.1f} ms a step" if times else last(text))

    def training(self):
        self.tests("devices", ["devices"] + ["elements"] * EMULATED)
        self.tests("training", ["training"] + ["bf16"] * EMULATED)
        self.wanted, why = self.losses("cpu", [])
        if self.wanted is None:
            self.add("layouts on the CPU", False, why)
        for flags in [[], *LAYOUTS]:
            self.layout(flags)
        self.tests("ranks by way of the host", ["ranks", "the suite passes over threads" if EMULATED else "host"])

    def losses(self, device, flags, **env):
        metrics = self.work / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        command = ["gpt", "train", *(TINY if EMULATED else SMALL), *self.data(), "--metrics", metrics, "--device", device]
        code, text = self.call([*command, *flags], **env)
        if code:
            return None, last(text)
        return [row["loss"] for row in lines(metrics.read_text()) if "loss" in row], ""

    def layout(self, flags):
        name = "layout " + (" ".join(flags) or "one rank")
        if self.wanted is None:
            return self.add(name, None, "there are no losses of the CPU's to compare with")
        got, why = self.losses("cuda", flags, PHALANX_CUDA_DEVICES="4")
        if got is None:
            return self.add(name, False, why)
        worst = max((abs(a - b) for a, b in zip(got, self.wanted)), default=float("inf"))
        same = len(got) == len(self.wanted) and worst < 1e-3
        self.add(name, same, f"{len(got)} losses within {worst:.1e} of the CPU's")


def last(text):
    """The last line that says something."""
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return said[-1][:300] if said else "it said nothing"


def lines(text):
    """The JSON objects among the lines."""
    rows = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                rows.append(json.loads(line))
            except ValueError:  # cut short, or mixed with another line
                pass
    return rows


def version(doctor, library):
    """The version of a library in the doctor's report."""
    found = re.search(rf"^{library} +\S.*, (\d+\.[\d.]*\d)$", doctor, re.M)
    return found and found.group(1)


# ---- Results ----


def read(folders):
    """The stages of several runs; of a stage that several have, the last."""
    kept = {}
    for folder in folders:
        for stage in json.loads((folder / "gpu-check.json").read_text()):
            kept[stage["stage"]] = stage
    return [kept[stage] for stage in STAGES if stage in kept]


# The kernel that runs once in each of the benchmark's steps.
ONCE = "cross_entropy: forward"


def kernel_times(trace):
    """Milliseconds of a step by operation and kernel, from a trace for Chrome of many steps; captured ones are not in it."""
    times, steps = {}, 0
    for event in trace:
        named = re.match(r"(\S+) (?:(\S+) \(|cuBLASLt )", event["name"]) if event["ph"] == "X" else None
        if named:
            work = f"{named[1]}: {named[2] or 'product'}"
            times[work] = times.get(work, 0) + event["dur"] / 1e3
            steps += work == ONCE
    return {work: ms / steps for work, ms in times.items()} if steps else {}


def predictions(table):
    """The same of a table of `tests/dry`, for each kind of GPU that it is for."""
    by_gpu = {"predicted H100": {}, "predicted H200": {}}
    for h100, h200, work in re.findall(r"^ +([\d.]+) +([\d.]+) +\d+ +[\d,]+ .*?  \w+, (\S+: \S+)", table, re.M):
        for known, ms in zip(by_gpu.values(), (h100, h200)):
            known[work] = known.get(work, 0) + float(ms)
    return by_gpu


def goals(rows):
    """What the benchmarks are wanted to reach, as `[name, ratio, wanted]`, of those that were measured."""
    # Ours are the captured steps, where there are both.
    rows = sorted(rows, key=lambda row: row["workload"].endswith("-captured"))
    known = {(row["peer"], row["metric"], row["unit"]): row["value"] for row in rows}
    reached = []

    def goal(name, ours, other, wanted, scale=1.0):
        if known.get(ours) and known.get(other):
            reached.append([name, scale * known[ours] / known[other], wanted])

    step, rate, flops = ("throughput", "tokens/s"), "GB/s", "TFLOP/s"
    goal("GPT-2 124M, of compiled PyTorch's tokens/s", ("phalanx", *step), ("torch-compile", *step), 1.05)
    # Operations of a token: 6 N + 6 L C T of llm.c, in 10^12.
    token = (6 * 124.5e6 + 6 * 12 * 768 * 1024) / 1e12
    goal("GPT-2 124M, of the measured product's peak", ("phalanx", *step), ("phalanx", "matmul_bf16_8192", flops), 0.4, token)
    for tokens in (1024, 4096):
        for passes in ("fwd", "fwd+bwd"):
            name = f"attention_{tokens}/{passes}"
            goal(f"{name}, of PyTorch's flash attention", ("phalanx", name, flops), ("torch", name, flops), 0.7)
    for name in ("adamw", "gelu_f32/fwd", "gelu_f32/fwd+bwd", "layer_norm_f32/fwd", "layer_norm_f32/fwd+bwd"):
        goal(f"{name}, of the measured copy's GB/s", ("phalanx", name, rate), ("phalanx", "copy_f32", rate), 0.8)
    return reached


def table(stages):
    """Prints the stages, then ours beside each peer's, a row a measurement, and the goals. 0 unless a check has failed."""
    print("\n| stage | date | seconds | passed | failed | not tried |\n|---|---|---:|---:|---:|---:|")
    for stage in stages:
        counts = [sum(check["passed"] is kind for check in stage["checks"]) for kind in (True, False, None)]
        print(f"| {stage['stage']} | {stage['date']} | {stage['seconds']} | " + " | ".join(map(str, counts)) + " |")
    rows = [row for stage in stages for row in stage["rows"]]
    cells = {}
    for row in rows:
        cells.setdefault((row["workload"], row["metric"], row["unit"]), {})[row["peer"]] = row["value"]
    peers = sorted({row["peer"] for row in rows}, key=lambda p: (p != "phalanx", p))
    print(f"\n{stages[-1]['driver'] if stages else ''}\n")
    if cells:
        print("| workload | metric | unit | " + " | ".join(peers) + " |")
        print("|---|---|---|" + "---:|" * len(peers))
    for (workload, metric, unit), values in cells.items():
        shown = " | ".join(f"{values[p]:.4g}" if p in values else "" for p in peers)
        print(f"| {workload} | {metric} | {unit} | {shown} |")
    for name, ratio, wanted in goals(rows):
        print(f"{name}: {ratio:.2f}, wanted {wanted}")
    return int(any(check["passed"] is False for stage in stages for check in stage["checks"]))

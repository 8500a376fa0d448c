#!/usr/bin/env python3
"""`gpu-check` with stand-ins for its programs: the order of its stages, their limits, and what it keeps and says."""

import json
import os
import platform
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import gpu_stages  # noqa: E402

# Every program of the bundle: its first word, and what the environment says, decide what it prints.
PROGRAM = """#!/bin/sh
name=$(basename "$0")
echo "$name $*" >>"$STUB_LOG"
[ -z "$PHALANX_KERNEL_CACHE" ] || printf '\\177ELF sm_90a' >"$PHALANX_KERNEL_CACHE/$name.bin"
case " $STUB_HANG " in *" $name "*) sleep ${STUB_SECONDS:-15};; esac
case " $STUB_FAIL " in *" $name "*) echo "it FAILED"; exit 1;; esac
case "$name $1" in
"gpt doctor") printf '%b' "$STUB_DOCTOR";;
"gpt train")
    while [ $# -gt 0 ]; do
        [ "$1" = --metrics ] && echo '{"loss": 2.5}' >"$2"
        shift
    done
    [ -z "$PHALANX_CUDA_TRACE" ] || echo '[]' >"$PHALANX_CUDA_TRACE";;
"bench gpu-ops")
    echo "cuda:0 ${STUB_GPU:-H100} by libcuda.so.1"
    echo '{"peer": "phalanx", "workload": "gpu-ops", "metric": "copy_f32", "value": 2000.0, "unit": "GB/s"}'
    echo '{"peer": "phalanx", "workload": "gpu-ops", "metric": "adamw", "value": 1800.0, "unit": "GB/s"}';;
"bench gpt2-124m")
    echo '{"peer": "phalanx", "workload": "gpt2-124m", "metric": "throughput", "value": 9.5, "unit": "tokens/s"}'
    [ -z "$PHALANX_CUDA_TRACE" ] || printf '%b' "$STUB_TRACE" >"$PHALANX_CUDA_TRACE";;
"kernels"*|"golden"*) echo "all passed";;
*) echo "cuda: a test ... ok";;
esac
"""
DOCTOR = "driver    /lib/libcuda.so, for CUDA up to 13.0\\nNVRTC     /lib/libnvrtc.so.13, 13.0\\nNCCL      /lib/libnccl.so.2, 2.27.3\\nGPU 0     H100\\nNCCL 2.27.3: it lacks something\\n"
# Two steps, and a graph of others.
TRACE = json.dumps(
    [{"ph": "M", "name": "process_name"}]
    + [{"ph": "X", "name": "cross_entropy forward (cross_entropy.cu) ELEMENT=bf16", "dur": us} for us in (1000, 3000)]
    + [{"ph": "X", "name": "linear cuBLASLt BF16 1 x [2, 3, 4]", "dur": us} for us in (4000, 5000, 3000)]
    + [{"ph": "X", "name": "step of 496 launches, whole", "dur": 7}]
)


class GpuCheck(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-check-test-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.bundle, self.out = self.folder / "bundle", self.folder / "out"
        self.bundle.mkdir()
        for name in ("gpu-check", "gpu_stages.py"):
            shutil.copy2(HERE / name, self.bundle / name)
        (self.bundle / "gpu_peer.py").write_text("raise SystemExit('no PyTorch here')")
        (self.bundle / "text.txt").write_text("text")
        (self.bundle / "golden-own").mkdir()
        self.needs(nvrtc=["13.0"])
        with tarfile.open(self.bundle / "programs.tar.xz", "w:xz", preset=0) as packed:
            for name in "gpt bench golden training devices kernels ranks".split():
                program = self.folder / name
                program.write_text(PROGRAM)
                program.chmod(0o755)
                packed.add(program, name)

    def needs(self, **more):
        needs = {"machine": platform.machine(), "glibc": [2, 0], "commit": "abc", **more}
        (self.bundle / "needs.json").write_text(json.dumps(needs))

    def command(self, *words):
        return [sys.executable, str(self.bundle / "gpu-check"), *map(str, words)]

    def env(self, env):
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_CUDA")}
        return clean | {"STUB_LOG": str(self.folder / "log"), "STUB_DOCTOR": DOCTOR, "STUB_TRACE": TRACE} | env

    def run_check(self, *words, **env):
        done = subprocess.run(self.command("run", self.out, *words), env=self.env(env), capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def called(self):
        return (self.folder / "log").read_text().splitlines()

    def stages(self):
        return {stage["stage"]: stage for stage in json.loads((self.out / "gpu-check.json").read_text())}

    def test_all_stages_run_in_their_order_and_each_is_kept(self):
        code, text = self.run_check()
        self.assertEqual(code, 0, text)
        self.assertEqual(list(self.stages()), list(gpu_stages.STAGES))
        for name, stage in self.stages().items():
            self.assertEqual(json.loads((self.out / f"{name}.json").read_text()), stage)
        begun = [stage["begun"] for stage in self.stages().values()]
        self.assertEqual(begun, sorted(begun))
        first = [self.called().index(line) for line in ("kernels smoke", "training a captured step", "golden ", "kernels ")]
        self.assertEqual(first, sorted(first))
        self.assertIn("adamw, of the measured copy's GB/s: 0.90, wanted 0.8", text)
        self.assertIn("skip NCCL: NCCL 2.27.3: it lacks something", text)
        self.assertIn("skip ranks over NCCL: NCCL 2.27.3 does not put several ranks on a GPU", text)
        self.assertIn("skip peer gpt2-124m --compile: no PyTorch here", text)
        self.assertIn("ok   trace: 3 bytes", text)
        self.assertIn("ok   trace of gpt2-124m: 8.0 ms a step", text)
        self.assertIn("| a step of gpt2-124m | linear: product | ms | 6 |", text)

    def test_a_bundle_has_all_that_a_run_reads(self):
        """With a `cargo` that has built the stand-ins, and a `strip` that leaves them as they are."""
        tools, bundled = self.folder / "tools", self.folder / "bundled"
        tools.mkdir()
        rows = [
            json.dumps({"manifest_path": str(HERE.parent / crate / "Cargo.toml"), "target": {"name": name}, "executable": str(self.folder / called)})
            for crate, name, called in runpy.run_path(str(HERE / "gpu-check"))["PROGRAMS"]
        ]
        for name, does in ("cargo", "cat <<'ROWS'\n%s\nROWS" % "\n".join(rows)), ("strip", "exit 0"):
            (tools / name).write_text(f"#!/bin/sh\n{does}\n")
            (tools / name).chmod(0o755)
        env = self.env({"PATH": f"{tools}:{os.environ['PATH']}"})
        done = subprocess.run([HERE / "gpu-check", "bundle", bundled], env=env, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        compiled = re.search(r" MiB, (\d+) compiled kernels", done.stdout)
        self.assertGreater(int(compiled[1]), 0, done.stdout)
        self.bundle = bundled
        code, text = self.run_check()
        self.assertEqual(code, 0, text)
        self.assertRegex(text, r"\| a step of gpt2-124m \| cross_entropy: forward \| ms \| 2 \|.* 2\.462 \| 1\.718 \|")
        self.assertEqual(list(self.stages()), list(gpu_stages.STAGES))

    def test_only_names_stages(self):
        code, text = self.run_check("--only", "sweep", "--only=golden")
        self.assertEqual(code, 0, text)
        self.assertEqual(list(self.stages()), ["golden", "sweep"])
        self.assertFalse([line for line in self.called() if line.startswith(("kernels", "training"))])
        code, text = self.run_check("--only", "nothing")
        self.assertEqual(code, 1)
        self.assertIn("--only is nothing, wanted one of facts, smoke,", text)

    def test_a_stage_that_hangs_is_stopped_and_the_others_run(self):
        begin = time.time()
        code, text = self.run_check("--only", "golden", "--only", "kernels", "--only", "sweep", STUB_HANG="kernels", STUB_SECONDS="90", GPU_CHECK_SECONDS="9")
        self.assertEqual(code, 1, text)
        self.assertLess(time.time() - begin, 80)
        checks = {name: [check["passed"] for check in stage["checks"]] for name, stage in self.stages().items()}
        self.assertEqual(checks, {"golden": [True], "kernels": [False, False], "sweep": [True, True, None]})
        self.assertIn("stopped after", text)

    def test_a_failure_fails_the_run_and_no_other_stage(self):
        code, text = self.run_check("--only", "golden", "--only", "sweep", STUB_FAIL="golden")
        self.assertEqual(code, 1, text)
        self.assertIn("FAIL golden-own: it FAILED", text)
        self.assertIn("ok   benchmark gpu-ops: 2 rows", text)

    def test_what_is_known_is_kept_when_the_run_is_killed(self):
        task = subprocess.Popen(self.command("run", self.out), env=self.env({"STUB_HANG": "kernels"}), stdout=subprocess.DEVNULL, start_new_session=True)
        for _ in range(200):
            if (self.out / "smoke.json").exists() or (self.folder / "log").exists() and "kernels smoke" in self.called():
                break
            time.sleep(0.1)
        os.killpg(task.pid, signal.SIGKILL)
        task.wait()
        self.assertEqual(self.stages()["facts"]["checks"][0]["detail"], "NVRTC 13.0, as for the kernels that were brought")

    def test_another_compiler_is_told_in_one_line(self):
        self.needs(nvrtc=["13.1"])
        _, text = self.run_check("--only", "facts")
        line = "skip compiler: the kernels that were brought want NVRTC 13.1, NVRTC 13.0 is there: all kernels are compiled anew; pip install nvidia-cuda-nvrtc==13.1.*"
        self.assertIn(line, text)
        _, text = self.run_check("--only", "facts", STUB_DOCTOR="NVRTC     not found\\n")
        self.assertIn("want NVRTC 13.1, no NVRTC is there: only they run", text)

    def test_an_emulator_where_a_gpu_was_wanted_is_no_success(self):
        code, text = self.run_check("--only", "golden", STUB_GPU="Phalanx emulated device")
        self.assertEqual(code, 2, text)
        self.assertIn("no GPU's own driver served this: cuda:0 Phalanx emulated device", text)

    def test_an_incomplete_bundle_says_what_is_missing(self):
        (self.bundle / "gpu_peer.py").unlink()
        code, text = self.run_check()
        self.assertEqual((code, text), (2, "this bundle cannot run here: gpu_peer.py is missing\n"))

    def test_several_runs_have_one_table(self):
        self.run_check("--only", "golden")
        first = self.folder / "first"
        self.out.rename(first)
        self.run_check("--only", "sweep", "--only", "gpt2", STUB_FAIL="golden")
        done = subprocess.run(self.command("table", first, self.out), env=self.env({}), capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        told = [line.split(" | ")[0] for line in done.stdout.splitlines() if line.startswith("| ")]
        self.assertEqual(told[1:4], ["| golden", "| gpt2", "| sweep"])
        self.assertIn("| gpt2-124m | throughput | tokens/s | 9.5 |", done.stdout)


if __name__ == "__main__":
    unittest.main()

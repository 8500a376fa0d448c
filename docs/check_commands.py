#!/usr/bin/env python3
"""Checks the command lines of the pages: `docs/check_commands.py [FILE ..]`, by default those of all *.md of the repository but CHANGELOG.md.

Every line of a code block, and every piece of code inside a sentence, that calls the example `gpt` is given to the program that
`cargo build --release --example gpt` has built. Those of `train` get `--print-config`, which refuses unknown flags and values that
contradict each other, and trains nothing. The others get a last flag that does not exist: if the program complains of that one, it has
taken all before it. So do lines that begin with `$ `, which show a refusal as the answer. Exits with 1 and names page, line and error
if a command is refused. GPT names another program.
"""

import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True  # no folder of bytecode among the pages
from check_links import FENCE, ROOT, pages_of_the_repository  # noqa: E402

# What stands in the pages for the program: `gpt`, a path to it, or Cargo's command.
CARGO = re.compile(r"^cargo run --release --example gpt(?: --features \S+)?(?: --(?= ))?(?=\s|$)")
INLINE = re.compile(r"`((?:gpt|cargo run --release --example gpt --) [^`]+)`")
SUBCOMMANDS = ("train", "profile", "plan", "replay", "generate", "prepare", "convert", "flight", "doctor")
# A flag that does not exist.
UNKNOWN = "--no-such-flag"
# If fewer are found, this script has stopped to see them.
FEWEST = 45


def blocks(path):
    """The lines of a page: number, text, and whether it stands in a code block. A line that ends with a backslash has the next one's."""
    fence, begun, first = None, "", 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        mark = FENCE.match(line)
        if mark and (fence is None or (mark[1].startswith(fence) and line.strip() == mark[1])):
            fence, begun = (None, "") if fence else (mark[1], "")
            yield number, "", False  # the block's variables end here
            continue
        if not fence:
            yield number, line, False
            continue
        first = first if begun else number
        begun += line.strip()
        if begun.endswith("\\"):
            begun = begun[:-1].rstrip() + " "
            continue
        yield first, begun, True
        begun = ""


def words(line, variables):
    """The arguments of `gpt` in a line of a shell, or nothing if it does not call it."""
    answered, line = line.startswith("$ "), line.removeprefix("$ ")
    line = re.sub(r"\$(\w+)", lambda name: variables.get(name[1], name[0]), line)
    try:
        given = shlex.split(CARGO.sub("gpt", line), comments=True)
    except ValueError:
        return None  # not a line of a shell
    given = list(itertools.takewhile(lambda word: word not in (">", "|", "&&"), given)) + [UNKNOWN] * answered
    at = [i for i, word in enumerate(given) if word == "gpt" or word.endswith("release/examples/gpt")]
    starts = given[:1] == ["gpt"] or (at and given[0] in ("mpirun", "torchrun", "srun"))
    return given[at[0] + 1 :] if starts else None


def commands(page):
    """The command lines of a page: number of the line, and arguments."""
    variables = {}
    for number, line, code in blocks(page):
        if not code:
            variables = variables if line else {}
            for inline in INLINE.findall(line):
                yield number, words(inline, {})
            continue
        named = re.match(r'^(\w+)="([^"]*)"', line)
        if named:
            variables[named[1]] = named[2]
        given = words(line, variables)
        if given is not None and (not given or given[0] in SUBCOMMANDS or given[0].startswith("-")):
            yield number, given


def refused(program, given, folder):
    """What the program says against a command line, or nothing."""
    if {"profile", "plan", "replay", "generate", "prepare", "convert", "flight"} & set(given[:1]):
        given = [*given, UNKNOWN]
    elif not {"--help", "--print-config", UNKNOWN} & set(given):
        given = [*given, "--print-config"]
    said = subprocess.run([program, *given], cwd=folder, capture_output=True, text=True, timeout=60)
    taken = UNKNOWN in said.stderr if UNKNOWN in given else said.returncode == 0
    return None if taken else said.stderr.strip() or f"it ended with {said.returncode}"


def main():
    program = Path(os.environ.get("GPT") or ROOT / "target/release/examples/gpt").absolute()
    named = [Path(name).resolve() for name in sys.argv[1:]]
    pages = named or [page for page in pages_of_the_repository() if page.name != "CHANGELOG.md"]
    problems, count = [], 0
    with tempfile.TemporaryDirectory() as folder:
        # What the pages name as files of earlier runs.
        (Path(folder) / "run").mkdir()
        config = subprocess.run([program, "train", "--print-config"], capture_output=True, text=True, check=True)
        (Path(folder) / "run/config.toml").write_text(config.stdout)
        (Path(folder) / "plan.toml").write_text("[[stage]]\nlayers = 6\nreplicas = 1\n")
        for page in pages:
            for number, given in commands(page):
                count += 1
                why = refused(program, given, folder)
                if why:
                    problems.append(f"{page.relative_to(ROOT)}:{number}: gpt {shlex.join(given)}\n    {why}")
    if not named and count < FEWEST:
        problems.append(f"only {count} command lines were found, at least {FEWEST} were expected")
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    print(f"{count} command lines in {len(pages)} pages, {len(problems)} problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

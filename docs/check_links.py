#!/usr/bin/env python3
"""Checks the links of the pages: `docs/check_links.py [FILE ..]`, by default all *.md of the repository, and in *.rs those to the pages.

A relative link must lead to a file of this repository, and its anchor to a heading of that page. Every page under docs/ must be in
SUMMARY.md, and every page of SUMMARY.md must exist. Links of rustdoc (`crate::guide::NAME`) must name a page of the guide. Addresses
of other sites are not asked for, but those of this repository's files at GITHUB must be files here, with those headings. Exits with 1 and names page, line and link if something is broken.
"""

import os
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
# Where the book, which holds no other files of the repository, finds them.
GITHUB = "https://github.com/phalanx-ml/phalanx/blob/main/"
# Pages that are no chapters.
APART = {"SUMMARY.md", "from_pytorch_lines.md"}

FENCE = re.compile(r"^\s*(```+|~~~+)")
INLINE = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\s*\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
HTML = re.compile(r"<(?:a|img)\b[^>]*?\b(?:href|src)=[\"']([^\"']+)[\"']")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$")
EXPLICIT = re.compile(r"<(?:a|h[1-6])\b[^>]*?\b(?:id|name)=[\"']([^\"']+)[\"']|\{#([\w-]+)\}")


def prose(path):
    """The lines of a page that are not inside a code block, with their numbers."""
    fence = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        mark = FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and line.strip() == mark[1]:
                fence = None
            continue
        if mark:
            fence = mark[1]
            continue
        yield number, line


def without_code(text):
    """The text with what stands in backticks, which may go over the end of a line, replaced by as many letters."""
    return re.sub(r"(`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)\1(?!`)", lambda match: re.sub(r"[^\n]", "x", match[0]), text, flags=re.DOTALL)


def anchor(heading):
    """The anchor that mdBook and GitHub give a heading."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    kept = "".join(c for c in heading.strip().lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def anchors(path):
    """All anchors of a page; a heading that comes again is numbered."""
    found, counts = set(), {}
    for _, line in prose(path):
        for explicit in EXPLICIT.findall(line):
            found.update(name for name in explicit if name)
        heading = HEADING.match(line)
        if heading:
            name = anchor(heading[1])
            count = counts.get(name, 0)
            counts[name] = count + 1
            found.add(name if count == 0 else f"{name}-{count}")
    return found


def wrong(page, link):
    """Why a link is broken, or nothing."""
    if link.startswith(GITHUB):
        name, _, heading = link.removeprefix(GITHUB).partition("#")
        there = ROOT / name
        if not there.exists():
            return "there is no such file in this repository"
        return "the page has no such heading" if heading and heading not in anchors(there) else None
    if re.match(r"[a-z][a-z0-9+.-]*:(?!:)", link, re.IGNORECASE):
        return None
    if link.startswith("crate::"):
        guide = re.match(r"crate::guide::(\w+)", link)
        if guide and not (DOCS / "guide" / f"{guide[1]}.md").is_file():
            return "there is no such page of the guide"
        return None
    target, _, name = link.partition("#")
    path = (page.parent / target).resolve() if target else page
    if ROOT not in [path, *path.parents]:
        return "it leads out of the repository"
    if not path.exists():
        return "there is no such file"
    if DOCS in page.parents and DOCS not in [path, *path.parents]:
        return f"it leads out of the book, which has no such file: use {GITHUB}"
    if name and path.suffix == ".md" and name not in anchors(path):
        return "the page has no such heading"
    return None


def links(page):
    """The links of a page and their lines. A link's text may go over the end of a line. Of Rust only the addresses under GITHUB."""
    if page.suffix == ".rs":
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            yield from ((number, link) for link in re.findall(re.escape(GITHUB) + r"[\w./#-]*\w", line))
        return
    lines = dict(prose(page))
    text = "\n".join(lines.get(number, "") for number in range(1, max(lines, default=0) + 1))
    shown = without_code(text)
    for pattern in (INLINE, REFERENCE, HTML):
        for match in pattern.finditer(shown):
            begin, end = match.span(1)  # what was replaced is of the same length
            yield text.count("\n", 0, begin) + 1, text[begin:end]


def chapters():
    """Problems between SUMMARY.md and the pages that there are."""
    summary = DOCS / "SUMMARY.md"
    listed = {(DOCS / link.partition("#")[0]).resolve() for _, link in links(summary)}
    for page in sorted(DOCS.rglob("*.md")):
        name = page.relative_to(DOCS).as_posix()
        if name not in APART and page.resolve() not in listed:
            yield f"docs/{name}: it is not in SUMMARY.md"


def files_of_the_repository(suffix):
    """All files of a kind but those that a build or an editor has made."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name != "target" and not name.startswith(".")]
        found += [Path(folder) / name for name in names if name.endswith(suffix)]
    return sorted(found)


def pages_of_the_repository():
    """Its pages: the book, and every README and note beside the code."""
    return files_of_the_repository(".md")


def main():
    named = [Path(name).resolve() for name in sys.argv[1:]]
    pages = named or [*pages_of_the_repository(), *files_of_the_repository(".rs")]
    problems, count = list(chapters()) if not named else [], 0
    for page in pages:
        for number, link in links(page):
            count += 1
            why = wrong(page, link)
            if why:
                problems.append(f"{page.relative_to(ROOT)}:{number}: {link}: {why}")
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    print(f"{count} links in {len(pages)} files, {len(problems)} problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

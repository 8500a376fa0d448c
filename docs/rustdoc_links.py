#!/usr/bin/env python3
"""A preprocessor of mdBook: turns rustdoc's links into links of the book.

Pages under guide/ are shown by rustdoc too, where `[Var](crate::Var)` leads to a type. In the book a link to a page of the guide
(`crate::guide::NAME`) leads to that chapter, and any other becomes its text.
"""

import json
import re
import sys

LINK = re.compile(r"\[([^\]]+)\]\(crate::([\w:]+)(?:\(\))?\)")


def rewritten(text):
    """The text of a page of the guide, with links that the book can follow."""

    def link(match):
        shown, path = match.groups()
        if path.startswith("guide::"):
            return f"[{shown}]({path.removeprefix('guide::')}.md)"
        return shown

    return LINK.sub(link, text)


def visit(value):
    """Rewrites every chapter under guide/ inside a book, whatever the parts of the book are called."""
    if isinstance(value, list):
        for item in value:
            visit(item)
    elif isinstance(value, dict):
        if (value.get("path") or "").startswith("guide/") and "content" in value:
            value["content"] = rewritten(value["content"])
        for item in value.values():
            visit(item)


def main():
    if sys.argv[1:2] == ["supports"]:
        return
    _context, book = json.load(sys.stdin)
    visit(book)
    json.dump(book, sys.stdout)


if __name__ == "__main__":
    main()

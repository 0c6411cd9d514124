#!/usr/bin/env python3
"""Check the subject of a commit: `area: imperative verb, object`, at most 72 characters."""

from __future__ import annotations

import re
import sys
from pathlib import Path

MAX_CHARACTERS = 72
SUBJECT = re.compile(r"[a-z0-9][a-z0-9_./-]*: [a-z`].*[^.]")
GENERATED = re.compile(r"(Merge|Revert|fixup!|squash!) ")
"""Subjects that git generates."""


def subject_error(message: str) -> str | None:
    """Return what is wrong with the subject of a commit message, or None."""
    subject = message.partition("\n")[0]
    if GENERATED.match(subject):
        return None
    if len(subject) > MAX_CHARACTERS:
        return f"the subject has {len(subject)} characters; at most {MAX_CHARACTERS} are allowed"
    if not SUBJECT.fullmatch(subject):
        return "write the subject as `area: verb object`, in lower case, without a full stop"
    return None


if __name__ == "__main__":
    if found := subject_error(Path(sys.argv[1]).read_text(encoding="utf-8")):
        sys.exit(found)

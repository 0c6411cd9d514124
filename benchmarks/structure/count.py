"""Count what makes code hard to follow, in text read from a commit or from the working tree."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

BRANCHES: dict[type[ast.AST], str] = {
    ast.If: "if",
    ast.IfExp: "ternary",
    ast.For: "for",
    ast.AsyncFor: "for",
    ast.While: "while",
    ast.comprehension: "comprehension",
    ast.ExceptHandler: "except",
    ast.BoolOp: "bool-op",
    ast.match_case: "case",
}
"""An `elif` is an if; `a and b and c` is one bool-op; each `for` of a comprehension and each `case` count."""
OTHERS = ("isinstance", "Any", "cast", "kind", "fmt: skip")
"""`kind`: comparisons with a name or an attribute called so. `fmt: skip` counts comments."""
FMT_SKIP = re.compile(r"# fmt: skip\b")


def count(source: str) -> Counter[str]:
    """Return lines, branches (their sum and each kind) and OTHERS of a Python file."""
    counts = Counter({"lines": len(source.splitlines()), "fmt: skip": len(FMT_SKIP.findall(source))})
    for node in ast.walk(ast.parse(source)):
        if type(node) in BRANCHES:
            counts.update(["branches", BRANCHES[type(node)]])
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "cast" as name)):
                counts[name] += 1
            case ast.Name(id="Any"):
                counts["Any"] += 1
            case ast.Compare(left=left, comparators=others) if any(map(_is_kind, [left, *others])):
                counts["kind"] += 1
    return counts


def by_folder(files: Mapping[str, str]) -> dict[str, Counter[str]]:
    """Return the sums over Python files by their first two folders, and over all of them as "all"."""
    sums: dict[str, Counter[str]] = {}
    for path, text in sorted(files.items()):
        if path.endswith(".py"):
            folder = "/".join(path.split("/")[:-1][:2])
            for name in (folder, "all"):
                sums.setdefault(name, Counter()).update(count(text))
    return sums


def naming(files: Mapping[str, str], knob: str) -> list[str]:
    """Return the files of any type in which a knob's name stands as a word."""
    word = re.compile(rf"\b{re.escape(knob)}\b")
    return sorted(path for path, text in files.items() if word.search(text))


def files_of_commit(repository: Path, commit: str, *, roots: tuple[str, ...]) -> dict[str, str]:
    """Return path -> text of the text files below `roots`, as they were at a commit."""
    command = ["git", "archive", "--format=tar", commit, *roots]
    archive = subprocess.run(command, cwd=repository, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [(member.name, tar.extractfile(member)) for member in tar if member.isfile()]
        return _texts({name: file.read() for name, file in members if file})


def files_now(repository: Path, *, roots: tuple[str, ...]) -> dict[str, str]:
    """Return path -> text of the text files below `roots` that git tracks or would add, as they are on disk."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *roots]
    listed = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout.split("\0")
    return _texts({name: (repository / name).read_bytes() for name in listed if (repository / name).is_file()})


def _texts(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: content.decode() for name, content in files.items() if b"\0" not in content}


def _is_kind(node: ast.expr) -> bool:
    match node:
        case ast.Name(id="kind") | ast.Attribute(attr="kind"):
            return True
    return False

"""Draw mutants: replace an operator, constant or condition of a source file, drop a factor, or
remove a lock.
"""

from __future__ import annotations

import ast
import functools
import random
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

Kind = Literal["operator", "factor", "lock"]
PACKAGES = ("hp_tool/cost", "hp_tool/loop/calibration")
LOCKED_PACKAGES = (
    "hp_tool/cluster/launchers",
    "hp_tool/loop/search",
    "hp_tool/store",
    "hp_tool/loop/tuning",
)
"""Packages in which locks are removed. Nothing else is mutated there."""
COORDINATOR = "hp_tool/loop/search/coordinator.py"
"""Module that is mutated with the modules of its package that it imports, also indirectly."""

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
LOCK = re.compile("(?:^|_)lock", re.IGNORECASE)
UNLOCKED = '__import__("contextlib").nullcontext()'
FUNCTIONS = {
    a: b
    for pair in (("max", "min"), ("maximum", "minimum"), ("all", "any"), ("ceil", "floor"))
    for a, b in (pair, pair[::-1])
}
SELF_DECIDING = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
"""Comparisons for which the mutated operator already negates the condition."""
UNMUTATED_FIELDS = {"annotation", "returns", "decorator_list"}
UNMUTATED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
"""Messages and invariants. A fault in them changes no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One replacement in a file. Offsets are in bytes, as in `ast`."""

    kind: Kind
    path: str
    """Path relative to the repository's root."""
    line: int
    start: int
    end: int
    replacement: str
    function: str | None
    """`path:qualified name` of the outermost function that contains the replacement; None for code
    that runs on import.
    """

    def apply(self, source: bytes) -> bytes:
        """Return the source with the replacement."""
        return source[: self.start] + self.replacement.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        """Return the changed line before and after the replacement."""
        before, after = (
            text.decode().splitlines()[self.line - 1].strip()
            for text in (source, self.apply(source))
        )
        return f"- {before}\n+ {after}"


def draw(
    root: Path, *, seed: int, count: int, kinds: Collection[Kind] = ("operator", "factor", "lock")
) -> list[Mutant]:
    """Return at most `count` mutants of these kinds. Each place is equally likely, and the draw
    depends only on the seed and the code.
    """
    places = [one for one in _candidate_places(root) if one.kind in kinds]
    random.Random(seed).shuffle(places)
    valid = (mutant for mutant in places if _is_fault(mutant, (root / mutant.path).read_bytes()))
    return [mutant for mutant, _ in zip(valid, range(count), strict=False)]


@functools.cache
def _candidate_places(root: Path) -> tuple[Mutant, ...]:
    """Return the places of all possible faults: locks in LOCKED_PACKAGES, others in the core."""
    mutated = set(mutated_files(root))
    locked = {
        str(path.relative_to(root))
        for package in LOCKED_PACKAGES
        for path in (root / package).rglob("*.py")
    }
    every = (
        mutant
        for path in sorted(mutated | locked)
        for mutant in find_mutants((root / path).read_bytes(), path=path)
    )
    return tuple(one for one in every if one.kind == "lock" or one.path in mutated)


def mutated_files(root: Path) -> list[str]:
    """Return the files to draw from, relative to the root."""
    files = {path for package in PACKAGES for path in (root / package).rglob("*.py")}
    waiting = [root / COORDINATOR]
    while waiting:
        path = waiting.pop()
        files.add(path)
        imported = (
            node.module
            for node in ast.walk(ast.parse(path.read_bytes()))
            if isinstance(node, ast.ImportFrom)
        )
        modules = {path.parent / f"{name.rpartition('.')[2]}.py" for name in imported if name}
        waiting += [module for module in modules if module.is_file() and module not in files]
    return sorted(str(path.relative_to(root)) for path in files)


def find_mutants(source: bytes, *, path: str) -> Iterator[Mutant]:
    """Return the replacements in a file, in the order of its syntax tree."""
    text = _Text(source)
    for node, function in _mutated_nodes(ast.parse(source)):
        name = f"{path}:{function}" if function else None
        every: dict[Kind, Iterator[tuple[int, int, str]]] = {
            "operator": text.replacements(node),
            "factor": text.dropped_factors(node),
            "lock": text.lost_locks(node),
        }
        for kind, replacements in every.items():
            for start, end, new in replacements:
                line = source.count(b"\n", 0, start) + 1
                yield Mutant(
                    kind=kind,
                    path=path,
                    line=line,
                    start=start,
                    end=end,
                    replacement=new,
                    function=name,
                )


def _mutated_nodes(
    node: ast.AST, *, scope: str = "", function: str | None = None
) -> Iterator[tuple[ast.AST, str | None]]:
    """Yield the nodes of the tree with their outermost function, without type hints, decorators,
    messages and invariants.
    """
    yield node, function
    if isinstance(node, ast.ClassDef):
        scope = f"{scope}{node.name}."
    for name, value in ast.iter_fields(node):
        if name in UNMUTATED_FIELDS:
            continue
        inside = function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name == "body":
            inside = function or f"{scope}{node.name}"
        for child in value if isinstance(value, list) else [value]:
            if (
                isinstance(child, ast.AST)
                and not isinstance(child, UNMUTATED)
                and not _is_type(child, parent=node)
            ):
                yield from _mutated_nodes(child, scope=scope, function=inside)


def _is_type(node: ast.AST, *, parent: ast.AST) -> bool:
    """Return True for types: a union outside an annotation (an alias, or an argument of
    isinstance), and imports for type checkers only.
    """
    if (
        isinstance(parent, ast.Call)
        and isinstance(parent.func, ast.Name)
        and parent.func.id == "isinstance"
    ):
        return node is parent.args[1]
    if isinstance(parent, ast.Module) and isinstance(node, ast.Assign):
        return isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.BitOr)
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def _names(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        match each:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                yield name


class _Text:
    """The source of a file, and the possible replacements at a node as (start, end, new text)."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def replacements(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        match node:
            case ast.BinOp(left=left, op=op, right=right) if not {type(left), type(right)} & {
                ast.Dict,
                ast.DictComp,
                ast.JoinedStr,
            }:
                yield from self._operator(left, op, right)
            case ast.BoolOp(op=op, values=values):
                for left, right in pairwise(values):
                    yield from self._operator(left, op, right)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for (before, after), op in zip(pairwise([left, *comparators]), ops, strict=True):
                    yield from self._operator(before, op, after)
            case ast.AugAssign(target=target, op=op, value=value) if not isinstance(op, ast.BitOr):
                yield from self._operator(target, op, value)
            case ast.UnaryOp(operand=operand):
                yield self._start(node), self._start(operand), ""
            case ast.Constant(value=bool()):
                pass
            case ast.Constant(value=int(value)):
                yield self._start(node), self._end(node), str(value + 1)
            case ast.Constant(value=float(value)):
                yield self._start(node), self._end(node), repr(value * 1.25 or 1.0)
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in FUNCTIONS:
                yield self._end(node) - len(name), self._end(node), FUNCTIONS[name]
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield from self._negated(test)
            case ast.comprehension(ifs=ifs):
                for test in ifs:
                    yield from self._negated(test)

    def dropped_factors(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        """Return the replacements that turn `a * b` and `a / b` into `a`."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
            for start, _, _ in self._operator(node.left, node.op, node.right):
                yield start, self._end(node), ""

    def lost_locks(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        """Return the replacements that remove the lock of a block, of a query's rows, or of a
        file.
        """
        match node:
            case ast.withitem(context_expr=lock, optional_vars=None) if any(
                LOCK.search(name) for name in _names(lock)
            ):
                yield self._start(lock), self._end(lock), UNLOCKED
            case ast.Call(func=ast.Attribute(value=query, attr="with_for_update")):
                yield self._end(query), self._end(node), ""
            case ast.Call(func=ast.Attribute(attr="flock" | "lockf")):
                yield self._start(node), self._end(node), "None"

    def _operator(
        self, left: ast.AST, op: ast.AST, right: ast.AST
    ) -> Iterator[tuple[int, int, str]]:
        """Return the position of the operator between two operands, which may be in parentheses."""
        if type(op) in OPERATORS:
            old, new = OPERATORS[type(op)]
            start = self._source.find(old.encode(), self._end(left), self._start(right))
            if start >= 0:
                yield start, start + len(old), new

    def _negated(self, test: ast.expr) -> Iterator[tuple[int, int, str]]:
        decided = (
            isinstance(test, ast.Compare)
            and len(test.ops) == 1
            and isinstance(test.ops[0], SELF_DECIDING)
        )
        if not decided and not isinstance(test, ast.UnaryOp):
            start, end = self._start(test), self._end(test)
            yield start, end, f"not ({self._source[start:end].decode()})"

    def _start(self, node: ast.AST) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]


def _is_fault(mutant: Mutant, source: bytes) -> bool:
    """Return True if the mutated source compiles and differs from the original."""
    try:
        return ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False

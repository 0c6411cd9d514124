"""Sums of whole numbers in a script, and its conditions; both know a third answer: that only
running would tell.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node

    from hp_tool.formats.shell.words import Filler

LIMIT = 1 << 63
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "&&": lambda a, b: int(bool(a) and bool(b)),
    "||": lambda a, b: int(bool(a) or bool(b)),
}
_TESTS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


class SumError(Exception):
    """A sum that holds what is not known, or is none."""


def calculate(filler: Filler, node: Node, depth: int = 0) -> int:
    """The number of an arithmetic expression's node. Raises SumError."""
    from hp_tool.formats.shell.words import OPEN, Word, source_of

    filler.step()
    if depth > 30:
        raise SumError
    kind, children = node.type, node.children

    def part(child: Node) -> int:
        return calculate(filler, child, depth + 1)

    if kind == "parenthesized_expression":
        return part(children[1])
    if kind == "ternary_expression":
        return part(children[2]) if part(children[0]) else part(children[4])
    if kind in ("unary_expression", "postfix_expression"):
        sign, other = (
            (children[0], children[1]) if kind == "unary_expression" else (children[1], children[0])
        )
        if sign.type in ("++", "--"):
            old = part(other)
            new = _bounded(old + (1 if sign.type == "++" else -1))
            filler.variables[source_of(other)] = Word(str(new), filler.line(node))
            return new if kind == "unary_expression" else old
        number = part(other)
        return {"-": -number, "+": number, "!": int(not number), "~": ~number}[sign.type]
    if kind in ("binary_expression", "variable_assignment"):
        sign_text = children[1].type
        if sign_text == "=" or (
            sign_text.endswith("=") and sign_text[:-1] in ("+", "-", "*", "/", "%")
        ):
            number = part(children[2])
            if sign_text != "=":
                number = _combined(sign_text[:-1], part(children[0]), number)
            filler.variables[source_of(children[0])] = Word(str(number), filler.line(node))
            return number
        return _combined(sign_text, part(children[0]), part(children[2]))
    if kind in ("variable_name", "word"):
        value = filler.value(source_of(node))
        text = (
            None
            if value is None
            else "".join(each.text for each in ([value] if isinstance(value, Word) else [])[:1])
        )
    else:
        text = filler.text(node).text
    if text is None or OPEN in text:
        raise SumError
    return _number(filler, text.strip(), depth)


def _number(filler: Filler, text: str, depth: int) -> int:
    """The number a text writes, which may itself be a sum."""
    from hp_tool.formats.shell.grammar import parse

    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    if not text or len(text) > 1_000:
        raise SumError
    root = parse(f"(( {text} ))".encode())
    inside = root.children[0] if root.children and not root.has_error else None
    if inside is None or inside.type != "compound_statement" or len(inside.children) != 3:
        raise SumError
    return calculate(filler, inside.children[1], depth + 5)


def _combined(sign: str, one: int, other: int) -> int:
    if sign in ("/", "%"):
        if other == 0:
            raise SumError
        quotient = abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
        return quotient if sign == "/" else one - quotient * other
    if sign in ("**", "<<", ">>"):
        if not 0 <= other <= 64:
            raise SumError
        return _bounded({"**": one**other, "<<": one << other, ">>": one >> other}[sign])
    if sign not in _OPERATORS:
        raise SumError
    return _bounded(int(_OPERATORS[sign](one, other)))


def _bounded(number: int) -> int:
    if abs(number) >= LIMIT:
        raise SumError
    return number


def test(filler: Filler, tokens: list[str]) -> bool | None:
    """The truth of `[ words ]`; None where only running would tell (files, values nobody set)."""
    truth, rest = _joined(filler, tokens, 0)
    return truth if not rest else None


def _joined(
    filler: Filler, tokens: list[str], depth: int, *, either: bool = True
) -> tuple[bool | None, list[str]]:
    """`a || b`, whose parts may be `a && b` (`either`: False): the truth, and the tokens behind."""
    signs = ("||", "-o") if either else ("&&", "-a")

    def part(tokens: list[str]) -> tuple[bool | None, list[str]]:
        return (
            _joined(filler, tokens, depth, either=False) if either else _one(filler, tokens, depth)
        )

    truth, rest = part(tokens)
    while rest and rest[0] in signs:
        other, rest = part(rest[1:])
        truth = (
            either if either in (truth, other) else None if None in (truth, other) else not either
        )
    return truth, rest


def _one(filler: Filler, tokens: list[str], depth: int) -> tuple[bool | None, list[str]]:
    from hp_tool.formats.shell.words import OPEN

    if not tokens or depth > 30:
        return False, []
    if tokens[0] == "!":
        truth, rest = _one(filler, tokens[1:], depth + 1)
        return None if truth is None else not truth, rest
    if tokens[0] == "(":
        truth, rest = _joined(filler, tokens[1:], depth + 1)
        return truth, rest[1:]
    if len(tokens) >= 3 and tokens[1] in ("=", "==", "!=", "=~", "<", ">", *_TESTS):
        left, right = (filler.without_unset(each) for each in (tokens[0], tokens[2]))
        return (
            None if OPEN in left + right else _compared(filler, left, tokens[1], right)
        ), tokens[3:]
    if len(tokens) >= 2 and re.fullmatch(r"-[a-zA-Z]", tokens[0]):
        word = filler.without_unset(tokens[1])
        if tokens[0] in ("-z", "-n"):
            return (None if OPEN in word else (not word) == (tokens[0] == "-z")), tokens[2:]
        return (filler.value(word) is not None if tokens[0] == "-v" else None), tokens[2:]
    word = filler.without_unset(tokens[0])
    return (None if OPEN in word else bool(word)), tokens[1:]


def _compared(filler: Filler, left: str, sign: str, right: str) -> bool | None:
    if sign in _TESTS:
        try:
            return _TESTS[sign](_number(filler, left, 0), _number(filler, right, 0))
        except SumError:
            return None
    if sign == "=~":
        return None
    if sign in ("<", ">"):
        return left < right if sign == "<" else left > right
    equal = (
        fnmatch.fnmatchcase(left, right)
        if len(left) < 1_000 and len(right) < 100
        else left == right
    )
    return equal == (sign != "!=")

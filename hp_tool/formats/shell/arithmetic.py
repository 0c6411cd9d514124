"""Evaluate integer arithmetic and conditions of bash scripts. Values may be unknown."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node

    from hp_tool.formats.shell.words import WordExpander

INTEGER_LIMIT = 1 << 63
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
    "&&": lambda a, b: int(bool(a) and bool(b)),
    "||": lambda a, b: int(bool(a) or bool(b)),
}
EXPR_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
}
"""Operators of `expr` on two non-negative integers."""
_ASSIGNMENT = re.compile(r"[-+*/%&|^]?=|(\*\*|<<|>>)=")
_TEST_OPERATORS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


class SumError(Exception):
    """The arithmetic expression is invalid or contains an unknown value."""


def sets_variable(node: Node) -> bool:
    """Return True if an arithmetic expression assigns or increments a variable."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node.type.endswith(("_expression", "_assignment")):
            signs = [child.type for child in node.children if not child.is_named]
            if any(sign in ("++", "--") or _ASSIGNMENT.fullmatch(sign) for sign in signs):
                return True
        waiting += node.children
    return False


def evaluate_arithmetic(expander: WordExpander, node: Node, depth: int = 0) -> int:
    """Return the value of an arithmetic expression.

    Raises:
        SumError: The expression is invalid, or its value is unknown.
    """
    from hp_tool.formats.shell.words import OPEN, Word, source_text

    expander.step()
    if depth > 30:
        raise SumError
    kind, children = node.type, node.children

    def evaluate_operand(child: Node) -> int:
        return evaluate_arithmetic(expander, child, depth + 1)

    if kind == "parenthesized_expression":
        return evaluate_operand(children[1])
    if kind == "unary_expression":
        if children[0].type not in ("-", "!") or children[1].type == "binary_expression":
            raise SumError  # The grammar parses -a + b as -(a + b).
        return (
            -evaluate_operand(children[1])
            if children[0].type == "-"
            else int(not evaluate_operand(children[1]))
        )
    if kind == "ternary_expression":
        raise SumError
    if kind == "binary_expression":
        return _apply_operator(
            children[1].type, evaluate_operand(children[0]), evaluate_operand(children[2])
        )
    if kind in ("variable_name", "word"):
        value = expander.value(source_text(node))
        text = (
            None
            if value is None
            else "".join(each.text for each in ([value] if isinstance(value, Word) else [])[:1])
        )
    else:
        text = expander.text(node).text
    if text is None or OPEN in text:
        raise SumError
    return _parse_integer(text.strip())


def _parse_integer(text: str) -> int:
    """Return the decimal integer in a text.

    Raises:
        SumError: The text is not a number.
    """
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise SumError
    return int(text)


def _apply_operator(sign: str, left: int, right: int) -> int:
    if sign in ("/", "%"):
        if right == 0:
            raise SumError
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if sign == "/" else left - quotient * right
    if sign == "**" and 0 <= right <= 64:
        return _check_range(left**right)
    if sign not in _OPERATORS:
        raise SumError
    return _check_range(int(_OPERATORS[sign](left, right)))


def _check_range(number: int) -> int:
    if abs(number) >= INTEGER_LIMIT:
        raise SumError
    return number


def evaluate_test(expander: WordExpander, tokens: list[str]) -> bool | None:
    """Evaluate `[ words ]`; return None if the result depends on files or undefined variables."""
    truth, rest = _evaluate_junction(expander, tokens, 0)
    return truth if not rest else None


def _evaluate_junction(
    expander: WordExpander, tokens: list[str], depth: int, *, either: bool = True
) -> tuple[bool | None, list[str]]:
    """Evaluate a chain of conditions joined by or (`either`) or and.

    Return the truth value, None if unknown, and the remaining tokens.
    """
    signs = ("||", "-o") if either else ("&&", "-a")

    def evaluate_operand(tokens: list[str]) -> tuple[bool | None, list[str]]:
        return (
            _evaluate_junction(expander, tokens, depth, either=False)
            if either
            else _evaluate_condition(expander, tokens, depth)
        )

    truth, rest = evaluate_operand(tokens)
    while rest and rest[0] in signs:
        other, rest = evaluate_operand(rest[1:])
        truth = (
            either if either in (truth, other) else None if None in (truth, other) else not either
        )
    return truth, rest


def _evaluate_condition(
    expander: WordExpander, tokens: list[str], depth: int
) -> tuple[bool | None, list[str]]:
    from hp_tool.formats.shell.words import OPEN

    if not tokens:
        return False, []
    if depth > 30:
        return None, []
    if tokens[0] == "!":
        truth, rest = _evaluate_condition(expander, tokens[1:], depth + 1)
        return None if truth is None else not truth, rest
    if tokens[0] == "(":
        truth, rest = _evaluate_junction(expander, tokens[1:], depth + 1)
        return truth, rest[1:]
    if len(tokens) >= 3 and tokens[1] in ("=", "==", "!=", "=~", "<", ">", *_TEST_OPERATORS):
        left, right = (expander.drop_undefined(each) for each in (tokens[0], tokens[2]))
        return (None if OPEN in left + right else _compare_words(left, tokens[1], right)), tokens[
            3:
        ]
    if len(tokens) >= 2 and re.fullmatch(r"-[a-zA-Z]", tokens[0]):
        word = expander.drop_undefined(tokens[1])
        if tokens[0] in ("-z", "-n"):
            return (None if OPEN in word else (not word) == (tokens[0] == "-z")), tokens[2:]
        return (expander.value(word) is not None if tokens[0] == "-v" else None), tokens[2:]
    word = expander.drop_undefined(tokens[0])
    return (None if OPEN in word else bool(word)), tokens[1:]


def _compare_words(left: str, sign: str, right: str) -> bool | None:
    if sign in _TEST_OPERATORS:
        try:
            return _TEST_OPERATORS[sign](
                _parse_integer(left.strip()), _parse_integer(right.strip())
            )
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

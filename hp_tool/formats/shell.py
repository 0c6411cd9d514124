"""A launch script as words, with the variables that it assigns and sums of numbers filled in; nothing is executed."""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping

from hp_tool.errors import InputError

MAX_CHARACTERS = 200_000
MAX_DEPTH = 16
MAX_FILLED = 5 * MAX_CHARACTERS
"""Characters looked through for variables, those of their values each time included: a few lines can ask for billions."""
MAX_SUM = 1_000
"""Characters of $((a sum))."""
_ASSIGNMENT = re.compile(r"(?:^|;)[ \t]*(?:export\s+|local\s+)?([A-Za-z_]\w*)(\+?)=", re.MULTILINE)
_REFERENCE = re.compile(
    r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)"
    r"|\$\{(?P<braced>[A-Za-z_]\w*)(?:\[[@*]\])?(?::?-(?P<default>[^{}]*))?\}"
    r"|\$(?P<plain>[A-Za-z_]\w*)"
)
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def words(text: str) -> list[str]:
    """Every word of the script's commands, variables filled in. Raises InputError where quotes do not close."""
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"the command has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read", code="too_large")
    text = re.sub(r"\\\r?\n", " ", text)
    values, rest = _assignments(text)
    try:
        return shlex.split(_filled(rest, values), comments=True)
    except ValueError as error:
        raise InputError(f"the command cannot be read as shell words: {error}", code="syntax") from None


def flags(text: str) -> dict[str, list[str]]:
    """Values behind every `--flag` of the script; the last of several wins. `--flag=value` counts as two words."""
    values: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in words(text):
        if re.match(r"--[A-Za-z]", word):
            name, separator, value = word[2:].partition("=")
            current = [value] if separator else []
            values[name.replace("_", "-")] = current
        elif re.match(r"-[A-Za-z]$", word) or word.endswith((".py", ".sh")) or word in ("$@", "$*"):
            current = None
        elif current is not None:
            current.append(word)
    return values


def num_gpus(text: str) -> int | None:
    """Processes that the script starts: nodes x processes per node of torchrun, or of its #SBATCH lines."""
    batch = flags("\n".join(re.findall(r"(?m)^#SBATCH[ \t]+(--\S.*)$", text)))
    options = batch | flags(text)

    def number(*names: str) -> int | None:
        for name in names:
            value = (options.get(name) or [""])[0].rsplit(":", 1)[-1]
            if value.isdecimal():
                return int(value)
        return None

    per_node = number("nproc-per-node", "gpus-per-node", "gres", "ntasks-per-node")
    nodes = number("nnodes", "nodes")
    return None if per_node is None else per_node * (nodes or 1)


def _assignments(text: str) -> tuple[dict[str, str], str]:
    """The values that NAME=value, NAME="several lines" and NAME=(an array) give, and the text without them."""
    values: dict[str, str] = {}
    rest: list[str] = []
    position = 0
    while match := _ASSIGNMENT.search(text, position):
        rest.append(text[position : match.start()])
        value, position = _value(text, match.end())
        name, append = match[1], match[2]
        values[name] = f"{values.get(name, '')} {value}" if append else value
    rest.append(text[position:])
    return values, "".join(rest)


def _value(text: str, start: int) -> tuple[str, int]:
    """The assigned text from `start`, quotes and brackets taken off, and where it ends."""
    first = text[start : start + 1]
    if first in ("'", '"'):
        end = text.find(first, start + 1)
        return (text[start + 1 :], len(text)) if end < 0 else (text[start + 1 : end], end + 1)
    if first == "(":
        end = text.find(")\n", start)
        end = text.find(")", start) if end < 0 else end
        inside = text[start + 1 :] if end < 0 else text[start + 1 : end]
        return re.sub(r"(?m)(^|\s)#.*$", " ", inside), len(text) if end < 0 else end + 1
    if text.startswith("$((", start) and (end := text.find("))", start, start + MAX_SUM)) >= 0:
        return text[start : end + 2], end + 2
    match = re.compile(r"[^\s;&|]*").match(text, start)
    assert match is not None  # the pattern matches the empty text
    return match[0], match.end()


def _filled(text: str, values: Mapping[str, str]) -> str:
    """`text` with references replaced; those nobody assigned, such as $MASTER_ADDR, stay as they are."""
    left = MAX_FILLED

    def filled(text: str, inside: tuple[str, ...]) -> str:
        nonlocal left
        left -= len(text)
        if len(inside) > MAX_DEPTH or left < 0:
            raise InputError("the command's variables refer to each other too deeply, or too often", code="syntax")

        def fill(match: re.Match[str]) -> str:
            if match["sum"] is not None:
                references = re.sub(r"\b([A-Za-z_]\w*)\b", r"${\1}", re.sub(r"[${}]", "", match["sum"]))
                number = _arithmetic(filled(references, (*inside, "")))
                return match[0] if number is None else str(number)
            name = match["braced"] or match["plain"]
            if name in values and name not in inside:
                return filled(values[name], (*inside, name))
            return match[0] if match["default"] is None else match["default"]

        return _REFERENCE.sub(fill, text)

    return filled(text, ())


def _arithmetic(text: str) -> int | None:
    """The number that + - * / of whole numbers give; None where something else stands there."""
    try:
        return _number(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 1 << 40:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError

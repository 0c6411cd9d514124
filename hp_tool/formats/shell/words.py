"""Expand words of a bash script: variables, arrays, defaults and arithmetic.

Parts with unknown values become placeholders.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hp_tool.errors import InputError
from hp_tool.formats.shell.arithmetic import (
    EXPR_OPERATORS,
    SumError,
    evaluate_arithmetic,
    sets_variable,
)
from hp_tool.formats.shell.grammar import parse_script

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_STEPS = 200_000
"""Maximum number of visited syntax nodes. Each iteration of a loop counts, as does each call."""
MAX_CHARACTERS = 2_000_000
"""Maximum number of characters of expanded text."""
MAX_DEPTH = 100
MAX_PATTERN_CHARACTERS = 4_000
"""Maximum length of a value in characters, for ${X%pattern} and similar operators."""
OPEN, CLOSE = "\ue000", "\ue001"
_MARK_PATTERN = re.compile(f"{OPEN}(\\d+){CLOSE}")
_PLAIN_REFERENCE = re.compile(r"\$\{?\w+(\[[@*\d]+\])?\}?")
_REFERENCE_NODES = ("simple_expansion", "expansion", "arithmetic_expansion", "command_substitution")
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "e": "\x1b",
    "f": "\f",
    "v": "\v",
}


class Word(NamedTuple):
    """A word of a command, with its line number and its unknown parts."""

    text: str
    line: int = 0
    unknown: tuple[str, ...] = ()
    """Source text of the unknown parts: undefined variables, and commands that are not run."""


class Piece(NamedTuple):
    """A part of a word. Unquoted text is split at blanks; None as text ends the word."""

    text: str | None
    quoted: bool
    line: int


Value = Word | list[Word] | dict[str, Word]


def join_pieces(pieces: Iterator[Piece]) -> list[Word]:
    """Join pieces to words, split as bash splits them."""
    words: list[Word] = []
    current: list[str] = []
    line, open_ = 0, False
    for piece in pieces:
        if piece.text is None or (not piece.quoted and piece.text[:1].isspace()):
            if open_:
                words.append(Word("".join(current), line))
            current, open_ = [], False
        if piece.text is None:
            continue
        if piece.quoted:
            line = line if open_ else piece.line
            current.append(piece.text)
            open_ = True
            continue
        row = piece.line
        for part in re.split(r"(\s+)", piece.text):
            if part.isspace():
                row += part.count("\n")
                if open_:
                    words.append(Word("".join(current), line))
                current, open_ = [], False
            elif part:
                line = line if open_ else row
                current.append(part)
                open_ = True
    if open_:
        words.append(Word("".join(current), line))
    return words


@dataclass
class WordExpander:
    """Expands the words of a script with the current values of its variables."""

    variables: dict[str, Value] = field(default_factory=dict)
    arguments: list[Word] = field(default_factory=list)
    placeholder_sources: list[str] = field(default_factory=list)
    """Source text of each unknown part. A placeholder contains an index into this list."""
    first_line: int = 0
    steps: int = 0
    num_characters: int = 0
    depth: int = 0

    def step(self, text: str = "") -> None:
        """Count an interpreted node and the characters of `text`.

        Raises:
            InputError: A limit is exceeded.
        """
        self.steps += 1
        self.num_characters += len(text)
        if self.steps > MAX_STEPS or self.num_characters > MAX_CHARACTERS:
            raise InputError(
                "the script is too long to interpret (too many steps or too much text)",
                code="too_large",
            )

    def line(self, node: Node) -> int:
        return self.first_line + int(node.start_point[0]) + 1

    def unsupported_error(self, node: Node, construct: str) -> InputError:
        """Return the error for an unsupported construct, with its line number."""
        source = " ".join(source_text(node).split())[:80]
        return InputError(
            f"line {self.line(node)}: {construct} is not supported, because only running the "
            f"script tells its result: {source}",
            code="syntax",
        )

    def add_placeholder(self, source: str) -> str:
        """Return a new placeholder for a part of a word whose value is unknown."""
        self.placeholder_sources.append(
            _MARK_PATTERN.sub(lambda match: self.placeholder_sources[int(match[1])], source)[:200]
        )
        return f"{OPEN}{len(self.placeholder_sources) - 1}{CLOSE}"

    def drop_undefined(self, text: str) -> str:
        """Remove the placeholders of undefined variables from a text."""
        return _MARK_PATTERN.sub(
            lambda match: (
                ""
                if _PLAIN_REFERENCE.fullmatch(self.placeholder_sources[int(match[1])])
                else match[0]
            ),
            text,
        )

    def restore_sources(self, word: Word) -> Word:
        """Return the word with its placeholders replaced by their source text."""
        unknown = tuple(
            self.placeholder_sources[int(number)] for number in _MARK_PATTERN.findall(word.text)
        )
        return Word(
            _MARK_PATTERN.sub(lambda match: self.placeholder_sources[int(match[1])], word.text),
            word.line,
            unknown,
        )

    def words(self, node: Node) -> list[Word]:
        """Return the words that a word in the source expands to."""
        return join_pieces(self.pieces(node, quoted=False))

    def text(self, node: Node) -> Word:
        """Return the value of an assignment, which is not split into words."""
        text = "".join(
            " " if piece.text is None else piece.text for piece in self.pieces(node, quoted=False)
        )
        return Word(text, self.line(node))

    def pieces(self, node: Node, *, quoted: bool) -> Iterator[Piece]:
        """Yield the pieces of a word.

        Raises:
            InputError: The word is nested too deeply.
        """
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise InputError(f"line {self.line(node)} is nested too deeply", code="syntax")
        for piece in self._pieces(node, quoted=quoted):
            self.step(piece.text or "")
            yield piece
        self.depth -= 1

    def _pieces(self, node: Node, *, quoted: bool) -> Iterator[Piece]:
        kind, source, line = node.type, source_text(node), self.line(node)
        if kind in _REFERENCE_NODES and quoted and source[:1].isspace():
            yield Piece(
                source[: len(source) - len(source.lstrip())], True, line
            )  # The grammar includes blanks in the `$`.
        if kind == "raw_string":
            yield Piece(source[1:-1], True, line)
        elif kind == "ansi_c_string":
            yield Piece(
                re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), source[2:-1]),
                True,
                line,
            )
        elif kind in ("string", "translated_string"):
            yield from self._string(node)
        elif kind == "simple_expansion":
            yield from self._variable_pieces(node.children[-1], quoted=quoted, line=line)
        elif kind == "expansion":
            yield from self._expansion(node, quoted=quoted)
        elif kind == "arithmetic_expansion":
            yield Piece(self.arithmetic_text(node), True, line)
        elif source.startswith("$((") and source.endswith(
            "))"
        ):  # In a heredoc, the grammar parses arithmetic as a command.
            inner = [
                child for each in parse_script(f"x={source}").children for child in each.children
            ]
            sums = [child for child in inner if child.type == "arithmetic_expansion"]
            yield Piece(
                self.arithmetic_text(sums[0]) if sums else self.add_placeholder(source), True, line
            )
        elif kind in ("command_substitution", "process_substitution"):
            yield Piece(self._expr(node) or self.add_placeholder(source.strip()), True, line)
        elif kind == "brace_expression":
            ends = [int(text) for text in re.findall(r"-?\d+", source)[:2]]
            step = 1 if ends[-1] >= ends[0] else -1
            for number in range(ends[0], ends[-1] + step, step):
                yield Piece(str(number), True, line)
                yield Piece(None, False, line)
                self.step()
        elif kind == "concatenation":
            yield from self._with_gaps(node, node.children, quoted=quoted)
        elif quoted:
            yield Piece(
                re.sub(r'\\([$`"\\\n])', lambda match: match[1].strip("\n"), source), True, line
            )
        else:
            text = re.sub(r"\\(.)", r"\1", re.sub(r"\\\r?\n", "", source), flags=re.DOTALL)
            yield Piece(text, True, line)

    def _expr(self, node: Node) -> str:
        """Return the value of `$(expr A + B)` for known integers; empty for other commands."""
        commands = [child for child in node.children if child.is_named]
        if len(commands) != 1 or commands[0].type != "command":
            return ""
        if not source_text(commands[0]).startswith("expr "):
            return ""
        texts = [word.text for child in commands[0].children for word in self.words(child)]
        first, *rest = texts[1:] or ("",)
        if not re.fullmatch(r"\d{1,18}( [-+*/%] \d{1,18}){1,5}", " ".join(texts[1:])):
            return ""
        if len({*rest[::2]} - {"*", "/", "%"}) and len(rest) > 2:
            return ""  # The operators differ in precedence.
        number = int(first)
        for sign, operand in zip(rest[::2], map(int, rest[1::2]), strict=True):
            if sign in "/%" and operand == 0:
                return ""
            number = EXPR_OPERATORS[sign](number, operand)
        return str(number)

    def _with_gaps(self, node: Node, children: list[Node], *, quoted: bool) -> Iterator[Piece]:
        """Yield the pieces of child nodes, and of the text between them."""
        source, start = node.text or b"", node.start_byte
        end = children[0].start_byte if children else start
        for child in children:
            if gap := source[end - start : child.start_byte - start].decode(errors="replace"):
                yield Piece(gap, quoted, self.line(child))
            yield from self.pieces(child, quoted=quoted)
            end = child.end_byte

    def _string(self, node: Node) -> Iterator[Piece]:
        """Yield the pieces of double-quoted text."""
        inside = [child for child in node.children if child.type not in ('"', "string")]
        if node.type == "translated_string":
            inside = [child for child in node.children[-1].children if child.type != '"']
        empty = True
        source, start, end = node.text or b"", node.start_byte, None
        for child in inside:
            gap = source[
                (child.start_byte if end is None else end) - start : child.start_byte - start
            ].decode(errors="replace")
            if end is None and (
                lead := source[: child.start_byte - start].decode(errors="replace").lstrip("$")[1:]
            ):
                gap = lead
            if gap:
                yield Piece(gap, True, self.line(child))
            yield from self.pieces(child, quoted=True)
            empty = empty and is_list(child) and not gap
            end = child.end_byte
        rest = (
            source[end - start : -1].decode(errors="replace")
            if end is not None
            else source_text(node).lstrip("$")[1:-1]
        )
        if rest or not inside or not empty:
            yield Piece(rest, True, self.line(node))

    def value(self, name: str) -> Value | None:
        """Return the value of a variable; None if it is undefined."""
        if name in ("@", "*"):
            return list(self.arguments)
        if name == "#":
            return Word(str(len(self.arguments)))
        if name == "?":
            return Word("0")
        if name.isdecimal() and 0 < int(name[:9]) <= len(self.arguments):
            return self.arguments[int(name) - 1]
        return self.variables.get(name)

    def _variable_pieces(self, name: Node, *, quoted: bool, line: int) -> Iterator[Piece]:
        text = source_text(name)
        value = self.value(text)
        if value is None:
            yield Piece(self.add_placeholder(f"${text}"), True, line)
        elif text in ("@", "*"):
            yield from array_pieces(value, quoted=quoted, joined=text == "*")
        else:
            word = scalar_value(value)
            yield Piece(word.text, quoted, word.line)

    def _expansion(self, node: Node, *, quoted: bool) -> Iterator[Piece]:
        line, children = self.line(node), node.children[1:-1]
        prefix = (
            children[0].type
            if children and children[0].type in ("!", "#") and len(children) > 1
            else ""
        )
        children = children[1:] if prefix else children
        if not children:
            return
        target, rest = children[0], children[1:]
        value, listed = self._resolve_reference(target)
        if prefix == "!" and value is not None:
            keys = (
                value
                if isinstance(value, dict)
                else range(len(value))
                if isinstance(value, list)
                else (0,)
            )
            value = (
                [Word(str(key), line) for key in keys]
                if listed
                else self.value(scalar_value(value).text)
            )
        if prefix == "#":
            length = (
                len(value)
                if isinstance(value, list | dict) and listed
                else None
                if value is None
                else len(scalar_value(value).text)
            )
            yield Piece(
                self.add_placeholder(source_text(node)) if length is None else str(length),
                True,
                line,
            )
            return
        operator = rest[0].type if rest else ""
        operands = rest[1:]
        empty = value is None or not (
            value if isinstance(value, list | dict) and listed else scalar_value(value).text
        )
        if operator in (":-", "-", ":=", "=", ":?", "?"):
            if value is not None and (not empty or not operator.startswith(":")):
                yield from self._value_pieces(value, listed, target, quoted=quoted)
            elif operator in (":?", "?"):
                yield Piece(self.add_placeholder(source_text(node)), True, line)
            else:
                pieces = list(self._with_gaps(node, operands, quoted=quoted))
                if operator.endswith("="):
                    self.variables[source_text(target)] = Word(
                        "".join(piece.text or " " for piece in pieces), line
                    )
                yield from pieces
        elif operator in (":+", "+"):
            if value is not None and (not empty or operator == "+"):
                yield from self._with_gaps(node, operands, quoted=quoted)
        elif value is None:
            yield Piece(self.add_placeholder(source_text(node)), True, line)
        elif not operator:
            yield from self._value_pieces(value, listed, target, quoted=quoted)
        elif operator == ":" and listed and isinstance(value, list):
            elements = (
                [Word(""), *value] if source_text(target) in ("@", "*") else value
            )  # $0 precedes the arguments.
            start, count = self._slice(operands, length=len(elements))
            yield from array_pieces(elements[start : start + count], quoted=quoted, joined=False)
        else:
            pattern = "".join(
                scalar_value(list(self.words(operand)) or Word("")).text for operand in operands[:1]
            )
            changed = self._transform_value(scalar_value(value).text, operator, pattern, operands)
            yield Piece(
                self.add_placeholder(source_text(node)) if changed is None else changed,
                quoted,
                line,
            )

    def _resolve_reference(self, node: Node) -> tuple[Value | None, bool]:
        """Return the value of NAME or NAME[index], and True if it refers to a whole array."""
        if node.type != "subscript":
            name = source_text(node)
            return self.value(name), name in ("@", "*")
        value, index = self.value(source_text(node.children[0])), node.children[2]
        key = source_text(index)
        if value is None or key in ("@", "*"):
            return ([value] if isinstance(value, Word) else value), True
        if isinstance(value, dict):
            return value.get(scalar_value(self.words(index) or Word("")).text), False
        values = value if isinstance(value, list) else [value]
        number = self.evaluate(index)
        inside = number is not None and -len(values) <= number < len(values)
        return (values[number] if inside and number is not None else None), False

    def _value_pieces(
        self, value: Value, listed: bool, target: Node, *, quoted: bool
    ) -> Iterator[Piece]:
        if listed:
            yield from array_pieces(
                value, quoted=quoted, joined=source_text(target).endswith(("*", "*]"))
            )
        else:
            word = scalar_value(value)
            yield Piece(word.text, quoted, word.line)

    def _slice(self, operands: list[Node], *, length: int) -> tuple[int, int]:
        numbers = [self.evaluate(operand) for operand in operands if operand.type != ":"]
        start = numbers[0] if numbers and numbers[0] is not None else 0
        start = max(start + length, 0) if start < 0 else min(start, length)
        count = numbers[1] if len(numbers) > 1 and numbers[1] is not None else length
        return start, max(count, 0) if count >= 0 else max(length + count - start, 0)

    def _transform_value(
        self, text: str, operator: str, pattern: str, operands: list[Node]
    ) -> str | None:
        """Return the value of ${X%pattern}, ${X#pattern}, ${X:start:count} or ${X,,}.

        Return None for other operators and for unknown values.
        """
        if OPEN in text + pattern or len(text) > MAX_PATTERN_CHARACTERS or len(pattern) > 100:
            return None
        if operator in ("%", "%%", "#", "##"):
            tail, shortest = operator[0] == "%", len(operator) == 1
            cuts = range(len(text) + 1) if tail != shortest else range(len(text), -1, -1)
            matches = re.compile(fnmatch.translate(pattern)).match
            for cut in cuts:
                part, remainder = (text[cut:], text[:cut]) if tail else (text[:cut], text[cut:])
                if matches(part):
                    return remainder
            return text
        if operator == ":":
            start, count = self._slice(operands, length=len(text))
            return text[start : start + count]
        return text.lower() if operator == ",," else None

    def arithmetic_text(self, node: Node) -> str:
        """Return the value of $((expression)) as text; a placeholder if unknown."""
        number = next((self.evaluate(child) for child in node.children[1:-1]), 0)
        return self.add_placeholder(source_text(node)) if number is None else str(number)

    def evaluate(self, node: Node) -> int | None:
        """Return the value of an arithmetic expression; None if unknown."""
        self.step()
        if sets_variable(node):
            raise self.unsupported_error(node, "a sum that sets a variable")
        try:
            return evaluate_arithmetic(self, node)
        except SumError:
            return None


def scalar_value(value: Value) -> Word:
    """Return the value of an unindexed name. For an array, this is its first element."""
    if isinstance(value, Word):
        return value
    return next(iter(value.values() if isinstance(value, dict) else value), Word(""))


def array_pieces(value: Value, *, quoted: bool, joined: bool) -> Iterator[Piece]:
    """Yield the pieces of an array's elements."""
    values = (
        list(value.values())
        if isinstance(value, dict)
        else value
        if isinstance(value, list)
        else [value]
    )
    for number, each in enumerate(values):
        if number:
            yield (
                Piece(" ", True, each.line) if joined and quoted else Piece(None, False, each.line)
            )
        yield Piece(each.text, quoted, each.line)


def is_list(node: Node) -> bool:
    """Return True if an expansion refers to all arguments or to all elements of an array."""
    source = source_text(node)
    return node.type in ("simple_expansion", "expansion") and (
        source.lstrip("${")[:1] == "@" or "[@]" in source.split(":")[0]
    )


def source_text(node: Node) -> str:
    return (node.text or b"").decode(errors="replace")

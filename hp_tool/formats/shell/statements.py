"""Interpret bash statements: conditions, loops, assignments and redirections.

No command is executed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from hp_tool.errors import InputError
from hp_tool.formats.shell.arithmetic import evaluate_test
from hp_tool.formats.shell.branches import Branch, run_branch
from hp_tool.formats.shell.grammar import MAX_CHARACTERS, parse_script
from hp_tool.formats.shell.words import (
    CLOSE,
    MAX_DEPTH,
    OPEN,
    Value,
    Word,
    WordExpander,
    scalar_value,
    source_text,
)

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_NESTING = 12
"""Maximum nesting depth of functions, sourced files and nested scripts."""
SOURCED = "the sourced file was not found; pass it with --file"
MAX_COMMANDS = 2_000
SHELLS = ("bash", "sh", "zsh", "dash")


@dataclass(frozen=True)
class Command:
    """A command that the script would run."""

    words: tuple[Word, ...]
    line: int
    stdin: str | None = None
    """Text of the command's heredoc or here-string."""
    environment: Mapping[str, Word] = field(default_factory=dict)
    """Variables that the script exports, or sets for this command only."""


@dataclass(frozen=True)
class Note:
    """A part of the script that was not interpreted, and why."""

    text: str
    reason: str
    line: int


class LeaveError(Exception):
    """Raised by `break`, `continue` and `return` to leave a loop or function."""


class BreakError(LeaveError):
    pass


class ReturnError(LeaveError):
    pass


@dataclass
class Statements:
    """Interprets statements, and collects the commands that they would run."""

    files: dict[str, str]
    expander: WordExpander = field(default_factory=WordExpander)
    functions: dict[str, Node] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    prefix: tuple[Word, ...] = ()
    """Words in front of a nested script: `srun -N 4` for `srun -N 4 bash -c '...'`."""
    nesting: int = 0
    stdin: str | None = None
    """Text of the heredoc or here-string of the current command."""
    locals_: list[dict[str, Value | None]] = field(default_factory=list)
    exported: set[str] = field(default_factory=set)
    """Names of exported variables."""
    assigned: tuple[str, ...] = ()
    """Names of the variables assigned in front of the current command."""
    undecided: str = ""
    """Text of the last condition that is known only at run time."""
    ends: int = 0
    """Number of times that the script would have exited so far."""

    def run(self, text: str, *, first_line: int) -> None:
        """Interpret the text of a script. `first_line` is the number of lines before it."""
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise InputError(
                "the script's functions and scripts call each other too deeply to follow",
                code="syntax",
            )
        if len(text) > MAX_CHARACTERS:
            raise InputError(
                f"the command has {len(text):,} characters; the maximum is {MAX_CHARACTERS:,}",
                code="too_large",
            )
        self.expander.step(text)
        before, self.expander.first_line = self.expander.first_line, first_line
        clean = text if self.nesting > 1 else text.replace(OPEN, "?").replace(CLOSE, "?")
        with contextlib.suppress(LeaveError):
            self.statements(parse_script(clean.replace("\r\n", "\n")).children)
        self.expander.first_line = before
        self.nesting -= 1

    def note(self, node: Node, reason: str) -> None:
        if len(self.notes) < MAX_COMMANDS:
            text = self.expander.restore_sources(Word(" ".join(source_text(node).split()))).text
            self.notes.append(Note(text[:200], reason, self.expander.line(node)))

    def statements(self, nodes: list[Node]) -> bool:
        """Interpret statements in order, and return True if the last one succeeds."""
        succeeds = True
        for node in nodes:
            if node.is_named and node.type != "comment":
                succeeds = self.statement(node)
        return succeeds

    def statement(self, node: Node) -> bool:
        """Interpret a statement, and return True if it succeeds. Commands count as successful."""
        self.expander.step()
        self.expander.depth += 1
        if self.expander.depth > MAX_DEPTH:
            raise InputError(f"line {self.expander.line(node)} is nested too deeply", code="syntax")
        method: Callable[[Node], bool] = getattr(self, f"_{node.type}", self._children)
        try:
            return method(node)
        finally:
            self.expander.depth -= 1

    def _children(self, node: Node) -> bool:
        return self.statements(node.children)

    def _compound_statement(self, node: Node) -> bool:
        if node.children[0].type != "((":
            return self.statements(node.children)
        number = next((self.expander.evaluate(child) for child in node.children[1:-1]), 0)
        return self._record_truth(node, None if number is None else number != 0)

    def _record_truth(self, node: Node, truth: bool | None) -> bool:
        if truth is None:
            self.note(node, "only known at run time; assumed to be false")
            self.undecided = " ".join(source_text(node).split())
        return bool(truth)

    def _evaluate_condition(self, nodes: list[Node]) -> tuple[bool, str]:
        """Return the truth value of a condition, and the part of it that is known only at run time.

        The part is empty if the condition is true regardless.
        """
        outer, self.undecided = self.undecided, ""
        truth = self.statements(nodes)
        undecided, self.undecided = "" if truth else self.undecided, outer
        return truth, undecided

    def _subshell(self, node: Node) -> bool:
        variables = dict(self.expander.variables)
        succeeds = self.statements(node.children)
        self.expander.variables = variables
        return succeeds

    def _list(self, node: Node) -> bool:
        left, sign, right = node.children[0], node.children[1].type, node.children[2]
        succeeds, undecided = self._evaluate_condition([left])
        branches: list[Branch] = [lambda: self.statement(right), lambda: succeeds]
        selected = 0 if succeeds == (sign == "&&") else 1
        succeeds = run_branch(
            self, branches[selected], others=[branches[1 - selected]], undecided=undecided
        )
        self.undecided = undecided or self.undecided
        return succeeds

    def _negated_command(self, node: Node) -> bool:
        inner = node.children[-1]
        if inner.type == "test_command":
            truth = evaluate_test(self.expander, self._tokens(inner))
            return self._record_truth(node, None if truth is None else not truth)
        return not self.statement(inner)

    def _test_command(self, node: Node) -> bool:
        if node.children[0].type == "((":
            return self._compound_statement(node)
        return self._record_truth(node, evaluate_test(self.expander, self._tokens(node)))

    def _tokens(self, node: Node, *, depth: int = 0) -> list[str]:
        """Return the operands and operators of a test, in source order.

        Raises:
            InputError: The test is nested too deeply.
        """
        if depth > MAX_DEPTH:
            raise InputError(f"line {self.expander.line(node)} is nested too deeply", code="syntax")
        tokens: list[str] = []
        for child in node.children:
            if child.type in ("binary_expression", "unary_expression", "parenthesized_expression"):
                tokens += self._tokens(child, depth=depth + 1)
            elif child.type in ("[", "]", "[[", "]]"):
                continue
            elif not child.is_named or child.type == "test_operator":
                tokens.append(source_text(child))
            else:
                tokens.append(self.expander.text(child).text)
        return tokens

    def _if_statement(self, node: Node) -> bool:
        kinds = ("elif_clause", "else_clause")
        first_clause = [child for child in node.children if child.type not in kinds]
        return self._clauses(
            [first_clause, *(child.children for child in node.children if child.type in kinds)]
        )

    def _clauses(self, clauses: list[list[Node]]) -> bool:
        """Interpret the first clause with a true condition, or the else clause."""
        if not clauses:
            return True
        first, rest = clauses[0], clauses[1:]
        then = next((place for place, child in enumerate(first) if child.type == "then"), None)
        if then is None:
            return self.statements(first)
        condition, body = first[:then], first[then + 1 :]
        truth, undecided = self._evaluate_condition(condition)
        if truth:
            return self.statements(body)
        others: list[Branch] = [lambda: self.statements(body)]
        return run_branch(self, lambda: self._clauses(rest), others=others, undecided=undecided)

    def _case_statement(self, node: Node) -> bool:
        subject = self.expander.drop_undefined(self.expander.text(node.children[1]).text)
        passed: list[list[Node]] = []
        for item in node.children:
            if item.type != "case_item":
                continue
            end = next(i for i, child in enumerate(item.children) if child.type == ")")
            patterns = [self._pattern(child) for child in item.children[:end] if child.is_named]
            body = item.children[end + 1 :]
            if any(
                p == "*"
                or (OPEN not in subject and len(p) < 100 and fnmatch.fnmatchcase(subject, p))
                for p in patterns
            ):
                if OPEN in subject:
                    self.note(
                        node.children[1], "only known at run time; assumed to be the last case"
                    )
                return self._run_case(body, passed, node, subject)
            passed.append(body)
        return self._run_case([], passed, node, subject)

    def _run_case(
        self, body: list[Node], passed: list[list[Node]], node: Node, subject: str
    ) -> bool:
        """Interpret the selected case; earlier ones may apply if the subject is unknown."""
        others: list[Branch] = [functools.partial(self.statements, setting) for setting in passed]
        undecided = f"case {source_text(node.children[1])}" if OPEN in subject else ""
        return run_branch(self, lambda: self.statements(body), others=others, undecided=undecided)

    def _pattern(self, node: Node) -> str:
        return (
            source_text(node) if node.type == "extglob_pattern" else self.expander.text(node).text
        )

    def _for_statement(self, node: Node) -> bool:
        name, body = source_text(node.children[1]), node.children[-1]
        listed = [
            child for child in node.children[3:-1] if child.is_named and child.type != "comment"
        ]
        words = [word for child in listed for word in self.expander.words(child)]
        if node.children[2].type != "in":
            words = list(self.expander.arguments)
        return self._loop((self._assign(name, word) for word in words), body)

    def _assign(self, name: str, value: Value) -> bool:
        self.expander.variables[name] = value
        return True

    def _loop(self, rounds: Iterable[bool], body: Node) -> bool:
        with contextlib.suppress(BreakError):
            for continues in rounds:
                if not continues:
                    break
                self.expander.step()
                self.statement(body)
        return True

    def _c_style_for_statement(self, node: Node) -> bool:
        raise self.expander.unsupported_error(node, "for ((...))")

    def _while_statement(self, node: Node) -> bool:
        until, conditions = node.children[0].type == "until", node.children[1:-1]

        def rounds() -> Iterator[bool]:
            while True:
                yield self.statements(conditions) != until

        return self._loop(rounds(), node.children[-1])

    def _function_definition(self, node: Node) -> bool:
        name = next(source_text(child) for child in node.children if child.type == "word")
        self.functions[name] = node.children[-1]
        return True

    def _variable_assignment(self, node: Node) -> bool:
        target, sign, value = (
            node.children[0],
            node.children[1].type,
            node.children[2] if len(node.children) > 2 else None,
        )
        name = source_text(target.children[0] if target.type == "subscript" else target)
        old = self.expander.variables.get(name)
        if old is None and value is not None:
            # An undefined A expands to nothing in A="$A --more".
            self.expander.variables[name] = Word("")
        new: Value
        if value is not None and value.type == "array":
            new = self._array(value, old if isinstance(old, dict) else None)
            if sign == "+=" and isinstance(new, list):
                new = [
                    *(old if isinstance(old, list) else [old] if isinstance(old, Word) else []),
                    *new,
                ]
        else:
            new = Word("", self.expander.line(node)) if value is None else self.expander.text(value)
            if target.type == "subscript":
                return self._assign(name, self._element(target, new, old))
            if sign == "+=" and old is not None:
                old_word = scalar_value(old)
                new = Word(
                    old_word.text + new.text,
                    new.line if not old_word.text.strip() else old_word.line,
                )
                if isinstance(old, list):
                    new = [new, *old[1:]]
        return self._assign(name, new)

    def _array(self, node: Node, keys: dict[str, Word] | None) -> Value:
        elements = [
            child for child in node.children[1:-1] if child.is_named and child.type != "comment"
        ]
        pairs = [
            re.fullmatch(r"\[([^\]]*)\]=(.*)", self.expander.text(child).text, re.DOTALL)
            for child in elements
        ]
        if (
            elements
            and all(pairs)
            and (keys is not None or all(source_text(child).startswith("[") for child in elements))
        ):
            made = {
                m[1]: Word(m[2], self.expander.line(c))
                for m, c in zip(pairs, elements, strict=True)
                if m
            }
            return (keys or {}) | made
        return [word for child in elements for word in self.expander.words(child)]

    def _element(self, target: Node, new: Word, old: Value | None) -> Value:
        index = target.children[2]
        number = None if isinstance(old, dict) else self.expander.evaluate(index)
        if number is None or not 0 <= number < 10_000:
            return (old if isinstance(old, dict) else {}) | {self.expander.text(index).text: new}
        values = list(old) if isinstance(old, list) else [old] if isinstance(old, Word) else []
        values += [Word("")] * (number + 1 - len(values))
        values[number] = new
        return values

    def _declaration_command(self, node: Node) -> bool:
        local = node.children[0].type in ("local", "declare", "typeset") and self.locals_
        options = [
            source_text(child)
            for child in node.children
            if child.type == "word" and source_text(child).startswith("-")
        ]
        keyed, refers = (any(letter in option for option in options) for letter in "An")
        for child in node.children[1:]:
            if child.type not in ("variable_assignment", "variable_name"):
                continue
            name = re.split(r"\+?=|\[", source_text(child), maxsplit=1)[0]
            if node.children[0].type == "export":
                self.exported.add(name)
            if local and self.locals_ and name not in self.locals_[-1]:
                self.locals_[-1][name] = self.expander.variables.get(name)
            if keyed and not isinstance(self.expander.variables.get(name), dict):
                self.expander.variables[name] = {}
            if child.type == "variable_assignment":
                self.statement(child)
                if (
                    refers
                    and (
                        target := self.expander.variables.get(
                            scalar_value(self.expander.variables[name]).text
                        )
                    )
                    is not None
                ):
                    self.expander.variables[name] = (
                        target  # `export NAME` exports the current value.
                    )
        return True

    def _unset_command(self, node: Node) -> bool:
        for child in node.children[1:]:
            self.expander.variables.pop(source_text(child), None)
        return True

    def _redirected_statement(self, node: Node) -> bool:
        target, stdin = None, None
        for child in node.children:
            if child.type == "file_redirect":
                target = self._file(child) or target
            elif child.type == "heredoc_redirect":
                stdin = self._heredoc(child)
                target = next(
                    (self._file(each) for each in child.children if each.type == "file_redirect"),
                    target,
                )
            elif child.type == "herestring_redirect":
                stdin = self.expander.text(child.children[-1]).text
        inner = node.children[0]
        self.stdin = stdin if inner.type == "command" else None
        if inner.type == "while_statement" and stdin is not None:
            raise self.expander.unsupported_error(node, "a loop over the lines of a text")
        before = len(self.commands)
        succeeds = (
            self.statement(inner)
            if inner.is_named and not inner.type.endswith("_redirect")
            else True
        )
        if stdin is not None and len(self.commands) == before + 1:
            command = self.commands.pop()
            names = [PurePosixPath(word.text).name for word in command.words]
            if names[:1] == ["cat"] and target:
                self.files[target] = self.expander.restore_sources(Word(stdin)).text
            elif names[-1] in SHELLS or names[0] == "sbatch":
                self._nested(stdin, command.words, line=command.line)
            else:
                text = self.expander.restore_sources(Word(stdin)).text
                self.commands.append(replace(command, stdin=text))
        for child in node.children:
            if child.type == "heredoc_redirect":
                self.statements([each for each in child.children if each.type == "pipeline"])
        return succeeds

    def _file(self, node: Node) -> str | None:
        signs = [child.type for child in node.children if not child.is_named]
        return (
            self.expander.restore_sources(self.expander.text(node.children[-1])).text
            if signs and signs[0] in (">", ">>", ">|")
            else None
        )

    def _heredoc(self, node: Node) -> str:
        body = next((child for child in node.children if child.type == "heredoc_body"), None)
        start = next(source_text(child) for child in node.children if child.type == "heredoc_start")
        if body is None:
            return ""
        text = source_text(body)
        if not re.search(r"['\"\\]", start):
            source, parts = body.text or b"", body.children
            head, tail = (
                (parts[0].start_byte - body.start_byte, parts[-1].end_byte - body.start_byte)
                if parts
                else (0, 0)
            )
            inside = "".join(
                piece.text or " " for piece in self.expander._with_gaps(body, parts, quoted=True)
            )
            text = (
                source[:head].decode(errors="replace")
                + inside
                + source[tail:].decode(errors="replace")
            )
        return re.sub(r"(?m)^\t+", "", text) if node.children[0].type == "<<-" else text

    def _nested(
        self, text: str, prefix: Iterable[Word], *, arguments: list[Word] | None = None, line: int
    ) -> None:
        """Interpret a nested script, after the words `prefix` that launch it."""
        outer_prefix, self.prefix = self.prefix, (*self.prefix, *prefix)
        outer, self.expander.arguments = self.expander.arguments, arguments or []
        self.run(text, first_line=line)
        self.prefix, self.expander.arguments = outer_prefix, outer

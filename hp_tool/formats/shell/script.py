"""Interpret a bash script, and collect the commands that it would run."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from hp_tool.errors import InputError
from hp_tool.formats.shell.arithmetic import evaluate_test
from hp_tool.formats.shell.statements import (
    MAX_COMMANDS,
    MAX_NESTING,
    SHELLS,
    SOURCED,
    BreakError,
    Command,
    Note,
    ReturnError,
    Statements,
)
from hp_tool.formats.shell.words import Value, Word, scalar_value, source_text

if TYPE_CHECKING:
    from tree_sitter import Node

_SLURM = {
    "SLURM_NNODES": "nodes",
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_GPUS_ON_NODE": "gpus-per-node",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_NTASKS": "ntasks",
}
"""Variables that Slurm sets, each with the #SBATCH option of the same value."""


@dataclass(frozen=True)
class Script:
    """The commands that a script would run, and the files that it uses."""

    commands: tuple[Command, ...]
    notes: tuple[Note, ...]
    files: Mapping[str, str]
    """Files that the script writes from heredocs, and files that were passed with it."""
    header: Mapping[str, str]
    """Options of the #SBATCH lines, without dashes."""


def read_script(
    text: str, *, variables: Mapping[str, str] | None = None, files: Mapping[str, str] | None = None
) -> Script:
    """Return the commands that a script would run.

    Args:
        variables: The script's environment; 1, 2, ... are its arguments.
        files: Texts of files that the script sources or names.

    Raises:
        InputError: The script is not valid bash, or exceeds the limits.
    """
    environment = dict(variables or {})
    runner = _Runner(files=dict(files or {}))
    last = max((number for number in range(1, 100) if str(number) in environment), default=0)
    for name in map(str, range(1, last + 1)):
        runner.expander.arguments.append(
            Word(
                environment[name]
                if name in environment
                else runner.expander.add_placeholder(f"${{{name}}}")
            )
        )
    header = _sbatch_options(text)
    if "gpus-per-node" not in header and "gres" in header:
        header["gpus-per-node"] = header["gres"]
    for name, option in _SLURM.items():
        if (value := header.get(option, "").rsplit(":", 1)[-1]).isdecimal():
            runner.expander.variables[name] = Word(value)
    runner.expander.variables |= {
        name: Word(value) for name, value in environment.items() if not name.isdecimal()
    }
    runner.run(text, first_line=0)
    return Script(tuple(runner.commands), tuple(runner.notes), runner.files, header)


_SHORT_SBATCH_OPTIONS = {"N": "nodes", "n": "ntasks"}
"""Long names of sbatch's short options."""


def _sbatch_options(text: str) -> dict[str, str]:
    """Return the options in #SBATCH lines, without leading dashes."""
    header: dict[str, str] = {}
    for line in re.findall(r"(?m)^#SBATCH[ \t]+(.*)$", text):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # An unclosed quote.
            words = line.split()
        name = ""
        for word in words:
            option = re.fullmatch(r"--([\w-]+)(?:=(.*))?|-([A-Za-z])=?(.*)", word, re.DOTALL)
            if option is not None:
                name = option[1] or _SHORT_SBATCH_OPTIONS.get(option[3], option[3])
                header[name] = (option[2] if option[1] else option[4]) or ""
            elif name and not header[name]:
                header[name] = word
    return header


_DATA_SUFFIXES = (".json", ".yaml", ".yml", ".toml", ".txt", ".py")
"""Suffixes of files that a command reads as data, not as bash."""


class _Runner(Statements):
    """Interprets shell builtins and records all other commands."""

    def _command(self, node: Node) -> bool:
        previous: dict[str, Value | None] = {}
        words: list[Word] = []
        for child in node.children:
            if child.type == "variable_assignment":
                name = source_text(child.children[0])
                previous[name] = self.expander.variables.get(name)
                self.statement(child)
            elif child.type == "command_name":
                words += self.expander.words(child.children[0])
            elif child.type == "herestring_redirect":
                self.stdin = self.expander.text(child.children[-1]).text
            elif not child.is_named:
                continue
            elif child.type != "comment" and not child.type.endswith("redirect"):
                words += self.expander.words(child)
        self.assigned = tuple(previous)
        succeeds = self._run_command(words, node) if words else True
        self.stdin, self.assigned = None, ()
        if words:
            for name, old in previous.items():
                self.expander.variables.pop(name, None)
                if old is not None:
                    self.expander.variables[name] = old
        return succeeds

    def _run_command(self, words: list[Word], node: Node) -> bool:
        name, rest = words[0].text, words[1:]
        builtin: Callable[[list[Word], Node], bool] | None = getattr(
            self, f"_do_{_BUILTIN.get(name, '')}", None
        )
        if name in self.functions:
            return self._function(name, rest)
        if builtin is not None:
            return builtin(rest, node)
        if PurePosixPath(name).name == "ssh" and len(rest) > 1 and " " in rest[-1].text:
            self._nested(rest[-1].text, (), line=rest[-1].line)
            return True
        for number, word in enumerate(words):
            program = PurePosixPath(word.text).name
            if name == "sbatch" and word.text.startswith("--wrap"):
                _, separator, script = word.text.partition("=")
                others = [*words[:number], *words[number + (1 if separator else 2) :]]
                self._nested(script if separator else words[-1].text, others, line=word.line)
                return True
            if program in SHELLS and number + 1 < len(words):
                return self._shell(words[number + 1 :], before=words[:number], node=node)
            path = word.text.removeprefix("./")
            if PurePosixPath(path).suffix in _DATA_SUFFIXES:
                continue
            if (number == 0 or words[0].text in ("sbatch", "srun")) and (
                path in self.files or program in self.files
            ):
                self._nested(
                    self.files.get(path, self.files.get(program, "")),
                    words[:number],
                    arguments=words[number + 1 :],
                    line=0,
                )
                return True
        if len(self.commands) < MAX_COMMANDS:
            shown = tuple(self.expander.restore_sources(word) for word in (*self.prefix, *words))
            environment = {
                name: self.expander.restore_sources(scalar_value(self.expander.variables[name]))
                for name in (*sorted(self.exported), *self.assigned)
                if name in self.expander.variables
            }
            self.commands.append(Command(shown, self.expander.line(node), environment=environment))
        return True

    def _shell(self, after: list[Word], *, before: list[Word], node: Node) -> bool:
        """Interpret `bash -c SCRIPT ARGUMENTS` or `bash FILE ARGUMENTS`."""
        options = 0
        while options < len(after) and after[options].text.startswith(("-", "+")):
            options += 1
            if (
                "c" in after[options - 1].text
                and not after[options - 1].text.startswith("--")
                and options < len(after)
            ):
                script = after[options]
                self._nested(
                    script.text,
                    before,
                    arguments=after[options + 2 :],
                    line=max(script.line - 1, 0),
                )
                return True
        name = after[options].text if options < len(after) else ""
        text = self.files.get(name, self.files.get(PurePosixPath(name).name))
        if text is None:
            self.note(
                node,
                f"{name or 'the file'} was not found; pass it with --file, or import it directly",
            )
        else:
            self._nested(text, before, arguments=after[options + 1 :], line=0)
        return True

    def _function(self, name: str, arguments: list[Word]) -> bool:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise InputError(
                "the script's functions and scripts call each other too deeply to follow",
                code="syntax",
            )
        outer, self.expander.arguments = self.expander.arguments, arguments
        self.locals_.append({})
        succeeds = True
        with contextlib.suppress(ReturnError):
            succeeds = self.statement(self.functions[name])
        for local, old in self.locals_.pop().items():
            self.expander.variables.pop(local, None)
            if old is not None:
                self.expander.variables[local] = old
        self.expander.arguments = outer
        self.nesting -= 1
        return succeeds

    def _do_true(self, words: list[Word], node: Node) -> bool:
        return True

    def _do_false(self, words: list[Word], node: Node) -> bool:
        return False

    def _do_test(self, words: list[Word], node: Node) -> bool:
        return self._record_truth(
            node, evaluate_test(self.expander, [word.text for word in words if word.text != "]"])
        )

    def _do_break(self, words: list[Word], node: Node) -> bool:
        raise BreakError

    def _do_return(self, words: list[Word], node: Node) -> bool:
        raise ReturnError

    def _do_exit(self, words: list[Word], node: Node) -> bool:
        self.note(
            node,
            "the script would end here as it stands; read on as if its arguments and files were "
            "right",
        )
        self.ends += 1
        return True

    def _do_let(self, words: list[Word], node: Node) -> bool:
        raise self.expander.unsupported_error(node, "let")

    def _do_set(self, words: list[Word], node: Node) -> bool:
        texts = [word.text for word in words]
        if "--" in texts:
            self.expander.arguments = words[texts.index("--") + 1 :]
        return True

    def _do_shift(self, words: list[Word], node: Node) -> bool:
        count = int(words[0].text[:9]) if words and words[0].text.isdecimal() else 1
        had = len(self.expander.arguments) >= count
        self.expander.arguments = self.expander.arguments[count:]
        return had

    def _do_printf(self, words: list[Word], node: Node) -> bool:
        if len(words) > 2 and words[0].text == "-v":
            form, values = words[2], iter([word.text for word in words[3:]])
            plain = "%" not in re.sub(r"%[sd]", "", form.text)
            text = (
                re.sub(r"%[sd]", lambda match: next(values, ""), form.text)
                if plain
                else self.expander.add_placeholder(source_text(node))
            )
            self.expander.variables[words[1].text] = form._replace(text=text)
        return True

    def _do_eval(self, words: list[Word], node: Node) -> bool:
        self.run(" ".join(word.text for word in words), first_line=self.expander.line(node) - 1)
        return True

    def _do_source(self, words: list[Word], node: Node) -> bool:
        name = words[0].text if words else ""
        text = self.files.get(name, self.files.get(PurePosixPath(name).name))
        if text is None:
            self.note(node, SOURCED)
        else:
            self.run(text, first_line=0)
        return True

    def _do_read(self, words: list[Word], node: Node) -> bool:
        """Interpret `read` from a heredoc or here-string."""
        stdin, options, names, rest = self.stdin, "", [], iter(words)
        for word in rest:
            if not word.text.startswith("-"):
                names.append(word.text)
            elif word.text[-1:] in "dinNptu":
                options += word.text + ("0" if not next(rest, Word("")).text else "")
            else:
                options += word.text
        self.stdin = None
        if stdin is None:
            self.note(node, "its input is only known at run time")
        for name in filter(re.compile(r"[A-Za-z_]\w*").fullmatch, names):
            if stdin is None:
                self.expander.variables[name] = Word(
                    self.expander.add_placeholder(f"$({source_text(node)})")
                )
        if stdin is None or not names:
            return False
        reads_all, line = "0" in options, self.expander.line(node)
        text = stdin.strip() if reads_all else stdin.split("\n", 1)[0]
        separators = scalar_value(self.expander.variables.get("IFS") or Word(" ")).text.strip()
        between = f"[{re.escape(separators)}]" if separators else r"\s+"
        alone = "a" not in options and len(names) == 1
        parts = (
            [text]
            if alone
            else re.split(between, text.strip(), maxsplit=0 if "a" in options else len(names) - 1)
        )
        words_read = [Word(part, line) for part in parts]
        if "a" in options:
            self.expander.variables[names[-1]] = list(words_read)
        else:
            self.expander.variables |= dict(
                zip(names, [*words_read, *[Word("")] * len(names)], strict=False)
            )
        return not reads_all


_BUILTIN = {
    ":": "true",
    "true": "true",
    "false": "false",
    "test": "test",
    "[": "test",
    "break": "break",
    "continue": "true",
    "return": "return",
    "exit": "exit",
    "let": "let",
    "set": "set",
    "shift": "shift",
    "eval": "eval",
    "source": "source",
    ".": "source",
    "read": "read",
    "mapfile": "read",
    "readarray": "read",
    "getopts": "read",
    "printf": "printf",
}
"""Shell builtins, and the methods that interpret them."""

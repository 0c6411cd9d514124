"""The commands that a bash script would run, in its order: conditions, loops and functions followed, nothing executed."""

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tree_sitter import Node

from hp_tool.errors import InputError
from hp_tool.formats.shell.grammar import MAX_CHARACTERS, parse_script
from hp_tool.formats.shell.sums import test
from hp_tool.formats.shell.words import CLOSE, MAX_DEPTH, OPEN, Filler, Value, Word, first, source_of

MAX_NESTING = 12
"""Functions, sourced files and scripts within scripts."""
MAX_COMMANDS = 2_000
SHELLS = ("bash", "sh", "zsh", "dash")
_SLURM = {"SLURM_NNODES": "nodes", "SLURM_JOB_NUM_NODES": "nodes", "SLURM_GPUS_PER_NODE": "gpus-per-node",
          "SLURM_GPUS_ON_NODE": "gpus-per-node", "SLURM_NTASKS_PER_NODE": "ntasks-per-node", "SLURM_NTASKS": "ntasks"}  # fmt: skip
"""Variables that Slurm sets, and the option of the script's header that each repeats."""


@dataclass(frozen=True)
class Command:
    """A command as the script would run it."""

    words: tuple[Word, ...]
    line: int
    stdin: str | None = None
    """What a heredoc feeds it."""


@dataclass(frozen=True)
class Note:
    """Something the script says that was not followed, and why."""

    text: str
    reason: str
    line: int


@dataclass(frozen=True)
class Script:
    """What a script would do."""

    commands: tuple[Command, ...]
    notes: tuple[Note, ...]
    files: Mapping[str, str]
    """Files that it writes from heredocs, and those given beside it."""
    header: Mapping[str, str]
    """Options of its #SBATCH lines, without dashes."""


class _Leave(Exception):
    """break, continue or return."""


class _Break(_Leave):
    pass


class _Return(_Leave):
    pass


def read(text: str, *, variables: Mapping[str, str] | None = None, files: Mapping[str, str] | None = None) -> Script:
    """The commands of a script. `variables` are those of its environment (and 1, 2, ... its arguments), `files` the texts of
    the files that it sources or names.

    Raises InputError where it is no bash, or asks for more than is followed.
    """
    given = dict(variables or {})
    arguments = [Word(given[str(number)]) for number in range(1, 100) if str(number) in given]
    runner = _Runner(files=dict(files or {}))
    runner.filler.arguments = arguments
    header = {}
    for match in re.finditer(r"(?m)^#SBATCH[ \t]+(?:--([\w-]+)|-([A-Za-z]))(?:[= \t]+(\S+))?", text):
        header[match[1] or {"N": "nodes", "n": "ntasks"}.get(match[2], match[2])] = match[3] or ""
    if "gpus-per-node" not in header and "gres" in header:
        header["gpus-per-node"] = header["gres"]
    for name, option in _SLURM.items():
        if (value := header.get(option, "").rsplit(":", 1)[-1]).isdecimal():
            runner.filler.variables[name] = Word(value)
    runner.filler.variables |= {name: Word(value) for name, value in given.items() if not name.isdecimal()}
    runner.run(text, first_line=0)
    return Script(tuple(runner.commands), tuple(runner.notes), runner.files, header)


@dataclass
class _Runner:
    files: dict[str, str]
    filler: Filler = field(default_factory=Filler)
    functions: dict[str, Node] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    prefix: tuple[Word, ...] = ()
    """Words before a script within the script: `srun -N 4 bash -c '...'`."""
    nesting: int = 0
    locals_: list[dict[str, Value | None]] = field(default_factory=list)

    def run(self, text: str, *, first_line: int) -> None:
        """Follow a script's text; its lines count from `first_line`."""
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise InputError("the script's functions and scripts call each other too deeply", code="syntax")
        if len(text) > MAX_CHARACTERS:
            raise InputError(f"the command has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read", code="too_large")
        self.filler.step(text)
        before, self.filler.first_line = self.filler.first_line, first_line
        clean = text if self.nesting > 1 else text.replace(OPEN, "?").replace(CLOSE, "?")
        try:
            self.statements(parse_script(clean.replace("\r\n", "\n")).children)
        except _Return:
            pass
        except _Leave:
            pass
        self.filler.first_line = before
        self.nesting -= 1

    def note(self, node: Node, reason: str) -> None:
        if len(self.notes) < MAX_COMMANDS:
            text = self.filler.shown(Word(" ".join(source_of(node).split()))).text
            self.notes.append(Note(text[:200], reason, self.filler.line(node)))

    def statements(self, nodes: list[Node]) -> bool:
        """Follow statements in order; whether the last one succeeds."""
        done = True
        for node in nodes:
            if node.is_named and node.type != "comment":
                done = self.statement(node)
        return done

    def statement(self, node: Node) -> bool:
        """Follow one statement; whether it succeeds. Commands count as succeeding."""
        self.filler.step()
        self.filler.depth += 1
        if self.filler.depth > MAX_DEPTH:
            raise InputError(f"line {self.filler.line(node)} is nested too deeply to be read", code="syntax")
        follow: Callable[[Node], bool] = getattr(self, f"_{node.type}", self._children)
        try:
            return follow(node)
        finally:
            self.filler.depth -= 1

    def _children(self, node: Node) -> bool:
        return self.statements(node.children)

    def _compound_statement(self, node: Node) -> bool:
        if node.children[0].type != "((":
            return self.statements(node.children)
        number = next((self.filler.calculated(child) for child in node.children[1:-1]), 0)
        return self._known(node, None if number is None else number != 0)

    def _known(self, node: Node, truth: bool | None) -> bool:
        if truth is None:
            self.note(node, "only running would tell; taken as false")
        return bool(truth)

    def _subshell(self, node: Node) -> bool:
        kept = dict(self.filler.variables)
        done = self.statements(node.children)
        self.filler.variables = kept
        return done

    def _list(self, node: Node) -> bool:
        left, sign, right = node.children[0], node.children[1].type, node.children[2]
        done = self.statement(left)
        return self.statement(right) if done == (sign == "&&") else done

    def _negated_command(self, node: Node) -> bool:
        inner = node.children[-1]
        if inner.type == "test_command":
            truth = test(self.filler, self._tokens(inner))
            return self._known(node, None if truth is None else not truth)
        return not self.statement(inner)

    def _test_command(self, node: Node) -> bool:
        if node.children[0].type == "((":
            return self._compound_statement(node)
        return self._known(node, test(self.filler, self._tokens(node)))

    def _tokens(self, node: Node) -> list[str]:
        """Operands and operators of a test in the order they are written."""
        tokens: list[str] = []
        for child in node.children:
            if child.type in ("binary_expression", "unary_expression", "parenthesized_expression"):
                tokens += self._tokens(child)
            elif child.type in ("[", "]", "[[", "]]"):
                continue
            elif not child.is_named or child.type == "test_operator":
                tokens.append(source_of(child))
            else:
                tokens.append(self.filler.text(child).text)
        return tokens

    def _if_statement(self, node: Node) -> bool:
        condition, body, taken = True, [], False
        reading = True
        for child in node.children[1:]:
            if child.type == "then":
                reading = False
            elif child.type in ("elif_clause", "else_clause"):
                break
            elif reading:
                condition = self.statement(child) if child.is_named and child.type != "comment" else condition
            else:
                body.append(child)
        taken = condition
        if taken:
            return self.statements(body)
        for clause in node.children:
            if clause.type == "else_clause":
                return self.statements(clause.children)
            if clause.type == "elif_clause":
                then = next(i for i, child in enumerate(clause.children) if child.type == "then")
                if self.statements(clause.children[:then]):
                    return self.statements(clause.children[then + 1 :])
        return True

    def _case_statement(self, node: Node) -> bool:
        subject = self.filler.without_unset(self.filler.text(node.children[1]).text)
        for item in node.children:
            if item.type != "case_item":
                continue
            end = next(i for i, child in enumerate(item.children) if child.type == ")")
            patterns = [self._pattern(child) for child in item.children[:end] if child.is_named]
            if any(p == "*" or (OPEN not in subject and len(p) < 100 and fnmatch.fnmatchcase(subject, p)) for p in patterns):
                if OPEN in subject:
                    self.note(node.children[1], "only running would tell; the last case is taken")
                return self.statements(item.children[end + 1 :])
        return True

    def _pattern(self, node: Node) -> str:
        return source_of(node) if node.type == "extglob_pattern" else self.filler.text(node).text

    def _for_statement(self, node: Node) -> bool:
        name, body = source_of(node.children[1]), node.children[-1]
        listed = [child for child in node.children[3:-1] if child.is_named and child.type != "comment"]
        words = [word for child in listed for word in self.filler.words(child)]
        if node.children[2].type != "in":
            words = list(self.filler.arguments)
        return self._loop((self._set(name, word) for word in words), body)

    def _set(self, name: str, value: Value) -> bool:
        self.filler.variables[name] = value
        return True

    def _loop(self, rounds: object, body: Node) -> bool:
        try:
            for go in rounds:  # type: ignore[attr-defined]
                if not go:
                    break
                self.filler.step()
                self.statement(body)
        except _Break:
            pass
        return True

    def _c_style_for_statement(self, node: Node) -> bool:
        parts: list[list[Node]] = [[]]
        for child in node.children[2:]:
            if child.type == "))":
                break
            parts.append([]) if child.type == ";" else parts[-1].append(child)
        start, condition, after = (parts + [[], []])[:3]

        def rounds() -> object:
            for each in start:
                self.filler.calculated(each) if each.type != "variable_assignment" else self.statement(each)
            while all(self.filler.calculated(each) for each in condition):
                yield True
                for each in after:
                    self.filler.calculated(each)

        return self._loop(rounds(), node.children[-1])

    def _while_statement(self, node: Node) -> bool:
        until, conditions = node.children[0].type == "until", node.children[1:-1]

        def rounds() -> object:
            while True:
                yield self.statements(conditions) != until

        return self._loop(rounds(), node.children[-1])

    def _function_definition(self, node: Node) -> bool:
        name = next(source_of(child) for child in node.children if child.type == "word")
        self.functions[name] = node.children[-1]
        return True

    def _variable_assignment(self, node: Node) -> bool:
        target, sign, value = node.children[0], node.children[1].type, node.children[2] if len(node.children) > 2 else None
        name = source_of(target.children[0] if target.type == "subscript" else target)
        old = self.filler.variables.get(name)
        if old is None and value is not None:
            self.filler.variables[name] = Word("")  # A="$A --more" begins with nothing
        made: Value
        if value is not None and value.type == "array":
            made = self._array(value, old if isinstance(old, dict) else None)
            if sign == "+=" and isinstance(made, list):
                made = [*(old if isinstance(old, list) else [old] if isinstance(old, Word) else []), *made]
        else:
            made = Word("", self.filler.line(node)) if value is None else self.filler.text(value)
            if target.type == "subscript":
                return self._set(name, self._element(target, made, old))
            if sign == "+=" and old is not None:
                kept = first(old)
                made = Word(kept.text + made.text, made.line if not kept.text.strip() else kept.line)
                if isinstance(old, list):
                    made = [made, *old[1:]]
        return self._set(name, made)

    def _array(self, node: Node, keys: dict[str, Word] | None) -> Value:
        elements = [child for child in node.children[1:-1] if child.is_named and child.type != "comment"]
        pairs = [re.fullmatch(r"\[([^\]]*)\]=(.*)", self.filler.text(child).text, re.DOTALL) for child in elements]
        if elements and all(pairs) and (keys is not None or all(source_of(child).startswith("[") for child in elements)):
            made = {m[1]: Word(m[2], self.filler.line(c)) for m, c in zip(pairs, elements, strict=True) if m}
            return (keys or {}) | made
        return [word for child in elements for word in self.filler.words(child)]

    def _element(self, target: Node, made: Word, old: Value | None) -> Value:
        index = target.children[2]
        number = None if isinstance(old, dict) else self.filler.calculated(index)
        if number is None or not 0 <= number < 10_000:
            return (old if isinstance(old, dict) else {}) | {self.filler.text(index).text: made}
        values = list(old) if isinstance(old, list) else [old] if isinstance(old, Word) else []
        values += [Word("")] * (number + 1 - len(values))
        values[number] = made
        return values

    def _declaration_command(self, node: Node) -> bool:
        local = node.children[0].type in ("local", "declare", "typeset") and self.locals_
        keyed = any(
            source_of(child).startswith("-") and "A" in source_of(child) for child in node.children if child.type == "word"
        )
        for child in node.children[1:]:
            if child.type not in ("variable_assignment", "variable_name"):
                continue
            name = re.split(r"\+?=|\[", source_of(child), maxsplit=1)[0]
            if local and self.locals_ and name not in self.locals_[-1]:
                self.locals_[-1][name] = self.filler.variables.get(name)
            if keyed and not isinstance(self.filler.variables.get(name), dict):
                self.filler.variables[name] = {}
            if child.type == "variable_assignment":
                self.statement(child)
        return True

    def _unset_command(self, node: Node) -> bool:
        for child in node.children[1:]:
            self.filler.variables.pop(source_of(child), None)
        return True

    def _redirected_statement(self, node: Node) -> bool:
        target, stdin = None, None
        for child in node.children:
            if child.type == "file_redirect":
                target = self._file(child) or target
            elif child.type == "heredoc_redirect":
                stdin = self._heredoc(child)
                target = next((self._file(each) for each in child.children if each.type == "file_redirect"), target)
            elif child.type == "herestring_redirect":
                stdin = self.filler.text(child.children[-1]).text
        inner = node.children[0]
        before = len(self.commands)
        done = self.statement(inner) if inner.is_named and not inner.type.endswith("_redirect") else True
        if stdin is not None and len(self.commands) == before + 1:
            command = self.commands.pop()
            names = [PurePosixPath(word.text).name for word in command.words]
            if names[:1] == ["cat"] and target:
                self.files[target] = self.filler.shown(Word(stdin)).text
            elif names[-1] in SHELLS or names[0] == "sbatch":
                self._nested(stdin, command.words, line=command.line)
            else:
                self.commands.append(Command(command.words, command.line, self.filler.shown(Word(stdin)).text))
        for child in node.children:
            if child.type == "heredoc_redirect":
                self.statements([each for each in child.children if each.type == "pipeline"])
        return done

    def _file(self, node: Node) -> str | None:
        signs = [child.type for child in node.children if not child.is_named]
        return self.filler.shown(self.filler.text(node.children[-1])).text if signs and signs[0] in (">", ">>", ">|") else None

    def _heredoc(self, node: Node) -> str:
        body = next((child for child in node.children if child.type == "heredoc_body"), None)
        start = next(source_of(child) for child in node.children if child.type == "heredoc_start")
        if body is None:
            return ""
        text = source_of(body)
        if not re.search(r"['\"\\]", start):
            whole, parts = body.text or b"", body.children
            start, end = (parts[0].start_byte - body.start_byte, parts[-1].end_byte - body.start_byte) if parts else (0, 0)
            inside = "".join(piece.text or " " for piece in self.filler._with_gaps(body, parts, quoted=True))
            text = whole[:start].decode(errors="replace") + inside + whole[end:].decode(errors="replace")
        return re.sub(r"(?m)^\t+", "", text) if node.children[0].type == "<<-" else text

    def _command(self, node: Node) -> bool:
        own: dict[str, Value | None] = {}
        words: list[Word] = []
        for child in node.children:
            if child.type == "variable_assignment":
                name = source_of(child.children[0])
                own[name] = self.filler.variables.get(name)
                self.statement(child)
            elif child.type == "command_name":
                words += self.filler.words(child.children[0])
            elif child.type == "herestring_redirect" or not child.is_named:
                continue
            elif child.type != "comment" and not child.type.endswith("redirect"):
                words += self.filler.words(child)
        done = self._called(words, node) if words else True
        if words:
            for name, old in own.items():
                self.filler.variables.pop(name, None)
                if old is not None:
                    self.filler.variables[name] = old
        return done

    def _called(self, words: list[Word], node: Node) -> bool:
        name, rest = words[0].text, words[1:]
        builtin: Callable[[list[Word], Node], bool] | None = getattr(self, f"_do_{_BUILTIN.get(name, '')}", None)
        if name in self.functions:
            return self._function(name, rest)
        if builtin is not None:
            return builtin(rest, node)
        for number, word in enumerate(words):
            program = PurePosixPath(word.text).name
            after = words[number + 1 :]
            if program in SHELLS and after:
                return self._shell(after, before=words[:number], node=node)
            path = word.text.removeprefix("./")
            if (number == 0 or words[0].text in ("sbatch", "srun")) and (path in self.files or program in self.files):
                self._nested(self.files.get(path, self.files.get(program, "")), words[:number], arguments=after, line=0)
                return True
        if len(self.commands) < MAX_COMMANDS:
            shown = tuple(self.filler.shown(word) for word in (*self.prefix, *words))
            self.commands.append(Command(shown, self.filler.line(node)))
        return True

    def _shell(self, after: list[Word], *, before: list[Word], node: Node) -> bool:
        """bash -c 'a script' arguments, or bash file arguments."""
        options = 0
        while options < len(after) and after[options].text.startswith(("-", "+")):
            options += 1
            if "c" in after[options - 1].text and not after[options - 1].text.startswith("--") and options < len(after):
                script = after[options]
                self._nested(script.text, before, arguments=after[options + 2 :], line=max(script.line - 1, 0))
                return True
        name = after[options].text if options < len(after) else ""
        text = self.files.get(name, self.files.get(PurePosixPath(name).name))
        if text is None:
            self.note(node, f"{name or 'it'} is not at hand; give it with --file, or import it itself")
        else:
            self._nested(text, before, arguments=after[options + 1 :], line=0)
        return True

    def _nested(
        self, text: str, prefix: list[Word] | tuple[Word, ...], *, arguments: list[Word] | None = None, line: int
    ) -> None:
        kept, self.prefix = self.prefix, (*self.prefix, *prefix)
        given, self.filler.arguments = self.filler.arguments, arguments or []
        self.run(text, first_line=line)
        self.prefix, self.filler.arguments = kept, given

    def _function(self, name: str, arguments: list[Word]) -> bool:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise InputError("the script's functions and scripts call each other too deeply", code="syntax")
        given, self.filler.arguments = self.filler.arguments, arguments
        self.locals_.append({})
        done = True
        try:
            done = self.statement(self.functions[name])
        except _Return:
            pass
        for local, old in self.locals_.pop().items():
            self.filler.variables.pop(local, None)
            if old is not None:
                self.filler.variables[local] = old
        self.filler.arguments = given
        self.nesting -= 1
        return done

    def _do_true(self, words: list[Word], node: Node) -> bool:
        return True

    def _do_false(self, words: list[Word], node: Node) -> bool:
        return False

    def _do_test(self, words: list[Word], node: Node) -> bool:
        return self._known(node, test(self.filler, [word.text for word in words if word.text != "]"]))

    def _do_break(self, words: list[Word], node: Node) -> bool:
        raise _Break

    def _do_return(self, words: list[Word], node: Node) -> bool:
        raise _Return

    def _do_exit(self, words: list[Word], node: Node) -> bool:
        self.note(node, "the script would end here as it stands; read on as if its arguments and files were right")
        return True

    def _do_let(self, words: list[Word], node: Node) -> bool:
        for word in words:
            self.run(f"(( {word.text} ))", first_line=word.line - 1)
        return True

    def _do_set(self, words: list[Word], node: Node) -> bool:
        texts = [word.text for word in words]
        if "--" in texts:
            self.filler.arguments = words[texts.index("--") + 1 :]
        return True

    def _do_shift(self, words: list[Word], node: Node) -> bool:
        count = int(words[0].text) if words and words[0].text.isdecimal() else 1
        had = len(self.filler.arguments) >= count
        self.filler.arguments = self.filler.arguments[count:]
        return had

    def _do_eval(self, words: list[Word], node: Node) -> bool:
        self.run(" ".join(word.text for word in words), first_line=self.filler.line(node) - 1)
        return True

    def _do_source(self, words: list[Word], node: Node) -> bool:
        name = words[0].text if words else ""
        text = self.files.get(name, self.files.get(PurePosixPath(name).name))
        if text is None:
            self.note(node, "the sourced file is not at hand; give it with --file")
        else:
            self.run(text, first_line=0)
        return True

    def _do_read(self, words: list[Word], node: Node) -> bool:
        for word in words:
            if re.fullmatch(r"[A-Za-z_]\w*", word.text):
                self.filler.variables[word.text] = Word(self.filler.mark(f"$({source_of(node)})"))
        return False


_BUILTIN = {
    ":": "true", "true": "true", "false": "false", "test": "test", "[": "test", "break": "break", "continue": "true",
    "return": "return", "exit": "exit", "let": "let", "set": "set", "shift": "shift", "eval": "eval", "source": "source",
    ".": "source", "read": "read", "mapfile": "read", "readarray": "read", "getopts": "read",
}  # fmt: skip
"""Commands of the shell itself, and the method that follows each."""

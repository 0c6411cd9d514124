"""Interpret branches whose condition is unknown.

Variables that the branches set to different values become unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hp_tool.formats.shell.words import OPEN, Value, Word

if TYPE_CHECKING:
    from hp_tool.formats.shell.statements import Statements

Branch = Callable[[], bool]
"""Interprets the statements of a branch, and returns True if the last one succeeds."""


def run_branch(
    shell: Statements, selected: Branch, *, others: Sequence[Branch], undecided: str
) -> bool:
    """Interpret the selected branch, and return True if it succeeds.

    If the condition is known only at run time, `undecided` is its text. Each variable that another
    branch would set to another word then becomes unknown. Variables with flags or arrays keep the
    value of the selected branch.
    """
    if not undecided:
        return selected()
    variants = [_variables_after(shell, branch) for branch in others]
    succeeds = selected()
    variables = shell.expander.variables
    for name in {name for variant in variants for name in variant}:
        values = [variables.get(name), *(variant[name] for variant in variants if name in variant)]
        words = {
            value.text for value in values if isinstance(value, Word) and _is_one_word(value.text)
        }
        if len(words) > 1:
            variables[name] = Word(shell.expander.add_placeholder(f"${name} (by {undecided[:80]})"))
    return succeeds


def _is_one_word(text: str) -> bool:
    return (
        bool(text)
        and not text.startswith("-")
        and OPEN not in text
        and not any(c.isspace() for c in text)
    )


def _variables_after(shell: Statements, branch: Branch) -> dict[str, Value]:
    """Return the variables that a branch would set, and undo its effects."""
    from hp_tool.formats.shell.statements import LeaveError

    expander, ends = shell.expander, shell.ends
    expander_state = (
        dict(expander.variables),
        list(expander.arguments),
        expander.first_line,
        expander.depth,
    )
    shell_state = (
        dict(shell.files),
        dict(shell.functions),
        shell.prefix,
        shell.nesting,
        shell.stdin,
        list(shell.locals_),
    )
    commands, notes = len(shell.commands), len(shell.notes)
    try:
        branch()
        variables = dict(expander.variables) if shell.ends == ends else {}
    except LeaveError:
        variables = {}
    expander.variables, expander.arguments, expander.first_line, expander.depth = expander_state
    (
        shell.files,
        shell.functions,
        shell.prefix,
        shell.nesting,
        shell.stdin,
        shell.locals_,
    ) = shell_state
    del shell.commands[commands:], shell.notes[notes:]
    shell.ends = ends
    return variables

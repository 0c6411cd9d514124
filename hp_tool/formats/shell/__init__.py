"""Bash as bash reads it, with nothing executed: the commands a script would run, their words filled
in.
"""

from hp_tool.formats.shell.script import Script, read
from hp_tool.formats.shell.statements import SOURCED, Command, Note
from hp_tool.formats.shell.words import Word

__all__ = ["SOURCED", "Command", "Note", "Script", "Word", "read"]

"""hp_tool for language-model agents: tools of the Model Context Protocol over the service's own routes."""

from importlib.util import find_spec
from pathlib import Path

from hp_tool.errors import MissingExtraError

SKILL = Path(__file__).with_name("SKILL.md")
"""What an agent should know before it asks."""


def require_sdk() -> None:
    """Raise MissingExtraError where the protocol's SDK is not installed."""
    if find_spec("mcp") is None:
        raise MissingExtraError("tools for agents need the mcp extra: pip install 'hp-tool[mcp]'")

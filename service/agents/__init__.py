"""Tools for language-model agents (Model Context Protocol) over the service's routes."""

from pathlib import Path

from hp_tool.extras import require

SKILL = Path(__file__).parent / "skills/hp-tool/SKILL.md"
"""Guide for agents as an agent skill, which can be installed by copying its folder."""


def require_sdk() -> None:
    """Raise MissingExtraError unless the MCP SDK and the service are installed."""
    require("mcp", by="a server of tools for agents")

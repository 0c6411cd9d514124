"""Tools for language-model agents (Model Context Protocol), built on the service's routes."""

from pathlib import Path

from hp_tool.extras import require

SKILL = Path(__file__).parent / "skills/hp-tool/SKILL.md"
"""Guide for agents in the agent skill format. To install the skill, copy its folder."""


def require_sdk() -> None:
    """Raise MissingExtraError unless the MCP SDK and the service are installed."""
    require("mcp", by="a server of tools for agents")

"""hp_tool for language-model agents: tools of the Model Context Protocol over the service's own
routes.
"""

from pathlib import Path

from hp_tool.extras import require

SKILL = Path(__file__).with_name("SKILL.md")
"""What an agent should know before it asks."""


def require_sdk() -> None:
    """Raise MissingExtraError where the protocol's SDK, or the service whose routes the tools ask,
    is not installed.
    """
    require("mcp", by="a server of tools for agents")

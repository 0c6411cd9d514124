"""Evals of the agent skill, and a command that runs an agent on them."""

"""The agent skill: its evals, and an agent run on them."""

"""Explain recorded steps: measured and predicted parts, and changes that shorten a step."""

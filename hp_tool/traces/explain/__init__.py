"""Explain recorded steps: each part beside its prediction, and what would shorten them."""

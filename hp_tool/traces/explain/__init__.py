"""Explain recorded steps: measured and predicted parts, and changes that shorten them."""

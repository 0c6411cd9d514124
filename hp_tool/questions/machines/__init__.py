"""Queries over several machines: which to rent, how many of them, and the cost."""

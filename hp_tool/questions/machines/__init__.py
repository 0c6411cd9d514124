"""Queries that compare several machines: which to rent, how many, and at what cost."""

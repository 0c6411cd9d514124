"""Queries that compare several machines: which machine to rent, how many devices, and the cost."""

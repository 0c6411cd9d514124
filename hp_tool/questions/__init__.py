"""Queries and answers: parsing, estimates, rankings, fixes, anatomy and budgets."""

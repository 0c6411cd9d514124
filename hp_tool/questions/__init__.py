"""A query in, an answer out: parsing, estimates, rankings, fixes, anatomy and budgets."""

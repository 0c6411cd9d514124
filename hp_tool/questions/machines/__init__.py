"""A question over several machines: which to rent, how many of them, and what that costs."""

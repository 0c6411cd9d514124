"""The ranking of a training query: bounds, enumeration, order, choice of rank 1, nearest misses."""

"""Sequences of unequal length: packed attention, replica imbalance, dynamic context parallelism."""

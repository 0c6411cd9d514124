"""Sequences of unequal length: packed attention, imbalance of replicas, dynamic context
parallelism.
"""

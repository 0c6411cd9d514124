"""Sequences of unequal length: attention after packing, imbalance between replicas, and dynamic
context parallelism.
"""

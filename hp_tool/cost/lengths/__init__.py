"""Sequences of unequal length: attention in packed rows, imbalance of replicas, dynamic context
parallelism.
"""

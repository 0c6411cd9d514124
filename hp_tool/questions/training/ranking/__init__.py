"""Rank the layouts of a training query: bounds, enumeration, order, choice of rank 1, and nearest
misses.
"""

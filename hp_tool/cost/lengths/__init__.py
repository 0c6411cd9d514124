"""Sequences of unequal length: what packing leaves of attention, how unevenly it falls, and what dynamic context
parallelism wins.
"""

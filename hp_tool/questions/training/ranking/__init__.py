"""The ranking of a training query: bounds, enumeration, order, the row to try, and the nearest
misses.
"""

"""How soon a slowdown of a running job is told, and how often one is told that is none, on
simulated step times.
"""

"""Queries and their answers: parsing, estimates, rankings, fixes, details of a configuration, and
budgets.
"""

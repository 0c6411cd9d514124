"""Sizing: scaling laws, model shapes and starting hyperparameters, as pure formulas with
sources.
"""

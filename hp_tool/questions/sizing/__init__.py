"""From a budget to a training: scaling laws, shapes, starting hyperparameters; pure formulas with
sources.
"""

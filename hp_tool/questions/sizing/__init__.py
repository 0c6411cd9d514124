"""From a budget to a training: scaling laws, shapes, starting hyperparameters. Pure formulas with
sources.
"""

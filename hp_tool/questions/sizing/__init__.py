"""Sizing: scaling laws, shapes and starting hyperparameters. Pure formulas with sources."""

"""Accuracy of the predictions, and the fits of their constants: `python -m benchmarks.accuracy
--data DIR`.
"""

"""How true the predictions are, and the fits behind them: `python -m benchmarks.accuracy --data
DIR`.
"""

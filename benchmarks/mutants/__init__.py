"""Mutation tests: insert small faults into the cost model, the calibration and the search
coordinator, and run the tests.
"""

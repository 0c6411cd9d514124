"""Small faults put into the cost model, the calibration and the search coordinator, one at a time:
do the tests see them?
"""

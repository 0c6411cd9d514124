"""The service under load and under faults: `python -m
benchmarks.service.{load,batch,million,faults,pages}`.
"""

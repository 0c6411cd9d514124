"""Benchmarks of the service under load and with faults: `python -m
benchmarks.service.{load,batch,million,faults,pages}`.
"""

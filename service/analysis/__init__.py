"""Analyse uploaded recordings in a child process with limits on memory, CPU time and answer
size.
"""

"""Analyse uploaded recordings in a child process with limits on memory, CPU time and the answer's
size.
"""

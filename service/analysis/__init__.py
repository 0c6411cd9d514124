"""Analyse uploaded recordings in a child process with limits on its memory, processor time and
answer.
"""

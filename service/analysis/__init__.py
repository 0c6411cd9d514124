"""Analyse uploaded recordings in a child process with limited memory and CPU time."""

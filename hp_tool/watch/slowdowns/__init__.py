"""Sequential tests on step times: when a job became slower, by how much, and which ranks.

No I/O.
"""

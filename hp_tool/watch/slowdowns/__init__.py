"""Sequential tests on the step times of a running job: since when it is slower, by how much, and
which ranks or parts. Pure.
"""

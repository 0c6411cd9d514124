"""Which few candidates deserve a real run, in which order, and when to stop. Reaches the outside
through ports only.
"""

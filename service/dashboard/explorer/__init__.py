"""A model on a cluster, one setting after the other, and what each does to memory and time."""

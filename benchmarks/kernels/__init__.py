"""Benchmarks of kernels, the allocator and a small step on one GPU, which need only torch."""

"""Benchmarks of kernels, the allocator and a small training step on one GPU, which need only
torch.
"""

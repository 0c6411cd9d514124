"""Kernels, allocator and one small training step timed on one GPU; needs torch alone."""

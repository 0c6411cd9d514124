"""Read and write the configurations of Megatron Bridge 0.3 and NeMo."""

"""Hugging Face's Trainer, under DeepSpeed or Accelerate: its arguments and configuration files."""

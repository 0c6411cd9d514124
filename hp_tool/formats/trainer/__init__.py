"""A Trainer of Hugging Face, under DeepSpeed or Accelerate: its arguments, and the files beside
them.
"""

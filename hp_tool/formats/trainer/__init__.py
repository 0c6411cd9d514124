"""Read Hugging Face Trainer arguments and the files of DeepSpeed and Accelerate."""

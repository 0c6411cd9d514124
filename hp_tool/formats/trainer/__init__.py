"""Read the arguments of Hugging Face's Trainer and the files of DeepSpeed and Accelerate."""

"""Training in plain torch without Megatron: FSDP2, DTensor tensor parallelism, torch pipelining."""

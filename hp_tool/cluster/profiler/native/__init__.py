"""The second engine, plain torch: FSDP2, DTensor tensor parallelism, torch's pipelining and
checkpointing. No Megatron here.
"""

"""Requirements behind each rejection code, in one sentence each."""

RULES = {
    "heads_not_divisible": "TP must divide the attention heads, and divide the KV heads or be a "
    "multiple of them",
    "hidden_not_divisible": "TP must divide the hidden size and the MLP's width",
    "layers_not_divisible": "each model chunk needs at least one layer, and most schedules "
    "need equal chunks",
    "world_size_mismatch": "TP x PP x CP x DP must be the number of GPUs",
    "batch_not_divisible": "DP x micro-batch must divide the global batch",
    "sequence_not_divisible": "CP, and TP with sequence parallelism, must divide the sequence",
    "experts_not_divisible": "EP must divide the experts, and EP x expert TP the GPUs of a stage",
    "interleaving_needs_pipeline": "several model chunks per rank need PP of at least 2",
    "micro_batches_not_divisible": "with interleaving, PP must divide the micro-batches of a step",
    "too_few_micro_batches": "the schedule or the framework needs more micro-batches per step",
    "shards_not_divisible": "the sharding group must divide DP and fit the ZeRO stage",
    "schedule_not_applicable": "the pipeline schedule must support the model and the number "
    "of chunks",
    "kinds_not_divisible": "with two kinds of GPU, each kind must run a whole number of stages",
    "encoder_decoder_not_split": "an encoder-decoder model needs PP 1 and CP 1",
    "context_heads_not_divisible": "CP by all-to-all must divide the heads of a TP rank",
    "exchange_overlap_not_applicable": "overlap of the expert all-to-all needs EP, "
    "interleaving if PP is used, and no "
    "recomputation of whole layers",
    "layout_not_applicable": "the pipeline layout must have PP x chunks stages",
    "dispatcher_not_applicable": "the token dispatcher must support the GPUs and the expert groups",
    "cuda_graphs_not_applicable": "CUDA graphs must support the recorded modules and the "
    "recomputation",
    "mixer_not_divisible": "TP must divide the heads and groups of recurrent layers",
    "attention_data_parallel_needs_experts": "attention data parallelism needs an MoE model",
    "request_too_long": "prompt and answer together must not exceed the maximum length",
    "memory": "the configuration must fit in the memory of a GPU",
    "host_memory": "the offloaded bytes must fit in the host's memory",
    "precision_unsupported": "the GPU must have matrix units for the precision",
    "overloaded": "the request rate must not exceed the throughput of the replicas",
    "queued": "all requests in flight must fit in the KV cache and the engine limit",
    "crashed": "the configuration must not have crashed in earlier runs",
    "target_missed": "the configuration must meet latency targets, deadline and budget",
}
"""Requirement by code, for the codes in `estimate.reasons` and `rejections`."""

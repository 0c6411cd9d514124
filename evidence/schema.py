"""The columns of every kind of table: names, types, units and meanings.

Names are those of hp_tool's queries and results wherever a column is one of their fields. The
loader validates rows against this module, and evidence/README.md is written from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Type = Literal["text", "integer", "number", "flag", "date"]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table."""

    name: str
    type: Type
    meaning: str
    unit: str = ""
    required: bool = False
    positive: bool = True
    """Whether numbers must exceed zero; none may be negative."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of table: a file may leave out any column that is not required."""

    name: str
    meaning: str
    columns: tuple[Column, ...]

    @property
    def by_name(self) -> Mapping[str, Column]:
        return {column.name: column for column in self.columns}


def _text(name: str, meaning: str, *, required: bool = False) -> Column:
    return Column(name=name, type="text", meaning=meaning, required=required)


def _integer(
    name: str, meaning: str, unit: str = "", *, required: bool = False, positive: bool = True
) -> Column:
    return Column(
        name=name, type="integer", meaning=meaning, unit=unit, required=required, positive=positive
    )


def _number(name: str, meaning: str, unit: str = "", *, positive: bool = True) -> Column:
    return Column(name=name, type="number", meaning=meaning, unit=unit, positive=positive)


def _flag(name: str, meaning: str) -> Column:
    return Column(name=name, type="flag", meaning=meaning)


PROVENANCE = (
    _text("table", "Table that the row was collected in"),
    _text("source", "Repository, file and commit, issue, or paper", required=True),
    Column(
        name="date",
        type="date",
        meaning="When the figure was measured or published; year and month, or the year, if only "
        "that is known",
    ),
    _text(
        "date_is",
        "`measured`: stated with the figure; `release`: the release or round it belongs to; "
        "`source`: the last change of the page that states it",
    ),
    _text("excluded", "Why the row takes no part in any fit or comparison; blank: it does"),
)
OTHER = _text("other", "Settings and figures without a column: `name=value; name=value`")

HARDWARE = (
    _text("model", "Name in hp_tool's catalogue or in models.csv", required=True),
    _text("gpu", "GPU in hp_tool's catalogue, or as the source writes it"),
    _integer("num_gpus", "GPUs of the run"),
    _integer("gpus_per_node", "GPUs of one host"),
)
BATCH = (
    _integer("sequence_length", "Length of a row", "tokens"),
    _integer("global_batch_size", "Sequences per optimizer step", "sequences"),
    _integer("micro_batch_size", "Sequences in one forward pass", "sequences"),
    _integer("num_microbatches", "Micro-batches per optimizer step on one replica"),
)
LAYOUT = (
    _integer("tensor_parallel_size", "Tensor parallelism"),
    _integer("pipeline_parallel_size", "Pipeline stages"),
    _integer("virtual_pipeline_parallel_size", "Model chunks per pipeline rank"),
    _integer("context_parallel_size", "Context parallelism"),
    _integer("expert_parallel_size", "Expert parallelism"),
    _integer("expert_tensor_parallel_size", "Tensor parallelism of one expert"),
)
ENGINE = (
    _text("engine", "Serving engine", required=True),
    _text("engine_version", "Release of the engine"),
)

TRAINING = Kind(
    name="training",
    meaning="Training runs: what was set, and the step time, speed or memory that was measured.",
    columns=(
        *PROVENANCE,
        _text("run", "Name of the run in its source, or who submitted it"),
        *HARDWARE,
        _number("inter_node_bandwidth_bytes_per_second", "Network bandwidth of one GPU", "bytes/s"),
        _text("variant", "Name of a model of which the row gives another shape"),
        _integer("num_hidden_layers", "Layers, if not the model's own"),
        _integer("hidden_size", "Width, if not the model's own"),
        _integer("num_attention_heads", "Query heads, if not the model's own"),
        _integer("num_key_value_heads", "Key and value heads, if not the model's own"),
        _integer("intermediate_size", "Width of the MLP, if not the model's own"),
        _integer("vocab_size", "Vocabulary, if not the model's own"),
        _flag("gated_mlp", "Whether the MLP is gated, if not the model's own"),
        _text("normalization", "`layernorm` or `rmsnorm`, if not the model's own"),
        _flag("tie_word_embeddings", "Whether embeddings are tied, if not the model's own"),
        _integer("max_position_embeddings", "Learned positions, if not the model's own"),
        _integer(
            "num_nextn_predict_layers",
            "Multi-token prediction layers, if not the model's own",
            positive=False,
        ),
        _text("framework", "Training framework"),
        _text("framework_version", "Release of the framework"),
        _text("task", "`pretrain`, `sft`, `lora`, or as the source writes it"),
        *BATCH,
        _text("precision", "Precision of matmul inputs"),
        _text("fp8_recipe", "How fp8 is scaled: `delayed`, `tensorwise`, `blockwise`"),
        _text("parameter_precision", "Precision of stored parameters"),
        _text("gradient_precision", "Precision of accumulated and reduced gradients"),
        _text("optimizer_precision", "Precision of the optimizer's states"),
        _text("frozen_precision", "Precision of frozen weights under LoRA"),
        _integer("lora_rank", "Rank of the adapters"),
        _text("lora_target_modules", "Matrices with an adapter, joined by `+`"),
        _number("lora_dropout", "Probability of dropout before an adapter"),
        _text("attention", "`flash` or `unfused`"),
        _text("attention_kernel", "Whose fused attention ran"),
        _number("dropout", "Probability of dropout"),
        _text("cross_entropy", "`unfused`, `fused`, `in_place` or `chunked`"),
        _flag("cuda_graphs", "Whether kernels were launched as CUDA graphs"),
        _flag("kernel_fusion", "Whether norms and rotary positions are one kernel each"),
        _text("cuda_graph_modules", "Parts recorded as graphs, joined by `+`"),
        _text("offload", "What was kept in host memory: `optimizer`, `activations`"),
        _number("offload_fraction", "Fraction of the layers or parameters that was offloaded"),
        _number("expert_capacity_factor", "Tokens above this multiple of the mean were dropped"),
        _text("overlap", "Whether exchanges overlapped compute: `name=true` joined by `+`"),
        *LAYOUT,
        _integer("data_parallel_size", "Data parallelism"),
        _integer("data_parallel_shard_size", "GPUs that ZeRO shards over; 0: all", positive=False),
        _integer("zero_stage", "ZeRO stage; 3: FSDP", positive=False),
        _flag("sequence_parallel", "Whether norms are split over the tensor group"),
        _text(
            "recompute",
            "`none`, `full`, `per_op`, `selective` and its modules, or as the source writes it",
        ),
        _text("pipeline_layout", "Contents of the chunks in Megatron Core's notation"),
        _text("pipeline_schedule", "Order of forward and backward passes"),
        _text("moe_token_dispatcher_type", "How tokens travel to their experts"),
        _text("status", "`ran`, `failed` (cause unknown) or `out_of_memory`"),
        _number("step_s", "Time of one optimizer step", "s"),
        _number("step_s_fastest_run", "Step time of the fastest of several runs", "s"),
        _number("step_s_slowest_run", "Step time of the slowest of several runs", "s"),
        _number("step_s_p10", "10th percentile of single steps", "s"),
        _number("step_s_p90", "90th percentile of single steps", "s"),
        _number("forward_s", "Forward pass of one layer", "s"),
        _number("backward_s", "Backward pass of one layer, recomputation included", "s"),
        _number("tokens_per_second", "Speed of the whole run", "tokens/s"),
        _number("tokens_per_second_per_gpu", "Speed of one GPU", "tokens/s"),
        _number("model_tflops_per_gpu", "Model FLOPs as the source counts them", "TFLOP/s"),
        _number(
            "mfu", "Model FLOPs utilization as the source counts it; 1 is the peak", positive=False
        ),
        _number(
            "hfu",
            "Hardware FLOPs utilization as the source counts it; 1 is the peak",
            positive=False,
        ),
        _number("allocated_bytes", "Peak of allocated memory of one GPU", "bytes"),
        _number("reserved_bytes", "Peak of what the allocator held on one GPU", "bytes"),
        _number("used_bytes", "Peak memory of one GPU, counted in another way", "bytes"),
        OTHER,
    ),
)

SERVING = Kind(
    name="serving",
    meaning="Serving runs: engine, layout and load, and latency or throughput.",
    columns=(
        *PROVENANCE,
        _text("run", "Name of the run in its source"),
        *HARDWARE,
        *ENGINE,
        _text("precision", "Precision of the weights"),
        _text("kv_cache_precision", "Precision of keys and values; blank: the engine's choice"),
        _text("load", "`closed`: a constant number of requests; `offline`: all queued at once"),
        _text(
            "client", "Load generator; `inferencemax` draws lengths from 0.8 to 1 of those named"
        ),
        _number("input_length", "Prompt length: asked of the client, or measured mean", "tokens"),
        _number("output_length", "Answer length: asked of the client, or measured mean", "tokens"),
        _integer("concurrency", "Requests in flight, or queued", "requests"),
        _integer("num_prompts", "Requests of the run", "requests"),
        _flag("disaggregated", "Whether prefill and decoding ran on GPUs of their own"),
        *LAYOUT[:2],
        LAYOUT[4],
        _integer("moe_tensor_parallel_size", "Tensor parallelism of the experts"),
        _integer("attention_data_parallel_size", "Replicas of attention within the engine"),
        *(
            column
            for pool in ("prefill", "decode")
            for column in (
                _integer(f"{pool}_replicas", f"Replicas for {pool}"),
                _integer(f"{pool}_batch_size", f"Maximum batch of a {pool} replica", "requests"),
                _integer(f"{pool}_tensor_parallel_size", f"Tensor parallelism for {pool}"),
                _integer(f"{pool}_pipeline_parallel_size", f"Pipeline stages for {pool}"),
                _integer(f"{pool}_expert_parallel_size", f"Expert parallelism for {pool}"),
                _integer(
                    f"{pool}_moe_tensor_parallel_size", f"Tensor parallelism of experts for {pool}"
                ),
                _integer(
                    f"{pool}_attention_data_parallel_size", f"Replicas of attention for {pool}"
                ),
            )
        ),
        _number("memory_fraction", "Share of device memory that the engine may use"),
        _text("statistic", "`mean` or `median` of the latencies; blank: mean"),
        _number("ttft_s", "Time to first token", "s"),
        _number("tpot_s", "Time per output token after the first", "s"),
        _number("request_latency_s", "Time of a whole request", "s"),
        _number("output_tokens_per_second", "Output of the whole run", "tokens/s"),
        _number("output_tokens_per_second_per_gpu", "Output of one GPU", "tokens/s"),
        OTHER,
    ),
)

CACHE = Kind(
    name="cache",
    meaning="KV-cache sizes and memory that engines printed when they started.",
    columns=(
        *PROVENANCE,
        *HARDWARE,
        *ENGINE,
        _text("checkpoint", "Checkpoint that was loaded"),
        _text("precision", "Format of the weights"),
        _text("kv_cache_precision", "Precision of keys and values"),
        _number("device_memory_bytes", "Memory of one GPU as printed", "bytes"),
        LAYOUT[0],
        _number("memory_fraction", "Share of device memory that the engine may use"),
        _integer("max_model_len", "Longest sequence that was allowed", "tokens"),
        _integer("max_num_seqs", "Most requests in a batch", "requests"),
        _integer("max_num_batched_tokens", "Most tokens in a batch", "tokens"),
        _integer("block_size", "Tokens of a cache block", "tokens"),
        _integer("kv_cache_tokens", "Tokens that the cache holds", "tokens"),
        _integer("kv_cache_blocks", "Blocks that the cache holds"),
        _number("kv_cache_bytes", "Size of the cache of one GPU", "bytes"),
        _number("max_concurrency", "Requests of the longest length that fit"),
        _number("weights_bytes", "Weights on one GPU", "bytes"),
        _number("non_torch_bytes", "Memory outside PyTorch on one GPU", "bytes"),
        _number("activations_bytes", "Peak of activations on one GPU", "bytes"),
        _flag("hybrid_or_window", "The printed count is not a capacity: layers differ"),
        _text("status", "`ran`, or how the start ended"),
        OTHER,
    ),
)

RL = Kind(
    name="rl",
    meaning="Reinforcement learning steps: generation and training together.",
    columns=(
        *PROVENANCE,
        *HARDWARE,
        _text("algorithm", "GRPO, DAPO, ..."),
        _text("framework", "Framework of the loop"),
        _text("framework_version", "Release of the framework"),
        _text("mode", "`sync` or `async`"),
        _flag("colocated", "Whether generation and training share GPUs"),
        _number("staleness", "Steps, or share of a step, that samples may be old", positive=False),
        _text("precision", "Precision of training"),
        _text("generation_precision", "Precision of generation"),
        _integer("max_sequence_length", "Cap on prompt and answer", "tokens"),
        _integer("max_prompt_length", "Cap on the prompt", "tokens"),
        _integer("max_response_length", "Cap on the answer", "tokens"),
        _number("mean_sequence_length", "Mean length of the answers", "tokens"),
        _integer("prompts_per_step", "Prompts per step"),
        _integer("generations_per_prompt", "Answers per prompt"),
        _integer("rollouts_per_step", "Answers per step"),
        _integer("global_batch_size", "Sequences per optimizer step", "sequences"),
        _integer("micro_batch_size", "Sequences in one forward pass of training", "sequences"),
        *LAYOUT[:2],
        *LAYOUT[3:5],
        _flag("sequence_parallel", "Whether norms are split over the tensor group"),
        _text("recompute", "`none` or `full`"),
        _integer("training_gpus", "GPUs that train"),
        _integer("generation_gpus", "GPUs that generate"),
        _integer("generation_tensor_parallel_size", "Tensor parallelism of generation"),
        _integer("generation_pipeline_parallel_size", "Pipeline stages of generation"),
        _number("memory_fraction", "Share of device memory for the generating engine"),
        _number("step_s", "Time of one step", "s"),
        _number("generation_s", "Generation, or the wait for samples if asynchronous", "s"),
        _number("logprob_s", "Log-probabilities", "s"),
        _number("update_s", "Training", "s"),
        _number("tokens_per_second_per_gpu", "Speed as the source counts tokens", "tokens/s"),
        OTHER,
    ),
)

RECIPES = Kind(
    name="recipes",
    meaning="Settings that a framework's maker chose for a model and GPU; nothing was measured. "
    "Blank: left to the library's default of the release.",
    columns=(
        *PROVENANCE,
        *HARDWARE,
        _text("framework_version", "Release that has the preset"),
        _text("task", "`pretrain`, `sft` or `lora`"),
        _text("precision", "`bf16`, `nvfp4`, or fp8 with its scaling: `fp8_cs`, `fp8_mx`, ..."),
        _text("preset", "Name of the preset"),
        *BATCH[:3],
        *LAYOUT,
        _flag("use_megatron_fsdp", "Megatron FSDP"),
        _text("moe_token_dispatcher_type", "Dispatcher, with its backend"),
        _text("moe_flex_dispatcher_backend", "Backend of the flex dispatcher"),
        _flag("overlap_moe_expert_parallel_comm", "Experts' exchanges behind other passes"),
        _flag("overlap_grad_reduce", "Gradients reduced behind the backward pass"),
        _flag("overlap_param_gather", "Parameters gathered behind the forward pass"),
        _text("recompute_modules", "Modules recomputed, joined by `+`"),
        _integer("recompute_num_layers", "Layers recomputed per chunk"),
        _text("cuda_graph_impl", "Implementation of CUDA graphs"),
        _text("cuda_graph_modules", "Parts recorded as graphs, joined by `+`"),
        _integer("cpu_offloading_num_layers", "Layers whose activations are offloaded"),
        _text("pipeline_layout", "Contents of the chunks in Megatron Core's notation"),
        OTHER,
    ),
)

FIGURES = Kind(
    name="figures",
    meaning="Published figures that are no run of their own: activation memory, days to train.",
    columns=(
        *PROVENANCE,
        *HARDWARE,
        _text("quantity", "What the figure is", required=True),
        Column(name="value", type="number", meaning="The figure", required=True),
        _text("unit", "Unit of the figure", required=True),
        OTHER,
    ),
)

MODELS = Kind(
    name="models",
    meaning="Shapes of the models that rows name.",
    columns=(
        *PROVENANCE,
        _text("model", "Name", required=True),
        _integer("num_hidden_layers", "Layers"),
        _integer("hidden_size", "Width of the residual stream"),
        _integer("num_attention_heads", "Query heads"),
        _integer("num_key_value_heads", "Key and value heads"),
        _integer("head_dim", "Width of a head"),
        _integer("intermediate_size", "Width of the dense MLP"),
        _flag("gated_mlp", "Whether the MLP is gated"),
        _integer("vocab_size", "Rows of the embedding"),
        _integer("num_experts", "Routed experts of a layer"),
        _integer("num_experts_per_tok", "Experts of a token"),
        _integer("moe_intermediate_size", "Width of a routed expert"),
        _integer("num_shared_experts", "Shared experts", positive=False),
        _integer("first_k_dense_replace", "Dense layers before the first experts", positive=False),
        _integer("max_position_embeddings", "Longest sequence, or that of the runs", "tokens"),
        _flag("from_memory", "Typed from memory of the publication, not read from its files"),
        OTHER,
    ),
)

KINDS = {kind.name: kind for kind in (TRAINING, SERVING, CACHE, RL, RECIPES, FIGURES, MODELS)}

"""Write a configuration as flags of Megatron-LM's pretrain_gpt.py."""

from typing import Any

from hp_tool.cost.attention import head_exchange_ranks
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.network import dense_group
from hp_tool.domain.declared import LATENT_FIELDS, parse_names
from hp_tool.domain.graphs import recorded_modules
from hp_tool.domain.parallel import Recompute
from hp_tool.domain.releases import (
    DIST_MUON_OVERLAPS,
    LATEST,
    LOOP_REFUSES_IN_PLACE_LOSS,
    MUON_OVERLAPS,
    is_at_least,
)
from hp_tool.domain.setups import TrainingSetup
from hp_tool.domain.workload import OverlapSpec, TrainingWorkload
from hp_tool.errors import UnsupportedError
from hp_tool.formats.tools.megatron_lm import hybrid, patterns, words
from hp_tool.formats.tools.megatron_lm.words import Flags
from hp_tool.formats.writing import Values, headline, option_words, reject_inexpressible


def flags(setup: TrainingSetup) -> Flags:
    """Return the flags of a configuration, without data, learning rate and checkpoints.

    Raises:
        UnsupportedError: The flags cannot express the setup.
    """
    packed = set() if max_packed_tokens(setup) is None else words.PACKING_FIELDS
    is_hybrid = hybrid.is_hybrid(setup.model)
    unlike = hybrid.hybrid_flags(setup) if is_hybrid else patterns.pattern_flags(setup)
    expressed = words.EXPRESSED_FIELDS | packed | (hybrid.FIELDS if is_hybrid else patterns.FIELDS)
    if setup.model.kv_lora_rank is not None:
        expressed |= LATENT_FIELDS
    reject_inexpressible(setup, tool=words.TOOL, expressed=expressed, runs="megatron-core")
    return option_words(
        {**_model_flags(setup), **_parallel_flags(setup), **_training_flags(setup), **unlike}
    )


def loop_flags(setup: TrainingSetup) -> Flags:
    """Return the flags that the training loop requires if CUDA graphs capture whole iterations."""
    records_iterations = cuda_graph_settings(setup)[0] == "local"
    return option_words(
        {
            "no-check-for-nan-in-loss-and-grad": records_iterations,
            "moe-pad-experts-for-cuda-graph-inference": records_iterations
            and setup.parallel.expert_parallel_size > 1,
        }
    )


def _model_flags(setup: TrainingSetup) -> Values:
    m = setup.model
    biases = (m.has_mlp_bias and not m.has_attention_bias) or m.attention_output_bias not in (
        None,
        m.has_mlp_bias,
    )
    if (
        m.architecture != "decoder"
        or m.positions not in words.POSITIONS
        or biases
        or m.query_key_norm not in (None, "head")
    ):
        raise UnsupportedError(
            f"pretrain_gpt.py has no flags for the architecture of {m.name}", field="model"
        )
    latent, dense = m.kv_lora_rank is not None, m.first_k_dense_replace
    grouped = m.kv_heads != m.num_attention_heads
    experts: Values = {
        "num-experts": m.num_experts,
        "moe-router-topk": m.num_experts_per_tok or 1,
        "moe-ffn-hidden-size": m.moe_intermediate_size or m.ffn_size,
        "moe-token-dispatcher-type": setup.strategy.moe_token_dispatcher_type,
        "moe-flex-dispatcher-backend": setup.switches.get("moe_flex_dispatcher_backend"),
        "moe-grouped-gemm": setup.switches.get("moe_grouped_gemm"),
        "moe-permute-fusion": setup.switches.get("moe_permute_fusion"),
        "moe-shared-expert-intermediate-size": m.shared_expert_size
        if m.num_shared_experts
        else None,
        "moe-router-num-groups": m.n_group or None,
        "moe-router-group-topk": (m.topk_group or m.n_group) if m.n_group else None,
        "moe-layer-freq": f"([0]*{dense}+[1]*{m.num_hidden_layers - dense})" if dense else None,
        "moe-expert-capacity-factor": setup.workload.expert_capacity_factor,
        "moe-shared-expert-gate": m.shared_expert_gate,
    }
    windowed = m.sliding_window_layers or m.num_hidden_layers
    return {
        "num-layers": m.num_hidden_layers,
        "hidden-size": m.hidden_size,
        "ffn-hidden-size": m.ffn_size,
        "num-attention-heads": m.num_attention_heads,
        "kv-channels": m.head_size,
        "max-position-embeddings": max_positions(setup),
        "position-embedding-type": words.POSITIONS[m.positions],
        "normalization": words.NORMS[m.normalization],
        "vocab-size": m.vocab_size,
        "make-vocab-size-divisible-by": 1,
        "group-query-attention": grouped
        and not latent,  # MLA excludes GQA, so the groups are not used.
        "num-query-groups": m.kv_heads if grouped else None,
        "swiglu": m.gated_mlp,
        "untie-embeddings-and-output-weights": not m.tie_word_embeddings,
        "qk-layernorm": m.query_key_norm is not None or latent,  # With MLA, norms of the latents.
        "disable-bias-linear": not m.has_mlp_bias,
        "add-qkv-bias": m.has_attention_bias > m.has_mlp_bias,
        **(experts if m.num_experts else {}),
        "multi-latent-attention": latent,
        "kv-lora-rank": m.kv_lora_rank,
        "q-lora-rank": m.q_lora_rank if latent else None,
        "qk-head-dim": m.qk_nope_head_dim if latent else None,
        "qk-pos-emb-head-dim": m.qk_rope_head_dim if latent else None,
        "v-head-dim": m.v_head_dim if latent else None,
        "rope-type": "rope" if latent else None,  # MLA's default is YaRN.
        "no-rope-fusion": m.positions == "rotary" and not setup.switches["apply_rope_fusion"],
        "mtp-num-layers": m.num_nextn_predict_layers or None,
        "softmax-type": "learnable" if m.attention_sinks else None,
        "window-size": None if m.sliding_window is None else f"{m.sliding_window - 1},0",
        "window-attn-skip-freq": f"[1]*{windowed}+[0]*{m.num_hidden_layers - windowed}"
        if m.sliding_window and m.sliding_window_layers
        else None,
    }


def max_positions(setup: TrainingSetup) -> int:
    """Return --max-position-embeddings, which is at least the sequence length.

    Raises:
        UnsupportedError: The learned position embedding is shorter than the sequence.
    """
    m, length = setup.model, setup.workload.sequence_length
    if m.positions == "learned" and (m.max_position_embeddings or length) < length:
        raise UnsupportedError(
            f"{words.TOOL} rejects a sequence length of {length} above "
            f"max_position_embeddings {m.max_position_embeddings}",
            field="model.max_position_embeddings",
        )
    return max(m.max_position_embeddings or length, length)


def _parallel_flags(setup: TrainingSetup) -> Values:
    c, layout = setup.parallel, setup.strategy.pipeline_layout
    chunks, context = c.virtual_pipeline_parallel_size, c.context_parallel_size > 1
    return {
        "tensor-model-parallel-size": c.tensor_parallel_size,
        "pipeline-model-parallel-size": c.pipeline_parallel_size,
        "sequence-parallel": c.sequence_parallel and c.tensor_parallel_size > 1,
        **(end_stage_flags(setup) if layout is None else {}),
        words.LAYOUT_FLAG: layout.text
        if layout is not None
        else None,  # The layout already contains the number of chunks.
        "num-virtual-stages-per-pipeline-rank": chunks if layout is None and chunks > 1 else None,
        "context-parallel-size": c.context_parallel_size if context else None,
        "cp-comm-type": words.CONTEXT[setup.strategy.context_parallel_communication][0]
        if context
        else None,
        "hierarchical-context-parallel-sizes": context_level_sizes(setup),
        "hybrid-context-parallel": max_packed_tokens(setup) is not None,
        "max-seqlen-per-dp-cp-rank": max_packed_tokens(setup),
        "num-distributed-optimizer-instances": num_shard_groups(setup),
        "use-tp-pp-dp-mapping": setup.cluster.rank_order == words.PIPELINE_BEFORE_DATA,
        "expert-model-parallel-size": c.expert_parallel_size if setup.model.num_experts else None,
        "expert-tensor-parallel-size": c.expert_tensor_parallel_size
        if setup.model.num_experts
        else None,
        "use-distributed-optimizer": c.zero_stage >= 1 and setup.workload.optimizer != "muon",
        "use-megatron-fsdp": c.zero_stage >= 2,
        "data-parallel-sharding-strategy": words.SHARDING.get(c.zero_stage),
        "ckpt-format": "fsdp_dtensor" if c.zero_stage >= 2 else None,
        "no-gradient-accumulation-fusion": not setup.switches["gradient_accumulation_fusion"],
        **recomputation_flags(setup.recompute),
    }


def context_level_sizes(setup: TrainingSetup) -> list[str] | None:
    """Return the two group sizes of a2a+p2p: ranks per all-to-all group, and groups per ring.

    The sizes are those that the cost model assumes.
    """
    c, strategy = setup.parallel, setup.strategy
    if c.context_parallel_size == 1 or strategy.context_parallel_communication != "a2a+p2p":
        return None
    ranks = dense_group(Candidates.alone(c), "cp", cluster=setup.cluster)
    inner = int(
        head_exchange_ranks(
            ranks, model=setup.model, strategy=strategy, heads_split=c.tensor_parallel_size
        )
    )
    heads, kv = (
        max(count // c.tensor_parallel_size, 1)
        for count in (setup.model.num_attention_heads, setup.model.kv_heads)
    )
    if heads % inner or kv % inner:
        raise UnsupportedError(
            f"{words.TOOL} cannot split each rank's {heads} query and {kv} KV heads evenly "
            f"across {inner} context-parallel ranks; set "
            "parallel.hierarchical_context_parallel_sizes",
            field="parallel.hierarchical_context_parallel_sizes",
        )
    return [str(inner), str(c.context_parallel_size // inner)]


def max_packed_tokens(setup: TrainingSetup) -> int | None:
    """Return the maximum number of tokens per rank with dynamic context parallelism, else None."""
    size = setup.parallel.context_parallel_size
    return (
        setup.workload.sequence_length // size
        if setup.strategy.dynamic_context_parallel and size > 1
        else None
    )


def num_shard_groups(setup: TrainingSetup) -> int | None:
    """Return the number of distributed optimizer instances; None for one.

    Raises:
        UnsupportedError: Parameters or gradients are sharded too (ZeRO stage 2 or 3).
    """
    c = setup.parallel
    if not c.data_parallel_shard_size or c.data_parallel_shard_size == c.data_parallel_size:
        return None
    if c.zero_stage >= 2:
        raise UnsupportedError(
            f"{words.TOOL} supports parallel.data_parallel_shard_size only with zero_stage 1",
            field="parallel.zero_stage",
        )
    return c.data_parallel_size // c.data_parallel_shard_size


def end_stage_flags(setup: TrainingSetup) -> Values:
    """Return the layer counts of the first and last pipeline stages, if stages cannot be equal."""
    first, last = setup.missing_layers
    if last <= 1:
        return {words.WITH_EMBEDDING: first == 1, words.WITH_LOSS: last == 1}
    each = (setup.model.num_hidden_layers + first + last) // setup.parallel.pipeline_parallel_size
    return {words.FIRST_STAGE: each - first, words.LAST_STAGE: each - last}


def recomputation_flags(recompute: Recompute) -> Values:
    """Return the recomputation flags.

    Raises:
        UnsupportedError: The flags cannot express the granularity.
    """
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "selective":
        return {
            "recompute-granularity": "selective",
            "recompute-modules": list(recompute.modules or ("core_attn",)),
        }
    if recompute.granularity != "full":
        raise UnsupportedError(
            f"{words.TOOL} does not support parallel.recompute {recompute.granularity}",
            field="parallel.recompute",
        )
    is_complete = recompute.method is None or (
        recompute.method == "block" and recompute.num_layers is None
    )
    method, count = "uniform" if is_complete else recompute.method, recompute.num_layers or 1
    return {
        "recompute-granularity": "full",
        "recompute-method": method,
        "recompute-num-layers": count,
    }


def _training_flags(setup: TrainingSetup) -> Values:
    w = setup.workload
    if w.cross_entropy == "chunked":
        raise UnsupportedError(
            f"{words.TOOL} does not support training.cross_entropy chunked",
            field="training.cross_entropy",
        )
    gradients = w.gradient_precision or "fp32"
    if gradients not in ("fp32", "bf16"):
        raise UnsupportedError(
            f"{words.TOOL} accumulates gradients in fp32 or bf16",
            field="training.gradient_precision",
        )
    computed = w.precision if w.precision in ("fp16", "fp32") else "bf16"
    if w.parameter_precision not in (None, "fp8", computed):
        raise UnsupportedError(
            f"{words.TOOL} stores parameters in the matmul precision or in fp8",
            field="training.parameter_precision",
        )
    first, second, master, aware = state_precisions(w)
    if master not in ("fp32", "fp16"):
        raise UnsupportedError(
            f"{words.TOOL} has no flag for training.master_precision {master}",
            field="training.master_precision",
        )
    offloaded = w.offload == "optimizer"
    layers = num_offloaded_layers(setup) if w.offload == "activations" else None
    return {
        "seq-length": w.sequence_length,
        "micro-batch-size": setup.parallel.micro_batch_size,
        "global-batch-size": w.global_batch_size,
        "attention-backend": words.ATTENTION[w.attention],
        "attention-dropout": w.dropout,
        "hidden-dropout": w.dropout,
        "optimizer": "dist_muon"
        if w.optimizer == "muon" and setup.parallel.zero_stage
        else w.optimizer,
        "sft": w.task == "sft",
        **words.PRECISIONS[w.precision],
        **({"fp8-recipe": w.fp8_recipe} if w.fp8_recipe else {}),
        "fp8-param-gather": w.parameter_precision == "fp8",
        **dict(
            zip(("cuda-graph-impl", "cuda-graph-scope"), cuda_graph_settings(setup), strict=True)
        ),
        "cross-entropy-loss-fusion": setup.switches["cross_entropy_loss_fusion"],
        "cross-entropy-fusion-impl": fused_loss_kind(setup),
        "grad-reduce-in-bf16": gradients == "bf16" and w.precision != "fp16",
        "accumulate-allreduce-grads-in-fp32": gradients == "fp32" and w.precision == "fp16",
        "use-precision-aware-optimizer": aware,
        "exp-avg-dtype": first if aware else None,
        "exp-avg-sq-dtype": second if aware else None,
        "main-params-dtype": master if master != "fp32" else None,
        "optimizer-cpu-offload": offloaded,
        "optimizer-offload-fraction": w.offload_fraction if offloaded else None,
        "cpu-offloading-num-layers": layers,
        "no-masked-softmax-fusion": w.kernel_fusion is False,
        "no-bias-dropout-fusion": w.kernel_fusion is False,
        **_overlap_flags(setup),
    }


def cuda_graph_settings(setup: TrainingSetup) -> tuple[str | None, list[str] | None]:
    """Return the implementation and scope of CUDA graphs; (None, None) without graphs."""
    if not setup.workload.cuda_graphs:
        return None, None
    modules = recorded_modules(setup.workload, setup.model)
    return "transformer_engine" if modules else "local", list(modules or ("full_iteration",))


def fused_loss_kind(setup: TrainingSetup) -> str | None:
    """Return the implementation of an in-place loss; None for other losses.

    Raises:
        UnsupportedError: The release's training loop rejects it.
    """
    workload = setup.workload
    if workload.loss != "in_place":
        return None
    if is_at_least(workload.framework_version or LATEST, since=LOOP_REFUSES_IN_PLACE_LOSS):
        raise UnsupportedError(
            f"{words.TOOL}'s training loop rejects --cross-entropy-fusion-impl te since "
            "Megatron Core 0.18.2 (NeMo 26.06.01); set training.cross_entropy to "
            "fused, or export to nemo, whose recipes use it",
            field="training.cross_entropy",
        )
    return str(setup.switches["cross_entropy_fusion_impl"])


def num_offloaded_layers(setup: TrainingSetup) -> int:
    """Return the number of layers whose activations are offloaded to host memory.

    Raises:
        UnsupportedError: TransformerConfig rejects offloading of all layers, and offloading with
            pipeline parallelism or recomputation.
    """
    layers = setup.model.num_hidden_layers
    offloaded = round((setup.workload.offload_fraction or 1.0) * layers)
    if offloaded >= layers:
        raise UnsupportedError(
            "Megatron Core cannot offload the activations of all layers; set "
            f"training.offload_fraction to at most {(layers - 1) / layers:.4g} "
            f"({layers - 1} of {layers})",
            field="training.offload_fraction",
        )
    if setup.parallel.pipeline_parallel_size > 1 or setup.recompute.granularity != "none":
        raise UnsupportedError(
            "Megatron Core does not offload activations with pipeline parallelism or "
            "recomputation; remove training.offload, or use neither",
            field="training.offload",
        )
    return offloaded


def state_precisions(workload: TrainingWorkload) -> tuple[str, str, str, bool]:
    """Return the precisions of Adam's moments and master copy, and True if flags must set them."""
    first = workload.optimizer_precision or "fp32"
    second, master = workload.exp_avg_sq_precision or first, workload.master_precision or "fp32"
    return (
        first,
        second,
        master,
        {first, second, master} != {"fp32"} or workload.offload == "optimizer",
    )


def _overlap_flags(setup: TrainingSetup) -> Values:
    """Return the flags that enable or disable communication overlap.

    Raises:
        UnsupportedError: Megatron has no flag for an overlap.
    """
    overlap = setup.workload.overlap or OverlapSpec()
    if overlap.context_parallel is not None:
        raise UnsupportedError(
            f"{words.TOOL} has no switch for training.overlap.context_parallel",
            field="training.overlap.context_parallel",
        )
    since = DIST_MUON_OVERLAPS if setup.parallel.zero_stage else MUON_OVERLAPS
    release = setup.workload.framework_version or LATEST
    if (
        setup.workload.optimizer == "muon"
        and setup.switches["overlap_grad_reduce"]
        and not is_at_least(release, since=since)
    ):
        raise UnsupportedError(
            "Megatron Core overlaps data parallelism with muon since "
            f"{'.'.join(map(str, since['core']))}; set training.overlap.data_parallel "
            "to false, or training.framework_version to that release or later",
            field="training.overlap.data_parallel",
        )
    names = (
        "overlap_grad_reduce",
        "overlap_param_gather",
        "tp_comm_overlap",
        "overlap_moe_expert_parallel_comm",
    )
    return {
        **{name.replace("_", "-"): setup.switches[name] for name in names},
        "no-overlap-p2p-communication": overlap.pipeline_parallel is False,
    }


_LANGUAGE_MODEL_FLAGS = parse_names("""
    num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels num-query-groups
    normalization attention-dropout hidden-dropout recompute-granularity recompute-method
    recompute-num-layers recompute-modules num-experts moe-router-topk moe-ffn-hidden-size
    moe-shared-expert-intermediate-size moe-router-num-groups moe-router-group-topk
    moe-layer-freq moe-token-dispatcher-type moe-grouped-gemm moe-flex-dispatcher-backend
    moe-expert-capacity-factor add-qkv-bias moe-permute-fusion rope-type no-rope-fusion
    cuda-graph-impl cuda-graph-scope no-masked-softmax-fusion no-bias-dropout-fusion
    qk-layernorm fp8-format fp8-recipe fp4-format fp4-recipe attention-backend
    multi-latent-attention kv-lora-rank q-lora-rank qk-head-dim qk-pos-emb-head-dim
    v-head-dim mtp-num-layers cp-comm-type
""") | {
    words.WITH_EMBEDDING,
    words.WITH_LOSS,
    words.FIRST_STAGE,
    words.LAST_STAGE,
}
_MODEL_PARALLEL_FLAGS = parse_names("""
    tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size
    expert-model-parallel-size expert-tensor-parallel-size sequence-parallel bf16 fp16
    tp-comm-overlap overlap-moe-expert-parallel-comm cross-entropy-loss-fusion
    cross-entropy-fusion-impl num-virtual-stages-per-pipeline-rank
    no-gradient-accumulation-fusion no-overlap-p2p-communication
""")
_RENAMED_FIELDS = {
    "num-experts": "num_moe_experts",
    "fp8-format": "fp8",
    "fp4-format": "fp4",
    "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "no-rope-fusion": "apply_rope_fusion",
    "no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "no-masked-softmax-fusion": "masked_softmax_fusion",
    "no-bias-dropout-fusion": "bias_dropout_fusion",
    "no-overlap-p2p-communication": "overlap_p2p_comm",
    words.FIRST_STAGE: "num_layers_in_first_pipeline_stage",
    words.LAST_STAGE: "num_layers_in_last_pipeline_stage",
}
"""Fields of Megatron Core whose names differ from the flag."""


def field_name(flag: str) -> str:
    """Return the Megatron Core configuration field that a flag sets."""
    return _RENAMED_FIELDS.get(flag, flag.replace("-", "_"))


def yaml_content(setup: TrainingSetup) -> dict[str, Any]:
    """Return `flags` as content of Megatron-LM's --yaml-cfg.

    That file contains every argument, so these keys replace some in examples/gpt3/gpt_config.yaml.
    Fields of TransformerConfig are under `language_model`, those of ModelParallelConfig under
    `model_parallel`, and others at the top level.

    Raises:
        UnsupportedError: The file cannot express a flag.
    """
    if not setup.model.is_uniform:
        raise UnsupportedError(
            "--yaml-cfg cannot describe layers of different kinds; choose megatron-lm",
            field="model.blocks",
        )
    options = flags(setup)
    gated = "swiglu" in options
    language: dict[str, Any] = {
        "add_bias_linear": "disable-bias-linear" not in options,
        "gated_linear_unit": gated,
        "activation_func": "swiglu" if gated else "gelu",
    }
    parallel: dict[str, Any] = {"overlap_p2p_comm": True}
    others: dict[str, Any] = {}
    for name, values in options.items():
        if name == "disable-bias-linear":
            continue
        section = (
            language
            if name in _LANGUAGE_MODEL_FLAGS
            else parallel
            if name in _MODEL_PARALLEL_FLAGS
            else others
        )
        section[field_name(name)] = False if name.startswith("no-") else _yaml_value(name, values)
    return {"language_model": language, "model_parallel": parallel, **others}


def _yaml_value(name: str, values: list[str]) -> Any:
    """Return a flag's values as a YAML value."""
    if name == "recompute-modules":
        return values
    if not values:
        return True
    if len(values) > 1:
        return [_yaml_value(name, [value]) for value in values]
    (text,) = values
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def yaml_text(setup: TrainingSetup) -> str:
    """Return the YAML keys to merge into examples/gpt3/gpt_config.yaml."""
    from yaml import safe_dump

    head = f"# {words.TOOL}: {headline(setup)}; lay over examples/gpt3/gpt_config.yaml\n"
    return head + safe_dump(yaml_content(setup), sort_keys=False)

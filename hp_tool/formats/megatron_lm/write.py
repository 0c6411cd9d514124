"""A configuration as the flags of pretrain_gpt.py, named after the fields of megatron-core's classes; tests compare the two."""

from __future__ import annotations

import shlex
from typing import Any

from hp_tool.domain.parallel import Recompute
from hp_tool.domain.workload import OverlapSpec
from hp_tool.errors import UnsupportedError
from hp_tool.formats.megatron_lm import words
from hp_tool.formats.megatron_lm.words import Flags
from hp_tool.formats.setup import TrainingSetup, headline, refuse_unsaid


def flags(setup: TrainingSetup) -> Flags:
    """Every flag of the configuration; data, tokenizer, learning rate and checkpoints stay the user's.

    Raises UnsupportedError for what the flags cannot say.
    """
    refuse_unsaid(setup, tool=words.TOOL, said=words.SAID, runs="megatron-core")
    return {**_model(setup), **_parallel(setup), **_training(setup)}


def _model(setup: TrainingSetup) -> Flags:
    m, t = setup.model, setup.parallel.tensor_parallel_size
    biases = (m.has_mlp_bias and not m.has_attention_bias) or m.attention_output_bias not in (None, m.has_mlp_bias)
    if m.architecture != "decoder" or m.positions not in words.POSITIONS or biases or m.query_key_norm not in (None, "head"):
        raise UnsupportedError(f"pretrain_gpt.py has no flags for the architecture of {m.name}", field="model")
    options: Flags = {
        "num-layers": [str(m.num_hidden_layers)],
        "hidden-size": [str(m.hidden_size)],
        "ffn-hidden-size": [str(m.ffn_size)],
        "num-attention-heads": [str(m.num_attention_heads)],
        "kv-channels": [str(m.head_size)],
        "max-position-embeddings": [str(m.max_position_embeddings or setup.workload.sequence_length)],
        "position-embedding-type": [words.POSITIONS[m.positions]],
        "normalization": [words.NORMS[m.normalization]],
        "vocab-size": [str(m.vocab_size)],
        "make-vocab-size-divisible-by": [str(m.vocab_size // t if m.vocab_size % t == 0 else 1)],
    }
    if m.kv_heads != m.num_attention_heads:
        options |= {"group-query-attention": [], "num-query-groups": [str(m.kv_heads)]}
    options |= _switches({"swiglu": m.gated_mlp, "untie-embeddings-and-output-weights": not m.tie_word_embeddings})
    options |= _switches({"qk-layernorm": m.query_key_norm is not None})
    options |= _switches({"disable-bias-linear": not m.has_mlp_bias, "add-qkv-bias": m.has_attention_bias > m.has_mlp_bias})
    if m.num_experts:
        width = m.moe_intermediate_size or m.ffn_size
        options |= {
            "num-experts": [str(m.num_experts)],
            "moe-router-topk": [str(m.num_experts_per_tok or 1)],
            "moe-ffn-hidden-size": [str(width)],
            "moe-token-dispatcher-type": ["alltoall"],
            "moe-grouped-gemm": [],
        }
        if m.num_shared_experts:
            options["moe-shared-expert-intermediate-size"] = [str(m.shared_expert_size)]
        if m.n_group:
            options |= {"moe-router-num-groups": [str(m.n_group)], "moe-router-group-topk": [str(m.topk_group or m.n_group)]}
        if m.first_k_dense_replace:
            sparse = m.num_hidden_layers - m.first_k_dense_replace
            options["moe-layer-freq"] = [f"([0]*{m.first_k_dense_replace}+[1]*{sparse})"]
        if setup.workload.expert_capacity_factor is not None:
            options["moe-expert-capacity-factor"] = [f"{setup.workload.expert_capacity_factor:g}"]
    if m.kv_lora_rank is not None:
        sizes = {
            "kv-lora-rank": m.kv_lora_rank, "q-lora-rank": m.q_lora_rank, "qk-head-dim": m.qk_nope_head_dim,
            "qk-pos-emb-head-dim": m.qk_rope_head_dim, "v-head-dim": m.v_head_dim,
        }  # fmt: skip
        options |= {"multi-latent-attention": []} | {name: [str(size)] for name, size in sizes.items() if size is not None}
    if m.num_nextn_predict_layers:
        options["mtp-num-layers"] = [str(m.num_nextn_predict_layers)]
    return options


def _parallel(setup: TrainingSetup) -> Flags:
    c, layout = setup.parallel, setup.strategy.pipeline_layout
    options: Flags = {
        "tensor-model-parallel-size": [str(c.tensor_parallel_size)],
        "pipeline-model-parallel-size": [str(c.pipeline_parallel_size)],
        **_switches({"sequence-parallel": c.sequence_parallel and c.tensor_parallel_size > 1}),
        **({} if layout is not None else _shorter_ends(setup)),
    }
    if layout is not None:  # it says the number of chunks, too
        options[words.LAYOUT] = [layout.text]
    elif c.virtual_pipeline_parallel_size > 1:
        options["num-virtual-stages-per-pipeline-rank"] = [str(c.virtual_pipeline_parallel_size)]
    if c.context_parallel_size > 1:
        options["context-parallel-size"] = [str(c.context_parallel_size)]
        options["cp-comm-type"] = [words.CONTEXT[setup.strategy.context_parallel_communication]]
    if setup.model.num_experts:
        options["expert-model-parallel-size"] = [str(c.expert_parallel_size)]
        options["expert-tensor-parallel-size"] = [str(c.expert_tensor_parallel_size)]
    if c.zero_stage >= 1:
        options["use-distributed-optimizer"] = []
    if c.zero_stage >= 2:
        options |= {
            "use-megatron-fsdp": [],
            "data-parallel-sharding-strategy": [words.SHARDING[c.zero_stage]],
            "ckpt-format": ["fsdp_dtensor"],
            "no-gradient-accumulation-fusion": [],
        }
    return options | _recompute(setup.recompute)


def _shorter_ends(setup: TrainingSetup) -> Flags:
    """Where stages cannot hold equally many layers."""
    first, last = setup.missing_layers
    if (first, last) == (1, 1):
        return {words.WITH_EMBEDDING: [], words.WITH_LOSS: []}
    if (first, last) == (0, 0):
        return {}
    each = (setup.model.num_hidden_layers + first + last) // setup.parallel.pipeline_parallel_size
    return {words.FIRST_STAGE: [str(each - first)], words.LAST_STAGE: [str(each - last)]}


def _recompute(recompute: Recompute) -> Flags:
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "selective":
        return {"recompute-granularity": ["selective"], "recompute-modules": list(recompute.modules or ("core_attn",))}
    if recompute.granularity != "full":
        raise UnsupportedError(f"{words.TOOL} has no recomputation {recompute.granularity}", field="parallel.recompute")
    whole = recompute.method is None or (recompute.method == "block" and recompute.num_layers is None)
    method, count = "uniform" if whole else recompute.method, recompute.num_layers or 1
    return {"recompute-granularity": ["full"], "recompute-method": [str(method)], "recompute-num-layers": [str(count)]}


def _training(setup: TrainingSetup) -> Flags:
    w, c = setup.workload, setup.parallel
    options: Flags = {
        "seq-length": [str(w.sequence_length)],
        "micro-batch-size": [str(c.micro_batch_size)],
        "global-batch-size": [str(w.global_batch_size)],
        "attention-backend": [w.attention],
        "attention-dropout": [f"{w.dropout:g}"],
        "hidden-dropout": [f"{w.dropout:g}"],
        "optimizer": [w.optimizer],
        **words.PRECISIONS[w.precision],
        **_switches({"cross-entropy-loss-fusion": w.cross_entropy == "fused"}),
    }
    gradients = w.gradient_precision or "fp32"
    if gradients not in ("fp32", "bf16"):
        raise UnsupportedError(f"{words.TOOL} accumulates gradients in fp32 or bf16", field="training.gradient_precision")
    options |= _switches(
        {
            "grad-reduce-in-bf16": gradients == "bf16" and w.precision != "fp16",
            "accumulate-allreduce-grads-in-fp32": gradients == "fp32" and w.precision == "fp16",
        }
    )
    first = w.optimizer_precision or "fp32"
    second = w.exp_avg_sq_precision or first
    if (first, second) != ("fp32", "fp32"):
        options |= {"use-precision-aware-optimizer": [], "exp-avg-dtype": [first], "exp-avg-sq-dtype": [second]}
    return options | _overlap(setup)


def _overlap(setup: TrainingSetup) -> Flags:
    """What is not said is switched on, as in the runs that the framework's constants come from."""
    c, overlap = setup.parallel, setup.workload.overlap or OverlapSpec()
    if overlap.context_parallel is not None or overlap.expert_parallel is False:
        name = "context_parallel" if overlap.context_parallel is not None else "expert_parallel"
        raise UnsupportedError(f"{words.TOOL} has no switch for training.overlap.{name}", field=f"training.overlap.{name}")
    data, sharded = overlap.data_parallel is not False, c.zero_stage >= 1
    # Userbuffers reach as far as NVLink.
    tensor = c.sequence_parallel and 1 < c.tensor_parallel_size <= setup.cluster.nvlink_domain_size
    return _switches(
        {
            "overlap-grad-reduce": data,
            "overlap-param-gather": data and sharded,
            "tp-comm-overlap": overlap.tensor_parallel is not False and tensor,
            "no-overlap-p2p-communication": overlap.pipeline_parallel is False,
            "overlap-moe-expert-parallel-comm": bool(overlap.expert_parallel),
        }
    )


def _switches(switches: dict[str, bool]) -> Flags:
    return {name: [] for name, on in switches.items() if on}


def command(setup: TrainingSetup, *, script: str = "pretrain_gpt.py") -> str:
    """A shell script that starts the configuration with torchrun; whatever follows its name is passed on."""
    nodes = setup.cluster.num_nodes
    lines = [" ".join(shlex.quote(word) for word in (f"--{name}", *values)) for name, values in flags(setup).items()]
    launch = f"torchrun --nnodes {nodes} --nproc-per-node {min(setup.cluster.gpus_per_node, setup.cluster.num_gpus)}"
    if nodes > 1:
        launch += ' --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:?set it to the first node}:${MASTER_PORT:-29500}"'
    return "\n".join(
        (
            "#!/usr/bin/env bash",
            f"# {words.TOOL}: {headline(setup)}.",
            "# Add your data, tokenizer, learning-rate and checkpoint flags behind this script's name.",
            " \\\n    ".join((f"{launch} {script}", *lines, '"$@"')),
            "",
        )
    )


_LANGUAGE_MODEL = {
    "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "kv-channels", "num-query-groups", "normalization",
    "attention-dropout", "hidden-dropout", "recompute-granularity", "recompute-method", "recompute-num-layers",
    "recompute-modules", "num-experts", "moe-router-topk", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size",
    "moe-router-num-groups", "moe-router-group-topk", "moe-layer-freq", "moe-token-dispatcher-type", "moe-grouped-gemm",
    "moe-expert-capacity-factor", "add-qkv-bias",
    "qk-layernorm", "fp8-format", "fp8-recipe", "fp4-format", "fp4-recipe", "attention-backend",
    "multi-latent-attention", "kv-lora-rank", "q-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim",
    "mtp-num-layers", "cp-comm-type", words.WITH_EMBEDDING, words.WITH_LOSS, words.FIRST_STAGE, words.LAST_STAGE,
}  # fmt: skip
_MODEL_PARALLEL = {
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
    "expert-model-parallel-size", "expert-tensor-parallel-size", "sequence-parallel", "bf16", "fp16", "tp-comm-overlap",
    "overlap-moe-expert-parallel-comm", "cross-entropy-loss-fusion", "num-virtual-stages-per-pipeline-rank",
}  # fmt: skip
_KEYS = {
    "num-experts": "num_moe_experts",
    "fp8-format": "fp8",
    "fp4-format": "fp4",
    "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    words.FIRST_STAGE: "num_layers_in_first_pipeline_stage",
    words.LAST_STAGE: "num_layers_in_last_pipeline_stage",
}
"""Where the file's key is not the flag's name."""


def yaml_content(setup: TrainingSetup) -> dict[str, Any]:
    """The same flags as keys and values of Megatron-LM's --yaml-cfg. Raises UnsupportedError for what it cannot say.

    That file must hold every argument, so these keys replace some of examples/gpt3/gpt_config.yaml: those of TransformerConfig
    under `language_model`, those of ModelParallelConfig under `model_parallel`, all others beside them.
    """
    options = flags(setup)
    gated = "swiglu" in options
    language: dict[str, Any] = {
        "add_bias_linear": "disable-bias-linear" not in options,
        "gated_linear_unit": gated,
        "activation_func": "swiglu" if gated else "gelu",
    }
    parallel: dict[str, Any] = {"overlap_p2p_comm": "no-overlap-p2p-communication" not in options}
    others: dict[str, Any] = {}
    for name, values in options.items():
        if name in ("disable-bias-linear", "no-overlap-p2p-communication"):
            continue
        section = language if name in _LANGUAGE_MODEL else parallel if name in _MODEL_PARALLEL else others
        section[_KEYS.get(name, name.replace("-", "_"))] = _value(name, values)
    return {"language_model": language, "model_parallel": parallel, **others}


def _value(name: str, values: list[str]) -> Any:
    """A switch is true; numbers are numbers; what may be several stays a list."""
    if name == "recompute-modules":
        return values
    if not values:
        return True
    text = " ".join(values)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def yaml(setup: TrainingSetup) -> str:
    """The YAML file, to lay over examples/gpt3/gpt_config.yaml."""
    from yaml import safe_dump

    head = f"# {words.TOOL}: {headline(setup)}; lay over examples/gpt3/gpt_config.yaml\n"
    return head + safe_dump(yaml_content(setup), sort_keys=False)


def slurm(setup: TrainingSetup) -> str:
    """An sbatch script with one torchrun agent per node; account, partition and time limit are given to sbatch."""
    per_node = min(setup.cluster.gpus_per_node, setup.cluster.num_gpus)
    # Letters, digits, dot and dash alone: a model's name is a user's string.
    job_name = "".join(c if c.isascii() and (c.isalnum() or c in ".-") else "-" for c in setup.model.name)[:64] or "training"
    body = command(setup).splitlines()
    start = next(i for i, line in enumerate(body) if line.startswith("torchrun"))
    run = "\n".join(body[start:]).replace("torchrun ", "srun torchrun ", 1)
    return "\n".join(
        (
            "#!/usr/bin/env bash",
            f"#SBATCH --job-name={job_name}",
            f"#SBATCH --nodes={setup.cluster.num_nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={per_node}",
            "#SBATCH --exclusive",
            *body[1:start],
            "set -euo pipefail",
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export MASTER_ADDR",
            run,
            "",
        )
    )

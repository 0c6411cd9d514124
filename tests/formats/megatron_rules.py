"""What Megatron checks before it trains: Core's configuration classes, and the assertions of training/arguments.py.

Core's classes are those installed. The training loop is in no package of core 0.16, so what its validate_args asserts stands
here in our words, one a line; with HP_MEGATRON_LM, a checkout, its own parser and validation run as well.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hp_tool.formats.tools.megatron_lm.write import field_name

Words = dict[str, list[str]]

OFFICIAL = """
import os, sys, types
sys.path.insert(0, sys.argv[1])
import torch
capability = int(sys.argv[2])
torch.cuda.get_device_capability = lambda *_: (capability, 0)
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=capability, minor=0)
sys.argv = [sys.argv[0], *sys.argv[3:]]
from megatron.training.arguments import parse_args, validate_args, core_transformer_config_from_args
args = parse_args()
validate_args(args, {"tokenizer_type": "NullTokenizer"})
core_transformer_config_from_args(args)
print("validated")
"""


def official(words: Words, *, world_size: int, environment: dict[str, str], architecture: int) -> str | None:
    """The complaint of Megatron-LM's own validation, from the checkout of HP_MEGATRON_LM; None where it has none or is not
    there."""
    folder = os.environ.get("HP_MEGATRON_LM")
    if not folder:
        return None
    line = [word for name, values in words.items() for word in (f"--{name}", *values)]
    variables = {**os.environ, **environment, "WORLD_SIZE": str(world_size), "RANK": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", OFFICIAL, str(Path(folder)), str(architecture), *line],
        capture_output=True, text=True, check=False, env=variables, timeout=180,
    )  # fmt: skip
    return None if "validated" in ran.stdout else ran.stderr[-2000:]


def complaints(words: Words, *, world_size: int, environment: dict[str, str], architecture: int) -> list[str]:
    """The assertions of the training loop that the arguments break."""

    def on(name: str) -> bool:
        return name in words

    def number(name: str, default: int = 1) -> int:
        return int(words[name][0]) if name in words else default

    def text(name: str, default: str = "") -> str:
        return words[name][0] if words.get(name) else default

    t, p, c = (number(f"{kind}-parallel-size") for kind in ("tensor-model", "pipeline-model", "context"))
    experts, chunks = number("expert-model-parallel-size"), number("num-virtual-stages-per-pipeline-rank")
    if on("pipeline-model-parallel-layout"):
        chunks = max(chunks, 2)  # it may say several
    length, layers = number("seq-length"), number("num-layers")
    counted = layers + on("account-for-embedding-in-pipeline-split") + on("account-for-loss-in-pipeline-split")
    said = (
        on("decoder-first-pipeline-num-layers")
        or on("decoder-last-pipeline-num-layers")
        or on("pipeline-model-parallel-layout")
    )
    levels = [int(each) for each in words.get("hierarchical-context-parallel-sizes", [])]
    fsdp, sharded = on("use-megatron-fsdp"), on("use-distributed-optimizer") or on("use-megatron-fsdp")
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    muon, optimizer_offload = "muon" in text("optimizer", "adam"), on("optimizer-cpu-offload")
    broken = {
        "world size is a multiple of TP x PP x CP": world_size % (t * p * c) != 0,
        "batch is a multiple of micro-batch x DP": number("global-batch-size")
        % (number("micro-batch-size") * (world_size // (t * p * c)))
        != 0,
        "hierarchical sizes multiply to CP": bool(levels) and levels[0] * levels[1] != c,
        "a2a+p2p names its sizes": text("cp-comm-type") == "a2a+p2p" and not levels,
        "layers divide among stages": not said and counted % (p * chunks) != 0,
        "interleaving has stages": chunks > 1
        and not on("pipeline-model-parallel-layout")
        and p < (3 if on("no-overlap-p2p-communication") else 2),
        "one way to say chunks": on("pipeline-model-parallel-layout") and on("num-virtual-stages-per-pipeline-rank"),
        "param gather overlaps with sharding and grad reduce": on("overlap-param-gather")
        and not (sharded and on("overlap-grad-reduce")),
        "8-bit parameters are gathered by a sharding optimizer": on("fp8-param-gather") and not sharded,
        "FSDP wants more than one connection": fsdp and connections == "1",
        "FSDP saves DTensors": fsdp and text("ckpt-format") != "fsdp_dtensor",
        "connections are 1 before Blackwell": architecture < 10
        and (t > 1 or c > 1)
        and not fsdp
        and not on("overlap-moe-expert-parallel-comm")
        and connections != "1",
        "not two precisions": on("bf16") and on("fp16"),
        "not fp8 and fp4": on("fp8-format") and on("fp4-format"),
        "graphs of an iteration check no NaN": text("cuda-graph-scope") == "full_iteration"
        and not on("no-check-for-nan-in-loss-and-grad"),
        "graphs with expert parallelism pad": text("cuda-graph-impl") == "local"
        and experts > 1
        and not on("moe-pad-experts-for-cuda-graph-inference"),
        "a sequence is a multiple of 2 CP": c > 1 and length % (2 * c) != 0,
        "positions reach a sequence": number("max-position-embeddings", 0) < length,
        "userbuffers need sequence parallelism": on("tp-comm-overlap") and not (on("sequence-parallel") and t > 1),
        "experts divide": experts > 1 and number("num-experts", 0) % experts != 0,
        "muon has no overlap and no distributed optimizer": muon
        and (on("overlap-grad-reduce") or on("use-distributed-optimizer") or fsdp),
        "the optimizer is offloaded by the precision-aware one": optimizer_offload and not on("use-precision-aware-optimizer"),
        "latent attention has no groups": on("multi-latent-attention") and on("group-query-attention"),
        "MTP wants rotary positions, or none": on("mtp-num-layers") and text("position-embedding-type") not in ("rope", "none"),
        "grouped GEMMs from Ampere on": on("moe-grouped-gemm") and architecture < 8,
    }
    return [rule for rule, violated in broken.items() if violated]


def configured(words: Words) -> Any:
    """Core's TransformerConfig of the arguments, as core_transformer_config_from_args makes it; its own checks run."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.enums import AttnBackend, CudaGraphScope
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    transformer_config.is_te_min_version = lambda *_, **__: True  # the nodes have Transformer Engine, this host has not
    kind = MLATransformerConfig if "multi-latent-attention" in words else TransformerConfig
    known = {field.name for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {"pipeline_dtype": torch.bfloat16, "overlap_p2p_comm": False, "batch_p2p_comm": True}
    for flag, texts in words.items():
        name = field_name(flag)
        if flag.startswith("no-") and name == flag.replace("-", "_"):
            name = name.removeprefix("no_")
        if name in known:
            values[name] = _typed(name, texts, negative=flag.startswith("no-"))
    if "disable-bias-linear" in words:
        values["add_bias_linear"] = False
    if "swiglu" in words:
        values |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    if "group-query-attention" not in words:
        values["num_query_groups"] = None
    if "virtual_pipeline_model_parallel_size" in values:
        values |= {
            "overlap_p2p_comm": "no-overlap-p2p-communication" not in words,
            "batch_p2p_comm": "no-overlap-p2p-communication" in words,
        }
    if values.get("virtual_pipeline_model_parallel_size") == 1:
        values["virtual_pipeline_model_parallel_size"] = None
    values["attention_backend"] = AttnBackend[words["attention-backend"][0]]
    if "cuda-graph-scope" in words:
        values["cuda_graph_scope"] = [CudaGraphScope[each] for each in words["cuda-graph-scope"]]
    values["layernorm_epsilon"] = float(words.get("norm-epsilon", ["1e-5"])[0])
    if values.get("num_moe_experts"):
        values.setdefault("moe_ffn_hidden_size", values["ffn_hidden_size"])
    values.pop("moe_permute_fusion", None)  # asks for kernels of Transformer Engine, which this host has not
    DistributedDataParallelConfig(
        overlap_grad_reduce="overlap-grad-reduce" in words,
        use_distributed_optimizer="use-distributed-optimizer" in words,
        use_megatron_fsdp="use-megatron-fsdp" in words,
    )
    return kind(**values)


def _typed(name: str, texts: list[str], *, negative: bool) -> Any:
    if not texts:
        return not negative
    if name in ("recompute_modules", "cp_comm_type", "hierarchical_context_parallel_sizes", "cuda_graph_scope"):
        many = [int(each) if each.isdecimal() else each for each in texts]
        return many[0] if name == "cp_comm_type" and len(many) == 1 else many
    if name in ("moe_layer_freq", "window_attn_skip_freq"):
        return _pattern(texts[0])
    if name == "window_size":
        return tuple(int(each) for each in texts[0].split(","))
    if name == "pipeline_model_parallel_layout":
        return texts[0]
    try:
        return ast.literal_eval(texts[0])
    except (ValueError, SyntaxError):
        return texts[0]


def _pattern(text: str) -> Any:
    from hp_tool.formats.tools.megatron_lm.arguments import number_list

    return int(text) if text.isdecimal() else number_list(ast.parse(text, mode="eval").body)

"""What Megatron checks before it trains: Core's configuration classes, and the assertions of
training/arguments.py by release.

Core's classes are those installed. `complaints` records what validate_args of 0.16.1, 0.17.1,
0.18.2 and 0.19.2 asserts, and what TransformerConfig asserts of CUDA graphs, one rule a line. With
HP_MEGATRON_LM, a folder with the package `megatron.training` (an unpacked wheel of megatron-core
0.17 or later), the release's own parser and validation run as well.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hp_tool.formats.tools.megatron_lm.write import field_name
from tests.formats.record_megatron_arguments import STAND_INS

Words = dict[str, list[str]]

OFFICIAL = f"""
import io, os, contextlib, importlib.abc, importlib.machinery, json, sys, types, typing, unittest.mock, warnings
{STAND_INS}
warnings.filterwarnings("ignore")
torch.cuda.get_device_capability = lambda *_: (capability, 0)
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=capability, minor=0)
from megatron.training import arguments
import megatron.core.transformer.transformer_config
for module in list(sys.modules.values()):
    if module and module.__name__.startswith("megatron") and hasattr(module, "is_te_min_version"):
        module.is_te_min_version = lambda *_, **__: True  # the nodes have Transformer Engine, this host has not
answers = []
for case in json.load(sys.stdin):
    capability = case["architecture"]
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(case["environment"], WORLD_SIZE=str(case["world_size"]), RANK="1", LOCAL_RANK="1")
    sys.argv = [sys.argv[0], *case["line"]]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            args = arguments.parse_args()
            arguments.validate_args(args, dict(tokenizer_type="NullTokenizer"))
            args.moe_permute_fusion = args.apply_rope_fusion = False  # kernels of Transformer Engine
            arguments.core_transformer_config_from_args(args)
        answers.append(None)
    except SystemExit:
        answers.append(printed.getvalue().strip().splitlines()[-1])
    except Exception as error:
        answers.append(f"{{type(error).__name__}}: {{error}}")
print(json.dumps(answers))
"""  # noqa: E501


def official(cases: list[dict[str, Any]]) -> list[str | None] | None:
    """Return the complaint of the release in HP_MEGATRON_LM about each case, None for those it
    accepts; None without it.

    A case has the words of `complaints` under `line` and its keyword arguments.
    """
    folder = os.environ.get("HP_MEGATRON_LM")
    if not folder:
        return None
    ran = subprocess.run(
        [sys.executable, "-c", OFFICIAL, str(Path(folder))],
        capture_output=True,
        text=True,
        check=True,
        input=json.dumps(cases),
        timeout=600,
    )
    answers: list[str | None] = json.loads(ran.stdout.splitlines()[-1])
    return answers


def line(words: Words) -> list[str]:
    """Return the arguments as a command line."""
    return [word for name, values in words.items() for word in (f"--{name}", *values)]


def complaints(
    words: Words,
    *,
    world_size: int,
    environment: dict[str, str],
    architecture: int,
    release: str = "0.16.1",
) -> list[str]:
    """Return the assertions of the release that the arguments break."""
    since = tuple(map(int, release.split(".")))

    def on(name: str) -> bool:
        return name in words

    def number(name: str, default: int = 1) -> int:
        return int(words[name][0]) if name in words else default

    def text(name: str, default: str = "") -> str:
        return words[name][0] if words.get(name) else default

    t, p, c = (
        number(f"{kind}-parallel-size") for kind in ("tensor-model", "pipeline-model", "context")
    )
    experts, chunks = (
        number("expert-model-parallel-size"),
        number("num-virtual-stages-per-pipeline-rank"),
    )
    if on("pipeline-model-parallel-layout"):
        chunks = max(chunks, 2)  # it may say several
    length, layers = number("seq-length"), number("num-layers")
    counted = (
        layers
        + on("account-for-embedding-in-pipeline-split")
        + on("account-for-loss-in-pipeline-split")
    )
    said = (
        on("decoder-first-pipeline-num-layers")
        or on("decoder-last-pipeline-num-layers")
        or on("pipeline-model-parallel-layout")
    )
    levels = [int(each) for each in words.get("hierarchical-context-parallel-sizes", [])]
    fsdp, sharded = (
        on("use-megatron-fsdp"),
        on("use-distributed-optimizer") or on("use-megatron-fsdp"),
    )
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    graphs, scope = text("cuda-graph-impl", "none"), set(words.get("cuda-graph-scope", []))
    merged, recomputed = (
        on("overlap-moe-expert-parallel-comm"),
        set(words.get("recompute-modules", [])),
    )
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
        "one way to say chunks": on("pipeline-model-parallel-layout")
        and on("num-virtual-stages-per-pipeline-rank"),
        "param gather overlaps with sharding and grad reduce": on("overlap-param-gather")
        and not ((sharded or text("optimizer") == "dist_muon") and on("overlap-grad-reduce")),
        "8-bit parameters are gathered by a sharding optimizer": on("fp8-param-gather")
        and not sharded,
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
        "graphs with expert parallelism pad": since < (0, 17)
        and text("cuda-graph-impl") == "local"
        and experts > 1
        and not on("moe-pad-experts-for-cuda-graph-inference"),
        "a sequence is a multiple of 2 CP": c > 1 and length % (2 * c) != 0,
        "positions reach a sequence": number("max-position-embeddings", 0) < length,
        "userbuffers need sequence parallelism": on("tp-comm-overlap")
        and not (on("sequence-parallel") and t > 1),
        "experts divide": experts > 1 and number("num-experts", 0) % experts != 0,
        "muon has no overlap": muon
        and (since < (0, 17) or (since < (0, 18) and text("optimizer") == "muon"))
        and (on("overlap-grad-reduce") or on("overlap-param-gather")),
        "muon has no distributed optimizer": muon
        and since < (0, 18)
        and on("use-distributed-optimizer"),
        "muon has no FSDP": muon and fsdp,
        "Transformer Engine's loss is refused": since >= (0, 18, 2)
        and on("cross-entropy-loss-fusion")
        and text("cross-entropy-fusion-impl") == "te",
        "merged passes record no whole iteration": merged
        and since < (0, 18)
        and graphs in ("local", "full_iteration"),
        "merged passes record no experts": merged
        and graphs == "transformer_engine"
        and bool({"mlp", "moe"} & scope),
        "merged passes recompute no expert block": merged and "moe" in recomputed,
        "graphs of modules exclude full recomputation": on("cuda-graph-impl")
        and scope != {"full_iteration"}
        and text("recompute-granularity") == "full",
        "graphs of the router exclude recomputed expert blocks": graphs == "transformer_engine"
        and "moe_router" in scope
        and "moe" in recomputed,
        "graphs of experts' modules need experts": bool({"moe", "moe_router"} & scope)
        and not on("num-experts"),
        "graphs and activations on the host": graphs != "none"
        and on("cpu-offloading-num-layers")
        and (since < (0, 18) or scope != {"full_iteration"}),
        "the optimizer is offloaded by the precision-aware one": optimizer_offload
        and not on("use-precision-aware-optimizer"),
        "latent attention has no groups": on("multi-latent-attention")
        and on("group-query-attention"),
        "MTP wants rotary positions, or none": on("mtp-num-layers")
        and text("position-embedding-type") not in ("rope", "none"),
        "grouped GEMMs from Ampere on": on("moe-grouped-gemm") and architecture < 8,
    }
    return [rule for rule, violated in broken.items() if violated]


def configured(words: Words) -> Any:
    """Core's TransformerConfig of the arguments, as core_transformer_config_from_args makes it; its
    own checks run.
    """
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.enums import AttnBackend, CudaGraphScope
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    transformer_config.is_te_min_version = lambda *_, **__: (
        True
    )  # the nodes have Transformer Engine, this host has not
    kind = MLATransformerConfig if "multi-latent-attention" in words else TransformerConfig
    known = {field.name for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {
        "pipeline_dtype": torch.bfloat16,
        "overlap_p2p_comm": False,
        "batch_p2p_comm": True,
    }
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
    values.pop(
        "moe_permute_fusion", None
    )  # asks for kernels of Transformer Engine, which this host has not
    DistributedDataParallelConfig(
        overlap_grad_reduce="overlap-grad-reduce" in words,
        use_distributed_optimizer="use-distributed-optimizer" in words,
        use_megatron_fsdp="use-megatron-fsdp" in words,
    )
    return kind(**values)


def _typed(name: str, texts: list[str], *, negative: bool) -> Any:
    if not texts:
        return not negative
    if name in (
        "recompute_modules",
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
        "cuda_graph_scope",
    ):
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
    from hp_tool.formats.tools.megatron_lm.arguments import evaluate_list

    return int(text) if text.isdecimal() else evaluate_list(ast.parse(text, mode="eval").body)

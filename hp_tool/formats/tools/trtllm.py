"""Read and write TensorRT-LLM's server command (tensorrt_llm/commands/serve.py)."""

import json

from hp_tool.domain.setups import ServingSetup
from hp_tool.errors import UnsupportedError
from hp_tool.formats.engine_formats import register_engine
from hp_tool.formats.engines import (
    EXPRESSED_FIELDS,
    model_argument,
    quantization_option,
    reject_speculation,
    replica_script,
    size_above_one,
)
from hp_tool.formats.signs import Sign, has_any_key
from hp_tool.formats.writing import Values, reject_inexpressible

VERSION = "1.0"


def server_command(setup: ServingSetup) -> tuple[str, Values]:
    """Return the trtllm-serve command for the PyTorch backend, and its options.

    Settings without an option are in the --extra_llm_api_options file (see `extra_options`). With
    data-parallel attention, each tensor-parallel rank serves its own requests; attention groups of
    several ranks are not supported.
    """
    reject_inexpressible(setup, tool=f"trtllm {VERSION}", expressed=EXPRESSED_FIELDS)
    c, w = setup.parallel, setup.workload
    quantization_option(setup, engine="trtllm", words={})
    reject_speculation(setup, tool="trtllm")
    if c.attention_data_parallel_size > 1 and c.tensor_parallel_size > 1:
        raise UnsupportedError(
            "trtllm-serve supports attention data parallelism on all ranks or on none; set "
            "tensor_parallel_size to 1, or choose sglang",
            field="parallel.attention_data_parallel_size",
        )
    if setup.leaves_headroom:
        raise UnsupportedError(
            "trtllm-serve's memory fraction applies to the memory left after loading the "
            "weights, not to the whole device; set inference.memory_fraction instead of "
            "constraints.memory_headroom_fraction, or choose vllm or sglang",
            field="constraints.memory_headroom_fraction",
        )
    if w.kv_cache_precision not in (None, "fp8", w.precision):
        raise UnsupportedError(
            f"trtllm-serve {VERSION} has no option for a {w.kv_cache_precision} cache "
            f"with {w.precision} weights; set inference.kv_cache_precision to fp8, or "
            "remove it",
            field="inference.kv_cache_precision",
        )
    if w.two_batch_overlap:
        raise UnsupportedError(
            "trtllm-serve has no two-batch overlap; remove it, or choose vllm or sglang",
            field="inference.two_batch_overlap",
        )
    return f"trtllm-serve {model_argument(setup)}", {
        "--backend": "pytorch",
        "--tp_size": c.tensor_parallel_size * c.attention_data_parallel_size,
        "--pp_size": c.pipeline_parallel_size,
        "--max_batch_size": c.max_num_seqs,
        "--max_num_tokens": c.max_num_batched_tokens,
        "--max_seq_len": setup.longest,
        "--kv_cache_free_gpu_memory_fraction": w.memory_fraction,
        "--ep_size": size_above_one(c.expert_parallel_size),
    }


def extra_options(setup: ServingSetup) -> dict[str, object]:
    """Return the content of the --extra_llm_api_options file, which may be empty."""
    options: dict[str, object] = {}
    if setup.parallel.attention_data_parallel_size > 1:
        options["enable_attention_dp"] = True
    if setup.parallel.redundant_experts:
        slots = (setup.model.num_experts or 0) + setup.parallel.redundant_experts
        options["moe_config"] = {"load_balancer": {"num_slots": slots, "layer_updates_per_iter": 1}}
    if setup.workload.kv_cache_precision == "fp8":
        options["kv_cache_config"] = {"dtype": "fp8"}
    return options


def text(setup: ServingSetup) -> str:
    """Return a shell script that starts one replica.

    Raises:
        UnsupportedError: The command cannot express the setup.
    """
    before, last = [], []
    if extra := extra_options(setup):
        before = [
            'extra="$(mktemp --suffix=.yaml)"',
            "cat > \"$extra\" <<'END'",
            json.dumps(extra),
            "END",
        ]
        last = ['--extra_llm_api_options "$extra"']
    return replica_script(
        setup, tool=f"trtllm {VERSION}", start=server_command, before=before, last=last
    )


_OPTIONS = has_any_key(
    "enable_attention_dp",
    "kv_cache_config",
    "cuda_graph_config",
    "moe_config",
    "attention_dp_config",
    "cache_transceiver_config",
)
register_engine(
    name="trtllm",
    title="TensorRT-LLM",
    version=VERSION,
    command=r"trtllm-serve|tensorrt_llm\.commands\.serve",
    rank=22,
    signs=(Sign(place="keys", rank=97, matches=_OPTIONS),),
    start=server_command,
    write=text,
    reads="a command that starts the TensorRT-LLM server, with the options file that it writes "
    "or names; or only this file",
    writes="the command of one replica",
)

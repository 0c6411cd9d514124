"""Read and write vLLM's server command (vllm/engine/arg_utils.py)."""

import json

from hp_tool.domain.setups import ServingSetup
from hp_tool.errors import UnsupportedError
from hp_tool.formats.engine_formats import register_engine
from hp_tool.formats.engines import (
    EXPRESSED_FIELDS,
    draft_settings,
    model_argument,
    pools_script,
    precision_options,
    replica_role,
    size_above_one,
    uses_deepep,
)
from hp_tool.formats.scripts import required_variable
from hp_tool.formats.writing import Values, reject_inexpressible

VERSION = "0.12.0"
_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
"""Environment variable with the address from which the other pool reads KV caches."""


def server_command(setup: ServingSetup) -> tuple[str, Values]:
    """Return the `vllm serve` command and its options."""
    reject_inexpressible(setup, tool=f"vllm {VERSION}", expressed=EXPRESSED_FIELDS)
    c, w = setup.parallel, setup.workload
    ranks = c.tensor_parallel_size * c.attention_data_parallel_size
    if c.expert_parallel_size not in (1, ranks):
        raise UnsupportedError(
            f"vllm shards the experts across all {ranks} ranks of a stage, or not at all; set "
            f"expert_parallel_size to {ranks} or 1, or choose sglang",
            field="parallel.expert_parallel_size",
        )
    return f"vllm serve {model_argument(setup)}", {
        "--tensor-parallel-size": c.tensor_parallel_size,
        "--pipeline-parallel-size": c.pipeline_parallel_size,
        "--max-num-seqs": c.max_num_seqs,
        "--max-num-batched-tokens": c.max_num_batched_tokens,
        "--max-model-len": setup.longest,
        "--gpu-memory-utilization": setup.memory_fraction,
        "--data-parallel-size": size_above_one(c.attention_data_parallel_size),
        "--enable-expert-parallel": c.expert_parallel_size > 1,
        "--enable-eplb": c.redundant_experts > 0,
        "--eplb-config": json.dumps({"num_redundant_experts": c.redundant_experts})
        if c.redundant_experts
        else None,
        "--all2all-backend": "deepep_low_latency" if uses_deepep(setup) else None,
        "--enable-dbo": w.two_batch_overlap is True,
        "--speculative-config": _speculation_options(setup),
        **precision_options(setup, engine="vllm", version=VERSION, cache={"fp8": "fp8"}),
    }


def _speculation_options(setup: ServingSetup) -> str | None:
    """Return the JSON value of --speculative-config (vllm/config/speculative.py).

    `method` is written if the draft model's name does not contain EAGLE.
    """
    if (how := draft_settings(setup)) is None:
        return None
    method, numbers = how
    config: dict[str, object] = {} if method == "model" else {"method": method}
    if numbers.draft_model is not None:
        config["model"] = numbers.draft_model
    return json.dumps(config | {"num_speculative_tokens": numbers.num_speculative_tokens})


TRANSFER = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
"""KVTransferConfig of both pools (docs/features/nixl_connector_usage.md)."""


def pool_command(setup: ServingSetup) -> tuple[str, Values]:
    """Return the command of a replica that sends or receives KV caches."""
    program, options = server_command(setup)
    return program, {**options, "--kv-transfer-config": TRANSFER}


def pools_text(prefill: ServingSetup, decode: ServingSetup) -> str:
    """Return a script that starts one replica of either pool. vLLM has no router."""
    sides = {"prefill": prefill, "decode": decode}
    return pools_script(
        tool=f"vllm {VERSION}",
        prefill=prefill,
        decode=decode,
        before=(
            "# Requests go through a router that has them prefilled first, as "
            "tests/v1/kv_connector/nixl_integration/",
            "# toy_proxy_server.py of vLLM's source does.",
            f'export {_HOST}="{required_variable(_HOST, "set it to the address of this host")}"',
        ),
        roles=[replica_role(name, setup, pool_command(setup)) for name, setup in sides.items()],
    )


register_engine(
    name="vllm",
    title="vLLM",
    version=VERSION,
    place=0,
    command=r"(?m)(?<![\w/.-])vllm\s+serve\b|\bdynamo\.vllm\b|vllm/vllm-openai\b|"
    r"vllm\.entrypoints\.(openai\.)?api_server",
    rank=20,
    start=server_command,
    write_pools=pools_text,
    reads="`vllm serve`, also in a Kubernetes manifest; two roles in a script or manifest "
    "become separate pools",
    writes="the command of one replica; for separate pools, a script that starts one replica of "
    "either pool",
)

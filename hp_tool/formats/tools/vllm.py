"""Read and write vLLM's server command: options as in vllm/engine/arg_utils.py."""

import json

from hp_tool.domain.setups import ServingSetup
from hp_tool.errors import UnsupportedError
from hp_tool.formats.engine_commands import reader
from hp_tool.formats.engines import (
    SAID,
    Role,
    above_one,
    command,
    drafts,
    model_word,
    number_formats,
    one_of,
    option_values,
    pools_command,
    replica,
    travels_by_deepep,
)
from hp_tool.formats.registry import Format, register
from hp_tool.formats.scripts import required
from hp_tool.formats.signs import Sign, words
from hp_tool.formats.writing import Values, refuse_unsaid

VERSION = "0.12.0"
_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
"""Address at which the other pool reads a replica's caches."""


def start(setup: ServingSetup) -> tuple[str, Values]:
    """Return the vllm serve command, with options as in vllm/engine/arg_utils.py."""
    refuse_unsaid(setup, tool=f"vllm {VERSION}", expressed=SAID)
    c, w = setup.parallel, setup.workload
    ranks = c.tensor_parallel_size * c.attention_data_parallel_size
    if c.expert_parallel_size not in (1, ranks):
        raise UnsupportedError(
            f"vllm divides experts over all {ranks} ranks of a stage or over none; "
            f"set expert_parallel_size to {ranks} or 1, or choose sglang",
            field="parallel.expert_parallel_size",
        )
    return f"vllm serve {model_word(setup)}", {
        "--tensor-parallel-size": c.tensor_parallel_size,
        "--pipeline-parallel-size": c.pipeline_parallel_size,
        "--max-num-seqs": c.max_num_seqs,
        "--max-num-batched-tokens": c.max_num_batched_tokens,
        "--max-model-len": setup.longest,
        "--gpu-memory-utilization": setup.memory_fraction,
        "--data-parallel-size": above_one(c.attention_data_parallel_size),
        "--enable-expert-parallel": c.expert_parallel_size > 1,
        "--enable-eplb": c.redundant_experts > 0,
        "--eplb-config": json.dumps({"num_redundant_experts": c.redundant_experts})
        if c.redundant_experts
        else None,
        "--all2all-backend": "deepep_low_latency" if travels_by_deepep(setup) else None,
        "--enable-dbo": w.two_batch_overlap is True,
        "--speculative-config": _speculative(setup),
        **number_formats(setup, engine="vllm", version=VERSION, cache={"fp8": "fp8"}),
    }


def _speculative(setup: ServingSetup) -> str | None:
    """Return SpeculativeConfig as JSON (vllm/config/speculative.py).

    A draft without EAGLE in its name contains its method.
    """
    if (how := drafts(setup)) is None:
        return None
    method, numbers = how
    config: dict[str, object] = {} if method == "model" else {"method": method}
    if numbers.draft_model is not None:
        config["model"] = numbers.draft_model
    return json.dumps(config | {"num_speculative_tokens": numbers.num_speculative_tokens})


TRANSFER = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
"""KVTransferConfig of both pools (docs/features/nixl_connector_usage.md)."""


def replica_of_pool(setup: ServingSetup) -> tuple[str, Values]:
    """Return `start` of a replica that sends or receives caches."""
    program, options = start(setup)
    return program, {**options, "--kv-transfer-config": TRANSFER}


def pools(prefill: ServingSetup, decode: ServingSetup) -> str:
    """Return a script that starts a replica of either pool; vLLM's package has no router."""
    sides = {"prefill": prefill, "decode": decode}
    return pools_command(
        tool=f"vllm {VERSION}",
        prefill=prefill,
        decode=decode,
        before=(
            "# Requests go through a router that has them prefilled first, as "
            "tests/v1/kv_connector/nixl_integration/",
            "# toy_proxy_server.py of vLLM's source does.",
            f'export {_HOST}="{required(_HOST, "set it to the address of this host")}"',
        ),
        roles=[
            Role(
                name=name,
                meaning=one_of(setup.replicas),
                command=replica(*replica_of_pool(setup)),
            )
            for name, setup in sides.items()
        ],
    )


register(
    Format(
        name="vllm",
        title="vLLM",
        kind="inference",
        place=0,
        signs=(
            Sign(
                of="script",
                rank=20,
                holds=words(
                    r"(?m)(?<![\w/.-])vllm\s+serve\b|\bdynamo\.vllm\b|vllm/vllm-openai\b|vllm\.entrypoints\.(openai\.)?api_server"
                ),
            ),
        ),
        read=reader("vllm"),
        write=lambda setup: command(setup, tool=f"vllm {VERSION}", start=start),
        write_pools=pools,
        options=lambda setup: option_values(start(setup)[1]),
        usual_of="vllm",
        reads="`vllm serve`, also in a Kubernetes manifest: a query of kind inference; of a script "
        "or a manifest with two roles, pools",
        writes="the command of one replica; of pools a script that starts one of either",
        checked="options and values recorded from the engine's own parser; read back by `import`",
    )
)

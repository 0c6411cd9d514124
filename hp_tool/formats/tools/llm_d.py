"""Write a vLLM deployment for llm-d as KServe's LLMInferenceService (serving.kserve.io/v1alpha1).

KServe's controller mounts the checkpoint at /mnt/models, and merges its own container `main` with
the one in the manifest.
"""

import re
from typing import Any

import yaml

from hp_tool.domain.setups import ServingSetup
from hp_tool.domain.units import format_count
from hp_tool.errors import UnsupportedError
from hp_tool.formats.engine_commands import command_reader
from hp_tool.formats.registry import Format, register
from hp_tool.formats.tools import vllm
from hp_tool.formats.writing import Values, headline, option_words

PORT, DECODE_PORT = 8000, 8001
"""Ports of a replica. A decode replica is behind a sidecar that uses the first port
(config-llm-decode-template.yaml of KServe).
"""
MOUNTED_MODEL = "/mnt/models"


def text(setup: ServingSetup) -> str:
    """Return the manifest of a single pool.

    Raises:
        UnsupportedError: Replicas span several nodes, which requires separate worker pods.
    """
    spec = _workload(setup, vllm.server_command(setup)[1], port=PORT)
    return (
        f"# {headline(setup)}; {format_count(setup.replicas, 'replica')}\n{_manifest(setup, spec)}"
    )


def pools_text(prefill: ServingSetup, decode: ServingSetup) -> str:
    """Return the manifest of a prefill and a decode pool. The top-level replicas decode.

    Raises:
        UnsupportedError: The cluster has two kinds of GPU.
    """
    if prefill.cluster.gpu.name != decode.cluster.gpu.name:
        raise UnsupportedError(
            "a manifest does not assign GPU types to nodes; use one type for both "
            "pools, or choose vllm or sglang",
            field="cluster.stages",
        )
    sides = ((prefill, PORT), (decode, DECODE_PORT))
    first, second = (
        _workload(side, vllm.pool_command(side)[1], port=port, sends=True) for side, port in sides
    )
    heads = f"# {headline(prefill)} for prefill, {decode.cluster.num_gpus} for decoding"
    return (
        f"{heads}; {prefill.replicas} and {decode.replicas} "
        f"replicas\n{_manifest(decode, {**second, 'prefill': first})}"
    )


def _service_name(setup: ServingSetup) -> str:
    return re.sub(r"[^a-z0-9-]+", "-", setup.model.name.casefold()).strip("-")[:50] or "model"


def _workload(
    setup: ServingSetup, options: Values, *, port: int, sends: bool = False
) -> dict[str, Any]:
    """Return the replica count, parallel sizes and pod specification of a pool."""
    c, ranks = setup.parallel, setup.gpus_per_replica
    if ranks > setup.cluster.gpus_per_node:
        raise UnsupportedError(
            f"a replica of {ranks} GPUs exceeds a node of "
            f"{setup.cluster.gpus_per_node}; a manifest describes replicas of one pod",
            field="parallel",
        )
    arguments = [word for name, words in option_words(options).items() for word in (name, *words)]
    address = {
        "name": "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
    }
    container = {
        "name": "main",
        "command": ["vllm", "serve", MOUNTED_MODEL],
        "args": ["--served-model-name", _service_name(setup), "--port", str(port), *arguments],
        **({"env": [address]} if sends else {}),
        "resources": {"limits": {"nvidia.com/gpu": str(ranks)}},
    }
    return {
        "replicas": setup.replicas,
        "parallelism": {"tensor": c.tensor_parallel_size, "expert": c.expert_parallel_size > 1},
        "template": {"containers": [container]},
    }


def _manifest(setup: ServingSetup, workload: dict[str, Any]) -> str:
    name = _service_name(setup)
    manifest = {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "LLMInferenceService",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": f"hf://{setup.model_path or 'FILL-IN/checkpoint'}", "name": name},
            **workload,
            "router": {"gateway": {}, "route": {}, "scheduler": {}},
        },
    }
    written: str = yaml.safe_dump(manifest, sort_keys=False, width=120)
    return written


register(
    Format(
        name="llm-d",
        kind="inference",
        read=command_reader("vllm"),
        write=text,
        write_pools=pools_text,
        reads="LLMInferenceService, or the values of llm-d's chart, with one kind of pod or "
        "separate pools of `vllm serve`",
        writes="a manifest of KServe's LLMInferenceService with vLLM's command, one pod per "
        "replica, also with separate pools",
        checked="a schema of the used fields, derived from KServe's types; read back by `import`",
    )
)

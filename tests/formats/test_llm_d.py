"""The manifest for llm-d, against the fields of KServe's LLMInferenceService."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml

from hp_tool.errors import UnsupportedError
from hp_tool.formats.exchange import export
from tests.formats.test_files_of_others import SERVING


def mapping(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


MOST = 2**31 - 1
TEXT, SIZE = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1, "maximum": MOST}
WORDS = {"type": "array", "items": TEXT}
VARIABLE = mapping(name=TEXT, value=TEXT, valueFrom=mapping(fieldRef=mapping(fieldPath=TEXT)))
CONTAINER = mapping(
    name={"const": "main"},
    command=WORDS,
    args=WORDS,
    env={"type": "array", "items": VARIABLE},
    resources=mapping(limits={"additionalProperties": TEXT}),
)
WORKLOAD = {
    "replicas": {"type": "integer", "minimum": 0, "maximum": MOST},
    "parallelism": mapping(
        tensor=SIZE, pipeline=SIZE, data=SIZE, dataLocal=SIZE, expert={"type": "boolean"}
    ),
    "template": mapping(containers={"type": "array", "items": CONTAINER}),
}
SPEC = mapping(
    model=mapping(uri={"type": "string", "pattern": "^hf://[^/]+/.+"}, name=TEXT)
    | {"required": ["uri"]},
    **WORKLOAD,
    prefill=mapping(**WORKLOAD),
    router=mapping(
        gateway={"type": "object"}, route={"type": "object"}, scheduler={"type": "object"}
    ),
)
SCHEMA = mapping(
    apiVersion={"const": "serving.kserve.io/v1alpha1"},
    kind={"const": "LLMInferenceService"},
    metadata=mapping(
        name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
    ),
    spec=SPEC,
)
"""What the manifest may say: names, types and bounds of its fields as KServe's generated CRD has
them, of a pod what it uses (config/crd/full/llmisvc/serving.kserve.io_llminferenceservices.yaml at
01b1241038b3, Apache-2.0; 2.2 MB, most of it of pods). A field of another name is an error.
"""


def manifest(**change: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(export(result=SERVING | change, format="llm-d"))
    jsonschema.validate(found, SCHEMA)
    return found


@pytest.mark.parametrize("model", ["qwen3-32b", "llama-3.3-70b"])
def test_a_deployment_is_a_manifest_with_all_its_replicas(model: str) -> None:
    spec = manifest(model=model)["spec"]
    (container,) = spec["template"]["containers"]
    assert spec["replicas"] == 2 and spec["parallelism"] == {"tensor": 4, "expert": False}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"} and spec["model"][
        "uri"
    ].startswith("hf://")
    words = container["args"]
    assert (
        words[words.index("--tensor-parallel-size") + 1] == "4"
        and "--max-num-seqs" in words
        and "--kv-cache-dtype" not in words
    )


def test_experts_share_a_pod_and_a_replica_over_nodes_is_refused() -> None:
    sizes = {"attention_data_parallel_size": 8, "expert_parallel_size": 8}
    spec = manifest(model="qwen3-30b-a3b", parallel=sizes)["spec"]
    assert spec["replicas"] == 1 and spec["parallelism"]["expert"]
    wide = {"cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 16}, "model": "llama-3.1-405b"}
    with pytest.raises(UnsupportedError, match="a replica of 16 GPUs exceeds a node of 8"):
        manifest(**wide, parallel={"tensor_parallel_size": 8, "pipeline_parallel_size": 2})


def test_pools_are_one_service_whose_own_replicas_decode() -> None:
    sizes = {
        "prefill_tensor_parallel_size": 2,
        "decode_tensor_parallel_size": 4,
        "prefill_replicas": 2,
        "decode_replicas": 1,
    }
    load = SERVING["inference"] | {"disaggregated": sizes}
    spec = manifest(inference=load)["spec"]
    pods = [side["template"]["containers"][0] for side in (spec, spec["prefill"])]
    assert (spec["replicas"], spec["prefill"]["replicas"]) == (1, 2)
    assert [side["parallelism"]["tensor"] for side in (spec, spec["prefill"])] == [4, 2]
    assert [pod["args"][pod["args"].index("--port") + 1] for pod in pods] == ["8001", "8000"]
    for pod in pods:
        transfer = json.loads(pod["args"][pod["args"].index("--kv-transfer-config") + 1])
        assert transfer == {"kv_connector": "NixlConnector", "kv_role": "kv_both"} and pod["env"]
    kinds = {
        "stages": [
            {"gpu": "h100-sxm-80gb", "num_gpus": 4},
            {"gpu": "h200-sxm-141gb", "num_gpus": 4},
        ]
    }
    with pytest.raises(UnsupportedError, match="a manifest does not assign GPU types to nodes"):
        manifest(inference=SERVING["inference"] | {"disaggregated": {}}, cluster=kinds)

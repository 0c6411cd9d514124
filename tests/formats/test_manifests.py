"""Servers and trainings that Kubernetes manifests start: one kind of pod or two pools, a known
number of them, with the variables of their containers.
"""

from __future__ import annotations

import pytest

import hp_tool
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.exchange import read_configuration, read_query
from hp_tool.formats.manifests import pod_command
from tests.formats.test_exported_words import LONG

CONTAINER = "      - {image: vllm/vllm-openai, args: [--model, /mnt/models, --max-num-seqs, '8']}\n"
MANIFEST = """apiVersion: apps/v1
kind: Deployment
spec:
  replicas: %s
  model: {uri: "hf://org/name"}
  template:
    spec:
      containers:
"""


@pytest.mark.parametrize("replicas", ["'{{ pods }}'", "0", "null"])
def test_a_number_of_pods_that_is_unknown_is_refused_by_name(replicas: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        pod_command(MANIFEST % replicas + CONTAINER)
    assert caught.value.field == "spec.replicas"


def test_two_servers_of_one_command_are_not_read_as_one() -> None:
    assert pod_command(MANIFEST % 2 + CONTAINER * 2) is None
    served = pod_command(MANIFEST % 2 + CONTAINER)
    assert served is not None and served.replicas == 2


def test_only_the_mounted_checkpoint_is_named_by_its_address() -> None:
    inside = CONTAINER.replace("'8'", "'8', --download-dir, /mnt/models/cache")
    served = pod_command(MANIFEST % 1 + inside)
    assert served is not None and served.script == (
        "vllm serve --model org/name --max-num-seqs 8 --download-dir /mnt/models/cache\n"
    )


LOAD = {"inference.input_length": 1000, "inference.output_length": 200}
GIVEN = {"cluster.gpu": "h100-sxm-80gb"} | LOAD
WITH_VARIABLES = """apiVersion: apps/v1
kind: Deployment
spec:
  replicas: 2
  template:
    spec:
      containers:
      - image: vllm/vllm-openai:v0.12.0
        command: [vllm, serve, $(MODEL)]
        args: [--tensor-parallel-size, $(TP), --max-num-seqs=$(SEQS), --host, $(POD_IP), --api-key,
          "$$(KEY)"]
        env:
        - {name: MODEL, value: Qwen/Qwen3-32B}
        - {name: TP, value: "4"}
        - {name: SEQS, valueFrom: {configMapKeyRef: {name: sizes, key: seqs}}}
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
%s"""
SIZES = """---
apiVersion: v1
kind: ConfigMap
metadata: {name: sizes}
data: {seqs: "64"}
"""


def test_variables_of_a_container_are_filled_in() -> None:
    reading = read_configuration(WITH_VARIABLES % "" + SIZES, overrides=GIVEN)
    parallel = reading.query["parallel"]
    assert reading.query["model"] == "Qwen/Qwen3-32B" and reading.num_gpus == 8
    assert (parallel["tensor_parallel_size"], parallel["max_num_seqs"]) == (4, 64)


def test_a_variable_that_nothing_here_sets_is_named() -> None:
    with pytest.raises(InputError, match=r"SEQS.*--var SEQS="):
        read_query(WITH_VARIABLES % "", overrides=GIVEN)
    given = read_query(WITH_VARIABLES % "", overrides=GIVEN, variables={"SEQS": "32"})
    assert given["parallel"]["max_num_seqs"] == 32


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("VLLM_USE_V1", "0", "VLLM_USE_V1: this variable is not supported"),
        ("VLLM_PP_LAYER_PARTITION", "10,12", "VLLM_PP_LAYER_PARTITION: this variable"),
        ("VLLM_OF_MY_OWN", "1", "VLLM_OF_MY_OWN 1 is not known to vllm"),
    ],
)
def test_a_variable_of_the_engine_is_refused_by_name(name: str, value: str, word: str) -> None:
    line = f"        - {{name: {name}, value: '{value}'}}\n"
    with pytest.raises(InputError, match=word):
        read_query(WITH_VARIABLES % line + SIZES, overrides=GIVEN)


def test_variables_without_a_cost_are_named_as_ignored() -> None:
    lines = "".join(
        f"        - {{name: {name}, value: '{value}'}}\n"
        for name, value in (("VLLM_LOGGING_LEVEL", "DEBUG"), ("VLLM_USE_V1", "1"), ("UCX_TLS", "x"))
    )
    reading = read_configuration(WITH_VARIABLES % lines + SIZES, overrides=GIVEN)
    ignored = {each.flag for each in reading.ignored}
    assert {"VLLM_LOGGING_LEVEL", "VLLM_USE_V1"} <= ignored and "UCX_TLS" not in ignored


CHART = """
modelArtifacts: {name: Qwen/Qwen3-32B, uri: 'hf://"{{ .Values.modelArtifacts.name }}"'}
routing: {servicePort: 8000}
decode:
  create: true
  replicas: 2
  parallelism: {tensor: 4}
  containers:
  - name: vllm
    image: ghcr.io/llm-d/llm-d:v0.3
    modelCommand: vllmServe
    args: [--max-num-seqs, "64", --kv-transfer-config, '{"kv_connector": "NixlConnector"}']
    env: [{name: VLLM_LOGGING_LEVEL, value: INFO}]
prefill:
  create: %s
  replicas: 3
  containers:
  - name: vllm
    image: ghcr.io/llm-d/llm-d:v0.3
    modelCommand: vllmServe
    args: [--max-num-seqs, "%s", --kv-transfer-config, '{"kv_connector": "NixlConnector"}']
"""


def test_values_of_llm_ds_chart_are_pools() -> None:
    reading = read_configuration(CHART % ("true", 64), overrides=GIVEN)
    pools = reading.query["inference"]["disaggregated"]
    assert reading.num_gpus == 2 * 4 + 3 and reading.query["model"] == "Qwen/Qwen3-32B"
    assert (pools["decode_tensor_parallel_size"], pools["prefill_tensor_parallel_size"]) == (4, 1)
    assert (pools["decode_replicas"], pools["prefill_replicas"]) == (2, 3)
    assert reading.query["parallel"] == {"max_num_seqs": 64}


def test_pools_with_other_limits_are_refused_by_name() -> None:
    with pytest.raises(
        InputError,
        match=r"parallel\.max_num_seqs differs between the pools \(prefill 32, decode 64",
    ):
        read_query(CHART % ("true", 32), overrides=GIVEN)


def test_a_chart_without_prefill_is_one_kind_of_server() -> None:
    alone = CHART.replace(', --kv-transfer-config, \'{"kv_connector": "NixlConnector"}\'', "")
    reading = read_configuration(alone % ("false", 64), overrides=GIVEN)
    assert reading.num_gpus == 8 and reading.query["parallel"]["tensor_parallel_size"] == 4
    with pytest.raises(InputError, match="kv-transfer-config"):
        read_query(CHART % ("false", 64), overrides=GIVEN)


def test_an_exported_job_is_read_as_its_script() -> None:
    manifest, script = (
        hp_tool.export(LONG, format=format).text for format in ("kubernetes", "megatron-lm")
    )
    gpu = {"cluster.gpu": "h100-sxm-80gb"}
    assert read_query(manifest, overrides=gpu) == read_query(script, overrides=gpu)


def test_pods_that_train_without_a_number_of_nodes_are_refused() -> None:
    manifest = """apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: 4
      template:
        spec:
          containers:
          - command: [torchrun, --nproc-per-node=8, pretrain_gpt.py, --num-layers, "2"]
"""
    with pytest.raises(InputError, match="4 pods run the training, but its command lacks --nnodes"):
        read_query(manifest, overrides={"cluster.gpu": "h100-sxm-80gb"})

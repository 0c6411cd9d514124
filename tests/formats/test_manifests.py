"""Servers that Kubernetes manifests start: one kind of pod, a known number of them."""

from __future__ import annotations

import pytest

from hp_tool.errors import UnsupportedError
from hp_tool.formats.manifests import serving_manifest

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
        serving_manifest(MANIFEST % replicas + CONTAINER)
    assert caught.value.field == "spec.replicas"


def test_two_servers_of_one_command_are_not_read_as_one() -> None:
    assert serving_manifest(MANIFEST % 2 + CONTAINER * 2) is None
    served = serving_manifest(MANIFEST % 2 + CONTAINER)
    assert served is not None and served.replicas == 2


def test_only_the_mounted_checkpoint_is_named_by_its_address() -> None:
    inside = CONTAINER.replace("'8'", "'8', --download-dir, /mnt/models/cache")
    served = serving_manifest(MANIFEST % 1 + inside)
    assert served is not None and served.script == (
        "vllm serve --model org/name --max-num-seqs 8 --download-dir /mnt/models/cache\n"
    )

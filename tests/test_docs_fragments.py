"""Every YAML and JSON block of the documentation goes through the door that its page speaks of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hp_tool.catalog import model_from_mapping, records
from hp_tool.catalog.documents import load_yaml
from hp_tool.catalog.lengths import sequence_lengths
from hp_tool.cluster.launchers.options import KubernetesOptions, RayOptions, SlurmOptions
from hp_tool.domain.prices import Offer
from hp_tool.domain.query import OwnFile, Query
from hp_tool.loop.learning.reports import read_report
from hp_tool.questions import schema
from hp_tool.questions.budgets import parse_sizing
from hp_tool.questions.serving.problem import resolve_serving
from hp_tool.questions.training.problem import resolve_training

DOCS = Path(__file__).parents[1] / "docs"
BASE: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    "training": {"sequence_length": 8192, "global_batch_size": 128},
}
"""What a fragment of a query is laid over."""


def query(content: dict[str, Any], folder: Path) -> None:
    """A whole query, or sections of one."""
    merged = content if "kind" in content else BASE | content
    if "kind" not in content and isinstance(content.get("training"), dict):
        merged["training"] = BASE["training"] | content["training"]
    parsed: Query = schema.parse_query(merged)
    (resolve_serving if parsed.kind == "inference" else resolve_training)(parsed)


def lengths(content: dict[str, Any], folder: Path) -> None:
    path = folder / "lengths.yaml"
    path.write_text(yaml.safe_dump(content))
    assert sequence_lengths(OwnFile(path)).lengths.size


def launcher(content: dict[str, Any], folder: Path) -> None:
    kubernetes = "image" in content
    (KubernetesOptions if kubernetes else RayOptions).parse(content, origin="docs/clusters.md")


DOORS: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "models.md": lambda content, folder: model_from_mapping(content["model"]),
    "sizing.md": lambda content, folder: parse_sizing(content),
    "clusters.md": launcher,
    "slurm.md": lambda content, folder: SlurmOptions.parse(content, origin="docs/slurm.md"),
    "renting.md": lambda content, folder: records.build(
        Offer, {"name": "mine", **content}, field="price"
    ),
    "calibration.md": lambda content, folder: (
        read_report(json.dumps(content).encode(), source="file")
        if "measurement" in content
        else query(content, folder)
    ),
}
"""Where a page's blocks are not queries."""
BLOCKS = [
    (page.name, block)
    for page in sorted(DOCS.glob("*.md"))
    for block in re.findall(
        r"^```(?:yaml|json)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    # files, which test_docs.py puts in their folder, what a webhook is sent, what an agent's client
    # reads, a site's own objects
    if not block.startswith(
        (
            "# my-catalogue/",
            '{"type": "search.ended"',
            '{"type": "watch.changed"',
            '{"mcpServers"',
            "apiVersion:",
        )
    )
]


@pytest.mark.parametrize(
    ("page", "block"), BLOCKS, ids=[f"{page} {block.split(':')[0]}" for page, block in BLOCKS]
)
def test_a_block_is_accepted(page: str, block: str, tmp_path: Path) -> None:
    content = load_yaml(block)
    door = DOORS.get(page, lengths if content.keys() & {"counts", "log_normal"} else query)
    door(content, tmp_path)

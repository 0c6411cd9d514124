"""A knob takes a field, a row in one table if recipes set it, and its formula if it has one.

Queries, recipes, profile runs, exports and answers follow from these.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import hp_tool
from hp_tool.domain.fields import Choice, choice_fields
from hp_tool.domain.workload import TrainingWorkload

PACKAGE = Path(hp_tool.__file__).parent
FIELD = '''    jumbo: Annotated[
        Choice[Literal["small", "large"] | None], Shown("Jumbo", "Training", unset="small")
    ] = None
    """How large it is."""
    attention: Annotated[AttentionKind, Shown("Attention", "Precision and kernels")] = "flash"
'''
ROW = '    "jumbo": Knob(trains=True, set_by="recipe", runs=_all("small")),\n'
RECIPE = """
source: this test
description: a knob of this test
rules:
  - training: {framework: megatron-core, jumbo: large}
"""
SCRIPT = """
import json
import hp_tool
from hp_tool.domain.profiling import unsupported_training
from hp_tool.errors import HpToolError
from hp_tool.formats.exchange.export import export
from hp_tool.questions.schema import parse_query, query_mapping
from hp_tool.questions.training import estimate
from hp_tool.questions.training.problem import resolve_training

BASE = {
    "kind": "training", "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8, "gpus_per_node": 8},
    "parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 1, "recompute": "none"},
}

def query(**training):
    sizes = {"sequence_length": 2048, "global_batch_size": 8}
    return parse_query(BASE | {"training": sizes | training})

def error(call):
    try:
        call()
    except HpToolError as raised:
        return raised.field

def runs(**training):
    problem = resolve_training(query(**training))
    return [field for field, _ in unsupported_training(
        model=problem.model, training=problem.workload, gpu="h100-sxm-80gb")]

def activations(**training):
    return estimate(query=query(**training)).memory.activations_bytes

recipe = {RECIPE}
print(json.dumps({
    "echoed": query_mapping(query(jumbo="large"))["training"].get("jumbo"),
    "wrong": error(lambda: query(jumbo="huge")),
    "choices": query(jumbo=["small", "large"]).training.choices,
    "several": error(lambda: resolve_training(query(jumbo=["small", "large"]))),
    "assumed": recipe and resolve_training(query(recipe=recipe)).assumed.get("training.jumbo"),
    "more_bytes": activations(jumbo="large") - activations(),
    "small": runs(jumbo="small"), "large": runs(jumbo="large"),
    "exported": error(lambda: export(
        result=query_mapping(query(jumbo="large")), format="megatron-lm")),
}))
"""


EDITS = (
    (
        "domain/workload.py",
        FIELD.splitlines(keepends=True)[-1],
        FIELD,
    ),
    ("domain/knobs.py", '    "gated_product":', f'{ROW}    "gated_product":'),
    (
        "cost/block.py",
        "product=0.0 if",
        'product=2.0 * saved_input if workload.jumbo == "large" else 0.0 if',
    ),
)
"""(file, text, text instead): the field, what is known of it, and a formula."""


def _with_knob(folder: Path, *, files: int) -> Path:
    """Link the package into a folder, but for the first files to edit."""
    copy = folder / "hp_tool"
    shutil.copytree(
        PACKAGE, copy, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, before, after in EDITS[:files]:
        path = copy / name
        text = path.read_text()
        assert text.count(before) == 1
        path.unlink()
        path.write_text(text.replace(before, after))
    return folder


def _asked(folder: Path, *, recipe: str | None) -> dict[str, Any]:
    catalog = folder / "catalog"
    (catalog / "recipes").mkdir(parents=True)
    if recipe:
        (catalog / "recipes" / "jumbo.yaml").write_text(RECIPE)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{RECIPE}", repr(recipe))],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "HP_CATALOG_DIR": str(catalog)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("files", [1, 2, 3])
def test_a_knob_takes_a_field_a_row_for_recipes_and_its_formula(tmp_path: Path, files: int) -> None:
    recipe, row = "jumbo" if files > 1 else None, files > 1
    answers = _asked(_with_knob(tmp_path, files=files), recipe=recipe)
    more_bytes = answers.pop("more_bytes")
    assert answers == {
        "echoed": "large",
        "wrong": "training.jumbo",
        "choices": {"jumbo": ["small", "large"]},
        "several": "training.jumbo",
        "assumed": "large" if row else None,
        "small": [] if row else ["training.jumbo"],
        "large": ["training.jumbo"],
        "exported": "training.jumbo",
    }
    assert more_bytes > 0.0 if files > 2 else more_bytes == 0.0


def test_fields_that_may_be_lists_are_told_by_their_annotation() -> None:
    hints = get_type_hints(TrainingWorkload, include_extras=True)
    marker = type(get_args(Choice[int])[1])
    several = [
        name
        for name, hint in hints.items()
        if any(isinstance(each, marker) for each in getattr(hint, "__metadata__", ()))
    ]
    assert several == list(choice_fields(TrainingWorkload))
    assert "precision" in several and "framework" not in several

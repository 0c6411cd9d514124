"""The nearest measured runs, what they lack, and the index that the catalog holds."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from benchmarks.accuracy.fit_familiarity import as_csv, groups
from evidence.table import FOLDER
from hp_tool.catalog import model
from hp_tool.catalog.efficiency import prediction_doubts
from hp_tool.catalog.familiarity import FILE, measured_runs, read_runs
from hp_tool.domain.familiarity import (
    DIMENSION_LABELS,
    SERVING_DIMENSIONS,
    TRAINING_DIMENSIONS,
    Index,
    Measured,
    Setting,
    family_of,
    find_nearest,
    kind_of_model,
)
from hp_tool.wording.familiarity import MISSING_RUNS_WORDS

EXTRAS = {
    "trainer": 0.5,
    "release": 0.01,
    "gpu": 0.05,
    "die": 0.3,
    "family": 0.1,
    "model_kind": 0.2,
    "precision": 0.07,
    "task": 0.06,
    "scale": 0.03,
    "load": 0.2,
    "engine": 0.4,
}
ASKED = Setting(
    software="megatron-core",
    release="26.04",
    gpu="h100-sxm-80gb",
    die="h100",
    family="llama-3",
    num_gpus=64,
)
LIKE = Measured(
    **{each.name: getattr(ASKED, each.name) for each in dataclasses.fields(Setting)},
    n=12,
    source="recipes",
)
DIFFERENT = {
    "trainer": {"software": "torch-fsdp"},
    "release": {"release": "25.09"},
    "gpu": {"gpu": "h200-sxm-141gb"},
    "die": {"gpu": "b200-sxm-180gb", "die": "b200"},
    "family": {"family": "qwen3"},
    "model_kind": {"model_kind": "mixture of experts"},
    "precision": {"precision": "fp8"},
    "task": {"task": "lora"},
    "scale": {"num_gpus": 8},
    "load": {"load": "offline"},
}


def test_runs_that_differ_in_nothing_are_familiar() -> None:
    near = find_nearest(ASKED, Index((LIKE,)), EXTRAS)
    assert (near.differs, near.variance) == ((), 0.0)
    answer = near.answer()
    assert (answer.class_, answer.n) == ("familiar", 12)
    assert answer.nearest[0].source == "recipes" and answer.nearest[0].differs_in == ()


@pytest.mark.parametrize("name", DIFFERENT)
def test_each_dimension_has_its_class_and_its_extra(name: str) -> None:
    other = dataclasses.replace(LIKE, **DIFFERENT[name])  # type: ignore[arg-type]
    near = find_nearest(ASKED, Index((other,)), EXTRAS, serves=name == "load")
    assert near.differs == (name,)
    assert near.variance == pytest.approx(EXTRAS[name] ** 2)
    assert near.answer().class_ == name
    (described,) = near.answer().nearest[0].differs_in
    assert str(next(iter(DIFFERENT[name].values()))) in described


def test_the_nearest_runs_lack_the_most_severe_difference() -> None:
    far = dataclasses.replace(LIKE, gpu="b200-sxm-180gb", die="b200", n=100)
    near = dataclasses.replace(LIKE, gpu="h200-sxm-141gb", family="qwen3", n=3)
    found = find_nearest(ASKED, Index((far, near)), EXTRAS)
    assert found.differs == ("family", "gpu")
    assert found.variance == pytest.approx(0.1**2 + 0.05**2)
    assert found.answer().n == 3


def test_nothing_measured_at_all_is_an_unknown_trainer() -> None:
    near = find_nearest(ASKED, Index(), EXTRAS)
    assert near.answer().class_ == "trainer" and near.answer().n == 0
    assert near.variance == 0.5**2
    assert find_nearest(ASKED, Index(), EXTRAS, serves=True).answer().class_ == "engine"


def test_a_layout_without_measured_features_is_no_familiar_one() -> None:
    answer = find_nearest(ASKED, Index((LIKE,)), EXTRAS).answer(("parallel.rank_order",))
    assert (answer.class_, answer.unmeasured) == ("layout", ("parallel.rank_order",))


@pytest.mark.parametrize("kind", ["training", "serving"])
def test_removing_a_familys_rows_widens_its_answers_and_changes_their_class(kind: str) -> None:
    index = measured_runs(kind)
    serves = kind == "serving"
    for run in index.runs:
        fields = {each.name: getattr(run, each.name) for each in dataclasses.fields(Setting)}
        asked = Setting(**fields)
        without = Index(tuple(each for each in index.runs if each.family != run.family))
        before, after = (
            find_nearest(asked, each, EXTRAS, serves=serves) for each in (index, without)
        )
        assert before.answer().class_ == "familiar" and before.variance == 0.0
        assert after.answer().class_ != "familiar" and after.variance > 0.0


@pytest.mark.parametrize("order", [TRAINING_DIMENSIONS, SERVING_DIMENSIONS])
def test_every_dimension_is_asked_once_and_has_words(order: tuple[str, ...]) -> None:
    assert len(set(order)) == len(order)
    assert set(order) <= DIMENSION_LABELS.keys() & MISSING_RUNS_WORDS.keys()


def test_the_order_of_severity_is_that_of_the_fitted_extras() -> None:
    """Of trainings; dimensions of nearly the same extra may stand in either order."""
    added = prediction_doubts().extras
    values = [added[name] for name in TRAINING_DIMENSIONS]
    assert all(later <= earlier + 0.03 for earlier, later in itertools.pairwise(values))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3"),
        ("llama-3-70b", "llama-3"),
        ("llama-2-70b", "llama-2"),
        ("qwen3-30b-a3b", "qwen3"),
        ("mixtral-8x7b", "mixtral"),
        ("t5-v1.1-base", "t5-v1"),
        ("deepseek-v3", "deepseek-v3"),
    ],
)
def test_a_family_is_a_name_without_its_size(name: str, family: str) -> None:
    assert family_of(name) == family


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama-3-8b", "dense"),
        ("qwen3-30b-a3b", "mixture of experts"),
        ("nemotron-3-nano-30b-a3b", "mixture of experts, mamba2"),
        ("gpt-oss-120b", "mixture of experts, sliding window"),
        ("deepseek-v3.2", "mixture of experts, sparse attention"),
        ("t5-3b", "dense, encoder_decoder"),
    ],
)
def test_kinds_of_models_differ_in_what_their_layers_compute(name: str, kind: str) -> None:
    assert kind_of_model(model(name)) == kind


def test_the_index_is_what_the_evidence_gives() -> None:
    assert FILE.read_text(encoding="utf-8") == as_csv(groups(FOLDER))


def test_a_line_of_the_index_is_a_group_of_runs(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(as_csv([("training", LIKE)]), encoding="utf-8")
    assert read_runs(path) == [("training", LIKE)]

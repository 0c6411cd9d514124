"""What an answer leaves unsaid and widens its interval: `narrowest` of estimates, in JSON and in
words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

Run = Callable[..., Any]
MIXTURE = (
    "--model=mixtral-8x7b",
    "--gpu=h100-sxm-80gb",
    "--num-gpus=64",
    "--sequence-length=4096",
    "--global-batch-size=512",
)
LORA = (
    "--model=llama-3-8b",
    "--gpu=a100-sxm-80gb",
    "--num-gpus=2",
    "--sequence-length=4096",
    "--global-batch-size=32",
    "--set=training.task=lora",
    "--set=training.lora.rank=16",
    "--set=parallel.recompute=per_layer",
)
PIPELINE = "--set=parallel.pipeline_parallel_size=8"
LEAST = 1.1


def estimated(run: Run, *arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run("estimate", *arguments, "--json").stdout)["estimate"]
    return answer


def flags(values: dict[str, Any]) -> list[str]:
    return [f"--set={path}={json.dumps(value)}" for path, value in values.items()]


def width(interval: Sequence[float]) -> float:
    return math.log(interval[1] / interval[0])


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ((*MIXTURE, PIPELINE, "--model=llama-3-8b"), {"training.framework_version"}),
        (
            (*MIXTURE, "--model=llama-3-8b", "--set=parallel.tensor_parallel_size=8"),
            {"training.framework_version", "training.cuda_graphs"},
        ),
        (
            (*MIXTURE, PIPELINE, "--gpu=b200-sxm-180gb", "--model=qwen3-30b-a3b"),
            {"training.recipe"},
        ),
        (
            (*MIXTURE, "--gpu=gb200-nvl72", "--set=parallel.expert_parallel_size=8"),
            {"training.recipe"},
        ),
        ((*LORA, "--set=training.framework=torch-fsdp"), {"training.framework"}),
    ],
    ids=["release", "release and graphs", "recipe", "recipe on NVL72", "trainer"],
)
def test_writing_what_is_named_gives_the_interval_that_is_promised(
    entry_point: Run, query: tuple[str, ...], named: set[str]
) -> None:
    estimate = estimated(entry_point, *query)
    narrowest = estimate["narrowest"]
    assert narrowest["set"].keys() == named
    assert width(estimate["intervals"]["step_s"]) > LEAST * width(narrowest["step_s"])
    written = estimated(entry_point, *query, *flags(narrowest["set"]))
    assert written["intervals"]["step_s"] == narrowest["step_s"]
    left = written["narrowest"] or {"set": {}}
    assert left["set"].keys() <= {"training.cuda_graphs"}, "what was named is no longer unsaid"


@pytest.mark.parametrize(
    "query",
    [
        (*MIXTURE, PIPELINE),
        (*MIXTURE, "--set=parallel.expert_parallel_size=8"),
        (*MIXTURE, PIPELINE, "--gpu=a100-sxm-80gb"),
    ],
)
def test_a_mixture_is_answered_as_if_its_recipe_were_named(
    entry_point: Run, query: tuple[str, ...]
) -> None:
    estimate = estimated(entry_point, *query)
    assumed = estimate["provenance"]["usual"]["set"]
    written = estimated(entry_point, *query, *flags(assumed))
    assert estimate["narrowest"] is written["narrowest"] is None
    assert written["time"] == estimate["time"]
    assert written["intervals"]["step_s"] == estimate["intervals"]["step_s"]


@pytest.mark.parametrize(
    "query",
    [
        (*MIXTURE, PIPELINE, '--set=training.framework_version="25.09"'),
        (*MIXTURE, "--model=llama-3-8b", "--set=training.framework=torch-fsdp"),
        (*MIXTURE, "--set=parallel.pipeline_parallel_size=7"),
    ],
    ids=["said", "another framework", "illegal"],
)
def test_nothing_is_named_where_nothing_unsaid_widens(
    entry_point: Run, query: tuple[str, ...]
) -> None:
    assert estimated(entry_point, *query)["narrowest"] is None


@pytest.mark.parametrize(
    "query",
    [
        (*MIXTURE, PIPELINE, "--model=llama-3-8b"),
        (*MIXTURE, PIPELINE, "--gpu=b200-sxm-180gb", "--model=qwen3-30b-a3b"),
    ],
    ids=["release", "recipe"],
)
def test_people_are_told(entry_point: Run, query: tuple[str, ...]) -> None:
    ((path, value),) = estimated(entry_point, *query)["narrowest"]["set"].items()
    shown = " ".join(entry_point("estimate", *query).stdout.split())
    assert f"set {path} to {value}." in shown and "Narrower range" in shown


def test_rows_of_a_ranking_name_it_too(entry_point: Run) -> None:
    asked = (*MIXTURE, "--model=llama-3-8b")
    first = json.loads(entry_point("recommend", *asked, "--top=2", "--json").stdout)[
        "recommendations"
    ][0]
    narrowest = first["estimate"]["narrowest"]
    chosen = first["set"] | {
        f"parallel.{name}": value for name, value in first["parallel"].items() if value is not None
    }
    values = {path: json.dumps(value) for path, value in chosen.items()}
    row = [f"--set={path}={value}" for path, value in values.items()]
    assert (
        estimated(entry_point, *asked, *row, *flags(narrowest["set"]))["intervals"]["step_s"]
        == narrowest["step_s"]
    )
    shown = " ".join(entry_point("recommend", *asked, "--top=2").stdout.split())
    assert "Narrower range" in shown and "set training.framework_version to" in shown


def test_fine_tuning_under_no_trainer_in_particular_is_less_sure_than_pretraining(
    entry_point: Run,
) -> None:
    """Constants of torch-fsdp come from pre-training: runs of trainers scatter about its answers by
    a factor of 2 in memory. The trainers have their own scatter.
    """
    bare = estimated(entry_point, *LORA, "--set=training.framework=torch-fsdp")["intervals"]
    full = estimated(entry_point, *LORA[:5], LORA[-1], "--set=training.framework=torch-fsdp")[
        "intervals"
    ]
    tuned = estimated(
        entry_point,
        *LORA[:5],
        LORA[-1],
        "--set=training.framework=torch-fsdp",
        "--set=training.task=sft",
    )["intervals"]
    trainer = estimated(
        entry_point,
        *LORA[:-1],
        "--set=training.framework=hf-trainer",
        "--set=parallel.recompute=full",
    )["intervals"]
    for figure, least in (("step_s", 1.2), ("memory_total_bytes", 3.0)):
        assert width(tuned[figure]) > least * width(full[figure]), figure
        assert width(bare[figure]) > least * width(full[figure]), figure
        assert width(bare[figure]) > 1.1 * width(trainer[figure]), figure

"""From budgets to trainings by the cost model: known points, fixed points, deadlines, and what is
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hp_tool
from hp_tool.domain.sizing import Sizing
from hp_tool.errors import InputError, NotFoundError, UnsupportedError
from hp_tool.questions import answers, schema
from hp_tool.questions.budgets import answer_sizing, parse_sizing

A100 = {"gpu": "a100-sxm-80gb", "num_gpus": 1024}
H100 = {"gpu": "h100-sxm-80gb", "num_gpus": 64}


def sized(**query: Any) -> Sizing:
    return answer_sizing(parse_sizing(query)).sizing


def test_gpt3() -> None:
    # arXiv 2104.04473, section 5.1: 34 days at 140 TFLOP/s with full recomputation; here the best
    # configuration of today.
    found = sized(
        cluster=A100,
        parameters=174.6e9,
        tokens=300e9,
        style="gpt",
        sequence_length=2048,
        global_batch_size=1536,
    )
    assert (found.model.num_hidden_layers, found.model.hidden_size) == (96, 12288)
    assert found.flops == pytest.approx(3.14e23, rel=0.05)  # arXiv 2005.14165, appendix D
    assert found.effective_days is not None and 15.0 < found.effective_days < 34.0
    assert found.compute_overhead > 0.5  # too large for its tokens, as arXiv 2203.15556 found


@pytest.mark.parametrize(
    ("parameters", "tokens", "layers", "hidden"),
    [(6.74e9, 1.0e12, 32, 4096), (65.2e9, 1.4e12, 80, 8192)],
)
def test_llama(parameters: float, tokens: float, layers: int, hidden: int) -> None:
    found = sized(parameters=parameters, tokens=tokens, vocab_size=32_000, sequence_length=2048)
    assert found.parameters == pytest.approx(parameters, rel=0.05)
    assert found.model.num_hidden_layers == pytest.approx(layers, rel=0.25)
    assert found.model.hidden_size == pytest.approx(hidden, rel=0.25)
    assert found.days is None and found.query is None


@pytest.mark.parametrize(
    ("law", "size"),
    [("chinchilla-1", 67e9), ("chinchilla-2", 63e9), ("chinchilla-corrected", 72e9)],
)
def test_chinchilla(law: str, size: float) -> None:
    found = sized(flops=5.76e23, law=law, style="gpt", vocab_size=32_000, sequence_length=2048)
    assert found.parameters == pytest.approx(size, rel=0.05)
    assert found.tokens == pytest.approx(1.4e12, rel=0.13)
    assert found.model.num_hidden_layers == pytest.approx(80, rel=0.25)
    assert found.model.hidden_size == pytest.approx(8192, rel=0.25)
    assert found.compute_overhead < 0.02


def test_a_time_is_filled_by_the_training_that_takes_it() -> None:
    found = sized(cluster=H100, days=20.0)
    assert found.effective_days == pytest.approx(20.0, rel=1e-6)
    assert found.days is not None and found.goodput is not None
    assert found.days / found.goodput.fraction == pytest.approx(20.0, rel=1e-6)
    assert found.parameters == pytest.approx(
        found.law.value, rel=0.06
    )  # the law's optimum at this compute, within a shape
    assert found.cost == pytest.approx((found.gpu_hours or 0.0) * 6.88, rel=0.01)
    again = answers.answer_recommend(schema.parse_query(found.query or {}), top=1)
    assert again.recommendations[0].estimate.days == pytest.approx(found.days)  # type: ignore[union-attr]


def test_python_asks_by_keys(tmp_path: Path) -> None:
    found = hp_tool.size({"cluster": {"gpu": "h100-sxm-80gb"}}, num_gpus=64, days=20.0)
    assert found == answer_sizing(parse_sizing({"cluster": H100, "days": 20.0}))
    path = tmp_path / "budget.yaml"
    path.write_text("parameters: 7.0e9\n")
    assert hp_tool.size(path, tokens_per_parameter=20.0).sizing.tokens == pytest.approx(140e9)


def test_twice_the_days_are_twice_the_compute() -> None:
    once, twice = (sized(cluster=H100, days=days) for days in (10.0, 20.0))
    assert twice.flops == pytest.approx(2.0 * once.flops, rel=0.08)


def test_memory_ends_the_size_and_tokens_fill_the_time() -> None:
    found = sized(cluster={"gpu": "a100-sxm-40gb", "num_gpus": 1}, days=2_000.0)
    assert found.effective_days == pytest.approx(2_000.0, rel=1e-6)
    assert isinstance(found.law.value, float) and found.parameters < 0.5 * found.law.value
    assert found.tokens_per_parameter > 40.0


def test_a_deadline_takes_the_fewest_devices() -> None:
    late, early = (
        sized(cluster=H100, model="llama-3-8b", tokens=200e9, days=days) for days in (10.0, 5.0)
    )
    for found, days in ((late, 10.0), (early, 5.0)):
        assert found.effective_days is not None and found.effective_days <= days
    assert late.num_gpus is not None and early.num_gpus is not None
    assert late.num_gpus < early.num_gpus <= 64
    half = sized(cluster=H100 | {"num_gpus": early.num_gpus // 2}, model="llama-3-8b", tokens=200e9)
    assert half.effective_days is not None and half.effective_days > 5.0


def test_a_deadline_that_cannot_be_met_says_by_how_much() -> None:
    found = sized(cluster=H100, model="llama-3-8b", tokens=2e12, days=1.0)
    assert not found.feasible and found.days is None
    assert found.reasons[0].code == "target_missed" and (found.reasons[0].needed or 0.0) > 1.0


def test_what_fits_nowhere_is_infeasible() -> None:
    found = sized(
        cluster={"gpu": "v100-sxm-32gb", "num_gpus": 1},
        parameters=175e9,
        tokens=1e9,
        precision="fp16",
    )
    assert not found.feasible and {reason.code for reason in found.reasons} == {"memory"}


def test_failures_cost_days() -> None:
    never, often = (
        sized(cluster=A100, parameters=7e9, tokens=1e12, reliability={"mtbf_per_gpu_hours": hours})
        for hours in (1e9, 500.0)
    )
    assert never.days == often.days and never.days is not None
    assert never.effective_days == pytest.approx(never.days, rel=1e-3)
    assert often.effective_days is not None and often.effective_days > 1.2 * never.days


def test_two_give_the_third() -> None:
    by_tokens = sized(flops=6.0 * 7e9 * 1e12, tokens=1e12)
    by_size = sized(flops=6.0 * 7e9 * 1e12, parameters=7e9)
    assert by_tokens.model == by_size.model and by_tokens.tokens == pytest.approx(by_size.tokens)
    assert sized(parameters=8e9, tokens_per_parameter=1875.0).tokens == pytest.approx(15e12)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({}, "days"),
        ({"days": 3.0}, "cluster"),
        ({"parameters": 7e9, "tokens": 1e12, "flops": 4.2e22}, "flops"),
        ({"parameters": 7e9, "model": "llama-3-8b"}, "parameters"),
        ({"parameters": 7e9, "tokens": 1e12, "tokens_per_parameter": 20.0}, "tokens_per_parameter"),
        ({"model": "llama-3-8b", "vocab_size": 32_000}, "vocab_size"),
        ({"parameters": -1.0}, "parameters"),
        ({"parameters": 1e6, "vocab_size": 1_000_000}, "parameters"),
        (
            {"parameters": 7e9, "parallel": {"tensor_parallel_size": 0}},
            "parallel.tensor_parallel_size",
        ),
        ({"parameters": 7e9, "reliability": {"checkpoint_s": 0.0}}, "reliability.checkpoint_s"),
        (
            {"parameters": 7e9, "experts": {"num_experts": 4, "num_experts_per_tok": 8}},
            "experts.num_experts_per_tok",
        ),
        ({"parameterz": 7e9}, "parameterz"),
        (
            {
                "parameters": 7e9,
                "cluster": {"gpu": "v100-sxm-32gb", "num_gpus": 8},
                "precision": "fp8",
            },
            "precision",
        ),
    ],
)
def test_bad_queries_name_the_field(query: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as refused:
        sized(**query)
    assert refused.value.field == field


def test_unknown_models_and_encoders_are_refused() -> None:
    with pytest.raises(NotFoundError):
        sized(model="llama-9")
    with pytest.raises(UnsupportedError):
        sized(model="bert-large", tokens=1e9)

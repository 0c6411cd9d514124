"""FLOPs of arXiv 2205.05198, appendix A, and the utilisation columns of its table 5."""

from __future__ import annotations

import dataclasses

import pytest

import hp_tool
from hp_tool.catalog import model as catalogue_model
from hp_tool.cost.flops import step_tokens, token_flops
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.result import Estimate
from hp_tool.domain.workload import TrainingWorkload
from tests.cost.korthikanti_models import MODELS, SEQUENCE, Published, published_estimate

each_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
PEAK = 312e12
VOCABULARY = 51200


def model_flops(model: Published) -> float:
    """72 B L s h^2 (1 + s/6h + V/12hL)."""
    s, h, layers = SEQUENCE, model.hidden, model.layers
    return 72 * model.batch * layers * s * h**2 * (1 + s / (6 * h) + VOCABULARY / (12 * h * layers))


def workload(model: Published) -> TrainingWorkload:
    return TrainingWorkload(sequence_length=SEQUENCE, global_batch_size=model.batch)


@each_model
def test_model_flops_of_a_step(model: Published) -> None:
    given = workload(model)
    found = token_flops(catalogue_model(model.name), given).model * step_tokens(given)
    assert found == pytest.approx(model_flops(model), rel=1e-12)


def test_causal_counts_half_of_the_attention() -> None:
    shape, given = catalogue_model("gpt3-175b"), workload(MODELS[1])
    full = token_flops(shape, given)
    half = token_flops(shape, dataclasses.replace(given, attention_mask_flops="causal"))
    assert half.attention == full.attention / 2
    assert (half.layers, half.logits) == (full.layers, full.logits)


@pytest.mark.parametrize("name", ["llama-3-8b", "bert-large", "t5-11b"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_shares_of_peak_by_the_causal_half_are_those_of_that_convention(
    name: str, recompute: str
) -> None:
    def estimate(mask: str) -> Estimate:
        answer = hp_tool.estimate(
            model=name,
            gpu="h100-sxm-80gb",
            num_gpus=8,
            sequence_length=16384,
            global_batch_size=8,
            training={"attention_mask_flops": mask},
            parallel={"recompute": recompute},
        )
        assert isinstance(answer.estimate, Estimate)
        return answer.estimate

    full, half = estimate("full"), estimate("causal")
    assert (full.mfu_causal, full.hfu_causal) == (pytest.approx(half.mfu), pytest.approx(half.hfu))
    assert (half.mfu_causal, half.hfu_causal) == (half.mfu, half.hfu)
    assert full.mfu is not None and half.mfu is not None
    assert (full.mfu > half.mfu) is (name != "bert-large")


@each_model
@pytest.mark.parametrize(
    ("recompute", "share", "share_paper"),
    [
        # of model FLOPs over 72 B L s h^2: what each convention adds to 1 + s/6h + V/12hL
        ("none", lambda s, h: 0.0, lambda s, h: 0.0),
        (
            "selective",
            lambda s, h: s / (4.5 * h) - s / (6 * h),
            lambda s, h: s / (3 * h) - s / (6 * h),
        ),
        ("full", lambda s, h: (1 + s / (6 * h)) / 3, lambda s, h: (1 + s / (6 * h)) / 3),
    ],
)
def test_hardware_flops_by_both_conventions(
    model: Published, recompute: str, share, share_paper
) -> None:  # type: ignore[no-untyped-def]
    s, h, layers = SEQUENCE, model.hidden, model.layers
    estimate = published_estimate(model, recompute=recompute)
    assert estimate.mfu and estimate.hfu and estimate.hfu_paper
    whole = 1 + s / (6 * h) + VOCABULARY / (12 * h * layers)
    assert estimate.hfu / estimate.mfu == pytest.approx(1 + share(s, h) / whole, rel=1e-12)
    assert estimate.hfu_paper / estimate.mfu == pytest.approx(
        1 + share_paper(s, h) / whole, rel=1e-12
    )


def test_full_recomputation_is_the_papers_96() -> None:
    """96 B L s h^2 (1 + s/6h + V/16hL)."""
    model = MODELS[1]
    s, h, layers = SEQUENCE, model.hidden, model.layers
    estimate = published_estimate(model, recompute="full")
    assert estimate.hfu and estimate.mfu
    hardware = (
        96 * model.batch * layers * s * h**2 * (1 + s / (6 * h) + VOCABULARY / (16 * h * layers))
    )
    assert estimate.hfu / estimate.mfu == pytest.approx(hardware / model_flops(model), rel=1e-12)


@each_model
def test_utilisation_columns_of_table_5(model: Published) -> None:
    """From the measured seconds: MFU, and HFU by the paper's own count of what selective
    recomputation repeats.
    """
    gpus = 8 * model.pipeline
    mfu = model_flops(model) / (gpus * PEAK * model.seconds)
    estimate = published_estimate(model, recompute="selective")
    assert estimate.hfu_paper and estimate.mfu
    assert 100 * mfu == pytest.approx(model.mfu, abs=0.2)
    assert 100 * mfu * estimate.hfu_paper / estimate.mfu == pytest.approx(model.hfu, abs=0.2)


@each_model
def test_mfu_divides_model_flops_by_the_dense_peak(model: Published) -> None:
    estimate = published_estimate(model, recompute="none")
    assert estimate.time and estimate.mfu
    flops = model_flops(model) * model.micro_batch / model.batch
    assert estimate.mfu == pytest.approx(flops / (estimate.time.step_s * 8 * PEAK), rel=1e-12)


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b"])
def test_a_layer_that_predicts_ahead_is_one_more_layer_with_its_projection_and_logits(
    name: str,
) -> None:
    """Its input is the hidden state beside the next token's embedding: a projection of 2h by h."""
    given = workload(MODELS[1])
    shape = catalogue_model(name)
    ahead, longer, plain = (
        token_flops(dataclasses.replace(shape, **changes), given)
        for changes in (
            {"num_nextn_predict_layers": 1},
            {"num_hidden_layers": shape.num_hidden_layers + 1},
            {},
        )
    )
    assert ahead.layers - longer.layers == pytest.approx(2 * 2 * shape.hidden_size**2, rel=1e-6)
    assert ahead.attention == longer.attention
    assert ahead.logits == 2 * plain.logits


def test_a_token_meets_each_layer_s_own_feed_forward() -> None:
    """One dense layer, then two with experts, by hand in entries of matrices. Attention 4 x 64^2
    = 16,384; the dense MLP 3 x 64 x 128 = 24,576; two experts of eight 2 x 3 x 64 x 32 = 12,288,
    and their router 64 x 8 = 512. Two FLOPs each.
    """
    shape = ModelSpec(
        num_hidden_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        vocab_size=256,
        intermediate_size=128,
        gated_mlp=True,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    )
    found = token_flops(shape, TrainingWorkload(sequence_length=16, global_batch_size=1))
    assert found.layers == 2.0 * (3 * 16_384 + 24_576 + 2 * (12_288 + 512))

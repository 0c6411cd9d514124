"""Named attention kernels: published ratios, a framework's own, and intervals beyond the lengths
that were timed.
"""

import pytest

from hp_tool.catalog.efficiency import prediction_doubts
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import UnsupportedError
from hp_tool.questions.training.evaluate import resolve_configuration
from tests.cost.test_intervals import adding, time_sd


def answer(
    kernel: str | None,
    *,
    model: str = "llama-3-8b",
    gpu: str = "h100-sxm-80gb",
    framework: str = "torch-fsdp",
    tokens: int = 8192,
) -> Estimate:
    workload = TrainingWorkload(
        sequence_length=tokens,
        global_batch_size=8,
        framework=framework,
        attention_kernel=kernel,  # type: ignore[arg-type]
    )
    query = Query(
        kind="training",
        model=model,
        cluster=ClusterQuery(gpu=gpu, num_gpus=8),
        training=workload,
        parallel=ParallelQuery(micro_batch_size=1, recompute="full"),
    )
    return resolve_configuration(query).estimate(with_fixes=False)


def attention_s(kernel: str | None, **where: str) -> float:
    estimate = answer(kernel, **where)
    assert estimate.time is not None
    return estimate.time.parts_s["attention"]


def test_kernels_on_h100_stand_in_their_published_ratios() -> None:
    fa2, fa3, cudnn = (attention_s(name) for name in ("fa2", "fa3", "cudnn"))
    assert fa2 / fa3 == pytest.approx(616 / 335, rel=1e-3)
    assert cudnn / fa3 == pytest.approx(616 / 539, rel=1e-3)


@pytest.mark.parametrize(
    ("framework", "gpu", "own"),
    [
        ("torch-fsdp", "h100-sxm-80gb", "fa2"),
        ("torch-fsdp", "a100-sxm-80gb", "fa2"),
        ("torch-fsdp", "b200-sxm-180gb", "cudnn"),
        ("megatron-core", "h100-sxm-80gb", "cudnn"),
        ("hf-trainer", "h100-sxm-80gb", "fa2"),
        ("hf-trainer", "b200-sxm-180gb", "cudnn"),
        ("verl", "h100-sxm-80gb", "cudnn"),
    ],
)
def test_left_open_it_is_the_frameworks_own(framework: str, gpu: str, own: str) -> None:
    left_open, named, auto = (
        attention_s(name, framework=framework, gpu=gpu) for name in (None, own, "auto")
    )
    assert left_open == named == auto
    assert answer(None, framework=framework, gpu=gpu).provenance["attention_kernel"] == own


def test_biases_by_distance_keep_the_kernel_that_took_them() -> None:
    assert attention_s(None, model="mpt-7b") == attention_s("triton", model="mpt-7b")
    assert attention_s("triton", model="mpt-7b") > 1.5 * attention_s("fa2", model="mpt-7b")


def test_a_kernel_without_figures_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="measured: cudnn") as caught:
        answer("fa3", framework="megatron-core", gpu="b200-sxm-180gb")
    assert caught.value.field == "training.attention_kernel"


def test_lengths_that_no_kernel_was_timed_on_widen_the_interval() -> None:
    """By the doubt of one feature without data, which adds in variance."""
    known, beyond = answer(None, tokens=16_384), answer(None, tokens=20_000)
    assert (
        beyond.familiarity.unmeasured == ("training.sequence_length",)
        and known.familiarity.unmeasured == ()
    )
    doubt = prediction_doubts().feature_log_sd
    assert doubt > 0.0 and time_sd(beyond) == adding(time_sd(known), doubt)

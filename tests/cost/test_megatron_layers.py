"""Saved activations against the real framework: one rank's layers under fake tensors, counted
storage by storage.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.encoder_decoder import decoder_layer_bytes
from hp_tool.cost.layer import layer_bytes
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload
from tests.conftest import skip_or_fail
from tests.cost.cases import case_of

pytestmark = pytest.mark.components

LLAMA = {"gated_mlp": True, "normalization": "rmsnorm", "vocab_size": 1024}
FAMILIES = {
    "gpt": ModelSpec(
        num_hidden_layers=2, hidden_size=12288, num_attention_heads=96, vocab_size=1024
    ),
    "gqa": ModelSpec(
        num_hidden_layers=2,
        hidden_size=8192,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        **LLAMA,
    ),
    "gated": ModelSpec(
        num_hidden_layers=2,
        hidden_size=4096,
        num_attention_heads=32,
        intermediate_size=11008,
        **LLAMA,
    ),
    "normed": ModelSpec(
        num_hidden_layers=2,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=12288,
        query_key_norm="head",
        **LLAMA,
    ),
    # A decoder layer with cross attention to an encoder of another length.
    "t5": ModelSpec(
        architecture="encoder_decoder",
        num_hidden_layers=2,
        hidden_size=4096,
        num_attention_heads=64,
        intermediate_size=10240,
        vocab_size=1024,
        position_embedding="learned",
    ),
    "bert": ModelSpec(
        architecture="encoder",
        num_hidden_layers=2,
        hidden_size=2560,
        num_attention_heads=40,
        vocab_size=1024,
    ),
}
DROPOUT = {"gpt": 0.1, "t5": 0.1, "bert": 0.1}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
CASES = [
    (family, t, sharded, recompute, attention)
    for family, t, sharded, recompute, attention in itertools.product(
        FAMILIES, (1, 2, 4, 8), (False, True), RECOMPUTE, ("unfused", "flash")
    )
    if (
        attention == "flash" or t in (1, 8)
    )  # a formula that holds at both ends of unfused attention holds between
    and (t > 1 or not sharded)  # no sequence parallelism over one rank
    # Unfused attention copies grouped keys and values to every query head; nobody trains GQA so,
    # and it is not counted.
    and (family not in ("gqa", "normed") or (recompute, attention) != ("none", "unfused"))
]
SEQUENCE, ENCODER, MICRO_BATCH = 2048, 512, 2
SLACK_BYTES = 8
"""A seed's worth: selective recomputation keeps one for each attention core."""


def workload(family: str, attention: str) -> TrainingWorkload:
    two_sided = family in FAMILIES and FAMILIES[family].architecture == "encoder_decoder"
    return TrainingWorkload(
        sequence_length=ENCODER if two_sided else SEQUENCE,
        decoder_sequence_length=SEQUENCE if two_sided else None,
        global_batch_size=MICRO_BATCH,
        attention=attention,  # type: ignore[arg-type]
        dropout=DROPOUT.get(family, 0.0),
    )


def megatron_case(
    model: ModelSpec, training: TrainingWorkload, *, t: int, sharded: bool, recompute: str = "none"
) -> dict[str, Any]:
    """The same in Megatron Core's words, for the program that counts."""
    dropout = training.dropout
    config = {
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.kv_heads,
        "ffn_hidden_size": model.ffn_size,
        "gated_linear_unit": model.gated_mlp,
        "normalization": "RMSNorm" if model.normalization == "rmsnorm" else "LayerNorm",
        "add_bias_linear": model.has_mlp_bias,
        "add_qkv_bias": model.has_attention_bias,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        **RECOMPUTE[recompute],
    }
    return {
        "tensor_parallel_size": t,
        "sequence_parallel": sharded,
        "attention": training.attention,
        "sequence_length": SEQUENCE,
        "encoder_length": ENCODER if model.architecture == "encoder_decoder" else None,
        "micro_batch_size": MICRO_BATCH,
        "rotary": model.positions == "rotary",
        "query_key_norm": model.query_key_norm is not None,
        "config": config,
    }


@functools.cache
def _counter() -> subprocess.Popen[str]:
    """The program that counts, until this process ends: its imports take ten seconds."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
        skip_or_fail(
            component="MEGATRON",
            reason="torch and megatron-core (the profiler extra) are not installed",
        )
    command = [sys.executable, "-m", "tests.cost.megatron_layers"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def count_bytes(case: dict[str, Any]) -> float:
    """Bytes a layer, by Megatron Core."""
    counter = _counter()
    assert counter.stdin is not None and counter.stdout is not None
    print(json.dumps(case), file=counter.stdin, flush=True)
    for line in counter.stdout:
        if line.startswith("["):  # not what a library says at its import
            (size,) = json.loads(line)
            return float(size)
    raise AssertionError(
        f"the program that counts ended with {counter.wait()}: see its standard error"
    )


def counted(family: str, t: int, sharded: bool, recompute: str, attention: str) -> float:
    return count_bytes(
        megatron_case(
            FAMILIES[family], workload(family, attention), t=t, sharded=sharded, recompute=recompute
        )
    )


def parameters(cases: Iterable[tuple[Any, ...]], *, long: Collection[Any]) -> list[Any]:
    """Cases for pytest; those whose division is among `long` only in its long run."""
    return [pytest.param(case, marks=[pytest.mark.long] * (case[1] in long)) for case in cases]


@pytest.mark.parametrize(
    "case", parameters(CASES, long=(2, 4)), ids=lambda case: "-".join(map(str, case))
)
def test_saved_bytes_are_megatrons(case: tuple[Any, ...]) -> None:
    """To the byte, but for what the formulas leave out on purpose: the norms' fp32 mean and inverse
    deviation per token, and the cosines and sines of queries and of keys, which fused kernels do
    not keep.
    """
    family, t, sharded, recompute, attention = case
    config = ParallelConfig(
        tensor_parallel_size=t, micro_batch_size=MICRO_BATCH, sequence_parallel=sharded
    )
    model = FAMILIES[family]
    two_sided = model.architecture == "encoder_decoder"
    count = decoder_layer_bytes if two_sided else layer_bytes
    found = count(
        case=case_of(model=model, workload=workload(family, attention)),
        candidates=Candidates.alone(config),
    )
    saved = {"none": found.saved, "selective": found.saved_selective, "full": found.saved_full}[
        recompute
    ]
    norms, numbers = 3 if two_sided else 2, 1 if model.normalization == "rmsnorm" else 2
    statistics = norms * numbers * 4 * SEQUENCE * MICRO_BATCH / (t if sharded else 1)
    angles = 4 * SEQUENCE * model.head_size * 2 if model.positions == "rotary" else 0
    if model.query_key_norm is not None:
        statistics += 4 * SEQUENCE * MICRO_BATCH * (model.num_attention_heads + model.kv_heads) / t
    left_out = 0.0 if recompute == "full" else statistics + angles
    assert counted(*case) == pytest.approx(float(saved) + left_out, abs=(norms - 1) * SLACK_BYTES)


def test_the_papers_layer_of_175b() -> None:
    """34sbh/t and sbh(10+24/t): 102 and 312 MiB per sequence at t = 8."""
    for sharded, mebibytes in ((True, 102.0), (False, 312.0)):
        found = counted("gpt", 8, sharded, "selective", "unfused")
        assert found / MICRO_BATCH / 2**20 == pytest.approx(mebibytes, abs=0.05)

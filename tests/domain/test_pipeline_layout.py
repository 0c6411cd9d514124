"""Megatron Core's notation of uneven pipelines, against its own parser."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.domain.pipeline_layout import MAX_TEXT, check_layout, parse_layout
from hp_tool.errors import InputError
from tests.conftest import skip_or_fail

LAYOUTS = (
    "EtttL",
    "Et*3|(tt|)*29,m|L",
    "E|t*4|t*4|mmL",
    "Et|(t*2|)*3|tL",
    "Ett||tt|L",
    "E(t|tt|)*2tL",
    "E,t,t|*2,L",
)


def megatron_chunks(text: str) -> list[tuple[int, int, int, int]]:
    try:
        from megatron.core.transformer.enums import LayerType
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout,
        )
    except ImportError:
        skip_or_fail(
            component="MEGATRON", reason="megatron-core (the profiler extra) is not installed"
        )
    kinds = (LayerType.embedding, LayerType.decoder, LayerType.mtp, LayerType.loss)
    chunks = PipelineParallelLayerLayout.parse_str_to_list(text)
    layout = PipelineParallelLayerLayout(text, len(chunks))
    assert len(chunks) == PipelineParallelLayerLayout.get_num_stages_from_str(text)
    layout.validate_layer_layout(
        layout.flatten_layout.count(LayerType.decoder), layout.flatten_layout.count(LayerType.mtp)
    )
    return [tuple(chunk.count(kind) for kind in kinds) for chunk in chunks]


@pytest.mark.components
@pytest.mark.parametrize("text", LAYOUTS)
def test_megatron_core_reads_the_same(text: str) -> None:
    ours = [
        (chunk.embedding, chunk.layers, chunk.mtp_layers, chunk.loss)
        for chunk in parse_layout(text).chunks
    ]
    assert ours == megatron_chunks(text)


def test_deepseek_v3_as_an_example() -> None:
    layout = parse_layout("Et*3|(tt|)*29,m|L")
    assert len(layout.chunks) == 32
    check_layout(layout, num_layers=61, mtp_layers=1)
    assert [chunk.layers for chunk in layout.stage(0, stages=16)] == [3, 2]
    assert [(chunk.mtp_layers, chunk.layers_before) for chunk in layout.stage(14, stages=16)] == [
        (0, 29),
        (1, 61),
    ]
    check_layout(layout, num_layers=61, mtp_layers=1)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "must start with E"),
        ("tttL", "must start with E"),
        ("Ettt", "end with L"),
        ("EtEtL", "must start with E"),
        ("EtLL", "end with L"),
        ("EmtL", "before"),
        ("Etm|mL", "one model chunk"),
        ("Etx*3L", "'x'"),
        ("Et*L", "'*'"),
        ("E((t|)*2)*2L", "'('"),
        ("Et*99999999L", "maximum"),
        ("E(t*9999)*9999L", "maximum"),
        ("Et*0000000099999999L", "maximum"),
        ("E" + "t" * MAX_TEXT + "L", "characters; the maximum"),
    ],
)
def test_what_is_no_layout_is_told_apart(text: str, word: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_layout(text)
    assert caught.value.field == "parallel.pipeline_layout" and word in str(caught.value)


@given(text=st.text(alphabet="EtmL|()*0123456789,", max_size=60))
def test_any_text_is_read_or_refused_at_once(text: str) -> None:
    start = time.process_time()
    try:
        layout = parse_layout(text)
    except InputError:
        pass
    else:
        assert layout.chunks[0].embedding == layout.chunks[-1].loss == 1
    assert time.process_time() - start < 1.0

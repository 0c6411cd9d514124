"""Shapes of published sizes, and that devices divide every shape."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool import catalog
from hp_tool.cost.parameters import active_parameters, total_parameters
from hp_tool.domain.sizing import ExpertsQuery, SizingQuery, Style
from hp_tool.questions.sizing.shapes import choose_shape

KNOWN: list[tuple[str, Style]] = [
    ("gpt3-126m", "gpt"),
    ("gpt3-760m", "gpt"),
    ("gpt3-1.3b", "gpt"),
    ("gpt3-2.7b", "gpt"),
    ("gpt3-6.7b", "gpt"),
    ("gpt3-13b", "gpt"),
    ("gpt3-175b", "gpt"),
    ("llama-7b", "llama"),
    ("llama-13b", "llama"),
    ("llama-30b", "llama"),
    ("llama-65b", "llama"),
    ("llama-2-70b", "llama"),
    ("llama-3-8b", "llama"),
    ("llama-3-70b", "llama"),
    ("llama-3.1-405b", "llama"),
]


def test_published_sizes_get_nearly_their_shapes(subtests: pytest.Subtests) -> None:
    for name, style in KNOWN:
        with subtests.test(name=str(name), style=str(style)):
            known = catalog.model(name)
            size = total_parameters(known, sequence_length=2048)
            grouped = known.kv_heads if known.kv_heads < known.num_attention_heads else None
            query = SizingQuery(
                style=style,
                sequence_length=2048,
                vocab_size=known.vocab_size,
                num_key_value_heads=grouped,
            )
            found = choose_shape(query, parameters=size)
            assert total_parameters(found, sequence_length=2048) == pytest.approx(size, rel=0.05)
            assert found.num_hidden_layers == pytest.approx(known.num_hidden_layers, rel=0.25)
            assert found.hidden_size == pytest.approx(known.hidden_size, rel=0.25)


def test_gpt3_itself() -> None:
    found = choose_shape(SizingQuery(style="gpt", sequence_length=2048), parameters=174.6e9)
    assert (found.num_hidden_layers, found.hidden_size, found.num_attention_heads) == (
        96,
        12288,
        96,
    )
    assert (found.vocab_size, found.ffn_size) == (51_200, 49_152)


@given(parameters=st.floats(3e8, 2e12), style=st.sampled_from(["llama", "gpt"]))
def test_devices_divide_every_shape(parameters: float, style: Style) -> None:
    found = choose_shape(SizingQuery(style=style), parameters=parameters)
    degree = 8 if parameters >= 10e9 else 4
    assert found.hidden_size % 128 == 0 and found.vocab_size % 1024 == 0
    assert (
        found.num_attention_heads % degree == 0 and found.num_attention_heads % found.kv_heads == 0
    )
    assert (
        found.head_size in (64, 128)
        and found.num_attention_heads * found.head_size == found.hidden_size
    )
    assert found.ffn_size % (128 * degree) == 0
    assert total_parameters(found, sequence_length=4096) == pytest.approx(parameters, rel=0.1)


@pytest.mark.parametrize(("experts", "top", "shared"), [(8, 2, 0), (64, 6, 2), (256, 8, 1)])
def test_experts_leave_the_active_size(experts: int, top: int, shared: int) -> None:
    asked = ExpertsQuery(num_experts=experts, num_experts_per_tok=top, num_shared_experts=shared)
    found = choose_shape(SizingQuery(experts=asked), parameters=13e9)
    assert active_parameters(found) == pytest.approx(13e9, rel=0.05)
    assert total_parameters(found) > 2.0 * active_parameters(found)
    assert (found.num_experts, found.num_experts_per_tok, found.num_shared_experts) == (
        experts,
        top,
        shared,
    )

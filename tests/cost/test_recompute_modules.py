"""Recomputation by module: what it saves and costs, what is refused. Bytes are held against
Megatron Core elsewhere.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hp_tool.catalog import model
from hp_tool.cost.candidates import MODULES, Candidates, recompute_codes, recompute_from_codes
from hp_tool.cost.recomputation import repeated_token_flops
from hp_tool.domain.parallel import ParallelConfig, Recompute, recompute_name
from hp_tool.domain.result import Estimate
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.questions.answers import answer_estimate
from hp_tool.questions.schema import parse_query, to_dict
from hp_tool.questions.training import config_query, estimate, recommend
from hp_tool.questions.training.problem import resolve_training

DENSE = ("core_attn", "layernorm", "mlp")
LATENT = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj")


def query(model: str, modules: Any, **training: Any) -> Any:
    return parse_query(
        {
            "kind": "training",
            "model": model,
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 256},
            "training": {
                "sequence_length": 4096,
                "global_batch_size": 256,
                "attention": "unfused",
                **training,
            },
            "parallel": {
                "tensor_parallel_size": 8,
                "pipeline_parallel_size": 1,
                "recompute": modules
                if isinstance(modules, str)
                else {"granularity": "selective", "modules": list(modules)},
            },
        }
    )


def asked(model: str, modules: Any, **training: Any) -> Estimate:
    return estimate(query=query(model, modules, **training), with_fixes=False)


def activations(found: Estimate) -> float:
    assert found.memory is not None
    return found.memory.layer_activations_bytes


@pytest.mark.parametrize(("model", "modules"), [("gpt-22b", DENSE), ("deepseek-v3", LATENT)])
def test_every_module_saves_memory_and_costs_time(model: str, modules: tuple[str, ...]) -> None:
    none = asked(model, "none")
    for name in modules:
        one = asked(model, [name])
        assert activations(one) < activations(none), name
        assert (
            one.time is not None and none.time is not None and one.time.parts_s["recompute"] > 0
        ), name
        # A device that waits for its host has time to recompute a little.
        assert one.time.step_s >= none.time.step_s, name


@pytest.mark.parametrize(("model", "modules"), [("gpt-22b", DENSE), ("deepseek-v3", LATENT)])
def test_more_modules_never_keep_more(model: str, modules: tuple[str, ...]) -> None:
    kept = {
        frozenset(some): activations(asked(model, sorted(some)))
        for count in range(1, len(modules) + 1)
        for some in itertools.combinations(modules, count)
    }
    full = activations(asked(model, "full"))
    for some, size in kept.items():
        assert size > full
        assert all(size <= kept[fewer] * (1 + 1e-12) for fewer in kept if fewer < some)


def test_modules_of_a_dense_layer_add_up() -> None:
    none = activations(asked("gpt-22b", "none"))
    saved = {name: none - activations(asked("gpt-22b", [name])) for name in DENSE}
    assert none - activations(asked("gpt-22b", DENSE)) == pytest.approx(sum(saved.values()))


def test_core_attn_alone_is_selective() -> None:
    assert asked("gpt-22b", ["core_attn"]).time == asked("gpt-22b", "selective").time
    assert asked("gpt-22b", ["core_attn"]).memory == asked("gpt-22b", "selective").memory


def test_mlp_runs_its_share_of_the_flops_again() -> None:
    """Of 24h^2 FLOPs a token and layer the MLP is 16h^2; MFU does not count them."""
    one, none = asked("gpt-22b", ["mlp"]), asked("gpt-22b", "none")
    assert one.hfu is not None and one.mfu is not None and none.hfu == none.mfu
    layers = 24 * (1 + 4096 / (6 * 6144)) + 2 * 51200 / (48 * 6144)  # in units of h^2
    assert one.hfu / one.mfu == pytest.approx(1 + 16 / 3 / layers, rel=0.01)


def test_a_narrow_mlp_keeps_its_input_wide() -> None:
    """In 8 bits a matmul keeps one byte an element of its input, a checkpoint two, where the norm
    does not discard it.
    """
    kept = {
        m: activations(asked("gpt-22b", list(m), precision="fp8"))
        for m in (("layernorm",), ("mlp",), ("layernorm", "mlp"))
    }
    none = activations(asked("gpt-22b", "none", precision="fp8"))
    tokens_width = 4096 * 6144 / 8 * 48  # sharded by sequence parallelism, all layers
    split = none - kept[("mlp",)] + tokens_width  # pre-activation and narrow activation
    assert split == pytest.approx(4096 * 4 * 6144 / 8 * 48 * (2 + 1))
    assert none - kept[("layernorm", "mlp")] == pytest.approx(none - kept[("layernorm",)] + split)


def test_codes_round_trip(subtests: pytest.Subtests) -> None:
    for modules in [sum(some) for some in itertools.combinations(MODULES.values(), 3)]:
        with subtests.test(modules=str(modules)):
            codes = (1, 0, modules)
            assert recompute_codes(recompute_from_codes(*codes)) == codes


def test_names_say_the_modules() -> None:
    assert (
        recompute_name(Recompute(granularity="selective", modules=("layernorm", "mlp")))
        == "selective layernorm+mlp"
    )
    assert recompute_name(Recompute(granularity="selective", modules=("core_attn",))) == "selective"


def test_a_list_is_searched_and_its_rows_are_valid_input() -> None:
    listed = [
        "none",
        "selective",
        {"granularity": "selective", "modules": ["mlp"]},
        {"granularity": "selective", "modules": ["layernorm", "core_attn"]},
        "full",
    ]
    given = to_dict(query("gpt-22b", "none"))
    given["parallel"]["recompute"] = listed
    given = {name: value for name, value in given.items() if value is not None}
    result = recommend(query=parse_query(given), top=50)
    alone = [
        recommend(
            query=parse_query(given | {"parallel": given["parallel"] | {"recompute": each}}), top=1
        )
        for each in listed
    ]
    names = {recompute_name(found.recommendations[0].parallel.recompute) for found in alone}
    assert names == {"none", "selective", "selective mlp", "selective core_attn+layernorm", "full"}
    assert (
        sum(each.space.legal + each.space.pruned for each in alone)
        == result.space.legal + result.space.pruned
    )
    for row in result.recommendations[:5]:
        again = answer_estimate(
            parse_query(given | {"parallel": to_dict(config_query(row.parallel))})
        ).estimate
        assert isinstance(again, Estimate)
        assert again.time is not None and row.estimate.time is not None
        assert again.time.step_s == pytest.approx(row.estimate.time.step_s, rel=1e-12)


def test_one_and_many_agree() -> None:
    problem = resolve_training(query("deepseek-v3", "none"))
    base = estimate(query=query("deepseek-v3", "none"), with_fixes=False).parallel
    assert base is not None
    rows = [
        base_with(base, some)
        for count in (1, 2, 7)
        for some in itertools.combinations(LATENT, count)
    ] + [base]
    many = problem.costs(Candidates.from_configs(rows))
    for index, config in enumerate(rows):
        alone = problem.costs(Candidates.alone(config))
        np.testing.assert_allclose(alone.step_s, many.step_s[index], rtol=1e-12)
        np.testing.assert_allclose(
            alone.memory_total_bytes, many.memory_total_bytes[index], rtol=1e-12
        )


def base_with(base: Any, modules: tuple[Any, ...]) -> Any:
    from dataclasses import replace

    return replace(base, recompute=Recompute(granularity="selective", modules=modules))


@pytest.mark.parametrize(
    ("model", "modules", "training", "kind"),
    [
        ("gpt-22b", ["moe"], {}, InputError),
        ("gpt-22b", ["moe_act"], {}, InputError),
        ("gpt-22b", ["mla_up_proj"], {}, InputError),
        ("mixtral-8x7b", ["mlp"], {}, InputError),
        ("mixtral-8x7b", ["shared_experts"], {}, InputError),
        ("gpt-22b", [], {}, InputError),
        ("gpt-22b", ["mlp"], {"framework": "torch-fsdp"}, UnsupportedError),
    ],
)
def test_what_means_nothing_is_refused(
    model: str, modules: Any, training: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind) as caught:
        asked(model, modules, **training)
    assert caught.value.field == "parallel.recompute.modules"  # type: ignore[attr-defined]


def test_shared_experts_that_run_again_are_two_flops_for_each_of_their_weights() -> None:
    """58 layers of DeepSeek-V3 have one shared expert of three matrices, 7168 x 2048; the
    prediction depth is one more.
    """
    only = Recompute(granularity="selective", modules=("shared_experts",))
    repeated = repeated_token_flops(
        model("deepseek-v3"), Candidates.alone(ParallelConfig(recompute=only)), attention=1e9
    )
    assert repeated == 2 * (58 + 1) * 3 * 7168 * 2048

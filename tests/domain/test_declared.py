"""A field that a consumer does not declare is rejected there by name, even one added later."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hp_tool.cluster.profiler.support import check_serving, check_training
from hp_tool.cluster.trainers.command import build_program
from hp_tool.cost.candidates import Candidates
from hp_tool.domain import declared, profiling
from hp_tool.domain.blocks import Block
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.inference import InferenceWorkload, LoadSpec, SpeculativeSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, Recompute, Strategy
from hp_tool.domain.requests import InferenceRequest
from hp_tool.domain.serving import ServingConfig
from hp_tool.domain.setups import ServingSetup, TrainingSetup
from hp_tool.domain.workload import LoraSpec, OverlapSpec, TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats import engines, fine_tuning
from hp_tool.formats.exchange import export, read_configuration
from hp_tool.formats.registry import formats, get_format
from hp_tool.formats.tools import accelerate, deepspeed, nanotron, torchtitan, verl
from hp_tool.formats.tools.megatron_lm import hybrid, patterns, words
from hp_tool.loop.tuning import problem as training_search
from hp_tool.loop.tuning import serving as serving_search
from hp_tool.questions import schema
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.problem import problem_of
from hp_tool.questions.training.problem import resolve_training
from tests.formats.cases import setup_of
from tests.formats.test_export_fields import OF
from tests.profiler.requests import LLAMA, request
from tests.trainers.test_command import asked_of, trainer

LATER = "knob_of_tomorrow"
TRAINING: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 32},
    "training": {"sequence_length": 8192, "global_batch_size": 128},
}
SERVING: dict[str, Any] = {
    "kind": "inference",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    "inference": {"input_length": 1000, "output_length": 100, "concurrency": 16},
    "parallel": {"tensor_parallel_size": 2},
}
FIXED = {"tensor_parallel_size": 2, "micro_batch_size": 1, "recompute": "none", "zero_stage": 1}


def grown(spec: Any, value: int = 1) -> Any:
    """The specification with one more field, which is not at its default."""
    kind = type(spec)
    later = dataclasses.make_dataclass(
        f"Later{kind.__name__}",
        [(LATER, int, dataclasses.field(default=0))],
        bases=(kind,),
        frozen=True,
        kw_only=True,
    )
    values = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)}
    return later(**values, **{LATER: value})


def with_overlap(training: TrainingWorkload) -> TrainingWorkload:
    return dataclasses.replace(training, overlap=grown(OverlapSpec()))


def with_recompute(parallel: ParallelConfig) -> ParallelConfig:
    return dataclasses.replace(parallel, recompute=grown(Recompute(granularity="full")))


def with_load(inference: InferenceWorkload) -> InferenceWorkload:
    return dataclasses.replace(inference, load=grown(LoadSpec()))


Change = tuple[str, str, Callable[[Any], Any]]
OF_TRAININGS: list[Change] = [
    ("model", f"model.{LATER}", grown),
    ("training", f"training.{LATER}", grown),
    ("training", "training.overlap", with_overlap),
    ("parallel", f"parallel.{LATER}", grown),
    ("parallel", f"parallel.recompute.{LATER}", with_recompute),
]
OF_SERVING: list[Change] = [
    ("inference", f"inference.{LATER}", grown),
    ("inference", "inference.load", with_load),
    ("parallel", f"parallel.{LATER}", grown),
]


def refused(consumer: Callable[[Any], object], asked: Any, named: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        consumer(asked)
    assert named in f"{caught.value.field} {caught.value}"


@pytest.mark.parametrize("framework", profiling.ENGINES)
@pytest.mark.parametrize(("part", "named", "change"), OF_TRAININGS)
def test_the_training_profiler(framework: str, part: str, named: str, change: Any) -> None:
    asked = request(training={"framework": framework}, parallel={"zero_stage": 1})
    if framework == "torch-fsdp":
        asked = request(model=LLAMA, training={"framework": framework}, parallel={"zero_stage": 2})
    check_training(asked)
    changed = dataclasses.replace(asked, **{part: change(getattr(asked, part))})
    refused(check_training, changed, named)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("model", f"model.{LATER}"),
        ("workload", f"training.{LATER}"),
        ("cluster", f"cluster.{LATER}"),
        ("strategy", f"parallel.{LATER}"),
    ],
)
def test_a_search_of_trainings(part: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query = schema.parse_query(TRAINING)
    problem = resolve_training(query)
    training_search.resolve_training_search(query)
    changed = dataclasses.replace(problem, **{part: grown(getattr(problem, part))})
    monkeypatch.setattr(training_search, "resolve_training", lambda query: changed)
    refused(training_search.resolve_training_search, query, named)


def test_a_search_names_the_knob_that_moves_memory_and_that_no_run_follows() -> None:
    knob = {"activation_func_fp8_input_store": True}
    query = schema.parse_query(TRAINING | {"training": TRAINING["training"] | knob})
    refused(
        training_search.resolve_training_search,
        query,
        "training.activation_func_fp8_input_store",
    )


def test_candidates_of_a_search() -> None:
    candidates = Candidates.from_configs([ParallelConfig(data_parallel_size=32)] * 2)
    problem = resolve_training(schema.parse_query(TRAINING))
    assert not training_search._unprofiled(candidates, problem).any()
    values = {each.name: getattr(candidates, each.name) for each in dataclasses.fields(Candidates)}
    later = type(grown(candidates))(**values, **{LATER: np.array([0, 1])})
    assert training_search._unprofiled(later, problem).tolist() == [False, True]


def served(runner: Any, **inference: Any) -> InferenceRequest:
    load = {"input_length": 8, "output_length": 6, "concurrency": 3, "precision": "fp32"}
    return InferenceRequest(
        run_id="test",
        num_gpus=1,
        gpu="cpu",
        timeout_s=60.0,
        model=ModelSpec(**{**LLAMA, "vocab_size": 32000}),
        inference=InferenceWorkload(**{**load, **inference}),
        parallel=ServingConfig(max_num_seqs=8),
        runner=runner,
    )


@pytest.mark.parametrize("runner", ["megatron-core", "vllm", "endpoint"])
@pytest.mark.parametrize(
    ("part", "named", "change"), [*OF_SERVING, ("model", f"model.{LATER}", grown)]
)
def test_the_serving_profilers(runner: str, part: str, named: str, change: Any) -> None:
    asked = served(runner)
    check_serving(asked)
    changed = dataclasses.replace(asked, **{part: change(getattr(asked, part))})
    if (runner, part) == ("endpoint", "model"):  # the server has its model already
        check_serving(changed)
    else:
        refused(check_serving, changed, named)


def test_a_search_of_deployments(monkeypatch: pytest.MonkeyPatch) -> None:
    query = schema.parse_query(
        SERVING | {"inference": SERVING["inference"] | {"precision": "bf16"}}
    )
    serving_search.resolve_serving_search(query)
    workload = serving_search.resolve_workload(query)
    monkeypatch.setattr(serving_search, "resolve_workload", lambda query: grown(workload))
    refused(serving_search.resolve_serving_search, query, f"inference.{LATER}")


def written_setups() -> Iterator[tuple[str, TrainingSetup]]:
    """A setup that each format for trainings writes."""
    for format in formats("training"):
        model, training, parallel = OF.get(format.name, ("llama-3-8b", {}, FIXED))
        query = TRAINING | {"model": model, "parallel": parallel}
        query["training"] = TRAINING["training"] | training
        yield format.name, setup_of(query)


@pytest.mark.parametrize(("part", "named", "change"), OF_TRAININGS)
def test_exports_of_trainings(part: str, named: str, change: Any) -> None:
    part = {"training": "workload"}.get(part, part)
    writers = {format.name: format.write for format in formats("training") if format.write}
    says_shape = {each.name for each in formats("training") if each.says_shape} | {"nanotron"}
    for name, setup in written_setups():
        if name not in writers:
            continue
        assert writers[name](setup)
        if part != "model" or name in says_shape:  # others name the model's checkpoint
            changed = dataclasses.replace(setup, **{part: change(getattr(setup, part))})
            refused(writers[name], changed, named)


@pytest.mark.parametrize("part", ["cluster", "strategy"])
def test_exports_of_machines_and_strategies(part: str) -> None:
    for name, setup in written_setups():
        writer = next(each.write for each in formats("training") if each.name == name)
        if writer is not None:
            changed = dataclasses.replace(setup, **{part: grown(getattr(setup, part))})
            refused(writer, changed, LATER)


@pytest.mark.parametrize(("part", "named", "change"), OF_SERVING)
def test_exports_of_deployments(part: str, named: str, change: Any) -> None:
    query = schema.parse_query(SERVING)
    problem = problem_of(query)
    rows = problem.rank(top=1).recommendations
    setup = problem.setup(Configuration.from_row(rows[0], query=query))
    assert isinstance(setup, ServingSetup)
    part = {"inference": "workload"}.get(part, part)
    for format in formats("inference"):
        if format.write is not None:
            assert format.write(setup)
            changed = dataclasses.replace(setup, **{part: change(getattr(setup, part))})
            refused(format.write, changed, named)


def test_exports_refuse_what_they_dropped() -> None:
    """The layout of two kinds of GPU, and TensorRT-LLM's precision of the cache."""
    stages = [{"gpu": name, "num_gpus": 8} for name in ("h100-sxm-80gb", "a100-sxm-80gb")]
    parallel = FIXED | {"pipeline_parallel_size": 2}
    mixed = setup_of(TRAINING | {"cluster": {"stages": stages}, "parallel": parallel})
    refused(get_format("megatron-lm").write, mixed, "cluster.stages")
    dense = setup_of(TRAINING | {"parallel": FIXED})
    narrow = dataclasses.replace(dense, model=dataclasses.replace(dense.model, v_head_dim=64))
    refused(get_format("megatron-lm").write, narrow, "model.v_head_dim: 64")
    cache = SERVING["inference"] | {"engine": "trtllm", "kv_cache_precision": "nvfp4"}
    with pytest.raises(
        UnsupportedError,
        match=r"trtllm-serve 1\.0 has no option for a nvfp4 cache with bf16 weights",
    ):
        export(result=SERVING | {"inference": cache}, format="trtllm")


def test_a_trainers_command() -> None:
    problem = resolve_training(schema.parse_query(TRAINING))
    config = ParallelConfig(tensor_parallel_size=4, data_parallel_size=8, sequence_parallel=True)
    asked = asked_of(problem, config, layers=None, batch=None)
    command = trainer("train.py", "{flags:megatron-lm}")
    assert build_program(command, request=asked, problem=problem).command
    changed = dataclasses.replace(asked, training=grown(asked.training))
    refused(
        lambda each: build_program(command, request=each, problem=problem),
        changed,
        f"training.{LATER}",
    )


@pytest.mark.parametrize("section", ["model", "cluster", "training", "parallel", "constraints"])
def test_readers_of_queries_refuse_keys_that_are_no_fields(section: str) -> None:
    """Agents, watch and the importer pass a whole query on; what it may hold is computed from its
    fields.
    """
    arguments = pytest.importorskip("service.agents.arguments")
    known = TRAINING if section != "model" else TRAINING | {"model": dict(LLAMA)}
    query = schema.set_paths(
        dict(known) | {section: dict(known.get(section, {}))}, {f"{section}.{LATER}": 1}
    )
    for mapping in (query, arguments.QueryArgument(**query).mapping()):
        with pytest.raises(InputError, match=LATER):
            resolve_training(schema.parse_query(mapping))


def test_the_importer_refuses_a_flag_that_it_does_not_know() -> None:
    script = "torchrun pretrain_gpt.py --num-layers 4 --knob-of-tomorrow 1"
    with pytest.raises(InputError, match="knob-of-tomorrow"):
        read_configuration(script, num_gpus=8)


DECLARED: dict[str, Any] = {
    "models": [
        profiling._PREDICTING_DECODER_FIELDS,
        profiling._LLAMA_FIELDS,
        declared.LATENT_FIELDS,
    ],
    "workloads": [
        profiling._declared_workload(TrainingWorkload(sequence_length=1, global_batch_size=1)),
        profiling._ENDPOINT_FIELDS,
        *profiling._SIZE_FIELDS.values(),
    ],
    "exports": [
        accelerate.EXPRESSED_FIELDS,
        deepspeed.EXPRESSED_FIELDS,
        nanotron.EXPRESSED_FIELDS,
        torchtitan.EXPRESSED_FIELDS,
        verl.MEGATRON_FIELDS,
        verl.FSDP_FIELDS,
        words.EXPRESSED_FIELDS,
        words.PACKING_FIELDS,
        hybrid.FIELDS,
        patterns.FIELDS,
        fine_tuning.EXPRESSED_FIELDS,
        engines.EXPRESSED_FIELDS,
    ],
}
SPECS = (ModelSpec, TrainingWorkload, ParallelConfig, Strategy, InferenceWorkload, ServingConfig)
INNER = {
    "overlap": OverlapSpec,
    "lora": LoraSpec,
    "recompute": Recompute,
    "load": LoadSpec,
    "speculative": SpeculativeSpec,
    "blocks": Block,
}


def test_every_declared_name_is_a_field() -> None:
    known = {each.name for spec in SPECS for each in dataclasses.fields(spec)}
    known |= {
        f"{name}.{each.name}" for name, spec in INNER.items() for each in dataclasses.fields(spec)
    }
    known |= {"row_tokens", "row_squares"}  # of lengths that were looked up
    for group in (name for groups in DECLARED.values() for name in groups):
        assert set(group) <= known, set(group) - known
    sections = {"model": SPECS[:1], "training": SPECS[1:2], "cluster": (ClusterSpec,)}
    sections |= {"parallel": SPECS[2:4] + SPECS[5:], "inference": SPECS[4:5]}
    for path in declared.ACCOUNTING_FIELDS:
        section, _, name = path.partition(".")
        assert any(name in {f.name for f in dataclasses.fields(s)} for s in sections[section]), path

"""Commands with placeholders: what they become, and what is refused."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.cost.candidates import Candidates
from hp_tool.domain.measurement import ProfileRequest, Program
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import TrainerCommand
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.queries.schema import parse_query
from hp_tool.trainers import NAMES, check_trainer, check_varied, program, program_name
from hp_tool.training.problem import resolve_training

CONFIG = ParallelConfig(
    tensor_parallel_size=4, pipeline_parallel_size=2, data_parallel_size=2, micro_batch_size=2, sequence_parallel=True
)
QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16, "gpus_per_node": 8},
    "training": {"sequence_length": 8192, "global_batch_size": 64, "precision": "bf16"},
}


def trainer(*command: str, **changes: Any) -> TrainerCommand:
    return TrainerCommand(command=command, **{"reader": "megatron-lm", **changes})


def run(given: TrainerCommand, *, config: ParallelConfig = CONFIG, **training: Any) -> Program:
    problem = resolve_training(parse_query({**QUERY, "training": {**QUERY["training"], **training}}))
    request = ProfileRequest(
        run_id="run-1",
        model=problem.model,
        training=problem.workload,
        parallel=config,
        num_gpus=16,
        gpu="h100-sxm-80gb",
        steps=5,
        warmup_steps=2,
        timeout_s=60.0,
    )
    return program(given, request=request, problem=problem)


def test_values_stand_where_their_names_stood() -> None:
    made = run(
        trainer("train.py", "--tp={tensor_parallel_size}", "{micro_batch_size}x{gradient_accumulation_steps}", "{train_iters}")
    )
    assert made.command == ("train.py", "--tp=4", "2x16", "7")
    assert made.torchrun and made.files == {}


def test_every_name_has_a_value() -> None:
    made = run(trainer("train", *(f"{{{name}}}" for name in NAMES)))
    assert len(made.command) == 1 + len(NAMES)
    assert not any("{" in word or word == "None" for word in made.command)


def test_an_argument_that_hangs_on_a_value_falls_away_with_it() -> None:
    given = trainer("train", "{sequence_parallel?--sequence-parallel}", "{recompute?--checkpoint all}")
    assert run(given).command == ("train", "--sequence-parallel")
    other = replace(CONFIG, sequence_parallel=False, recompute="full")
    assert run(given, config=other).command == ("train", "--checkpoint all")


def test_braces_that_are_no_placeholders_stay() -> None:
    words = ("train", '{"a": {"b": 1}}', "{{tensor_parallel_size}}", "{}", "{Upper}", "$(rm -rf /); `id`")
    assert run(trainer(*words)).command == (*words[:2], "{tensor_parallel_size}", *words[3:])


@given(st.lists(st.text(alphabet="abc {}$;'\"\\\n", max_size=20), max_size=5))
def test_no_text_becomes_more_or_fewer_arguments(words: list[str]) -> None:
    try:
        made = run(trainer("train", *words))
    except InputError:
        return
    assert len(made.command) == 1 + len(words)


def test_all_flags_of_megatron() -> None:
    words = run(trainer("pretrain_gpt.py", "{flags:megatron-lm}", "--mock-data")).command
    assert words[0] == "pretrain_gpt.py" and words[-1] == "--mock-data"
    assert words[words.index("--tensor-model-parallel-size") + 1] == "4"
    assert "--sequence-parallel" in words and words[words.index("--global-batch-size") + 1] == "64"


def test_a_configuration_as_a_file() -> None:
    given = trainer("-m", "torchtitan.train", "--job.config_file", "{file:torchtitan}", reader="torchtitan")
    made = run(given, config=replace(CONFIG, zero_stage=3), framework="torch-fsdp")
    assert made.command[-1] == "torchtitan.toml"
    assert tomllib.loads(made.files["torchtitan.toml"])["parallelism"]["tensor_parallel_degree"] == 4
    alone = ParallelConfig(data_parallel_size=16, zero_stage=2)
    made = run(trainer("train.py", "--deepspeed_config={file:deepspeed}"), config=alone)
    assert made.command[1] == "--deepspeed_config=deepspeed.json"
    assert json.loads(made.files["deepspeed.json"])["zero_optimization"]["stage"] == 2
    with pytest.raises(UnsupportedError):
        run(trainer("train.py", "{file:deepspeed}"))  # no tensor parallelism in such a file


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        (trainer(), "trainer.command", "empty"),
        (trainer("train", "{tensor_paralel_size}"), "trainer.command", r"did you mean \{tensor_parallel_size\}"),
        (trainer("train", "{flags:megatron}"), "trainer.command", r"did you mean \{flags:megatron-lm\}"),
        (trainer("train", "--x={flags:megatron-lm}"), "trainer.command", "must be a whole argument"),
        (trainer("train", "--x={sequence_parallel?1}"), "trainer.command", "must be a whole argument"),
        (trainer("{recompute}"), "trainer.command", "own name"),
        (trainer("train", "a\0b"), "trainer.command", "NUL"),
        (trainer("train", environment={"A B": "1"}), "trainer.environment", "A B"),
        (trainer("train", metrics_file="../x"), "trainer.metrics_file", "letters"),
        (trainer("train", metrics_file="result.json"), "trainer.metrics_file", "not one of ours"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_refused_by_name(given: TrainerCommand, field: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        check_trainer(given)
    assert refused.value.field == field


def test_what_candidates_differ_in_must_reach_the_command() -> None:
    two = Candidates.from_configs([CONFIG, replace(CONFIG, recompute="full")])
    with pytest.raises(InputError, match=r"differ in recompute.*\{recompute\}.*parallel.recompute"):
        check_varied(trainer("train.py", "--tp={tensor_parallel_size}"), two)
    check_varied(trainer("train.py", "{recompute}"), two)
    check_varied(trainer("train.py", "{flags:megatron-lm}"), two)
    check_varied(trainer("train.py"), Candidates.from_configs([CONFIG]))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("/opt/megatron/pretrain_gpt.py", "--x"), "pretrain_gpt.py"),
        (("-m", "torchtitan.train"), "torchtitan.train"),
        (("/usr/bin/deepspeed", "--num_gpus=8"), "deepspeed"),
        (("/bin/train; rm",), "train--rm"),
    ],
)
def test_measurements_are_filed_under_the_programs_name(words: tuple[str, ...], name: str) -> None:
    assert program_name(trainer(*words)) == name


def test_a_query_with_a_trainer_is_predicted_like_any_other() -> None:
    asked = parse_query({**QUERY, "trainer": {"command": ["train.py", "{recompute}"], "reader": "json"}})
    assert asked.trainer is not None and asked.trainer.launch == "torchrun"
    assert resolve_training(asked) == resolve_training(parse_query(QUERY))
    with pytest.raises(InputError, match="'megatron-lm'"):
        parse_query({**QUERY, "trainer": {"command": ["train.py"], "reader": "megatron"}})

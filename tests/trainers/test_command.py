"""Commands with placeholders: what they become, and what is refused."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.catalog import library, records
from hp_tool.cluster.launchers.jobs import request_json
from hp_tool.cluster.trainers.command import (
    NAMES,
    build_program,
    check_trainer,
    check_varied,
    program_name,
    trainer_of,
)
from hp_tool.cluster.trainers.runs import TrainerLauncher
from hp_tool.cost.candidates import Candidates
from hp_tool.domain.measurement import Fidelity, Hardware, Measurement, ProfileRequest, Program
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import SearchSettings, TrainerCommand
from hp_tool.errors import InputError, NotFoundError, UnsupportedError
from hp_tool.loop.tuning.problem import build_problem
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.questions.training.ranking.rank import CostedSpace

ROOT = Path(__file__).parents[2]

CONFIG = ParallelConfig(
    tensor_parallel_size=4,
    pipeline_parallel_size=2,
    data_parallel_size=2,
    micro_batch_size=2,
    sequence_parallel=True,
)
QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16, "gpus_per_node": 8},
    "training": {"sequence_length": 8192, "global_batch_size": 64, "precision": "bf16"},
}


def trainer(*command: str, **changes: Any) -> TrainerCommand:
    return TrainerCommand(command=command, **{"reader": "megatron-lm", **changes})


def run(
    given: TrainerCommand,
    *,
    config: ParallelConfig = CONFIG,
    layers: int | None = None,
    batch: int | None = None,
    **training: Any,
) -> Program:
    problem = resolve_training(
        parse_query({**QUERY, "training": {**QUERY["training"], **training}})
    )
    return build_program(
        given, request=asked_of(problem, config, layers=layers, batch=batch), problem=problem
    )


def asked_of(
    problem: TrainingProblem, config: ParallelConfig, *, layers: int | None, batch: int | None
) -> ProfileRequest:
    """The request of a run, with fewer layers or a smaller batch where they are given."""
    return ProfileRequest(
        run_id="run-1",
        model=problem.model if layers is None else replace(problem.model, num_hidden_layers=layers),
        training=problem.workload
        if batch is None
        else replace(problem.workload, global_batch_size=batch),
        parallel=config,
        num_gpus=8 * config.data_parallel_size,
        gpu="h100-sxm-80gb",
        steps=5,
        warmup_steps=2,
        timeout_s=60.0,
        fidelity=Fidelity(num_hidden_layers=layers),
    )


def test_values_stand_where_their_names_stood() -> None:
    made = run(
        trainer(
            "train.py",
            "--tp={tensor_parallel_size}",
            "{micro_batch_size}x{gradient_accumulation_steps}",
            "{train_iters}",
        )
    )
    assert made.command == ("train.py", "--tp=4", "2x16", "7")
    assert made.torchrun and made.files == {}


def test_every_name_has_a_value() -> None:
    made = run(trainer("train", *(f"{{{name}}}" for name in NAMES)))
    assert len(made.command) == 1 + len(NAMES)
    assert not any("{" in word or word == "None" for word in made.command)


def test_an_argument_that_hangs_on_a_value_falls_away_with_it() -> None:
    given = trainer(
        "train", "{sequence_parallel?--sequence-parallel}", "{recompute?--checkpoint all}"
    )
    assert run(given).command == ("train", "--sequence-parallel")
    other = replace(CONFIG, sequence_parallel=False, recompute="full")
    assert run(given, config=other).command == ("train", "--checkpoint all")


def test_braces_that_are_no_placeholders_stay() -> None:
    words = (
        "train",
        '{"a": {"b": 1}}',
        "{{tensor_parallel_size}}",
        "{}",
        "{Upper}",
        "$(rm -rf /); `id`",
    )
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


def words_of(name: str, **changes: Any) -> tuple[str, ...]:
    """The command of one of the trainers that the documentation registers."""
    return run(
        records.build(TrainerCommand, documented()[name], field="trainer"), **changes
    ).command


def documented() -> dict[str, Any]:
    text = (ROOT / "docs" / "trainers.md").read_text()
    (entries,) = re.findall(r"```yaml\n(# my-catalogue/.*?)```", text, re.DOTALL)
    return dict(yaml.safe_load(entries)["entries"])


def test_the_documented_recipes_say_the_configuration_in_their_own_words() -> None:
    megatron = words_of("megatron-lm")
    assert (
        megatron[megatron.index("--pipeline-model-parallel-size") + 1] == "2"
        and "--mock-data" in megatron
    )
    bridge = words_of("megatron-bridge")
    assert bridge[0].endswith("run_script.py") and "model.tensor_model_parallel_size=4" in bridge
    assert "train.micro_batch_size=2" in bridge and "train.train_iters=7" in bridge
    assert not any(word.startswith("model.num_layers") for word in bridge)  # the recipe says it
    titan = words_of("torchtitan", config=replace(CONFIG, zero_stage=3), framework="torch-fsdp")
    assert titan[:2] == ("-m", "torchtitan.train") and "torchtitan.toml" in titan
    actor = words_of("verl")
    assert actor[:3] == ("python3", "-m", "verl.trainer.main_ppo")
    assert "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4" in actor
    for name, entry in documented().items():
        assert entry["reader"] == name
        check_trainer(records.build(TrainerCommand, entry, field="trainer"))


def test_a_reduced_run_is_smaller_in_every_word() -> None:
    given = trainer(
        "run_script.py",
        "{flags:megatron-bridge}",
        "{num_gpus}",
        "{num_nodes}",
        reducible=("layers", "replicas"),
    )
    check_trainer(given)
    whole = run(given)
    config = replace(CONFIG, data_parallel_size=1)
    reduced = run(given, config=config, layers=16, batch=32)
    assert whole.command[-2:] == ("16", "2") and reduced.command[-2:] == ("8", "1")
    assert (
        "train.global_batch_size=64" in whole.command
        and "train.global_batch_size=32" in reduced.command
    )
    assert "model.num_layers=16" in reduced.command and reduced.returns == ("request.json",)
    assert not any(word.startswith("model.num_layers") for word in whole.command)
    flags = run(
        trainer("pretrain_gpt.py", "{flags:megatron-lm}"), config=config, layers=16, batch=32
    ).command
    assert flags[flags.index("--num-layers") + 1] == "16"


def test_what_a_reduced_run_measured_is_of_its_own_batch() -> None:
    problem = resolve_training(parse_query(QUERY))
    given = trainer("train.py", "{global_batch_size}", reader="json", reducible=("replicas",))

    class Engine:
        name = "memory"
        log = "\n".join(json.dumps({"step": n, "samples_per_second": 16.0}) for n in range(1, 8))
        request = ""

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

        def fetch(self, handle: str) -> Measurement:
            return Measurement(status="crashed", exit_code=0)

        def output(self, handle: str, *, name: str | None = None) -> str:
            return self.request if name == "request.json" else self.log

    engine = Engine()
    launcher = TrainerLauncher(engine, trainer=given, problem=problem, settings=SearchSettings())  # type: ignore[arg-type]
    assert launcher.fetch("job").status == "crashed"  # nobody knows what ran
    small = replace(CONFIG, data_parallel_size=1)
    engine.request = (
        request_json().dump_json(asked_of(problem, small, layers=None, batch=32)).decode()
    )
    found = launcher.fetch("job")
    assert (found.status, found.step_s) == ("ok", 2.0)  # 32 sequences, not 64
    assert found.tokens_per_second_per_gpu == pytest.approx(32 * 8192 / 2.0 / 8)


def test_a_registered_trainer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "ours.yaml").write_text(
        "command: [/opt/train.py, '{flags:megatron-lm}']\nreader: megatron-lm\n"
    )
    monkeypatch.setenv("HP_CATALOG_DIR", str(tmp_path))
    library.clear_cache()
    try:
        named = trainer_of(parse_query({**QUERY, "trainer": "ours"}))
        assert named == trainer("/opt/train.py", "{flags:megatron-lm}")
        with pytest.raises(
            NotFoundError, match=r"unknown trainer 'theirs'; known: ours"
        ) as unknown:
            trainer_of(parse_query({**QUERY, "trainer": "theirs"}))
        assert unknown.value.field == "trainer"
    finally:
        library.clear_cache()


def test_a_configuration_as_a_file() -> None:
    given = trainer(
        "-m", "torchtitan.train", "--job.config_file", "{file:torchtitan}", reader="torchtitan"
    )
    made = run(given, config=replace(CONFIG, zero_stage=3), framework="torch-fsdp")
    assert made.command[-1] == "torchtitan.toml"
    assert (
        tomllib.loads(made.files["torchtitan.toml"])["parallelism"]["tensor_parallel_degree"] == 4
    )
    alone = ParallelConfig(data_parallel_size=16, zero_stage=2)
    given = trainer("train.py", "--deepspeed_config={file:deepspeed}")
    made = run(given, config=alone, framework="deepspeed")
    assert made.command[1] == "--deepspeed_config=deepspeed.json"
    assert json.loads(made.files["deepspeed.json"])["zero_optimization"]["stage"] == 2
    with pytest.raises(UnsupportedError):
        run(given, framework="deepspeed")  # no tensor parallelism in such a file
    with pytest.raises(UnsupportedError, match=r"training\.framework: deepspeed"):
        run(given, config=alone)


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        (trainer(), "trainer.command", "empty"),
        (
            trainer("train", "{tensor_paralel_size}"),
            "trainer.command",
            r"did you mean \{tensor_parallel_size\}",
        ),
        (
            trainer("train", "{flags:megatron}"),
            "trainer.command",
            r"did you mean \{flags:megatron-lm\}",
        ),
        (
            trainer("train", "--x={flags:megatron-lm}"),
            "trainer.command",
            "must be a whole argument",
        ),
        (
            trainer("train", "--x={sequence_parallel?1}"),
            "trainer.command",
            "must be a whole argument",
        ),
        (trainer("{recompute}"), "trainer.command", "program's name"),
        (trainer("train", "a\0b"), "trainer.command", "NUL"),
        (trainer("train", environment={"A B": "1"}), "trainer.environment", "A B"),
        (trainer("train", metrics_file="../x"), "trainer.metrics_file", "letters"),
        (
            trainer("train", metrics_file="result.json"),
            "trainer.metrics_file",
            "not a reserved name",
        ),
        (
            trainer("train", "{seed}", reducible=("layers",)),
            "trainer.reducible",
            r"fewer layers. Add \{num_hidden_layers\}",
        ),
        (
            trainer("train", "{flags:verl}", reducible=("layers",)),
            "trainer.reducible",
            "fewer layers",
        ),  # its model is a folder
        (
            trainer("train", "{seed}", reducible=("replicas",)),
            "trainer.reducible",
            r"Add \{global_batch_size\}",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_refused_by_name(
    given: TrainerCommand, field: str, words: str
) -> None:
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
    asked = parse_query(
        {**QUERY, "trainer": {"command": ["train.py", "{recompute}"], "reader": "json"}}
    )
    assert asked.trainer is not None and asked.trainer.launch == "torchrun"
    assert resolve_training(asked) == resolve_training(parse_query(QUERY))
    with pytest.raises(InputError, match="'megatron-lm'"):
        parse_query({**QUERY, "trainer": {"command": ["train.py"], "reader": "megatron"}})


def searched(**changes: Any) -> Candidates:
    """The candidates of a search over a trainer."""
    asked = {
        **QUERY,
        "parallel": changes.pop("parallel", {}),
        "search": {"launcher": "slurm", "fidelity": "full"},
    }
    asked["trainer"] = {
        "command": ["train.py", "{micro_batch_size}", "{recompute}"],
        "reader": "json",
        **changes,
    }
    hardware = Hardware(gpu="h100-sxm-80gb", num_gpus=16, hosts=("slurm",))
    problem = build_problem(query=parse_query(asked), query_json=asked, hardware=hardware)
    assert not isinstance(problem, CostedSpace)
    return problem.search.candidates


def test_what_a_trainer_varies_is_said_once_and_all_else_has_one_value() -> None:
    with pytest.raises(InputError, match=r"remove \w+ from trainer.axes"):
        searched()
    few = searched(axes=["micro_batch_size", "recompute"])
    assert len(np.unique(few.micro_batch_size)) > 1 and len(np.unique(few.recompute_method)) > 1
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "context_parallel_size",
        "sequence_parallel",
        "zero_stage",
    ):
        assert len(np.unique(getattr(few, name))) == 1, name
    assert set(
        searched(
            axes=["micro_batch_size"], parallel={"tensor_parallel_size": 4}
        ).tensor_parallel_size
    ) == {4}


@pytest.mark.parametrize(
    ("axes", "parallel", "field", "words"),
    [
        (["recomputed"], {}, "trainer.axes", "did you mean recompute"),
        (["zero_stage"], {}, "trainer.axes", r"Add \{zero_stage\} to it"),
        (
            ["recompute"],
            {"micro_batch_size": [1, 2]},
            "parallel.micro_batch_size",
            "Give one value",
        ),
    ],
)
def test_axes_that_cannot_be_are_refused(
    axes: list[str], parallel: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InputError, match=words) as refused:
        searched(axes=axes, parallel=parallel)
    assert refused.value.field == field

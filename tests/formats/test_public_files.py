"""Scripts and files as people publish them (facts of theirs, written anew), each with what must be
read of it.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hp_tool.errors import HpToolError, InputError
from hp_tool.formats.exchange import assess, detect_format, read_configuration
from hp_tool.formats.manifests import pod_command
from hp_tool.formats.reading import ImportRefusedError, Reading
from hp_tool.questions import schema

TEXT = "".join(
    path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "public").glob("*.txt"))
)
"""`=== NAME {what is expected}` before each; `forms.txt` was written by the tools' own pages,
before any of it was read.
"""
PARTS = re.split(r"(?m)^=== (\S+) (\{.*\})\n", TEXT)[1:]
FILES = {
    name: (yaml.safe_load(expected), text)
    for name, expected, text in zip(PARTS[::3], PARTS[1::3], PARTS[2::3], strict=True)
}
OPTIONS = ("variables", "files", "ignore", "given", "given_gpus", "gpu")
FACTS = ("format", "missing", "refused", "ignored", "error", "num_gpus", *OPTIONS)


def read_as(expected: dict[str, Any], text: str) -> tuple[Reading, ImportRefusedError | None]:
    """The reading, and the refusal that it ended in."""
    given = dict(expected.get("given", {})) | (
        {"cluster.gpu": "h100-sxm-80gb"} if expected.get("gpu", True) else {}
    )
    try:
        reading = read_configuration(
            text,
            num_gpus=expected.get("given_gpus"),
            overrides=given,
            variables=expected.get("variables"),
            files=expected.get("files"),
            ignore=expected.get("ignore", ()),
        )
    except ImportRefusedError as error:
        return error.reading, error
    return reading, None


def value_at(query: dict[str, Any], dotted: str) -> Any:
    node: Any = query
    for name in dotted.split("."):
        if not isinstance(node, dict) or name not in node:
            return "absent"
        node = node[name]
    return node


def test_a_flag_whose_name_nobody_can_tell_is_refused() -> None:
    _, refusal = read_as({}, "torchrun pretrain_gpt.py --num-layers 2 --lr-$X 3\n")
    assert refusal is not None and "only known at run time" in str(refusal)


def test_the_trainers_fsdp_is_off_where_it_is_empty() -> None:
    command = (
        "torchrun train.py --model_name_or_path meta-llama/Llama-3.1-8B "
        "--per_device_train_batch_size 1 --bf16 true"
    )
    stages = [
        None if refusal else value_at(reading.query, "parallel.zero_stage")
        for reading, refusal in (
            read_as(
                {"given_gpus": 8, "given": {"training.sequence_length": 4096}},
                f"{command} --gradient_accumulation_steps 1 --fsdp {words}\n",
            )
            for words in ("''", "full_shard", "'hybrid_shard_zero2 auto_wrap'")
        )
    ]
    assert stages == [0, 3, None]


def test_there_are_a_hundred_and_more() -> None:
    assert len(FILES) >= 180


def test_a_public_file_is_read_right_or_refused_by_name(subtests: pytest.Subtests) -> None:
    for name in FILES:
        with subtests.test(name=str(name)):
            expected, text = FILES[name]
            if "error" in expected:
                with pytest.raises(InputError, match=expected["error"]):
                    read_as(expected, text)
                continue
            started = pod_command(text)
            assert detect_format(
                started.script if started else text, files=expected.get("files")
            ) == expected.get("format", "megatron-lm")
            reading, refusal = read_as(expected, text)
            if "refused" not in expected and "missing" not in expected:
                assert refusal is None, refusal
                schema.parse_query(reading.query)
            assert {each.field for each in reading.missing} >= set(expected.get("missing", ()))
            for word in expected.get("refused", ()):
                assert refusal is not None and word in refusal.message
            for flag in expected.get("ignored", ()):
                assert any(each.flag == flag and each.reason for each in reading.ignored)
            for key, value in expected.items():
                if key.startswith("line "):
                    assert [each.line for each in reading.read if each.flag == key[5:]] == [value]
                elif key.startswith("hint "):
                    assert [
                        each.hint
                        for each in reading.missing
                        if each.field == key[5:] and str(value) in each.hint
                    ], reading.missing
                elif key == "num_gpus":
                    assert reading.num_gpus == value
                elif key not in FACTS:
                    assert value_at(reading.query, key) == value, key


@settings(suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(sorted(FILES)),
    place=st.integers(0, 10_000),
    word=st.sampled_from(
        ("auto", "two", "", "-1", "9" * 5_000, "null", "[1,2]", "{}", "$X", '"', "nan", "1.5", "\0")
    ),
)
def test_a_wrong_value_anywhere_is_read_or_refused(name: str, place: int, word: str) -> None:
    expected, text = FILES[name]
    words = list(re.finditer(r"[^\s=:,\"']+", text))
    wrong = words[place % len(words)]
    with contextlib.suppress(HpToolError):
        reading, refusal = read_as(expected, text[: wrong.start()] + word + text[wrong.end() :])
        if refusal is None:
            schema.parse_query(reading.query)


def test_one_message_names_all_that_is_missing() -> None:
    expected, text = FILES["missing-much.sh"]
    _, refusal = read_as(expected, text)
    assert refusal is not None and refusal.code == "missing_field"
    for field in expected["missing"]:
        assert field in refusal.message
    assert refusal.details["missing"] and refusal.details["read"]


def test_a_log_completes_its_script_and_gives_step_times() -> None:
    script = (
        "srun -n $N python pretrain_gpt.py --tensor-model-parallel-size 4 --micro-batch-size "
        "$MBS --num-layers $L"
    )
    log = FILES["megatron-log.txt"][1].splitlines()
    reading = read_configuration(script, overrides={"cluster.gpu": "h100-sxm-80gb"}, log=log)
    assert (
        reading.num_gpus,
        reading.query["model"]["num_hidden_layers"],
        reading.query["parallel"]["micro_batch_size"],
    ) == (
        64,
        32,
        2,
    )
    answer = assess(schema.parse_query(reading.query), reading=reading, log=log)
    assert answer.logged is not None and answer.logged.step_s == pytest.approx(
        6.001
    )  # without the first two
    assert answer.read and answer.ignored and answer.missing == ()
    assert all(set(change) == {"flag", "from", "to"} for change in answer.changes)


def test_the_answer_ends_in_flags_that_can_be_pasted() -> None:
    """Pasted into the script, the changes make the better configuration."""
    expected, text = FILES["slurm-header-and-srun.sh"]
    reading, _ = read_as(expected, text)
    answer = assess(schema.parse_query(reading.query), reading=reading)
    assert answer.better is not None and answer.changes
    changed = {each["flag"]: each["to"] for each in answer.changes}
    words = " ".join(
        f"{flag} {value}".strip() for flag, value in changed.items() if value is not None
    )
    dropped = [flag[2:] for flag, value in changed.items() if value is None]
    flags = re.sub(r"--bf16 ", f"--bf16 {words} ", text)
    for flag in dropped:
        flags = re.sub(rf"--{flag}(?= |\")", "", flags)
    again, _ = read_as(expected, flags)
    better = answer.better.parallel
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "micro_batch_size",
        "sequence_parallel",
        "zero_stage",
    ):
        assert again.query["parallel"][name] == getattr(better, name), name


def test_flags_to_remove_are_those_that_the_script_has() -> None:
    """A script has its own words for a pipeline's chunks and for what is recomputed."""
    script = FILES["slurm-header-and-srun.sh"][1]
    wordy = re.sub(
        r"--bf16 ",
        "--bf16 --num-layers-per-virtual-pipeline-stage 1 --recompute-activations ",
        script,
    )
    reading, _ = read_as(FILES["slurm-header-and-srun.sh"][0], wordy)
    changes = assess(schema.parse_query(reading.query), reading=reading).changes
    assert all(each["flag"] in wordy for each in changes if each["from"] is not None)
    gone = {each["flag"] for each in changes if each["to"] is None}
    assert gone >= {"--num-layers-per-virtual-pipeline-stage", "--recompute-activations"}


def test_a_serving_command_is_assessed() -> None:
    expected, text = FILES["vllm-module.sh"]
    reading, _ = read_as(
        expected | {"given": expected["given"] | {"inference.concurrency": 32}}, text
    )
    answer = assess(schema.parse_query(reading.query), reading=reading)
    assert answer.format == "vllm" and answer.query["kind"] == "inference"

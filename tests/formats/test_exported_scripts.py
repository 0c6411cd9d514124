"""Every script that is exported is valid bash: rows of random rankings, in each format that writes
one.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import hp_tool
from hp_tool.errors import HpToolError
from hp_tool.formats.exchange.export import write_text
from hp_tool.formats.registry import get_format
from hp_tool.formats.scripts import required_variable
from hp_tool.questions import schema, serving, training
from hp_tool.questions.configuration import Configuration
from tests.formats import drawn
from tests.formats.test_engine_options import pool_query

SEEDS, ROWS = 6, 12
"""Rankings drawn of each tool, and rows written of each."""
ODD = 'it\'s "mine" $(date) `date` ${HOME} \\ *'
"""A name that a shell would take apart."""
OWN = {
    "name": ODD,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
LOSSES = {"trl": "chunked", "llama-factory": "unfused"}
"""What a tool computes, of the formats that none of `drawn.TOOLS` ranks for."""
ENGINES = ("vllm", "sglang", "trtllm")


def queries(seeds: int) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Queries, each with the formats that its rows are written in."""
    of_megatron = ("megatron-lm", "slurm", "kubernetes", "nemo", "verl")
    for seed in range(seeds):
        asked = drawn.training(seed, format="megatron-lm")
        yield {**asked, "model": OWN} if seed == 0 else asked, of_megatron
        asked = drawn.training(seed, format="verl")
        asked["training"]["framework"] = "torch-fsdp"
        yield asked, ("verl",)
        for engine in ENGINES:
            asked = drawn.serving(seed, format=engine)
            yield {**asked, "model": OWN} if seed == 0 else asked, (engine,)
        for format, loss in LOSSES.items():
            work = {
                "sequence_length": 2048,
                "global_batch_size": 64,
                "framework": "hf-trainer",
                "cross_entropy": loss,
            }
            asked = drawn.training(seed, format="accelerate") | {
                "training": work,
                "model": OWN if seed == 0 else "llama-3-8b",
            }
            yield {**asked, "parallel": dict(get_format(format).axes)}, (format,)


def script_of(text: str) -> str:
    """The script in an exported text: itself, the one that a manifest passes to bash, or the
    command that overrides end.
    """
    if text.startswith("#!"):
        return text
    if "apiVersion:" in text:
        (container,) = list(yaml.safe_load_all(text))[-1]["spec"]["template"]["spec"]["containers"]
        assert container["command"][:2] == ["bash", "-c"]
        return str(container["command"][2])
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return " ".join(("python recipe.py", *lines, "\n"))


@cache
def exported(seeds: int) -> tuple[tuple[str, str], ...]:
    """Scripts of random rows, each with its format."""
    made: set[tuple[str, str]] = set()
    for query, formats in queries(seeds):
        asked = schema.parse_query(query)
        try:
            rows = (
                (serving if asked.kind == "inference" else training)
                .recommend(query=asked, top=ROWS)
                .recommendations
            )
        except HpToolError:
            continue  # no such deployment, which the error says
        for row in rows:
            for format in formats:
                try:
                    text = write_text(Configuration.from_row(row, query=asked), format)
                except HpToolError:
                    continue  # the tool has no word for it, which test_export_fields.py holds
                made.add((format, script_of(text)))
    for engine in ("vllm", "sglang"):
        made.add(
            (f"{engine} in pools", hp_tool.export(pool_query(engine=engine), format=engine).text)
        )
    return tuple(sorted(made))


def complaints(folder: Path, scripts: list[str]) -> str:
    """What bash says of the scripts, read and not run, all of them in one process."""
    paths = []
    for number, script in enumerate(scripts):
        paths.append(folder / f"{number}.sh")
        paths[-1].write_text(script)
    loop = 'for script; do bash -n "$script" || echo "$script is refused"; done'
    ran = subprocess.run(
        ["bash", "-c", loop, "bash", *map(str, paths)], capture_output=True, text=True, timeout=120
    )
    return ran.stdout + ran.stderr


def test_bash_is_asked(tmp_path: Path) -> None:
    assert "0.sh is refused" in complaints(
        tmp_path, ['echo "${HOST:?set it to this host\'s address}"\n']
    )


@pytest.mark.components
def test_bash_reads_every_script(tmp_path: Path) -> None:
    made = exported(SEEDS)
    assert {format for format, _ in made} == {
        "megatron-lm",
        "slurm",
        "kubernetes",
        "nemo",
        "verl",
        *LOSSES,
        *ENGINES,
        "vllm in pools",
        "sglang in pools",
    }
    assert len(made) >= 300, len(made)
    assert complaints(tmp_path, [script for _, script in made]) == ""


def test_a_name_that_a_shell_would_take_apart_stays_a_word() -> None:
    named = [script for _, script in exported(1) if ODD in script]
    assert named
    for script in named:
        for line in script.splitlines():
            assert ODD not in line or line.startswith(("#", "model_name_or_path:")), (
                line
            )  # in a comment, in a heredoc


@pytest.mark.parametrize(
    "meaning", ["this host's address", 'the "host"', "$HOST", "`hostname`", "a \\ b", "a } b"]
)
def test_a_reason_that_bash_would_not_read_as_text_is_no_reason(meaning: str) -> None:
    assert required_variable("HOST", "set it to this host") == "${HOST:?set it to this host}"
    with pytest.raises(ValueError, match="quote"):
        required_variable("HOST", meaning)

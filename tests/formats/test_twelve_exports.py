"""Twelve cases in every format: what is written holds to the words of the releases that the page
names, and what a tool cannot say is refused, or left out, by its name.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import hp_tool
from hp_tool.errors import HpToolError
from hp_tool.formats.exchange import read_query
from hp_tool.formats.exchange.export import Exported
from hp_tool.formats.registry import writable
from tests.formats.engine_parsers import parsed as parsed_by_engine
from tests.formats.megatron_rules import complaints, configured
from tests.formats.test_exported_adapters import KEYS, settings
from tests.formats.test_files_of_others import DEEPSPEED
from tests.formats.test_megatron_arguments import RELEASES, parser
from tests.formats.test_megatron_validation import GPUS, parsed
from tests.formats.test_torchtitan import LOAD
from tests.formats.test_torchtitan_python import hold_to_its_classes
from tests.formats.twelve import DEPLOYMENTS, TRAININGS

BRIDGE: dict[str, Any] = json.loads(Path(__file__).with_name("bridge_keys.json").read_text())
OF_MEGATRON = ("megatron-lm", "kubernetes", "slurm", "megatron-lm-yaml")
SHARDED = ("axolotl", "deepspeed", "llama-factory", "trl")
"""Formats of tools that train each replica of a model on one device."""
NOT_SAID: dict[str, dict[str, str]] = {
    "mixture": {
        **dict.fromkeys(("accelerate", *SHARDED), "parallel.expert_parallel_size"),
        **dict.fromkeys(("nanotron", "torchtitan"), "model"),
    },
    "latent": {
        **dict.fromkeys(("accelerate", *SHARDED), "parallel.expert_parallel_size"),
        "nanotron": "model",
    },
    "context": dict.fromkeys(("nanotron", *SHARDED), "parallel.context_parallel_size"),
    "fp8": dict.fromkeys(
        ("axolotl", "deepspeed", "llama-factory", "nanotron", "trl", "verl"), "training.precision"
    ),
    "lora": {
        **dict.fromkeys(OF_MEGATRON, "training.lora"),
        **dict.fromkeys(
            ("accelerate", "deepspeed", "nanotron", "torchtitan", "torchtitan-python", "verl"),
            "training.task",
        ),
    },
    "uneven": dict.fromkeys(("accelerate", *SHARDED), "parallel.pipeline_parallel_size"),
    "blackwell": dict.fromkeys(SHARDED, "parallel.tensor_parallel_size"),
    "a100": {
        **dict.fromkeys(SHARDED, "parallel.tensor_parallel_size"),
        **dict.fromkeys(("nanotron", "torchtitan", "torchtitan-python"), "model"),
    },
    "offload": dict.fromkeys(
        (
            "accelerate",
            "axolotl",
            "llama-factory",
            "nanotron",
            "torchtitan",
            "torchtitan-python",
            "trl",
        ),
        "training.offload",
    ),
    "hybrid": {
        **dict.fromkeys(OF_MEGATRON, "model.expert_bias"),
        **dict.fromkeys(("accelerate", *SHARDED), "parallel.expert_parallel_size"),
        **dict.fromkeys(("nanotron", "torchtitan", "torchtitan-python"), "model"),
    },
}
"""By case and format the field that the tool has no word for; every other pair is written."""
PAIRS = [
    pytest.param(
        format,
        case,
        marks=pytest.mark.long
        if format in OF_MEGATRON[1:] and case not in ("dense", "uneven")
        else pytest.mark.components
        if case not in ("dense", "lora")
        else (),
    )
    for format in writable("training")
    for case in TRAININGS
]


@cache
def exported(format: str, case: str) -> Exported | HpToolError:
    """A training, ranked again for the format's tool, or the refusal."""
    try:
        return hp_tool.export(TRAININGS[case], format=format, rerank=True)
    except HpToolError as error:
        return error


def written(format: str, case: str) -> tuple[str | None, str]:
    """A training's text (None: it was refused), and what was not said, in words."""
    answer = exported(format, case)
    return (
        (None, f"{answer.field} {answer}")
        if isinstance(answer, HpToolError)
        else (answer.text, " ".join(answer.left_out))
    )


def texts(format: str) -> dict[str, str]:
    """What was written of each case."""
    return {case: text for case in TRAININGS if (text := written(format, case)[0]) is not None}


@pytest.mark.parametrize(("format", "case"), PAIRS)
def test_a_case_is_written_or_what_the_tool_cannot_say_is_named(format: str, case: str) -> None:
    text, unsaid = written(format, case)
    field = NOT_SAID.get(case, {}).get(format)
    if field is None:
        assert text is not None and not unsaid, unsaid
    else:
        assert re.search(rf"\b{re.escape(field)}\b", unsaid), unsaid


@pytest.mark.components
@pytest.mark.parametrize("case", TRAININGS)
def test_megatrons_arguments_hold_to_four_releases(case: str) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    text, _ = written("megatron-lm", case)
    if text is None:
        return
    cluster = TRAININGS[case]["cluster"]
    words, environment = parsed(text)
    assert (
        complaints(
            words,
            world_size=cluster["num_gpus"],
            environment=environment,
            architecture=GPUS[cluster["gpu"]],
        )
        == []
    )
    configured(words)
    for release in RELEASES:
        parser(release).parse_args(
            [word for name, values in words.items() for word in (f"--{name}", *values)]
        )


@pytest.mark.parametrize("format", ["megatron-lm", "nemo"])
def test_graphs_beside_merged_exchanges_name_the_modules_that_were_predicted(format: str) -> None:
    case = TRAININGS["latent"]
    merged = case["training"] | {"cuda_graphs": True, "overlap": {"expert_parallel": True}}
    answer = hp_tool.export(case | {"training": merged}, format=format, rerank=True)
    assert isinstance(answer, Exported)
    graphs = [line for line in answer.text.splitlines() if "graph" in line]
    assert "overlap" in answer.text and "transformer_engine" in "".join(graphs)
    assert all(name in "".join(graphs) for name in ("attn", "moe_router", "moe_preprocess"))
    assert not any("training.cuda_graphs" in note for note in answer.notes)


@pytest.mark.parametrize("case", ["dense", pytest.param("uneven", marks=pytest.mark.components)])
def test_slurm_and_kubernetes_start_megatrons_own_command(case: str) -> None:
    manifest = list(yaml.safe_load_all(written("kubernetes", case)[0] or ""))[1]
    scripts = [
        manifest["spec"]["template"]["spec"]["containers"][0]["command"][2],
        written("slurm", case)[0] or "",
    ]
    own = (written("megatron-lm", case)[0] or "").partition("pretrain_gpt.py")[2]
    assert own and [each.partition("pretrain_gpt.py")[2] for each in scripts] == [own, own]


@pytest.mark.components
@pytest.mark.parametrize("format", ["accelerate", "trl", "llama-factory"])
def test_accelerate_reads_its_file(format: str, tmp_path: Path) -> None:
    config_args = pytest.importorskip(
        "accelerate.commands.config.config_args", reason="accelerate is not installed"
    )
    from accelerate.parallelism_config import ParallelismConfig

    for case, text in texts(format).items():
        inner = re.search(r"cat > fsdp2.yaml <<'END'\n(.*?)\nEND\n", text, re.DOTALL)
        path = tmp_path / f"{case}.yaml"
        path.write_text(text if format == "accelerate" else inner[1])  # type: ignore[index]
        config = config_args.ClusterConfig.from_yaml_file(str(path))
        sizes = {
            name.removeprefix("parallelism_config_"): size
            for name, size in config.parallelism_config.items()
        }
        if not sizes:  # DDP
            assert config.distributed_type == "MULTI_GPU"
            assert config.num_processes == TRAININGS[case]["cluster"]["num_gpus"]
            continue
        assert sizes.pop("cp_comm_strategy", None) == ("alltoall" if sizes["cp_size"] > 1 else None)
        assert (
            ParallelismConfig(**sizes).total_size
            == config.num_processes
            == TRAININGS[case]["cluster"]["num_gpus"]
        )


@pytest.mark.components
@pytest.mark.parametrize("format", ["trl", "axolotl", "llama-factory"])
def test_fine_tuners_know_every_key(format: str) -> None:
    made = texts(format)
    assert "lora" in made and len(made) >= 4
    for text in made.values():
        assert not settings(text, format).keys() - set(KEYS[format])


@pytest.mark.long
def test_deepspeed_reads_each_file(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    made, paths, worlds = texts("deepspeed"), [], []
    for case, text in made.items():
        worlds.append(TRAININGS[case]["cluster"]["num_gpus"])
        paths.append(tmp_path / f"{case}.{worlds[-1]}.json")
        paths[-1].write_text(text)
    ran = subprocess.run(
        [sys.executable, "-c", DEEPSPEED, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines() if line.startswith("read")]
    assert [(int(line[2]), int(line[3])) for line in lines] == [(world, 128) for world in worlds]


@pytest.mark.components
def test_torchtitan_reads_each_file(tmp_path: Path) -> None:
    try:
        root = importlib.metadata.distribution("torchtitan").locate_file("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torchtitan is not installed")
    paths = []
    for case, text in texts("torchtitan").items():
        paths.append(tmp_path / f"{case}.{TRAININGS[case]['cluster']['num_gpus']}.toml")
        paths[-1].write_text(text)
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, str(root), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert (
        len([line for line in ran.stdout.splitlines() if line.startswith("read")])
        == len(paths)
        >= 6
    )


@pytest.mark.components
def test_torchtitans_classes_know_each_word() -> None:
    made = texts("torchtitan-python")
    assert {"mixture", "context", "latent"} <= made.keys()
    for text in made.values():
        hold_to_its_classes(text)


@pytest.mark.components
def test_nanotrons_file_comes_back() -> None:
    for case, text in texts("nanotron").items():
        query, cluster = (
            read_query(text, overrides={"cluster.gpu": "h100-sxm-80gb"}),
            TRAININGS[case]["cluster"],
        )
        assert query["cluster"]["num_gpus"] == cluster["num_gpus"]
        assert query["training"]["global_batch_size"] == 128


def overrides(text: str) -> dict[str, str]:
    """The dotted keys of a text, each with its value."""
    words = shlex.split(text, comments=True)
    return dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("--"))


@pytest.mark.components
@pytest.mark.parametrize("release", BRIDGE["megatron-bridge"])
def test_bridges_configuration_has_each_key(release: str) -> None:
    sections, made = BRIDGE["megatron-bridge"][release], texts("nemo")
    assert len(made) == len(TRAININGS)
    for case, text in made.items():
        keys = overrides(text)
        merged = (
            keys.get("comm_overlap.overlap_moe_expert_parallel_comm") == "true"
        )  # which no graph of a step may be
        assert not (merged and keys.get("model.cuda_graph_impl") == "local")
        for path, value in keys.items():
            section, _, key = path.lstrip("+").partition(".")
            if section == "mixed_precision":
                fields = (
                    re.findall(r"[{,](\w+):", value.replace("{_target_:", "{"))
                    if value.startswith("{")
                    else []
                )
                assert value in sections["recipes"] or fields, (case, path, value)
                continue
            assert key in sections[section], (case, path)
            choices = sections[section][key]
            assert not choices or value in choices or value == "null", (case, path, value)


@pytest.mark.components
@pytest.mark.parametrize("release", BRIDGE["verl"])
def test_verls_files_have_each_key(release: str) -> None:
    fields, made = BRIDGE["megatron-bridge"]["0.3.1"]["model"], texts("verl")
    assert len(made) == len(TRAININGS) - 2
    for case, text in made.items():
        known = BRIDGE["verl"][release]["megatron" if "ppo_megatron_trainer" in text else "fsdp"]
        for path in overrides(text.partition("OVERRIDES=(")[2]):
            if path.startswith("++"):
                folder, _, name = path[2:].rpartition(".")
                assert f"{folder}.*" in known or any(
                    each.startswith(f"{folder}.") for each in known
                ), (case, path)
                assert name in fields or folder.endswith("override_optimizer_config"), (case, path)
            else:
                assert path in known, (case, path)


@pytest.mark.parametrize("case", DEPLOYMENTS)
@pytest.mark.parametrize("format", writable("inference"))
def test_engines_take_each_deployment(format: str, case: str) -> None:
    engine = {"llm-d": "vllm"}.get(format, format)
    query = {**DEPLOYMENTS[case], "inference": {**DEPLOYMENTS[case]["inference"], "engine": engine}}
    text = hp_tool.export(query, format=format).text
    if format == "llm-d":
        (container,) = yaml.safe_load(text)["spec"]["template"]["containers"]
        words = list(container["args"])
    else:
        words = [
            word for word in shlex.split(text.replace("\\\n", " "), comments=True) if word != "$@"
        ]
        command = {"vllm": "serve", "sglang": "sglang.launch_server", "trtllm": "trtllm-serve"}[
            format
        ]
        words = words[words.index(command) + (1 if format == "sglang" else 2) :]
    ranks = parsed_by_engine(engine, words)
    size = {
        "vllm": "--tensor-parallel-size",
        "sglang": "--tensor-parallel-size",
        "trtllm": "--tensor_parallel_size",
    }[engine]
    split = query["parallel"]
    apart = split["attention_data_parallel_size"] if engine != "vllm" else 1
    assert int(ranks.get(size, 1)) == split.get("tensor_parallel_size", 1) * apart

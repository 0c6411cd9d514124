"""Detect the format of a configuration text.

Each supported format registers signs. Other signs identify tools that are known but unsupported.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.reading import as_settings, hyphenated, look_up, read_table_file, table
from hp_tool.formats.registry import formats, readable
from hp_tool.formats.signs import (
    Evidence,
    Place,
    Sign,
    has_any_key,
    has_key_near_top,
    matches_pattern,
)
from hp_tool.formats.source import parse_keys, parse_mapping

_KEY_FILE_SUFFIXES = (".json", ".yaml", ".yml", ".toml")
"""File name suffixes of configuration files, as opposed to scripts."""


def _is_olmo(evidence: Evidence) -> bool:
    model = evidence.content.get("model")
    return "max_duration" in evidence.keys and isinstance(model, Mapping) and "name" not in model


def _is_gpt_neox(evidence: Evidence) -> bool:
    return (
        bool(evidence.keys & {"pipe_parallel_size", "model_parallel_size", "train_iters"})
        or {"num_layers", "hidden_size"} <= evidence.keys
    )


def _is_nemo_rl(evidence: Evidence) -> bool:
    algorithms = {"grpo", "dpo", "ppo", "distillation", "loss_fn", "rm"}
    parts = {"sft", "defaults", "checkpointing", "cluster", "data_plane"}
    return bool(evidence.keys & {"grpo", "dpo"}) or (
        "policy" in evidence.keys and bool(evidence.keys & (algorithms | parts))
    )


_UNSUPPORTED_TOOLS = (
    Sign(place="keys", rank=10, matches=_is_gpt_neox, refused="GPT-NeoX"),
    Sign(place="keys", rank=80, matches=_is_olmo, refused="OLMo"),
    Sign(
        place="keys",
        rank=21,
        matches=_is_nemo_rl,
        refused="NeMo RL's file of one of its algorithms",
    ),
    Sign(
        place="keys",
        rank=50,
        matches=lambda evidence: (
            {"model", "train_dataset"} <= evidence.keys
            and bool(evidence.keys & {"model_class", "dist_config", "sample_backend"})
        ),
        refused="a file of LLaMA-Factory's launcher v1",
    ),
    Sign(
        place="keys",
        rank=50,
        matches=lambda evidence: (
            "template" in evidence.keys
            and bool(evidence.keys & {"infer_backend", "export_dir"})
            and "stage" not in evidence.keys
        ),
        refused="LLaMA-Factory's file of an inference or an export",
    ),
)
"""Signs of unsupported formats that need more than one test; see also tables/unsupported.yaml."""


@functools.cache
def _unsupported_signs() -> tuple[Sign, ...]:
    tests: dict[str, Callable[[Any], Callable[[Evidence], bool]]] = {
        "pattern": matches_pattern,
        "any_key": lambda keys: has_any_key(*keys),
        "all_keys": lambda keys: lambda evidence: set(keys) <= evidence.keys,
        "key_near_top": lambda keys: has_key_near_top(*keys),
    }
    return _UNSUPPORTED_TOOLS + tuple(
        Sign(
            place=entry["place"],
            rank=entry["rank"],
            matches=next(tests[name](entry[name]) for name in tests if name in entry),
            refused=entry["description"],
        )
        for entry in yaml.safe_load(read_table_file("unsupported.yaml"))
    )


_PROGRAM_PATTERN = re.compile(
    r"(?m)^(?![ \t]*#)[^\n]*?\b(?:python3?|torchrun|deepspeed|srun)\b[^\n]*?"
    r"(?:[\s/]([\w.-]+\.py)\b|\s-m\s+(?!torch\.distributed\b)([\w.]+))"
)
"""Matches a launch command. The groups are its Python file and its module (`-m`)."""


def detect_format(text: str, *, files: Mapping[str, str] | None = None) -> str:
    """Return the name of the format of a text, or of the command in a Kubernetes manifest.

    Raises:
        UnsupportedError: The format is known but not read.
        InputError: The text has no known format.
    """
    if tool := _match_signs("text", Evidence(text=text)):
        return tool
    content = (
        parse_keys(text) if text.lstrip("\ufeff \t\r\n").startswith("{") else parse_mapping(text)
    )
    if content is not None:
        return _format_of_mapping(content, text)
    script_files = "\n".join(
        each for name, each in (files or {}).items() if not name.endswith(_KEY_FILE_SUFFIXES)
    )
    if tool := next(
        filter(
            None,
            (
                _match_signs("script", Evidence(text=each, files=bool(files)))
                for each in (text, script_files)
            ),
        ),
        "",
    ):
        return tool
    if programs := [
        "".join(match) for match in _PROGRAM_PATTERN.findall(text.replace("\\\n", " "))
    ]:
        raise InputError(
            f"no supported entry point found (saw: {', '.join(dict.fromkeys(programs))}); "
            f"supported: {', '.join(readable())}; if it is one of these, pass --format",
            field="format",
        )
    if _has_megatron_flags(text):
        return "megatron-lm"
    if others := re.findall(
        r"(?m)^[ \t]*(?:source|\.|sbatch|bash|sh)\s+(?:-\S+\s+)*([^\s;&|]+)", text
    ):
        raise InputError(
            "the script only starts or sources other files "
            f"({', '.join(dict.fromkeys(others))}); pass them with --file",
            field="command",
        )
    raise InputError(
        "no training or serving command found, and no configuration or log of a supported "
        f"format; supported: {', '.join(readable())}. If it is one of these, pass --format",
        field="format",
    )


def _has_megatron_flags(text: str) -> bool:
    """Return True if at least half of the flags in a text are Megatron's."""
    flags = [hyphenated(flag) for flag in re.findall(r"(?<!\S)--([A-Za-z][\w-]*)", text)]
    num_known = sum(look_up(flag, table("megatron")) is not None for flag in flags)
    return 0 < len(flags) <= 2 * num_known


def _format_of_mapping(content: Mapping[str, Any], text: str) -> str:
    keys = frozenset(str(key).replace("-", "_") for key in content)
    if tool := _match_signs("keys", Evidence(text=text, content=content, keys=keys)):
        return tool
    if "kind" in keys and keys & {"training", "inference"}:
        raise InputError(
            "this is already a query; pass it to estimate, recommend or tune", field="format"
        )
    raise InputError(
        f"no supported tool has these keys{_describe_keys(content)}; supported: "
        f"{', '.join(readable())}. If it is one of these, pass --format",
        field="format",
    )


def _describe_keys(content: Mapping[str, Any]) -> str:
    """Return, for an error message, the tool that most keys belong to, or else the first keys."""
    names = [setting.name for setting in as_settings(content)]
    shares = {
        name: sum(look_up(each, table(name)) is not None for each in names) for name in _TABLES
    }
    best = max(shares, key=lambda name: shares[name])
    if names and shares[best] == len(names) and best in ("vllm", "sglang"):
        raise UnsupportedError(
            f"this file of {best} options names no model; import the command that "
            "starts the server, and pass this file with --file",
            field="format",
        )
    if 2 * shares[best] >= len(names):
        return f" (it resembles {best}: {shares[best]} of its {len(names)} keys)"
    return f" (it has {', '.join(list(map(str, content))[:6])})"


_TABLES = (
    "accelerate",
    "axolotl",
    "deepspeed",
    "nemo",
    "nemo-automodel",
    "torchtune",
    "trainer",
    "vllm",
    "sglang",
)
"""Tables of the tools whose configurations are mappings (JSON or YAML)."""


def _signs() -> Iterator[tuple[Sign, str]]:
    for tool_format in formats():
        yield from ((sign, tool_format.name) for sign in tool_format.signs)
    yield from ((sign, "") for sign in _unsupported_signs())


def _match_signs(place: Place, evidence: Evidence) -> str:
    """Return the format of the matching sign with the lowest rank; empty if no sign matches.

    Raises:
        UnsupportedError: The sign belongs to an unsupported format.
    """
    candidates = sorted(
        (pair for pair in _signs() if pair[0].place == place), key=lambda pair: pair[0].rank
    )
    sign, name = next((pair for pair in candidates if pair[0].matches(evidence)), (None, ""))
    if sign is not None and sign.refused:
        raise UnsupportedError(
            f"{sign.refused} is not supported; supported: {', '.join(readable())}",
            field="format",
        )
    return name

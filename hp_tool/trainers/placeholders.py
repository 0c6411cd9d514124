"""What stands in a command's braces, and the values of one run.

    {tensor_parallel_size}                   a value, anywhere in an argument
    {sequence_parallel?--sequence-parallel}  an argument of its own, left out where the value is false, 0 or none
    {flags:megatron-lm}                      an argument of its own that becomes all flags of the configuration
    {file:torchtitan}                        the name of a file with the configuration, laid into the run's folder

Braces around anything that is no name stay as they are; `{{name}}` is `{name}`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from hp_tool.domain.measurement import ProfileRequest
from hp_tool.domain.parallel import OF_THE_QUERY, ParallelConfig, recompute_name
from hp_tool.errors import InputError

PLACEHOLDER = re.compile(r"(?<!\{)\{(?P<name>[a-z][a-z0-9_]*)(?P<rest>(?::[a-z0-9-]+)?|\?[^{}]*)\}(?!\})")
FLAGS = ("megatron-lm",)
FILES = {
    "megatron-lm-yaml": "megatron-lm.yaml",
    "nemo": "nemo.py",
    "torchtitan": "torchtitan.toml",
    "deepspeed": "deepspeed.json",
    "accelerate": "accelerate.yaml",
}
"""Export formats that are files, and what these are called in the run's folder."""
AXES = tuple(item.name for item in fields(ParallelConfig) if item.name not in OF_THE_QUERY)
"""Fields of a configuration that candidates may differ in."""
_MODEL = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
_TRAINING = ("sequence_length", "global_batch_size", "precision")
_RUN = ("num_gpus", "num_nodes", "gpus_per_node", "gradient_accumulation_steps", "train_iters", "steps", "warmup_steps", "seed")
NAMES = (*AXES, *_MODEL, *_TRAINING, *_RUN)
SPECIAL = (*(f"flags:{name}" for name in FLAGS), *(f"file:{name}" for name in FILES))


def found(command: tuple[str, ...]) -> Iterator[str]:
    """Every placeholder of a command by its name, in order; `flags:` and `file:` with their format.

    Raises InputError for one that is unknown, with the nearest name, and for one that has to be an argument of its own.
    """
    for argument in command:
        for match in PLACEHOLDER.finditer(argument):
            name, rest = match["name"], match["rest"]
            whole = name + (rest if rest.startswith(":") else "")
            if whole not in (NAMES if ":" not in whole else SPECIAL):
                near = difflib.get_close_matches(whole, [*NAMES, *SPECIAL], n=1, cutoff=0.5)
                hint = f"did you mean {{{near[0]}}}?" if near else f"known: {', '.join([*NAMES, *SPECIAL])}"
                raise InputError(
                    f"trainer.command: unknown placeholder {match[0]}; {hint}", field="trainer.command", code="unknown_key"
                )
            if (rest.startswith("?") or name == "flags") and match[0] != argument:
                raise InputError(
                    f"trainer.command: {match[0]} must be an argument of its own, not part of {argument[:80]!r}",
                    field="trainer.command",
                )
            yield whole


def values(request: ProfileRequest, *, num_nodes: int) -> dict[str, Any]:
    """Value by name of everything but flags and files."""
    parallel, training, model = request.parallel, request.training, request.model
    batch = parallel.data_parallel_size * parallel.micro_batch_size
    given: dict[str, Any] = {name: getattr(parallel, name) for name in AXES}
    given |= {name: getattr(training, name) for name in _TRAINING}
    given |= {name: getattr(model, name) for name in _MODEL}
    given |= {"num_key_value_heads": model.kv_heads, "intermediate_size": model.ffn_size}
    given |= {"recompute": recompute_name(parallel.recompute), "pipeline_schedule": parallel.pipeline_schedule or "none"}
    return given | {
        "num_gpus": request.num_gpus,
        "num_nodes": num_nodes,
        "gpus_per_node": request.num_gpus // num_nodes,
        "gradient_accumulation_steps": training.global_batch_size // batch,
        "train_iters": request.warmup_steps + request.steps,
        "steps": request.steps,
        "warmup_steps": request.warmup_steps,
        "seed": request.seed,
    }


def filled(argument: str, given: Mapping[str, Any], *, names_of_files: Mapping[str, str]) -> str | None:
    """One argument with its values in place; None where it falls away."""
    alone = PLACEHOLDER.fullmatch(argument)
    if alone is not None and alone["rest"].startswith("?"):
        return alone["rest"][1:] if given[alone["name"]] not in (False, 0, None, "none") else None

    def value(match: re.Match[str]) -> str:
        return names_of_files[match["rest"][1:]] if match["name"] == "file" else _word(given[match["name"]])

    return re.sub(r"\{(\{[a-z][a-z0-9_:?-]*\})\}", r"\1", PLACEHOLDER.sub(value, argument))


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

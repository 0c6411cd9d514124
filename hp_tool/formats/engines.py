"""Write the command that starts one replica of vLLM, SGLang or TensorRT-LLM."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hp_tool.domain.declared import LOAD_FIELDS, SERVER_FIELDS, parse_names
from hp_tool.domain.inference import SpeculativeSpec
from hp_tool.domain.setups import ServingSetup
from hp_tool.errors import UnsupportedError
from hp_tool.formats.scripts import multiline_command, option_lines, required_variable, script_text
from hp_tool.formats.writing import (
    DTYPES,
    SHAPE_FIELDS,
    Values,
    headline,
    model_name_argument,
    option_words,
)

EXPRESSED_FIELDS = SHAPE_FIELDS.union(SERVER_FIELDS, LOAD_FIELDS) | parse_names("""
    precision kv_cache_precision memory_fraction engine_settings two_batch_overlap max_model_len
    speculative.num_speculative_tokens speculative.acceptance_rate
    speculative.draft_cost_fraction speculative.draft_model
""")
"""Setup fields that a replica's command expresses, or that only describe its load."""
WIDE_PRECISIONS = ("bf16", "fp16", "fp32")
FP8 = {"fp8": "fp8"}
"""Values of --quantization that quantise 16-bit weights during loading. Checkpoints that are
already quantised contain their own format.
"""


def uses_deepep(setup: ServingSetup) -> bool:
    """Return True if the estimate assumes DeepEP for token dispatch.

    DeepEP is assumed across NVLink domains and for two-batch overlap.
    """
    c = setup.parallel
    ranks = c.tensor_parallel_size * c.attention_data_parallel_size
    several = c.attention_data_parallel_size > 1 and c.expert_parallel_size > 1
    return several and (
        ranks > setup.cluster.nvlink_domain_size or setup.workload.two_batch_overlap is True
    )


def model_argument(setup: ServingSetup) -> str:
    """Return the positional model argument; a required shell variable if the model is unknown."""
    return (
        '"$MODEL"'
        if setup.model_path is None
        else shlex.quote(model_name_argument(setup.model_path))
    )


def size_above_one(size: int) -> int | None:
    """Return a parallel size; None if it is 1, the default."""
    return size if size > 1 else None


def reject_speculation(setup: ServingSetup, *, tool: str) -> None:
    """Reject a setup with speculative decoding.

    Raises:
        UnsupportedError: The setup uses speculative decoding.
    """
    if setup.workload.speculative is not None:
        raise UnsupportedError(
            f"speculative decoding is not supported for {tool}; choose vllm, sglang or "
            "llm-d, or remove inference.speculative",
            field="inference.speculative",
        )


def draft_settings(setup: ServingSetup) -> tuple[str, SpeculativeSpec] | None:
    """Return the draft method and its parameters; None without speculative decoding.

    The method is `ngram` or `mtp` (the model's own MTP layers), or depends on the draft model's
    name: `eagle3`, `eagle` or `model`.

    Raises:
        UnsupportedError: The query sets a draft cost, but the model has no draft layers
            and no draft model is named.
    """
    speculative = setup.workload.speculative
    if speculative is None:
        return None
    if speculative.draft_model is not None:
        name = re.sub("[^a-z0-9]", "", speculative.draft_model.lower())
        return (
            "eagle3" if "eagle3" in name else "eagle" if "eagle" in name else "model",
            speculative,
        )
    if speculative.draft_cost_fraction == 0.0:
        return "ngram", speculative
    if setup.model.num_nextn_predict_layers:
        return "mtp", speculative
    raise UnsupportedError(
        f"{setup.model.name} has no draft layers; name a checkpoint that has them, "
        "or remove draft_cost_fraction to draft from n-grams",
        field="inference.speculative.draft_model",
    )


def replica_script(
    setup: ServingSetup,
    *,
    tool: str,
    start: Callable[[ServingSetup], tuple[str, Values]],
    before: Sequence[str] = (),
    last: Sequence[str] = (),
) -> str:
    """Return a shell script that starts one replica.

    The script consists of the lines `before`, the command that `start` returns, and the lines
    `last`.

    Raises:
        UnsupportedError: The engine's command cannot express the setup.
    """
    program, options = start(setup)
    return script_text(
        (
            f"# {tool}: {headline(setup)}; {replica_count_words(setup.replicas)}.",
            *_model_check_lines(setup),
            *before,
            multiline_command(program, *option_lines(option_words(options)), *last),
        )
    )


def replica_count_words(replicas: int) -> str:
    """Return a phrase such as `one of 4 replicas`, for a comment in a script."""
    return "1 replica" if replicas == 1 else f"one of {replicas} replicas"


def _model_check_lines(setup: ServingSetup) -> list[str]:
    meaning = (
        f"set MODEL to the checkpoint in {setup.workload.precision}: a Hugging Face id or a folder"
    )
    return [f': "{required_variable("MODEL", meaning)}"'] if setup.model_path is None else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process of a disaggregated deployment: its name, host and command lines."""

    name: str
    meaning: str
    command: Sequence[str]


def replica_role(name: str, setup: ServingSetup, command: tuple[str, Values]) -> Role:
    """Return the process that runs one replica of a pool."""
    program, options = command
    return Role(
        name=name,
        meaning=replica_count_words(setup.replicas),
        command=[program, *option_lines(option_words(options))],
    )


def pools_script(
    *,
    tool: str,
    prefill: ServingSetup,
    decode: ServingSetup,
    roles: Sequence[Role],
    before: Sequence[str] = (),
) -> str:
    """Return a shell script that starts the role named by its first argument."""
    names = ", ".join(role.name for role in roles)
    cases = [
        line
        for role in roles
        for line in (f"{role.name})", f"    exec {multiline_command(*role.command)}", "    ;;")
    ]
    return script_text(
        (
            f"# {tool}: {headline(prefill)} for prefill, {decode.cluster.num_gpus} x "
            f"{decode.cluster.gpu.name} for decoding.",
            *(f"#   {role.name}: {role.meaning}" for role in roles),
            *_model_check_lines(decode),
            *before,
            f'role="{required_variable("1", names)}"',
            "shift",
            'case "$role" in',
            *cases,
            f'*) echo "no $role among {names}" >&2; exit 2 ;;',
            "esac",
        )
    )


def option_values(values: Values) -> dict[str, str]:
    """Return the values of each option, joined by spaces."""
    return {name: " ".join(words) for name, words in option_words(values).items()}


def precision_options(
    setup: ServingSetup, *, engine: str, version: str, cache: Mapping[str, str]
) -> Values:
    """Return the options for the precisions of weights and KV cache.

    vLLM's `auto` stores the KV cache in the model's dtype. It is the only value for 16 and 32 bits:
    `bfloat16` is for models that store it in fp8 by default (vllm/config/cache.py).
    """
    weights, cache_precision = setup.workload.precision or "bf16", setup.workload.kv_cache_precision
    dtype, narrowed = (
        DTYPES.get(weights, "bfloat16"),
        quantization_option(setup, engine=engine, words=FP8),
    )
    if cache_precision is None:
        return {"--dtype": dtype, "--quantization": narrowed}
    word = cache.get(cache_precision) or ("auto" if dtype == DTYPES.get(cache_precision) else None)
    if word is None:
        raise UnsupportedError(
            f"{engine} {version} has no option for a {cache_precision} cache with {weights} "
            "weights; set inference.kv_cache_precision to "
            f"{' or '.join(dict.fromkeys(('bf16', *cache)))}",
            field="inference.kv_cache_precision",
        )
    return {"--dtype": dtype, "--quantization": narrowed, "--kv-cache-dtype": word}


def quantization_option(
    setup: ServingSetup, *, engine: str, words: Mapping[str, str]
) -> str | None:
    """Return the option that quantises the weights during loading; None if none is needed.

    Raises:
        UnsupportedError: The engine would serve weights in another precision than the query's.
    """
    wanted, stored = setup.workload.precision or "bf16", setup.stored_precision
    if stored is None:  # A user's own checkpoint.
        return words.get(wanted)
    if stored == wanted or (stored in WIDE_PRECISIONS and wanted in WIDE_PRECISIONS):
        return None
    if stored in WIDE_PRECISIONS and wanted in words:
        return words[wanted]
    raise UnsupportedError(
        f"no {wanted} checkpoint of {setup.model.name} is known, and {engine} would "
        f"serve {setup.model_path} in {stored}; set inference.precision to "
        f"{stored}, or set model to your own checkpoint (a folder or its id)",
        field="inference.precision",
    )

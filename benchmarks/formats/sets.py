"""`python -m benchmarks.formats.sets FOLDER`: count how many public files are imported.

The sets are scripts of ms-swift, commands of vLLM's recipes, configurations of torchtitan, and
model types of the installed transformers. FOLDER contains each repository as OWNER+NAME; this
repository does not include them. The function of a set documents its scope. `--list` prints the
outcome of each file.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hp_tool import catalog
from hp_tool.cost.parameters import total_parameters
from hp_tool.errors import HpToolError
from hp_tool.formats.exchange import read_configuration
from hp_tool.questions import schema

LOAD = {
    "inference.input_length": 1024,
    "inference.output_length": 1024,
    "inference.concurrency": 64,
}
"""Load of a server, which no command sets."""
DRAFTS = {
    "inference.speculative.acceptance_rate": 0.7,
    "inference.speculative.draft_cost_fraction": 0.05,
    "inference.speculative.num_speculative_tokens": 3,
}
"""Values for speculative decoding that depend on the load, supplied if they are missing."""
LENGTH = {"training.sequence_length": 2048}
"""Sequence length, supplied if a script leaves it to the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file or command, with the values that its user supplies."""

    name: str
    text: str
    scope: str = ""
    """Reason why the file is out of scope; empty for a run of a modelled kind."""
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)


def refusal_of(file: File) -> str:
    """Return the refusal of a file; empty if it is imported.

    Supply the number of GPUs, a sequence length and values for speculative decoding if they are
    missing.
    """
    given: dict[str, Any] = {"cluster.gpu": "h100-sxm-80gb", **file.given}
    num_gpus, message = None, ""
    for _ in range(4):
        try:
            reading = read_configuration(
                file.text,
                num_gpus=num_gpus,
                overrides=given,
                variables=dict(file.variables),
                files=dict(file.files),
            )
            schema.parse_query(reading.query)
        except HpToolError as error:
            message = error.message
            missing = {path: value for path, value in (DRAFTS | LENGTH).items() if path in message}
            if "cluster.num_gpus" in message and num_gpus is None:
                num_gpus = 8
            elif missing.keys() - given.keys():
                given |= missing
            else:
                return message
        else:
            return ""
    return message


_OTHER_TASKS = re.compile(r"--(task_type (?!causal_lm)|num_labels|loss_type)|--reward_funcs")
_TUNERS = re.compile(
    r"--(tuner_type|train_type) (?!(lora|full)\b)|--use_(dora|galore) true|--lisa_activated|"
    r"--(lora_ga|reft)_|--quant_method hqq|init_weights lora-ga"
)
_MODEL_NAMES = re.compile(r"--?model[: ]+\S+|model: \S+")
_NOT_TEXT = re.compile(
    r"(?i)\bVL\b|-VL\b|omni|ocr|audio|asr\b|tts|image|glyph|embed|rerank|internvl|intern-s|ovis|"
    r"minicpm-?v|keye|moss-|emu3|janus|4\.[56]v|voxtral|phi-4-multi|phi4_mm|deepseek-vl|diffusion|"
    r"gemma-?4-(e\d|12b)|nemotron-nano-12b-v2|cosmos|\bwan|stable|flux|ltx"
)


def ms_swift(folder: Path) -> Iterator[File]:
    """Yield the scripts of ms-swift's examples.

    In scope are pretraining and supervised fine-tuning of text models, in full, with LoRA or
    QLoRA. Out of scope are preferences and rewards, classification, embedding and ranking, other
    adapters, models of images and sound, inference, export and Ray.
    """
    root = folder / "modelscope+ms-swift"
    for path in sorted((root / "examples").rglob("*.sh")):
        text = path.read_text(encoding="utf-8", errors="replace")
        named = set(re.findall(r"(?:\./)?(examples/[\w./-]+\.(?:json|yaml))", text))
        files = {
            prefix + name: (root / name).read_text(encoding="utf-8")
            for name in named
            if (root / name).is_file()
            for prefix in ("", "./")
        }
        whole = text + "".join(files.values())
        trained = re.search(
            r"(?m)^[^#\n]*((megatron|swift)\s+(sft|pt)\b|swift/cli/\S*(sft|pt)\.py)", text
        )
        scope = ""
        if trained is None:
            scope = "no training, or one on preferences"
        elif "use_ray" in whole:
            scope = "started by Ray"
        elif _OTHER_TASKS.search(whole):
            scope = "another task"
        elif _TUNERS.search(whole):
            scope = "another adapter"
        elif _NOT_TEXT.search(" ".join((path.name, *_MODEL_NAMES.findall(whole)))):
            scope = "no text model"
        yield File(
            name=str(path.relative_to(root / "examples")), text=text, scope=scope, files=files
        )


_FENCED = re.compile(r"(?ms)^[ \t>]*```\w*[^\n]*\n(.*?)^[ \t>]*```")
_SERVES = re.compile(r"vllm\s+serve\b|vllm\.entrypoints|vllm/vllm-openai\S*\s+(--model|[\w-]+/)")
_PART_OF_A_COMMAND = re.compile(
    r"docker (pull|tag)\b|serve \.\.\.|\.\.\. vllm|^from vllm|serve [\"']?\$\{?[a-zA-Z]"
)


def vllm_recipes(folder: Path) -> Iterator[File]:
    """Yield the blocks of vLLM's recipes that start a server.

    In scope are complete commands for text models, by the tasks in a recipe or the model names
    on a page. Pulled images, programs, and `...` or an unset variable for a model are
    incomplete.
    """
    root = folder / "vllm-project+recipes"
    beside = {
        path.name: path.read_text(encoding="utf-8")
        for path in root.rglob("*.yaml")
        if path.parent != root and "models" not in path.parts
    }
    for path in sorted([*root.rglob("*.md"), *root.rglob("*.yaml")]):
        if any(part.startswith(".") for part in path.relative_to(root).parts):
            continue
        content = path.read_text(encoding="utf-8", errors="replace")
        tasks: set[str] | None = None
        texts = [content]
        if path.suffix == ".yaml":
            loaded = yaml.safe_load(content)
            if not isinstance(loaded, dict):
                continue
            tasks = set((loaded.get("meta") or {}).get("tasks") or ())
            texts = list(_strings(loaded))
        blocks = (block for text in texts for block in _FENCED.findall(text))
        for number, block in enumerate(each for each in blocks if _SERVES.search(each)):
            text_model = tasks <= {"text"} if tasks is not None else not _NOT_TEXT.search(path.name)
            scope = ""
            if not text_model or "--omni" in block or _NOT_TEXT.search(block):
                scope = "no text model"
            elif _PART_OF_A_COMMAND.search(block):
                scope = "no whole command"
            yield File(
                name=f"{path.relative_to(root)}#{number}",
                text=block,
                scope=scope,
                files=beside,
                given=LOAD,
            )


def _strings(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        for each in content.values():
            yield from _strings(each)
    elif isinstance(content, list):
        for each in content:
            yield from _strings(each)


def torchtitan(folder: Path) -> Iterator[File]:
    """Yield the configuration functions of torchtitan's models.

    All models except Flux, which draws images, are in scope.
    """
    root = folder / "pytorch+torchtitan" / "torchtitan" / "models"
    for path in sorted(root.glob("*/config_registry.py")):
        text = path.read_text(encoding="utf-8")
        for function in ast.parse(text).body:
            if isinstance(function, ast.FunctionDef) and function.returns is not None:
                returned = ast.unparse(function.returns)
                if returned.endswith("Trainer.Config") and not function.name.startswith("_"):
                    scope = "draws images" if path.parent.name == "flux" else ""
                    yield File(
                        name=f"{path.parent.name} {function.name}",
                        text=text,
                        scope=scope,
                        variables={"CONFIG": function.name},
                    )


SETS: dict[str, Callable[[Path], Iterator[File]]] = {
    "ms-swift": ms_swift,
    "vllm-recipes": vllm_recipes,
    "torchtitan": torchtitan,
}


def transformers() -> Iterator[tuple[str, str, str]]:
    """Yield each text model type of transformers, the outcome of its default configuration, and
    why.

    Outcomes: read (with the parameter count of the class or its language model), refused by
    mechanism, unknown (by name only), or no default (it cannot be built).
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers as library
    from transformers.models.auto import modeling_auto

    library.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    heads = {
        "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForImageTextToText": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    for model_type in sorted(set().union(*heads.values())):
        head = next(name for name, types in heads.items() if model_type in types)
        try:
            config = library.AutoConfig.for_model(model_type)
            read_model = catalog.model_from_mapping(config.to_dict())
        except HpToolError as error:
            unknown = re.search(r"is not supported(; did you mean[^;]*)?; supported", error.message)
            yield model_type, "unknown" if unknown else "refused", error.message
            continue
        except Exception as error:  # a default that the library itself rejects
            yield model_type, "no default", repr(error)
            continue
        names = ["AutoModelForPreTraining"] if model_type in ("bert", "megatron-bert") else [head]
        try:
            with torch.device("meta"):
                built = getattr(library, names[0]).from_config(config)
        except Exception as error:  # likewise
            yield model_type, "no default", repr(error)
            continue
        counts = _language_counts(built)
        counted = total_parameters(read_model)
        right = counted in counts
        why = "" if right else f"{counted:,.0f}, not one of {counts}"
        yield model_type, "read" if right else "wrong", why


def _language_counts(built: Any) -> list[int]:
    """Return the possible parameter counts of a model and of its language models."""
    holders = [
        built,
        *(each for name in ("model", "language_model") for each in _attribute(built, name)),
    ]
    heads = [
        parameter
        for holder in holders
        for name in ("lm_head", "projection_head")
        for part in _attribute(holder, name)
        for parameter in part.parameters()
    ]
    embedding = max((tuple(each.shape) for each in heads), default=None)
    counts = [_num_parameters(built.parameters())]
    for holder in holders:
        for inner in (*_attribute(holder, "language_model"), *_attribute(holder, "text_model")):
            counts.append(_num_parameters(inner.parameters()))
            counts.append(counts[-1] + _num_parameters(heads))
            own = (each for each in heads if tuple(each.shape) != embedding)
            counts.append(counts[-2] + _num_parameters(own))
    return counts


def _attribute(module: Any, name: str) -> list[Any]:
    part = getattr(module, name, None)
    return [] if part is None else [part]


def _num_parameters(parameters: Iterable[Any]) -> int:
    return sum(parameter.numel() for parameter in parameters)


UNMODELLED = "layers not modelled"
"""Outcome of a run in scope whose model has layers that are not modelled."""
_MECHANISM = re.compile(r"\bmodel \S+( is not supported)?: \w+ .*\b(layers?|attention|experts)\b")


def main() -> None:
    """Print the number of files with each outcome, for each set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds each repository as OWNER+NAME")
    parser.add_argument("--only", choices=(*SETS, "transformers"))
    parser.add_argument("--list", action="store_true", help="print what became of each")
    given = parser.parse_args()
    for name, files in SETS.items():
        if given.only not in (None, name):
            continue
        outcomes: Counter[str] = Counter()
        for file in files(given.folder):
            refusal = refusal_of(file)
            outcome = file.scope or ("refused" if refusal else "read")
            if not file.scope and _MECHANISM.search(refusal):
                outcome = UNMODELLED
            outcomes[outcome] += 1
            if given.list:
                print(f"{outcome:20} {file.name}  {refusal[:300]}")
        print_counts(name, outcomes)
    if given.only in (None, "transformers"):
        types: Counter[str] = Counter()
        for model_type, outcome, why in transformers():
            types[outcome] += 1
            if given.list or outcome == "wrong":
                print(f"{outcome:20} {model_type}  {why[:300]}")
        known = types["read"] + types["refused"]
        print(
            f"transformers: {known} of {types.total()} types read or refused by mechanism;", end=""
        )
        print(f" {dict(types)}")


def print_counts(name: str, outcomes: Mapping[str, int]) -> None:
    """Print the share of a set that is imported: of all files, and of files with modelled
    layers.
    """
    num_read, others = outcomes["read"], dict(outcomes)
    modelled = num_read + outcomes["refused"]
    whole = modelled + outcomes[UNMODELLED]
    for outcome in ("read", "refused", UNMODELLED):
        others.pop(outcome, None)
    shares = [f"{num_read / size:.0%} of {size}" for size in (whole, modelled) if size]
    print(f"{name}: {num_read} in scope read: {', '.join(shares)} (with modelled layers)")
    print(f"    out of scope: {others}")


if __name__ == "__main__":
    main()

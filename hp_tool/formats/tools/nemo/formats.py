"""Register the format of Megatron Bridge and NeMo."""

from collections.abc import Mapping

from hp_tool.domain.setups import TrainingSetup
from hp_tool.formats.reading import Reading
from hp_tool.formats.registry import Format, register
from hp_tool.formats.scripts import assignments
from hp_tool.formats.signs import Evidence, Sign, matches_pattern
from hp_tool.formats.source import Source
from hp_tool.formats.tools.nemo.launch import read_launch_command
from hp_tool.formats.tools.nemo.overrides import parse_override_list
from hp_tool.formats.tools.nemo.read import read
from hp_tool.formats.tools.nemo.write import overrides, text


def _is_its_file(evidence: Evidence) -> bool:
    model = evidence.content.get("model")
    if evidence.keys & {"language_model", "model_parallel"}:
        return True
    return isinstance(model, Mapping) and (
        bool(evidence.keys & {"train", "trainer", "ddp", "mixed_precision"})
        or any("tensor_model_parallel_size" in str(key) for key in model)
    )


def _contains_only_overrides(evidence: Evidence) -> bool:
    """Return True if the text contains only overrides, at least one of them with a Bridge key."""
    return any(
        word.text.lstrip("+").startswith(("model.", "train.", "ddp.", "comm_overlap."))
        for word in parse_override_list(evidence.text)
    )


def _read_any(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of a YAML file, of overrides, or of a launch command."""
    if source.mapping is not None or parse_override_list(source.text):
        read(source, reading)
    else:
        read_launch_command(source, reading)


def _layers_override(setup: TrainingSetup) -> list[str]:
    """Return the override for the number of layers, which the recipe sets otherwise."""
    return [f"model.num_layers={setup.model.num_hidden_layers}"]


_NEMO_RECIPE_REASON = (
    "a recipe of NeMo 2 by name (its settings stand in Python; import the YAML file it saves)"
)
register(
    Format(
        name="nemo",
        title="Megatron Bridge",
        signs=(
            Sign(place="keys", rank=70, matches=_is_its_file),
            Sign(place="script", rank=17, matches=_contains_only_overrides),
            Sign(
                place="script",
                rank=18,
                matches=matches_pattern(
                    r"run_recipe\.py|scripts/training/train\.sh|(?<!\S)--recipe[ =]"
                    r"|(setup_experiment|run_script)\.py[\s\S]*(--model_recipe_name|-mr)\b"
                ),
            ),
            Sign(
                place="script",
                rank=19,
                matches=matches_pattern(r"\bnemo\s+llm\s+\w+\s"),
                refused=_NEMO_RECIPE_REASON,
            ),
        ),
        read=_read_any,
        write=text,
        options=overrides,
        framework="megatron-core",
        logs=("megatron-lm",),
        file="nemo.py",
        flags=lambda setup: assignments(overrides(setup)),
        flags_name="megatron-bridge",
        fewer_layers=_layers_override,
        reads="YAML files of Megatron Bridge and NeMo, the name of a recipe or preset with "
        "overrides, or only overrides",
        writes="overrides of a Megatron Bridge recipe, 0.3 to 0.6; for LoRA, overrides of a "
        "PEFT recipe",
        checked="keys, choices and precision recipes recorded from Megatron Bridge's classes, "
        "fields of Megatron Core for the optimizer; read back by `import`",
    )
)

"""Register Megatron-LM's formats: a torchrun script, Slurm, Kubernetes, and --yaml-cfg."""

from hp_tool.domain.setups import TrainingSetup
from hp_tool.formats.megatron_names import PRINTED_ARGUMENTS
from hp_tool.formats.registry import Format, register
from hp_tool.formats.signs import Sign, has_any_key, has_key_near_top, matches_pattern
from hp_tool.formats.tools.megatron_lm.commands import read_source
from hp_tool.formats.tools.megatron_lm.scripts import (
    kubernetes_manifest,
    slurm_script,
    torchrun_script,
)
from hp_tool.formats.tools.megatron_lm.write import flags, loop_flags, yaml_text

_FLAGS = r"--(num[-_]layers|tensor[-_]model[-_]parallel[-_]size|hidden[-_]size|micro[-_]batch[-_]size|recompute[-_]granularity)\b"  # noqa: E501
_PROGRAMS = r"\bpretrain_(bert|gpt|hybrid|mamba|t5)\.py\b"


def flag_values(setup: TrainingSetup) -> dict[str, str]:
    """Return the flags of a configuration, each with its value as text.

    Raises:
        UnsupportedError: The flags cannot express it.
    """
    return {f"--{name}": " ".join(values) for name, values in flags(setup).items()}


def _flag_words(setup: TrainingSetup) -> list[str]:
    return [
        word
        for flag, values in (flags(setup) | loop_flags(setup)).items()
        for word in (f"--{flag}", *values)
    ]


register(
    Format(
        name="megatron-lm",
        title="Megatron-LM",
        place=0,
        signs=(
            Sign(
                place="text",
                rank=20,
                matches=lambda evidence: PRINTED_ARGUMENTS.search(evidence.text) is not None,
            ),
            Sign(place="script", rank=50, matches=matches_pattern(rf"{_FLAGS}|{_PROGRAMS}")),
        ),
        read=read_source,
        write=torchrun_script,
        options=flag_values,
        usual_of="megatron-core",
        framework="megatron-core",
        logs=("megatron-lm",),
        flags=_flag_words,
        says_shape=True,
        reads="a launch script, flags, the Job of a Kubernetes manifest, or a log that begins "
        "with Megatron's arguments; also of older releases and of Megatron-DeepSpeed",
        writes="a script that starts `pretrain_gpt.py` with torchrun, or `pretrain_mamba.py` "
        "for layers that differ",
        checked="configuration classes of Megatron Core 0.16 with their checks, assertions of "
        "its training loop from 0.16 to 0.19, GPTModel; `bash -n`; read back by "
        "`import`",
    )
)
register(
    Format(
        name="megatron-lm-yaml",
        title="Megatron-LM, as YAML",
        write=yaml_text,
        framework="megatron-core",
        file="megatron-lm.yaml",
        says_shape=True,
        writes="keys for `--yaml-cfg`; merge them into a copy of Megatron-LM's "
        "`gpt_config.yaml`, because this file must contain every key",
        checked="fields of TransformerConfig and ModelParallelConfig, by section; read back by "
        "`import` as `nemo`",
    )
)
register(
    Format(
        name="slurm",
        title="Slurm",
        write=slurm_script,
        framework="megatron-core",
        writes="an sbatch script that starts Megatron-LM",
        checked="`bash -n`; read back by `import`",
    )
)
register(
    Format(
        name="kubernetes",
        title="Kubernetes",
        signs=(
            Sign(place="keys", rank=25, matches=has_any_key("apiVersion"), refused="Kubernetes"),
            Sign(
                place="keys", rank=93, matches=has_key_near_top("apiVersion"), refused="Kubernetes"
            ),
        ),
        write=kubernetes_manifest,
        framework="megatron-core",
        writes="an Indexed Job with Megatron-LM's script, and its Service",
        checked="Kubernetes' schema; read back by `import`",
    )
)

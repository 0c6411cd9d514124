"""The format of axolotl."""

from hp_tool.formats import fine_tuning
from hp_tool.formats.registry import Format, register
from hp_tool.formats.signs import Sign, has_any_key, matches_pattern
from hp_tool.formats.tools.axolotl.read import read
from hp_tool.formats.tools.axolotl.write import text

register(
    Format(
        name="axolotl",
        title="Axolotl",
        signs=(
            Sign(place="keys", rank=50, matches=has_any_key("base_model")),
            Sign(
                place="script",
                rank=12,
                matches=matches_pattern(r"(?m)^[^#\n]*(?<![/\w-])axolotl(\.cli|\s+train)"),
                refused="a command of Axolotl (import the YAML file that it names)",
            ),
        ),
        logs=("trainer",),
        read=read,
        write=text,
        framework="hf-trainer",
        axes=fine_tuning.AXES,
        trained_weights="fp32",
        reads="axolotl's YAML file for FSDP, or with `--file ds.json` for DeepSpeed",
        writes="axolotl's YAML file for FSDP 2: full fine-tuning, LoRA or QLoRA",
        checked="the fields of axolotl 0.21's schemas; read back by `import`",
    )
)

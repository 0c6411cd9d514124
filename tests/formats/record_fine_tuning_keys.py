"""`python -m tests.formats.record_fine_tuning_keys FOLDER`: the settings that TRL and its like
know, as data.

FOLDER has unpacked wheels (`pip download --no-deps trl==1.16.0 llamafactory==0.9.5 axolotl==0.21.0
ms-swift==4.6.0`), each in a folder of its package's name, and `transformers` for the Trainer's own.
Nothing of them is imported: fields of their classes are read.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

DATA = Path(__file__).with_name("fine_tuning_keys.json")
SOURCES = {
    "trl": (
        "trl/trainer/base_config.py",
        "trl/trainer/sft_config.py",
        "trl/trainer/model_config.py",
        "trl/scripts/utils.py",
        "transformers/training_args.py",
    ),
    "llama-factory": ("llamafactory/hparams/*.py", "transformers/training_args.py"),
    "axolotl": ("axolotl/utils/schemas/**/*.py", "axolotl/integrations/*/args.py"),
    "ms-swift": (
        "swift/arguments/**/*.py",
        "swift/trainers/arguments.py",
        "swift/megatron/arguments/*.py",
    ),
}
"""Files whose classes hold a tool's settings."""


def fields(text: str) -> set[str]:
    classes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
    annotated = (line for each in classes for line in each.body if isinstance(line, ast.AnnAssign))
    return {line.target.id for line in annotated if isinstance(line.target, ast.Name)}


def record(folder: Path) -> dict[str, list[str]]:
    return {
        tool: sorted(
            {
                name
                for each in files
                for path in folder.glob(f"*/{each}")
                for name in fields(path.read_text())
            }
        )
        for tool, files in SOURCES.items()
    }


if __name__ == "__main__":
    versions = sorted(
        path.name.removesuffix(".dist-info") for path in Path(sys.argv[1]).glob("*/*.dist-info")
    )
    DATA.write_text(
        json.dumps({"source": versions, **record(Path(sys.argv[1]))}, separators=(",", ":")) + "\n"
    )

"""`python -m tests.formats.record_torchtitan_classes FOLDER`: what torchtitan's configuration
classes take, as data.

FOLDER has an unpacked wheel (`pip download --no-deps torchtitan==0.3.0`). Nothing of it is
imported: fields, parameters, choices and flavors are read in its source. Its own ConfigManager took
written modules once, on 2026-11-27, with stand-ins for Triton and data sets.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("torchtitan_classes.json")
QUANTIZED = ("Float8LinearConverter.Config", "MXFP8LinearConverter.Config")
PLACES = {
    "torchtitan.trainer": ("trainer.py", ("Trainer.Config",)),
    "torchtitan.config": (
        "config/configs.py",
        ("TrainingConfig", "ParallelismConfig", "CompileConfig"),
    ),
    "torchtitan.components.loss": (
        "components/loss.py",
        ("CrossEntropyLoss.Config", "ChunkedLossWrapper.Config"),
    ),
    "torchtitan.components.optimizer": ("components/optimizer/optimizer.py", ("default_adamw",)),
    "torchtitan.components.quantization": ("components/quantization/*.py", QUANTIZED),
    "torchtitan.distributed.activation_checkpoint": (
        "distributed/activation_checkpoint.py",
        ("FullAC.Config", "SelectiveAC.Config"),
    ),
    "torchtitan.hf_datasets.text_datasets": (
        "hf_datasets/text_datasets.py",
        ("HuggingFaceTextDataLoader.Config",),
    ),
    "torchtitan.models.common.config_utils": (
        "models/common/config_utils.py",
        ("decoder_vocab_size",),
    ),
    "torchtitan.models.llama3": ("models/llama3/__init__.py", ("model_registry",)),
    "torchtitan.models.qwen3": ("models/qwen3/__init__.py", ("model_registry",)),
    "torchtitan.models.deepseek_v3": ("models/deepseek_v3/__init__.py", ("model_registry",)),
}
"""By module, its file and what written configurations take from it."""


def taken(node: ast.AST) -> dict[str, list[Any]]:
    """Return the fields of a class, or the parameters of a function, each with its choices."""
    if isinstance(node, ast.FunctionDef):
        return {
            each.arg: _choices(each.annotation) for each in (*node.args.args, *node.args.kwonlyargs)
        }
    assert isinstance(node, ast.ClassDef)
    lines = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return {
        each.target.id: _choices(each.annotation)
        for each in lines
        if isinstance(each.target, ast.Name)
    }


def _choices(annotation: ast.expr | None) -> list[Any]:
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "Literal":
        return []
    choices = ast.literal_eval(annotation.slice)
    return list(choices) if isinstance(choices, tuple) else [choices]


def record(folder: Path) -> dict[str, Any]:
    modules: dict[str, Any] = {}
    flavors: dict[str, list[str]] = {}
    for module, (pattern, names) in PLACES.items():
        trees = [
            ast.parse(path.read_text()) for path in sorted((folder / "torchtitan").glob(pattern))
        ]
        tops = {
            each.name: each
            for tree in trees
            for each in tree.body
            if isinstance(each, ast.ClassDef | ast.FunctionDef)
        }
        nested = {
            f"{name}.{inner.name}": inner
            for name, each in tops.items()
            for inner in each.body
            if isinstance(inner, ast.ClassDef)
        }
        modules[module] = {name: taken((tops | nested)[name]) for name in names}
        for each in (line for tree in trees for line in tree.body if isinstance(line, ast.Assign)):
            if (
                module.startswith("torchtitan.models.")
                and isinstance(each.value, ast.Dict)
                and ast.unparse(each.targets[0]).endswith("_configs")
            ):
                flavors[module.rpartition(".")[2]] = [
                    ast.literal_eval(key) for key in each.value.keys if key is not None
                ]
    return {"modules": modules, "flavors": flavors}


if __name__ == "__main__":
    version = next(Path(sys.argv[1]).glob("torchtitan-*.dist-info")).name.removesuffix(".dist-info")
    DATA.write_text(
        json.dumps({"source": version, **record(Path(sys.argv[1]))}, separators=(",", ":")) + "\n"
    )

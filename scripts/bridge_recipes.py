"""Convert Megatron Bridge's library recipes to the table that `import` uses.

`python scripts/bridge_recipes.py CHECKOUT COMMIT` evaluates the assignments of the recipes in a
checkout's src/megatron/bridge/recipes without running them. It writes the settings that affect time
or memory, for models of the catalogue, to hp_tool/formats/tables/bridge-recipes.yaml. A recipe with
statements that the evaluator does not support is skipped and printed with the reason.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hp_tool import catalog

TABLE = Path(__file__).parents[1] / "hp_tool" / "formats" / "tables" / "bridge-recipes.yaml"
FAMILIES = (
    "deepseek",
    "gemma",
    "gpt",
    "gpt_oss",
    "kimi",
    "llama",
    "moonlight",
    "nemotronh",
    "olmoe",
    "qwen",
)
KEPT_KEYS = re.compile(
    r"model\.(tensor_model_parallel_size|(virtual_)?pipeline_model_parallel_size"
    r"|context_parallel_size|expert_(model|tensor)_parallel_size|sequence_parallel|seq_length"
    r"|pipeline_model_parallel_layout|account_for_\w+|num_layers_in_\w+|recompute_\w+"
    r"|cuda_graph_(impl|scope|modules)|cross_entropy_\w+|moe_token_dispatcher_type"
    r"|moe_flex_dispatcher_backend|moe_expert_capacity_factor|cp_comm_type|cpu_offloading\w*"
    r"|fine_grained_activation_offloading|attention_backend)"
    r"|train\.(global|micro)_batch_size"
    r"|ddp\.(use_distributed_optimizer|use_megatron_fsdp|data_parallel_sharding_strategy"
    r"|overlap_\w+|grad_reduce_in_fp32|num_distributed_optimizer_instances)"
    r"|optimizer\.(use_precision_aware_optimizer|\w+_dtype|optimizer_cpu_offload)"
    r"|comm_overlap\.(tp_comm_overlap|overlap_\w+)|mixed_precision(\.\w+)?"
    r"|peft\.(_target_|dim|dropout|target_modules)|dataset\.(seq_length|enable_offline_packing)"
)
"""Keys that affect time or memory."""


class UnreadError(Exception):
    """An expression in a recipe that the evaluator does not support."""


class Unknown:
    """An unsupported value of a key that affects neither time nor memory."""


UNKNOWN = Unknown()
DEFAULTS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
}
"""Default values of Megatron Core's classes."""
SHAPE_KEYS = (
    "ffn_hidden_size",
    "hidden_size",
    "moe_router_topk",
    "mtp_num_layers",
    "num_attention_heads",
    "num_layers",
    "num_moe_experts",
    "vocab_size",
)
"""Keys by which a recipe would change the shape of its model."""
PARTS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""Kinds of layers in a list of pipeline stages, and their letters in a layout."""


class Table(dict[str, Any]):
    """A mapping in a module, with its keys as text."""


class Evaluator:
    """Evaluate the assignments in a package's functions."""

    def __init__(self, root: Path) -> None:
        self.functions: dict[str, ast.FunctionDef] = {}
        self.constants: dict[str, ast.expr] = {}
        self.aliases: dict[str, str] = {}
        files = [
            root / "common.py",
            *(p for f in FAMILIES for p in sorted((root / f).rglob("*.py"))),
        ]
        for path in files:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef):
                    self.functions[node.name] = node
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    for target in targets:
                        if isinstance(target, ast.Name) and node.value is not None:
                            self.constants[target.id] = node.value
                elif isinstance(node, ast.ImportFrom):
                    for name in node.names:
                        if name.asname and name.name.endswith("_config"):
                            self.aliases[name.asname] = name.name

    def call(self, name: str, given: Mapping[str, Any], positional: list[Any]) -> dict[str, Any]:
        function = self.functions[name]
        arguments = function.args
        names = [arg.arg for arg in (*arguments.args, *arguments.kwonlyargs)]
        local: dict[str, Any] = {}
        defaults = arguments.defaults
        for argument, default in zip(
            arguments.args[len(arguments.args) - len(defaults) :], defaults, strict=True
        ):
            local[argument.arg] = self.value(default, local)
        for argument, other in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if other is not None:
                local[argument.arg] = self.value(other, local)
        local |= dict(zip(names, positional, strict=False)) | dict(given)
        result = self.block(function.body, local)
        if not isinstance(result, dict):
            raise UnreadError(f"{name} returns no configuration")
        return result

    def block(self, body: list[ast.stmt], local: dict[str, Any]) -> Any:
        for node in body:
            if isinstance(node, ast.Return):
                return None if node.value is None else self.value(node.value, local)
            if isinstance(node, ast.Assign | ast.AnnAssign):
                if node.value is None:
                    continue
                value = self.value(node.value, local)
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self.assign(target, value, local)
            elif isinstance(node, ast.If):
                test = self.value(node.test, local)
                if isinstance(test, Unknown):
                    raise UnreadError(f"if {ast.unparse(node.test)}")
                result = self.block(node.body if test else node.orelse, local)
                if result is not None:
                    return result
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self.effect(node.value, local)
            elif not isinstance(
                node, ast.Expr | ast.Pass | ast.Assert | ast.Import | ast.ImportFrom
            ):
                raise UnreadError(ast.unparse(node).splitlines()[0])
        return None

    def assign(self, target: ast.expr, value: Any, local: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            local[target.id] = value
        elif isinstance(target, ast.Tuple):
            for elt in target.elts:
                self.assign(elt, UNKNOWN, local)
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value, local)
            if isinstance(owner, dict):
                owner[target.attr] = value
            elif ast.unparse(target) == "cfg.mixed_precision.grad_reduce_in_fp32":
                # mixed_precision overrides ddp
                local["cfg"]["ddp"]["grad_reduce_in_fp32"] = value
            elif not isinstance(owner, Unknown):
                path = ast.unparse(target).partition(".")[2]
                if KEPT_KEYS.fullmatch(path):
                    raise UnreadError(ast.unparse(target))
        # assignments within a list or a mapping have no effect here

    def effect(self, call: ast.Call, local: dict[str, Any]) -> None:
        text = ast.unparse(call)
        name = text.partition("(")[0]
        values = [self.value(arg, local) for arg in call.args]
        if name == "apply_flex_dispatcher_backend":
            model, backend = values[0], values[1]
            if backend in ("deepep", "hybridep") and isinstance(model, dict):
                model |= {
                    "moe_token_dispatcher_type": "flex",  # for all GPUs that have recipes
                    "moe_flex_dispatcher_backend": backend,
                }
            elif backend is not None:
                raise UnreadError(text)
        elif name in self.functions:
            given = {
                keyword.arg: self.value(keyword.value, local)
                for keyword in call.keywords
                if keyword.arg
            }
            arguments = [arg.arg for arg in self.functions[name].args.args]
            self.block(
                self.functions[name].body, dict(zip(arguments, values, strict=False)) | given
            )
        elif any(isinstance(value, dict) for value in values):
            raise UnreadError(text)

    def value(self, node: ast.expr, local: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id in local:
                return local[node.id]
            return self.value(self.constants[node.id], {}) if node.id in self.constants else UNKNOWN
        if isinstance(node, ast.Attribute):
            if ast.unparse(node).startswith("torch."):
                return ast.unparse(node)
            owner = self.value(node.value, local)
            usual = DEFAULTS.get(node.attr, UNKNOWN)
            return owner.get(node.attr, usual) if isinstance(owner, dict) else UNKNOWN
        if isinstance(node, ast.Dict):
            pairs = [
                (self.value(key, local), self.value(each, local))
                for key, each in zip(node.keys, node.values, strict=True)
                if key is not None
            ]
            return Table({str(key): each for key, each in pairs})
        if isinstance(node, ast.Subscript):
            owner, key = self.value(node.value, local), self.value(node.slice, local)
            return owner.get(str(key), UNKNOWN) if isinstance(owner, Table) else UNKNOWN
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(elt, local) for elt in node.elts]
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                found = self.value(value, local)
                if isinstance(found, Unknown):
                    return UNKNOWN
                if bool(found) == isinstance(node.op, ast.Or):
                    return found
            return found
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            found = self.value(node.operand, local)
            return UNKNOWN if isinstance(found, Unknown) else not found
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self.compared(node, local)
        if isinstance(node, ast.BinOp):
            return self.computed(node, local)
        if isinstance(node, ast.Call):
            return self.called(node, local)
        return UNKNOWN

    def compared(self, node: ast.Compare, local: Mapping[str, Any]) -> Any:
        left, right = self.value(node.left, local), self.value(node.comparators[0], local)
        if isinstance(left, Unknown) or isinstance(right, Unknown):
            return UNKNOWN
        operator = node.ops[0]
        if isinstance(operator, ast.Is | ast.Eq):
            return left == right
        if isinstance(operator, ast.IsNot | ast.NotEq):
            return left != right
        if isinstance(operator, ast.In | ast.NotIn):
            found = str(left) in right if isinstance(right, Table) else left in right
            return found == isinstance(operator, ast.In)
        if isinstance(operator, ast.Gt):
            return left > right
        return UNKNOWN

    def computed(self, node: ast.BinOp, local: Mapping[str, Any]) -> Any:
        left, right = self.value(node.left, local), self.value(node.right, local)
        if isinstance(left, list) and isinstance(node.op, ast.Mult | ast.Add):
            return left * right if isinstance(node.op, ast.Mult) else left + right
        if not isinstance(left, int) or not isinstance(right, int):
            return UNKNOWN
        return left * right if isinstance(node.op, ast.Mult) else UNKNOWN

    def called(self, node: ast.Call, local: Mapping[str, Any]) -> Any:
        text = ast.unparse(node.func)
        name = text.rpartition(".")[2]
        given = {
            keyword.arg: self.value(keyword.value, local)
            for keyword in node.keywords
            if keyword.arg
        }
        positional = [self.value(arg, local) for arg in node.args]
        if text == "isinstance" and ast.unparse(node.args[1]) == "str":
            return isinstance(positional[0], str)
        if name == "lower" and isinstance(node.func, ast.Attribute):
            found = self.value(node.func.value, local)
            return found.lower() if isinstance(found, str) else UNKNOWN
        if name == "get" and isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, local)
            key, *other = positional
            default = other[0] if other else None
            return owner.get(str(key), default) if isinstance(owner, Table) else UNKNOWN
        if name == "cast":
            return positional[1]
        if name in ("get_model_config", "to_megatron_provider"):
            assert isinstance(node.func, ast.Attribute)
            return self.value(node.func.value, local)
        if name in ("from_hf_pretrained", "from_hf_config"):
            return {"_hf_": positional[0]} if positional else UNKNOWN
        if name.endswith("_mixed") and not positional:
            return name
        if name == "get_mixed_precision_config":
            return positional[0]
        if name in ("default_squad_config", "default_peft_config"):
            if name == "default_peft_config":
                kind = positional[0] if positional else given.get("peft_scheme")
                if kind != "lora":
                    raise UnreadError(ast.unparse(node))
                return {"_target_": "megatron.bridge.peft.lora.LoRA"} | given
            return given
        if name == "LoRA":
            return {"_target_": "megatron.bridge.peft.lora.LoRA"} | given
        if name in self.functions and (name.startswith("_") or name.endswith("_config")):
            return self.call(name, given, positional)
        if name == "ConfigContainer" or name.endswith("Config"):
            return given
        return UNKNOWN


def flatten_configuration(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the kept keys of a configuration by dotted name."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= flatten_configuration(value, f"{path}.")
        elif KEPT_KEYS.fullmatch(path):
            if isinstance(value, Unknown) or (
                isinstance(value, list) and any(isinstance(each, Unknown) for each in value)
            ):
                raise UnreadError(f"{path} is computed")
            found[path] = value
    return found


def table_entry(content: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's line of the table."""
    model = content.get("model")
    path = model.get("_hf_") if isinstance(model, dict) else None
    if not isinstance(path, str) or not catalog.has_entry("models", path.lower()):
        raise UnreadError("the catalogue does not have its model")
    assigned = {key: model[key] for key in SHAPE_KEYS if key in model}
    own = catalog.model(path.lower())
    usual = {"mtp_num_layers": own.num_nextn_predict_layers or 0}
    if changed := [key for key, value in assigned.items() if (value or 0) != usual.get(key)]:
        raise UnreadError(f"changes its model: {', '.join(changed)}")
    keys = flatten_configuration(content)
    if keys.pop("dataset.enable_offline_packing", False):
        keys["packed"] = True
    keys["ddp.use_distributed_optimizer"] = True  # consistent with the optimizer of all recipes
    length = keys.pop("dataset.seq_length", None)
    keys.setdefault("model.seq_length", length)
    if keys["model.seq_length"] is None:
        raise UnreadError("no length of a sequence")
    keys = {key: value for key, value in keys.items() if value is not None}
    layout = keys.get("model.pipeline_model_parallel_layout")
    if isinstance(layout, list):
        stages = ["".join(PARTS[layer] for layer in stage) for stage in layout]
        keys["model.pipeline_model_parallel_layout"] = "|".join(stages)
    return {"model": catalog.model(path.lower()).name, **keys}


def layout_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(layout_text, value))}]"
    text = str(value)
    return text if re.fullmatch(r"[\w.+-]+", text) else f"'{text}'"


HEAD = """\
# Megatron Bridge's library recipes of models that the catalogue has, by the name of their function, and the names that stand for
# them: keys of ConfigContainer that decide time or memory. Facts of src/megatron/bridge/recipes of NVIDIA-NeMo/Megatron-Bridge at
# {commit}, by `python scripts/bridge_recipes.py CHECKOUT COMMIT`; change the script, not this file.
"""  # noqa: E501


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("commit")
    options = parser.parse_args()
    evaluator = Evaluator(options.checkout / "src/megatron/bridge/recipes")
    lines, left_out = [], {}
    for name in sorted(evaluator.functions):
        if not name.endswith("_config") or name.startswith("_"):
            continue
        try:
            found = table_entry(evaluator.call(name, {}, []))
        except UnreadError as error:
            left_out[name] = str(error)
            continue
        words = ", ".join(f"{key}: {layout_text(value)}" for key, value in found.items())
        lines.append(f"  {name}: {{{words}}}")
    known = {line.split(":")[0].strip() for line in lines}
    aliases = [
        f"  {alias}: {name}" for alias, name in sorted(evaluator.aliases.items()) if name in known
    ]
    TABLE.write_text(
        "\n".join(
            [HEAD.format(commit=options.commit) + "recipes:", *lines, "aliases:", *aliases, ""]
        )
    )
    for name, why in left_out.items():
        print(f"{name}: {why}")
    print(f"{len(lines)} recipes, {len(aliases)} aliases; {len(left_out)} skipped")


if __name__ == "__main__":
    main()

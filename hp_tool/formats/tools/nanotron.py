"""Read and write nanotron 0.4's YAML file for run_train.py (src/nanotron/config)."""

import math
import re
from typing import Any

from hp_tool.domain.declared import BATCH_FIELDS, parse_names
from hp_tool.domain.setups import TrainingSetup
from hp_tool.errors import UnsupportedError
from hp_tool.formats.reading import Reading, Settings, as_settings, key_values, sort_settings, table
from hp_tool.formats.registry import Format, register
from hp_tool.formats.scripts import FILL, fill_in_comment
from hp_tool.formats.signs import Sign
from hp_tool.formats.source import Source
from hp_tool.formats.tools.megatron_lm.scripts import published_flags
from hp_tool.formats.writing import DTYPES, headline, reject_inexpressible

TOOL = "nanotron 0.4"
_MODEL_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
    "max_position_embeddings",
)
"""Model fields with the same name under model.model_config."""
_RENAMED_KEYS = {"num_key_value_heads": "kv_heads", "intermediate_size": "ffn_size"}
"""Fields that may be unset, and the names of their resolved values."""
_EXPERT_KEYS = re.compile(r"^model\..*(?:[.-]moe[.-]|[.-]moe$|num-(?:local-)?experts$)")
_OFF_VALUES = ("", "0", "1", "none", "null", "false")
"""Values of these keys in a dense model."""
EXPRESSED_FIELDS = BATCH_FIELDS | parse_names("""
    gradient_precision tensor_parallel_size pipeline_parallel_size expert_parallel_size
    context_parallel_size sequence_parallel gated_mlp normalization position_embedding head_dim
    attention_bias mlp_bias
""").union(_MODEL_KEYS)
_USER_KEYS = (
    ("general:", "project and run"),
    ("  train_steps:", "how long it trains"),
    ("  learning_rate_scheduler:", "learning rate and schedule"),
    ("tokenizer:", "the tokenizer"),
    ("data_stages:", "the data (null: random tokens, which start at once)"),
    ("checkpoints:", "where checkpoints go"),
)
"""First lines of the sections that the user fills in, with values that allow a run to start."""


def config(setup: TrainingSetup) -> dict[str, Any]:
    """Return the content of the YAML file.

    Raises:
        UnsupportedError: nanotron does not support the setup.
    """
    reject_inexpressible(setup, tool=TOOL, expressed=EXPRESSED_FIELDS, runs="nanotron")
    m, c, w = setup.model, setup.parallel, setup.workload
    plain = (
        m.head_size * m.num_attention_heads == m.hidden_size
        and not m.has_attention_bias
        and not m.has_mlp_bias
    )
    if not (plain and m.gated_mlp and m.normalization == "rmsnorm" and m.positions == "rotary"):
        raise UnsupportedError(
            f"{TOOL}'s Llama model cannot express the architecture of {m.name}", field="model"
        )
    gradients = w.gradient_precision or "fp32"
    if w.precision != "bf16" or gradients not in ("fp32", "bf16") or c.zero_stage > 1:
        raise UnsupportedError(
            f"{TOOL} trains in bf16, accumulates gradients in fp32 or bf16, and "
            "supports zero_stage 0 and 1",
            field="training.precision",
        )
    if setup.recomputes_by_layer is None:
        raise UnsupportedError(
            f"{TOOL} recomputes whole layers or nothing; set parallel.recompute to none or full",
            field="parallel.recompute",
        )
    flags, _ = published_flags(setup)
    rotary = {"rope_theta": "rotary-base", "rms_norm_eps": "norm-epsilon"}
    scattered = c.sequence_parallel and c.tensor_parallel_size > 1
    return {
        "general": {"project": "hp-tool", "run": "exported", "seed": 42},
        "parallelism": {
            "dp": c.data_parallel_size,
            "tp": c.tensor_parallel_size,
            "pp": c.pipeline_parallel_size,
            "context_parallel_size": c.context_parallel_size,
            "expert_parallel_size": c.expert_parallel_size,
            "pp_engine": "1f1b",
            "tp_mode": "REDUCE_SCATTER" if scattered else "ALL_REDUCE",
            "tp_linear_async_communication": scattered,
            "recompute_layer": setup.recomputes_by_layer,
        },
        "tokens": {
            "micro_batch_size": c.micro_batch_size,
            "sequence_length": w.sequence_length,
            "batch_accumulation_per_replica": setup.accumulation_steps,
            "train_steps": 1000,
        },
        "model": {
            "dtype": "bfloat16",
            "init_method": {"std": 0.02},
            "make_vocab_size_divisible_by": 1,
            "model_config": {
                **{name: getattr(m, _RENAMED_KEYS.get(name, name)) for name in _MODEL_KEYS},
                "max_position_embeddings": max(m.max_position_embeddings or 0, w.sequence_length),
                **{key: float(flags[flag][0]) for key, flag in rotary.items() if flag in flags},
                "is_llama_config": True,
                "hidden_act": "silu",
                "rope_interleaved": False,
            },
        },
        "optimizer": {
            "zero_stage": c.zero_stage,
            "accumulate_grad_in_fp32": gradients == "fp32",
            "weight_decay": 0.1,
            "clip_grad": 1.0,
            "optimizer_factory": {
                "name": "adamW",
                "adam_beta1": 0.9,
                "adam_beta2": 0.95,
                "adam_eps": 1e-8,
                "torch_adam_is_fused": True,
            },
            "learning_rate_scheduler": {
                "learning_rate": 3e-4,
                "lr_warmup_steps": 100,
                "lr_warmup_style": "linear",
                "lr_decay_style": "cosine",
                "min_decay_lr": 3e-5,
            },
        },
        "tokenizer": {"tokenizer_name_or_path": "gpt2"},
        "data_stages": [
            {
                "name": "stable",
                "start_training_step": 1,
                "data": {"dataset": None, "num_loading_workers": 1, "seed": 42},
            }
        ],
        "checkpoints": {"checkpoint_interval": 1000, "checkpoints_path": "checkpoints"},
        "logging": {
            "iteration_step_info_interval": 1,
            "log_level": "info",
            "log_level_replica": "info",
        },
    }


def text(setup: TrainingSetup) -> str:
    """Return the file for `run_train.py --config-file`.

    A comment at the top lists the values that the user fills in.
    """
    import yaml

    flags, lacking = published_flags(setup)
    lacking += ("rope_scaling",) if "use-rope-scaling" in flags else ()
    yours = list(_USER_KEYS)
    if lacking:
        yours.append(
            ("    is_llama_config:", f"what the model is trained with: {', '.join(lacking)}")
        )
    head = [
        f"# {TOOL}: {headline(setup)}; CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes "
        f"{setup.cluster.num_nodes} "
        f"--nproc-per-node {setup.processes_per_node} run_train.py --config-file THIS.",
        *fill_in_comment(what for _, what in yours),
    ]
    lines = yaml.safe_dump(config(setup), sort_keys=False).splitlines()
    for number, (start, what) in enumerate(yours, 1):
        place = next(i for i, line in enumerate(lines) if line.startswith(start))
        lines[place] += f"  # {FILL} {number}: {what}"
    return "\n".join((*head, *lines, ""))


def read(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of a nanotron file."""
    content, num_gpus = source.keys(reading), reading.num_gpus
    by_name = sort_settings(
        as_settings(content, lines=source.text),
        table=table("nanotron"),
        reading=reading,
        spare=source.ignore,
    )
    settings = Settings(by_name)
    text_of, whole_number, is_on = settings.text, settings.whole_number, settings.is_on
    degrees = [whole_number(f"parallelism.{name}") for name in ("dp", "tp", "pp")]
    context, experts = (
        whole_number("parallelism.context-parallel-size"),
        whole_number("parallelism.expert-parallel-size"),
    )
    if any(
        missing_field.field == "cluster.num_gpus" for missing_field in reading.missing
    ):  # The number of GPUs determines the number of replicas.
        degrees[0] = max((num_gpus or 1) // math.prod((*degrees[1:], context, experts)), 1)
    reading.num_gpus = num_gpus or math.prod((*degrees, context, experts))
    micro, steps = (
        whole_number("tokens.micro-batch-size"),
        whole_number("tokens.batch-accumulation-per-replica"),
    )
    model: dict[str, Any] = {
        "normalization": "rmsnorm",
        "gated_mlp": True,
        "position_embedding": "rotary",
        "mlp_bias": False,
        "attention_bias": is_on("model.model-config.attention-bias"),
    }
    if text_of("model.model-config.sliding-window-size"):
        reading.refuse("model.model_config.sliding_window_size: windows are not supported")
    schedule = text_of("parallelism.pp-engine", "1f1b")
    if degrees[2] > 1 and schedule.lower() not in ("1f1b", "oneforwardonebackwardpipelineengine"):
        reading.refuse(f"parallelism.pp_engine {schedule} is not supported; supported: 1f1b")
    for field in _MODEL_KEYS:
        name = f"model.model-config.{field.replace('_', '-')}"
        if field == "tie_word_embeddings":
            model[field] = is_on(name)
        elif name in by_name:
            model[field] = whole_number(name)
        elif field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            reading.add_missing(
                f"model.{field}", f"model.model_config.{field} is missing; add", example="..."
            )
    of_experts = [
        each
        for name, each in by_name.items()
        if _EXPERT_KEYS.search(name) and each.text not in _OFF_VALUES
    ]
    if of_experts:
        reading.refuse(f"{of_experts[0].written}: experts are not supported for nanotron")
    mode, dtype = (
        text_of("parallelism.tp-mode", "ALL_REDUCE").upper(),
        text_of("model.dtype", "bfloat16"),
    )
    if mode not in ("ALL_REDUCE", "REDUCE_SCATTER"):
        reading.refuse(
            f"parallelism.tp_mode {mode} is not supported; supported: ALL_REDUCE, REDUCE_SCATTER"
        )
    if dtype not in DTYPES.values():
        reading.refuse(
            f"model.dtype {dtype} is not supported; supported: {', '.join(DTYPES.values())}"
        )
    scattered = mode == "REDUCE_SCATTER"
    reading.query = {
        "kind": "training",
        "model": model,
        "training": {
            "sequence_length": whole_number("tokens.sequence-length", 2048),
            "global_batch_size": micro * steps * degrees[0],
            "precision": next(
                (precision for precision, theirs in DTYPES.items() if theirs == dtype), "bf16"
            ),
            "framework": "nanotron",
            **(
                {}
                if is_on("optimizer.accumulate-grad-in-fp32", default=True)
                else {"gradient_precision": "bf16"}
            ),
        },
        "parallel": {
            "tensor_parallel_size": degrees[1],
            "pipeline_parallel_size": degrees[2],
            "micro_batch_size": micro,
            "sequence_parallel": scattered and degrees[1] > 1,
            "recompute": "full" if is_on("parallelism.recompute-layer") else "none",
            "zero_stage": whole_number("optimizer.zero-stage", 0),
            **({"context_parallel_size": context} if context > 1 else {}),
        },
    }


register(
    Format(
        name="nanotron",
        signs=(
            Sign(
                place="keys",
                rank=40,
                matches=lambda evidence: {"parallelism", "tokens"} <= evidence.keys,
            ),
        ),
        read=read,
        write=text,
        options=lambda setup: key_values(config(setup)),
        usual_of="nanotron",
        framework="nanotron",
        axes={"zero_stage": (0, 1), "virtual_pipeline_parallel_size": 1},
        reads="nanotron's YAML file",
        writes="nanotron's YAML file for its Llama model, with random tokens as data",
        checked="the source of nanotron's configuration classes (the tests do not install "
        "nanotron); read back by `import`",
    )
)

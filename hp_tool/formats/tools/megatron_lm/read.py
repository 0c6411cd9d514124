"""Read Megatron-LM's pretrain_gpt.py arguments, also of old releases and Megatron-DeepSpeed."""

import math
import re
from collections.abc import Iterable
from typing import Any, get_args

from hp_tool.domain.parallel import TokenDispatcher
from hp_tool.domain.pipeline_layout import chunk_layers, parse_layout
from hp_tool.domain.workload import GraphModule
from hp_tool.errors import InputError
from hp_tool.formats.reading import (
    Ignored,
    Reading,
    Setting,
    parse_whole_number,
    sort_settings,
    table,
)
from hp_tool.formats.tools.megatron_lm import words
from hp_tool.formats.tools.megatron_lm.arguments import TABLE, Arguments
from hp_tool.formats.tools.megatron_lm.hybrid import PATTERN_FLAGS, with_pattern_counts

_ALIASES = {
    "model-parallel-size": "tensor-model-parallel-size",
    "batch-size": "micro-batch-size",
    "encoder-seq-length": "seq-length",
    "encoder-num-layers": "num-layers",
    "topk": "moe-router-topk",
    "moe-expert-parallel-size": "expert-model-parallel-size",
    "moe-train-capacity-factor": "moe-expert-capacity-factor",
    "use-custom-fsdp": "use-megatron-fsdp",
    "activations-checkpoint-method": "recompute-method",
    "activations-checkpoint-num-layers": "recompute-num-layers",
    "checkpoint-num-layers": "recompute-num-layers",
    "rotary-position-embeddings": "use-rotary-position-embeddings",
    "pad-vocab-size-to": "padded-vocab-size",
}
"""Older names of arguments, and the current ones."""
_DEEPSPEED_FLAGS = ("deepspeed", "zero-stage")
"""Arguments of Megatron-DeepSpeed."""
OLDER_FLAGS = (
    "checkpoint-activations",
    "activations-checkpoint-method",
    "DDP-impl",
    "model-parallel-size",
    *_DEEPSPEED_FLAGS,
)
"""Arguments of releases that have only the local layer implementation. A separate flag enables
fused attention there.
"""
OTHER_PROGRAMS = {
    "bert": "an encoder",
    "t5": "an encoder-decoder model",
    "ict": "a retriever",
    "retro": "a model with retrieval",
    "vision": "a vision model",
    "vlm": "a model of images and text",
    "multimodal": "a model of images and text",
    "mimo": "a model of images and text",
    "llava": "a model of images and text",
    "rl": "reinforcement learning",
    "vit": "a vision model",
    "clip": "a vision model",
    "orm": "a reward model",
    "dpo": "preference training",
}
"""Unsupported training programs: what they train, by a part of their name."""


def read_arguments(
    settings: Iterable[Setting],
    *,
    reading: Reading,
    num_gpus: int | None,
    spare: Iterable[str] = (),
) -> None:
    """Fill the reading with the query of the arguments; absent ones have Megatron's defaults."""
    by_name = sort_settings(settings, table=table(TABLE), reading=reading, spare=spare)
    reader = _ArgumentReader(
        with_pattern_counts({_ALIASES.get(name, name): each for name, each in by_name.items()}),
        reading,
        num_gpus,
        older=any(name in by_name for name in OLDER_FLAGS),
    )
    sections = {
        "model": reader.model_fields(),
        "training": reader.training_fields(),
        "parallel": reader.parallel_fields(),
    }
    reading.query = {"kind": "training"} | {
        name: {key: value for key, value in each.items() if value is not None}
        for name, each in sections.items()
    }


def recompute_value(
    granularity: str,
    *,
    modules: Iterable[str] = ("core_attn",),
    method: str = "uniform",
    num_layers: int = 1,
) -> str | dict[str, Any]:
    """Return `parallel.recompute` for Megatron's recomputation arguments."""
    if granularity == "selective" and (names := list(modules)) != ["core_attn"]:
        return {"granularity": "selective", "modules": names}
    if granularity == "full" and (method, num_layers) != ("uniform", 1):
        return {"granularity": "full", "method": method, "num_layers": num_layers}
    return granularity


_KNOWN_SPECS = (
    r"gpt_layer_specs|mamba_layer_specs mamba_stack_spec|hybrid_layer_specs hybrid_stack_spec"
)
"""Specs of Megatron Core's own layers."""


class _ArgumentReader(Arguments):
    """Reads the model, training and parallelism fields of a query from Megatron-LM's arguments."""

    def parallel_fields(self) -> dict[str, Any]:
        tensor, stages = (
            self.number("tensor-model-parallel-size", 1),
            self.number("pipeline-model-parallel-size", 1),
        )
        ulysses = self.number("ds-sequence-parallel-size", 1)
        chunks, context = self.chunks_per_rank(), self.number("context-parallel-size", ulysses)
        experts = self.has_experts()
        communication = (
            "a2a" if ulysses > 1 else self.context_communication() if context > 1 else None
        )
        sizes = self.settings.get("hierarchical-context-parallel-sizes")
        return {
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": stages,
            "virtual_pipeline_parallel_size": chunks,
            "context_parallel_size": context,
            "micro_batch_size": self.number("micro-batch-size"),
            "sequence_parallel": self.is_given("sequence-parallel") and tensor > 1,
            "recompute": self.recompute(),
            "zero_stage": self.zero_stage(),
            "data_parallel_shard_size": self.shard_size(),
            "rank_order": "tp-cp-ep-pp-dp" if self.is_given("use-tp-pp-dp-mapping") else None,
            "pipeline_layout": self.get_text(words.LAYOUT_FLAG, "")
            or self.uneven_layout(stages=stages, chunks=chunks),
            "context_parallel_communication": communication,
            "hierarchical_context_parallel_sizes": [int(v) for v in sizes.values if v.isdecimal()]
            if sizes and communication == "a2a+p2p"
            else None,
            "expert_parallel_size": self.number("expert-model-parallel-size", 1)
            if experts
            else None,
            "expert_tensor_parallel_size": self.expert_tensor_size(tensor) if experts else None,
            "moe_token_dispatcher_type": self.dispatcher(tensor) if experts else None,
        }

    def has_experts(self) -> bool:
        """Return True if the model has experts, or if expert parallelism implies them."""
        return bool(self.num_experts()) or self.number("expert-model-parallel-size", 1) > 1

    def expert_tensor_size(self, tensor: int) -> int:
        """Return the expert tensor-parallel size.

        Megatron-DeepSpeed shards experts only with a flag.
        """
        return self.number(
            "expert-tensor-parallel-size",
            tensor if not self.older or self.is_given("enable-expert-tensor-parallelism") else 1,
        )

    def context_communication(self) -> str:
        text = self.get_text("cp-comm-type", "p2p")
        for kind, values in words.CONTEXT.items():
            if text.lower() in values:
                return kind
        self.refuse("cp-comm-type", f"not supported; supported: {', '.join(words.CONTEXT)}")
        return "p2p"

    def num_replicas(self) -> int:
        names = (
            "tensor-model-parallel-size",
            "pipeline-model-parallel-size",
            "context-parallel-size",
            "ds-sequence-parallel-size",
        )
        return max(self.num_gpus // math.prod(max(self.number(name, 1), 1) for name in names), 1)

    def shard_size(self) -> int | None:
        copies = self.number("num-distributed-optimizer-instances", 1)
        context = self.number("context-parallel-size", 1)
        if copies > 1 and not self.num_gpus:
            self.reading.add_missing(
                "parallel.data_parallel_shard_size",
                f"{copies} copies of the sharded states share the devices, whose number is "
                "not set; add",
                example="...",
            )
            return None
        return self.num_replicas() * context // copies // context if copies > 1 else None

    def chunks_per_rank(self) -> int:
        stages = max(self.number("pipeline-model-parallel-size", 1), 1)
        if layout := self.get_text(words.LAYOUT_FLAG, ""):
            return max(len(parse_layout(layout).chunks) // stages, 1)
        if len(self.stage_patterns()) > 1:
            return max(len(self.stage_patterns()) // stages, 1)
        if self.is_given("num-layers-per-virtual-pipeline-stage"):
            ends = int(self.is_given(words.WITH_EMBEDDING)) + int(self.is_given(words.WITH_LOSS))
            per_round = self.number("num-layers-per-virtual-pipeline-stage") * stages
            return max((self.number("num-layers") + ends) // max(per_round, 1), 1)
        return self.number("num-virtual-stages-per-pipeline-rank", 1)

    def zero_stage(self) -> int:
        stages = {"no_shard": 0, "optim": 1} | {
            name: stage for stage, name in words.SHARDING.items()
        }
        if self.is_given("zero-stage"):
            return self.number("zero-stage")
        if self.is_given("use-torch-fsdp2"):
            return 2 if self.is_given("torch-fsdp2-no-reshard-after-forward") else 3
        if self.is_given("use-megatron-fsdp"):
            name = self.get_text("data-parallel-sharding-strategy", "no_shard")
            if name not in stages:
                raise InputError(
                    f"--data-parallel-sharding-strategy {name} is unknown; choose one of: "
                    f"{', '.join(stages)}",
                    field="--data-parallel-sharding-strategy",
                )
            return stages[name]
        return int(self.is_given("use-distributed-optimizer"))

    def recompute(self) -> str | dict[str, Any]:
        if self.is_given(
            "checkpoint-activations", "deepspeed-activation-checkpointing"
        ) and not self.is_given("recompute-granularity", "recompute-method"):
            return recompute_value("full", num_layers=self.number("recompute-num-layers", 1))
        default = (
            "selective"
            if self.is_given("recompute-activations")
            else "full"
            if self.older and self.is_given("recompute-method")
            else "none"
        )
        granularity = self.get_text("recompute-granularity", default)
        if granularity == "none" and self.is_given("moe-layer-recompute"):
            return {"granularity": "selective", "modules": ["moe"]}
        if granularity == "selective":
            setting = self.settings.get("recompute-modules")
            return recompute_value(
                "selective", modules=setting.values if setting else ["core_attn"]
            )
        if granularity != "full":
            return granularity
        method, count = (
            self.get_text("recompute-method", "uniform"),
            self.number("recompute-num-layers", 1),
        )
        return recompute_value("full", method=method, num_layers=count)

    def training_fields(self) -> dict[str, Any]:
        aware = self.is_given("use-precision-aware-optimizer")
        first, second = (
            self.get_text(f"exp-avg{moment}-dtype", "fp32") if aware else "fp32"
            for moment in ("", "-sq")
        )
        capacity = self.is_given("moe-expert-capacity-factor") and not self.is_given(
            "disable-moe-token-dropping"
        )
        narrow = self.is_given("grad-reduce-in-bf16") or (
            aware and self.get_text("main-grads-dtype", "fp32") == "bf16"
        )
        narrow |= self.is_given("fp16") and not self.is_given(
            "accumulate-allreduce-grads-in-fp32"
        )  # --bf16 accumulates gradients in fp32 by default.
        attention = self.attention()
        unfused = self.is_given("no-masked-softmax-fusion") and self.is_given(
            "no-bias-dropout-fusion"
        )
        offload, fraction = self.offload_fields()
        return {
            "sequence_length": self.number("seq-length"),
            "global_batch_size": self.global_batch_size(),
            "precision": self.precision(),
            "fp8_recipe": self.fp8_recipe(),
            "parameter_precision": self.parameter_precision(),
            "cuda_graphs": self.cuda_graphs(),
            "cuda_graph_modules": self.cuda_graph_modules(),
            "framework": "megatron-deepspeed"
            if self.is_given(*_DEEPSPEED_FLAGS)
            else "megatron-core",
            "framework_version": "0.17"
            if self.is_given(PATTERN_FLAGS[0])
            else None,  # First release with this flag.
            "attention": attention,
            "kernel_fusion": False if unfused else None,
            "dropout": max(
                self.decimal("attention-dropout", 0.1), self.decimal("hidden-dropout", 0.1)
            ),
            "optimizer": self.optimizer(),
            "cross_entropy": self.cross_entropy(),
            "overlap": self.overlap() or None,
            "gradient_precision": "bf16" if narrow else "fp32",
            "optimizer_precision": first,
            "exp_avg_sq_precision": second if second != first else None,
            "master_precision": "fp16"
            if aware and self.get_text("main-params-dtype", "fp32") == "fp16"
            else None,
            "offload": offload,
            "offload_fraction": fraction,
            "task": "sft" if self.is_given("sft") else None,
            "expert_capacity_factor": self.decimal("moe-expert-capacity-factor", 1.0)
            if capacity
            else None,
        }

    def global_batch_size(self) -> int:
        """Return the global batch size. With a ramp-up schedule, this is the final size."""
        name = "step-batch-size-schedule"
        if not self.is_given(name):
            default = self.num_replicas() * self.number("micro-batch-size")
            return self.number("global-batch-size", default)
        if self.is_given("global-batch-size"):
            self.refuse(name, "Megatron does not start with --global-batch-size too; remove one")
        size = self.settings[name].text.rpartition(":")[2]
        return parse_whole_number(size, f"--{name}")

    def optimizer(self) -> str:
        name = self.get_text("optimizer", "adam").removeprefix("dist_")
        if name not in ("adam", "sgd", "muon"):
            self.refuse("optimizer", "not supported; supported: adam, sgd, muon")
        return name

    def offload_fields(self) -> tuple[str, float | None]:
        layers = self.number("cpu-offloading-num-layers", 0)
        if self.is_given("optimizer-cpu-offload", "cpu-optimizer"):
            fraction = self.decimal("optimizer-offload-fraction", 1.0)
            return "optimizer", fraction if fraction < 1.0 else None
        if layers > 0 or self.is_given("checkpoint-in-cpu"):
            share = layers / max(self.number("num-layers"), 1)
            return "activations", share if 0.0 < share < 1.0 else None
        return "none", None

    def cross_entropy(self) -> str:
        if not self.is_given("cross-entropy-loss-fusion"):
            return "unfused"
        return (
            "in_place" if self.get_text("cross-entropy-fusion-impl", "native") == "te" else "fused"
        )

    def attention(self) -> str:
        """Return `flash` or `unfused`.

        Transformer Engine selects a fused kernel by default; the local implementation has none.
        """
        backend, spec = self.get_text("attention-backend", "auto"), self.settings.get("spec")
        fused = any(name.startswith("use-flash-attn") for name in self.settings)
        default = "local" if self.older else "transformer_engine"
        local = self.get_text("transformer-impl", default) == "local" or (
            spec is not None and spec.values == ("local",)
        )
        if (
            spec is not None
            and spec.values != ("local",)
            and not re.search(_KNOWN_SPECS, " ".join(spec.values))
        ):
            self.refuse("spec", "custom layer specs are not supported")
        return "unfused" if (local and not fused) or backend in ("unfused", "local") else "flash"

    def overlap(self) -> dict[str, bool]:
        """Return the overlap switches that differ from those of the measured runs."""
        sequence = (
            self.is_given("sequence-parallel") and self.number("tensor-model-parallel-size", 1) > 1
        )
        zero = self.is_given("zero-stage") and not self.is_given(
            "overlap-grad-reduce"
        )  # DeepSpeed configures overlap in its own file.
        differs = {
            "tensor_parallel": sequence and not self.is_given("tp-comm-overlap"),
            "pipeline_parallel": self.is_given("no-overlap-p2p-communication"),
            "data_parallel": not self.is_given("overlap-grad-reduce") and not zero,
        }
        gathers = self.is_given("overlap-grad-reduce") and self.is_given(
            "use-distributed-optimizer"
        )
        if gathers and not self.is_given("overlap-param-gather"):
            reason = "absent: weights are assumed to be gathered while the step computes"
            self.reading.ignored.append(Ignored(flag="--overlap-param-gather", reason=reason))
        overlap = dict.fromkeys((name for name, differing in differs.items() if differing), False)
        if self.has_experts():
            overlap["expert_parallel"] = self.is_given("overlap-moe-expert-parallel-comm")
        return overlap

    def precision(self) -> str:
        if self.is_given("fp4-format"):
            return "nvfp4"
        if self.is_given("fp8-format", "fp8-hybrid", "fp8-e4m3"):
            return "mxfp8" if self.get_text("fp8-recipe", "delayed") == "mxfp8" else "fp8"
        return "bf16" if self.is_given("bf16") else "fp16" if self.is_given("fp16") else "fp32"

    def fp8_recipe(self) -> str | None:
        return self.get_text("fp8-recipe", "delayed") if self.precision() == "fp8" else None

    def parameter_precision(self) -> str | None:
        """Return fp8 if parameters are all-gathered in 8 bits; None for the framework's default."""
        if self.is_given("fp8-param-gather"):
            return "fp8"
        narrow = self.precision() in ("fp8", "mxfp8", "nvfp4")
        return None if not narrow else "fp16" if self.is_given("fp16") else "bf16"

    def named_dispatcher(self) -> str:
        name = self.get_text("moe-token-dispatcher-type", "alltoall" if self.older else "allgather")
        if self.is_given("moe-enable-deepep"):
            return "flex"
        if name not in get_args(TokenDispatcher) and name != "alltoall_seq":
            self.refuse(
                "moe-token-dispatcher-type",
                f"not supported; supported: {', '.join(get_args(TokenDispatcher))}",
            )
        return "alltoall" if name == "alltoall_seq" else name

    def dispatcher(self, tensor: int) -> str:
        """Return the token dispatcher; `alltoall` if each rank has all experts."""
        ranks = self.number("expert-model-parallel-size", 1) * self.expert_tensor_size(tensor)
        return "alltoall" if ranks == 1 else self.named_dispatcher()

    def cuda_graphs(self) -> bool:
        """Return True if CUDA graphs capture training steps or parts of a layer.

        No release captures graphs without a flag (cuda_graph_impl is none in Megatron Core 0.9 to
        0.20).
        """
        if self.is_given("enable-cuda-graph", "external-cuda-graph"):
            return True
        scope = self.graph_scope()
        if self.get_text("cuda-graph-impl", "none") == "none" or scope == [
            "full_iteration_inference"
        ]:
            return False
        if scope not in (["full"], ["full_iteration"]) and (
            unknown := sorted(set(scope) - set(get_args(GraphModule)))
        ):
            self.refuse(
                "cuda-graph-modules" if self.is_given("cuda-graph-modules") else "cuda-graph-scope",
                f"graphs of {', '.join(unknown)} are not modelled; supported: full, "
                f"full_iteration, {', '.join(get_args(GraphModule))}",
            )
        return True

    def graph_scope(self) -> list[str]:
        if (
            self.get_text("cuda-graph-impl", "none") == "full_iteration"
        ):  # A separate implementation since 0.18.
            return ["full_iteration"]
        setting = self.settings.get("cuda-graph-modules", self.settings.get("cuda-graph-scope"))
        return list(setting.values) if setting and setting.values else ["full"]

    def cuda_graph_modules(self) -> list[str] | None:
        scope = self.graph_scope()
        return (
            None
            if self.is_given("enable-cuda-graph", "external-cuda-graph")
            or not self.cuda_graphs()
            or scope[0].startswith("full")
            else scope
        )

    def uneven_layout(self, *, stages: int, chunks: int) -> str | None:
        """Return the pipeline layout if the first or last stage has another size, else None.

        Raises:
            InputError: The flags do not divide the layers evenly.
        """
        layers, segments = self.number("num-layers"), self.stage_patterns()
        uneven = self.is_given(
            words.FIRST_STAGE, words.LAST_STAGE, words.WITH_EMBEDDING, words.WITH_LOSS
        )
        if not uneven and len(segments) < 2:
            return None
        if len(segments) > 1 and len(segments) % stages:
            self.refuse(
                "hybrid-layer-pattern",
                f"{len(segments)} parts cannot be divided over {stages} stages",
            )
            return None
        sizes = list(map(len, segments)) if len(segments) > 1 else None
        if sizes is None and self.is_given(words.FIRST_STAGE, words.LAST_STAGE):
            sizes = self.stage_sizes(layers, stages, chunks)
        if (
            sizes is None
            # Embedding and output layer count as layers, so their chunks have one layer fewer.
        ):
            first, last = (
                int(self.is_given(words.WITH_EMBEDDING)),
                int(self.is_given(words.WITH_LOSS)),
            )
            sizes = [(layers + first + last) // (stages * chunks)] * (stages * chunks)
            sizes[0] -= first
            sizes[-1] -= last
        if sum(sizes) != layers or min(sizes) < 0:
            raise InputError(
                f"--num-layers {layers} does not fit {stages} stages of {chunks} chunks "
                f"with these first and last stages: chunks of {max(sizes)}, {sizes[0]} and "
                f"{sizes[-1]} layers add up to {sum(sizes)}",
                field="--num-layers",
            )
        begins_dense = (
            self.is_given("num-experts") and 0 < self.leading_dense_layers(layers) < layers
        )
        if sizes == chunk_layers(
            num_layers=layers, stages=stages, chunks=chunks, begins_dense=begins_dense
        ):
            return None
        texts = [f"t*{count}" if count else "" for count in sizes]
        return f"E{'|'.join(texts)}{'m' * self.number('mtp-num-layers', 0)}L"

    def stage_sizes(self, layers: int, stages: int, chunks: int) -> list[int]:
        """Return the number of layers per model chunk, in pipeline order.

        Stages without a flag divide the remaining layers evenly.
        """
        ends = {0: words.FIRST_STAGE, stages - 1: words.LAST_STAGE}
        fixed = {rank: self.number(name) for rank, name in ends.items() if self.is_given(name)}
        others = max(stages - len(fixed), 1)
        rest = (layers - sum(fixed.values())) // others
        return [fixed.get(rank, rest) // chunks for _ in range(chunks) for rank in range(stages)]

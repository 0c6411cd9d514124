"""Flags of Megatron-LM's pretrain_gpt.py as a query."""

import math
import re
from collections.abc import Mapping
from typing import Any

from hp_tool.domain.pipeline_layout import chunk_layers, parse_layout
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.megatron_lm import words
from hp_tool.formats.megatron_lm.words import Flags


def read(flags: Flags, *, num_gpus: int) -> dict[str, Any]:
    """The query (model, training, parallel) that flags of pretrain_gpt.py ask for; what is absent takes Megatron's default.

    Raises InputError where a flag that decides cost is missing or malformed, UnsupportedError where it is not modelled.
    """
    reader = _Reader(flags, num_gpus)
    sections = {"model": reader.model(), "training": reader.training(), "parallel": reader.parallel()}
    values = {name: {key: value for key, value in each.items() if value is not None} for name, each in sections.items()}
    return {"kind": "training"} | values


class _Reader:
    """Flags with typed access and Megatron's defaults; None in a section of the query: the flags do not say it."""

    def __init__(self, flags: Flags, num_gpus: int) -> None:
        self.flags = flags
        self.num_gpus = num_gpus

    def on(self, *names: str) -> bool:
        return any(name in self.flags for name in names)

    def text(self, name: str, default: str) -> str:
        values = self.flags.get(name, [default])
        if len(values) != 1:
            raise InputError(f"--{name} takes one value, got {' '.join(values) or 'none'}", field=f"--{name}")
        return values[0]

    def number(self, name: str, default: int | None = None) -> int:
        if name not in self.flags and default is None:
            raise InputError(f"the command does not say --{name}", field=f"--{name}", code="missing_field")
        text = self.text(name, str(default))
        try:
            return int(text)
        except ValueError:
            raise InputError(f"--{name} takes a whole number, got {text}", field=f"--{name}") from None

    def given(self, name: str) -> int | None:
        """The number behind a flag that has no default."""
        return self.number(name) if self.on(name) else None

    def real(self, name: str, default: float) -> float:
        text = self.text(name, str(default))
        try:
            return float(text)
        except ValueError:
            raise InputError(f"--{name} takes a number, got {text}", field=f"--{name}") from None

    def ours(self, name: str, theirs: Mapping[str, str], default: str) -> str:
        """Our word for a flag's value, of a mapping from our words to theirs."""
        text = self.text(name, default)
        for our, their in theirs.items():
            if their == text:
                return our
        raise UnsupportedError(f"--{name} {text} is not modelled", field=f"--{name}")

    def model(self) -> dict[str, Any]:
        hidden, heads, gated = self.number("hidden-size"), self.number("num-attention-heads"), self.on("swiglu")
        # validate_args: 4h, or two thirds of it in multiples of 64 where the MLP is gated.
        usual = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
        layers, bias = self.number("num-layers"), not self.on("disable-bias-linear")
        usual_kind = "rope" if self.on("use-rotary-position-embeddings") else "learned_absolute"
        positions = self.ours("position-embedding-type", words.POSITIONS, usual_kind)
        model: dict[str, Any] = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": self.number("num-query-groups", 1) if self.on("group-query-attention") else heads,
            "head_dim": self.number("kv-channels", hidden // heads),
            "intermediate_size": self.number("ffn-hidden-size", usual),
            "vocab_size": self.vocabulary(),
            "tie_word_embeddings": not self.on("untie-embeddings-and-output-weights"),
            "gated_mlp": gated,
            "normalization": "rmsnorm" if self.text("normalization", "LayerNorm") == "RMSNorm" else "layernorm",
            "position_embedding": positions,
            "attention_bias": bias or self.on("add-qkv-bias"),
            "mlp_bias": bias,
            "max_position_embeddings": self.number("max-position-embeddings") if positions == "learned" else None,
            # Of latent attention it switches the norms of the latents, which are always there.
            "query_key_norm": "head" if self.on("qk-layernorm") and not self.on("multi-latent-attention") else None,
            "num_nextn_predict_layers": self.given("mtp-num-layers"),
        }
        if self.on("num-experts"):
            width = self.number("moe-ffn-hidden-size", model["intermediate_size"])
            shared = self.number("moe-shared-expert-intermediate-size", 0)
            groups = self.given("moe-router-num-groups")
            model |= {
                "num_experts": self.number("num-experts"),
                "num_experts_per_tok": self.number("moe-router-topk", 2),
                "moe_intermediate_size": width,
                "num_shared_experts": 1 if shared % width else shared // width,
                "first_k_dense_replace": self.leading_dense_layers(layers),
                "n_group": groups,
                "topk_group": None if groups is None else self.number("moe-router-group-topk", groups),
                "shared_expert_intermediate_size": shared if shared % width else None,
            }
        if self.on("multi-latent-attention"):
            model |= {
                "kv_lora_rank": self.number("kv-lora-rank", 32),
                "qk_nope_head_dim": self.number("qk-head-dim", 128),
                "qk_rope_head_dim": self.number("qk-pos-emb-head-dim", 64),
                "v_head_dim": self.number("v-head-dim", 128),
                "q_lora_rank": self.given("q-lora-rank"),
            }
        return model

    def vocabulary(self) -> int:
        """Rows of the embedding: the vocabulary padded to a multiple of --make-vocab-size-divisible-by x TP."""
        if not self.on("vocab-size", "padded-vocab-size"):
            raise InputError(
                "the tokenizer decides the vocabulary, which the command does not say; add --set model.vocab_size=128256",
                field="model.vocab_size",
                code="missing_field",
            )
        if self.on("padded-vocab-size"):
            return self.number("padded-vocab-size")
        multiple = self.number("make-vocab-size-divisible-by", 128) * self.number("tensor-model-parallel-size", 1)
        return -(-self.number("vocab-size") // multiple) * multiple

    def leading_dense_layers(self, layers: int) -> int:
        """--moe-layer-freq: 1, or ([0]*k+[1]*n): k dense layers, then experts in all others."""
        text = self.text("moe-layer-freq", "1").replace(" ", "")
        match = re.fullmatch(r"\(?\[0\]\*(\d{1,5})\+\[1\]\*(\d{1,5})\)?", text)
        if text == "1" or text == f"([1]*{layers})":
            return 0
        if match is None or int(match[1]) + int(match[2]) != layers:
            raise UnsupportedError(
                f"--moe-layer-freq {text} is not modelled; write 1, or ([0]*k+[1]*n) with k + n = {layers}",
                field="--moe-layer-freq",
            )
        return int(match[1])

    def parallel(self) -> dict[str, Any]:
        tensor, stages = self.number("tensor-model-parallel-size", 1), self.number("pipeline-model-parallel-size", 1)
        chunks, context, experts = self.chunks(), self.number("context-parallel-size", 1), self.on("num-experts")
        return {
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": stages,
            "virtual_pipeline_parallel_size": chunks,
            "context_parallel_size": context,
            "micro_batch_size": self.number("micro-batch-size"),
            "sequence_parallel": self.on("sequence-parallel") and tensor > 1,
            "recompute": self.recompute(),
            "zero_stage": self.zero_stage(),
            "pipeline_layout": self.text(words.LAYOUT, "") or self.shorter_ends(stages=stages, chunks=chunks),
            "context_parallel_communication": self.ours("cp-comm-type", words.CONTEXT, "p2p") if context > 1 else None,
            "expert_parallel_size": self.number("expert-model-parallel-size", 1) if experts else None,
            "expert_tensor_parallel_size": self.number("expert-tensor-parallel-size", tensor) if experts else None,
            "moe_token_dispatcher_type": self.dispatcher() if experts else None,
        }

    def replicas(self) -> int:
        sizes = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
        return max(self.num_gpus // math.prod(max(self.number(name, 1), 1) for name in sizes), 1)

    def chunks(self) -> int:
        if layout := self.text(words.LAYOUT, ""):
            return max(len(parse_layout(layout).chunks) // max(self.number("pipeline-model-parallel-size", 1), 1), 1)
        if self.on("num-layers-per-virtual-pipeline-stage"):
            per_round = self.number("num-layers-per-virtual-pipeline-stage") * self.number("pipeline-model-parallel-size", 1)
            return max(self.number("num-layers") // max(per_round, 1), 1)
        return self.number("num-virtual-stages-per-pipeline-rank", 1)

    def zero_stage(self) -> int:
        stages = {"no_shard": 0, "optim": 1} | {name: stage for stage, name in words.SHARDING.items()}
        if self.on("use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2"):
            usual = "optim_grads_params" if self.on("use-torch-fsdp2") else "no_shard"
            name = self.text("data-parallel-sharding-strategy", usual)
            if name not in stages:
                raise InputError(
                    f"--data-parallel-sharding-strategy {name}: choose one of {', '.join(stages)}",
                    field="--data-parallel-sharding-strategy",
                )
            return stages[name]
        return int(self.on("use-distributed-optimizer"))

    def recompute(self) -> str | dict[str, Any]:
        granularity = self.text("recompute-granularity", "selective" if self.on("recompute-activations") else "none")
        if granularity == "selective":
            modules = self.flags.get("recompute-modules", ["core_attn"])
            return "selective" if modules == ["core_attn"] else {"granularity": "selective", "modules": modules}
        if granularity != "full":
            return granularity
        method, count = self.text("recompute-method", "uniform"), self.number("recompute-num-layers", 1)
        plain = method == "uniform" and count == 1
        return "full" if plain else {"granularity": "full", "method": method, "num_layers": count}

    def training(self) -> dict[str, Any]:
        aware = self.on("use-precision-aware-optimizer") and self.on("exp-avg-dtype")
        first, second = (self.text(f"exp-avg{moment}-dtype", "fp32") if aware else None for moment in ("", "-sq"))
        capacity = self.on("moe-expert-capacity-factor")
        return {
            "sequence_length": self.number("seq-length"),
            "global_batch_size": self.number("global-batch-size", self.replicas() * self.number("micro-batch-size")),
            "precision": self.precision(),
            "fp8_recipe": self.fp8_recipe(),
            "parameter_precision": "fp8" if self.on("fp8-param-gather") else None,
            "cuda_graphs": self.cuda_graphs(),
            "framework": "megatron-core",
            "attention": self.attention(),
            "dropout": max(self.real("attention-dropout", 0.1), self.real("hidden-dropout", 0.1)),
            "optimizer": self.text("optimizer", "adam"),
            "cross_entropy": self.loss(),
            "overlap": self.overlap() or None,
            "gradient_precision": "bf16" if self.on("grad-reduce-in-bf16") else None,
            "optimizer_precision": first,
            "exp_avg_sq_precision": second if second != first else None,
            "expert_capacity_factor": self.real("moe-expert-capacity-factor", 1.0) if capacity else None,
        }

    def loss(self) -> str:
        if not self.on("cross-entropy-loss-fusion"):
            return "unfused"
        return "in_place" if self.text("cross-entropy-fusion-impl", "native") == "te" else "fused"

    def attention(self) -> str:
        """Transformer Engine's automatic choice is a fused kernel; the local implementation has none."""
        backend = self.text("attention-backend", "auto")
        local = self.text("transformer-impl", "transformer_engine") == "local" and not self.on("use-flash-attn")
        return "unfused" if local or backend in ("unfused", "local") else "flash"

    def overlap(self) -> dict[str, bool]:
        """Only what differs from the runs that the framework's constants come from, which hid what they could."""
        sequence = self.on("sequence-parallel") and self.number("tensor-model-parallel-size", 1) > 1
        differs = {
            "tensor_parallel": sequence and not self.on("tp-comm-overlap"),
            "pipeline_parallel": self.on("no-overlap-p2p-communication"),
            "data_parallel": not self.on("overlap-grad-reduce"),
            "expert_parallel": self.on("overlap-moe-expert-parallel-comm"),
        }
        return {name: name == "expert_parallel" for name, differing in differs.items() if differing}

    def precision(self) -> str:
        if self.on("fp4-format"):
            return "nvfp4"
        if self.on("fp8-format"):
            return "mxfp8" if self.text("fp8-recipe", "delayed") == "mxfp8" else "fp8"
        return "bf16" if self.on("bf16") else "fp16" if self.on("fp16") else "fp32"

    def fp8_recipe(self) -> str | None:
        recipe = self.text("fp8-recipe", "delayed")
        return recipe if self.on("fp8-format") and recipe not in ("delayed", "mxfp8") else None

    def dispatcher(self) -> str:
        field = "--moe-token-dispatcher-type"
        name = self.text(field[2:], "alltoall")
        if name not in ("alltoall", "flex"):
            raise UnsupportedError(f"{field} {name} is not modelled; alltoall and flex are", field=field)
        return name

    def cuda_graphs(self) -> bool | None:
        """Only graphs of the whole iteration spare devices the wait for their host; those of parts of a layer do not."""
        if self.on("enable-cuda-graph"):
            return True
        scope = self.flags.get("cuda-graph-scope", ["full"])
        return True if self.text("cuda-graph-impl", "none") != "none" and scope in (["full"], ["full_iteration"]) else None

    def shorter_ends(self, *, stages: int, chunks: int) -> str | None:
        """A layout, in the notation of `domain.pipeline_layout`, where the flags give ends fewer layers than the usual ones.

        Raises InputError where the flags do not divide the layers.
        """
        if not self.on(words.FIRST_STAGE, words.LAST_STAGE, words.WITH_EMBEDDING, words.WITH_LOSS):
            return None
        layers = self.number("num-layers")
        sizes = self.stage_sizes(layers, stages, chunks) if self.on(words.FIRST_STAGE, words.LAST_STAGE) else None
        if sizes is None:  # embedding and output layer count as a layer each, so their chunks hold one fewer
            first, last = int(self.on(words.WITH_EMBEDDING)), int(self.on(words.WITH_LOSS))
            sizes = [(layers + first + last) // (stages * chunks)] * (stages * chunks)
            sizes[0] -= first
            sizes[-1] -= last
        if sum(sizes) != layers or min(sizes) < 0:
            raise InputError(
                f"--num-layers {layers} cannot be split over {stages} stages of {chunks} chunks with the ends that the command "
                f"asks for: chunks of {max(sizes)}, {sizes[0]} and {sizes[-1]} layers make {sum(sizes)}",
                field="--num-layers",
            )
        if sizes == chunk_layers(num_layers=layers, stages=stages, chunks=chunks):
            return None
        texts = [f"t*{count}" if count else "" for count in sizes]
        return f"E{'|'.join(texts)}{'m' * self.number('mtp-num-layers', 0)}L"

    def stage_sizes(self, layers: int, stages: int, chunks: int) -> list[int]:
        """Chunks of a stage hold equally many (get_num_layers_to_build of Megatron Core); what is not given is shared out."""
        ends = {0: words.FIRST_STAGE, stages - 1: words.LAST_STAGE}
        fixed = {rank: self.number(name) for rank, name in ends.items() if self.on(name)}
        others = max(stages - len(fixed), 1)
        rest = (layers - sum(fixed.values())) // others
        return [fixed.get(rank, rest) // chunks for _ in range(chunks) for rank in range(stages)]

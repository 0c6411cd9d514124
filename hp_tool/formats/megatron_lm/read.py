"""Arguments of Megatron-LM's pretrain_gpt.py, and of its older releases and Megatron-DeepSpeed, as a query."""

import ast
import math
from collections.abc import Iterable, Mapping
from typing import Any

from hp_tool.domain.pipeline_layout import chunk_layers, parse_layout
from hp_tool.errors import InputError
from hp_tool.formats.megatron_lm import words
from hp_tool.formats.reading import Reading, Setting, sort, table

TABLE = "megatron"
_ALIASES = {
    "model-parallel-size": "tensor-model-parallel-size", "batch-size": "micro-batch-size", "encoder-seq-length": "seq-length",
    "encoder-num-layers": "num-layers", "topk": "moe-router-topk", "moe-expert-parallel-size": "expert-model-parallel-size",
    "moe-train-capacity-factor": "moe-expert-capacity-factor", "use-custom-fsdp": "use-megatron-fsdp",
    "activations-checkpoint-method": "recompute-method", "activations-checkpoint-num-layers": "recompute-num-layers",
    "checkpoint-num-layers": "recompute-num-layers", "rotary-position-embeddings": "use-rotary-position-embeddings",
}  # fmt: skip
"""Older names, and today's."""
OLDER = (
    "checkpoint-activations",
    "activations-checkpoint-method",
    "DDP-impl",
    "model-parallel-size",
    "deepspeed",
    "zero-stage",
)
"""Of releases whose own layers were the only ones: their attention was fused only by a flag of its own."""
PROGRAMS = (
    "pretrain_gpt.py",
    "train_gpt.py",
    "pretrain_gpt_core.py",
    "pretrain_gpt_mcore.py",
    "pretrain_llama.py",
    "train.py",
    "",
)
"""Programs that train decoders with these arguments. Others that do may be named after a model (pretrain_qwen.py)."""
OTHER_PROGRAMS = {
    "bert": "an encoder", "t5": "an encoder-decoder model", "ict": "a retriever", "retro": "a model with retrieval", "vision": "a vision model",
    "vlm": "a model of images and text", "multimodal": "a model of images and text", "mimo": "a model of images and text",
    "llava": "a model of images and text", "mamba": "a state-space model", "hybrid": "a state-space model", "rl": "reinforcement learning",
    "vit": "a vision model", "clip": "a vision model", "orm": "a reward model", "dpo": "preference training",
}  # fmt: skip
"""Parts of a program's name, and what it trains, which is not read."""


def read(settings: Iterable[Setting], *, reading: Reading, num_gpus: int | None, spare: Iterable[str] = ()) -> None:
    """Fill `reading` with the query that the arguments ask for; what is absent takes Megatron's default."""
    found = sort(settings, table=table(TABLE), reading=reading, spare=spare)
    reader = Arguments(
        {_ALIASES.get(name, name): each for name, each in found.items()},
        reading,
        num_gpus,
        older=any(n in found for n in OLDER),
    )
    sections = {"model": reader.model(), "training": reader.training(), "parallel": reader.parallel()}
    reading.query = {"kind": "training"} | {
        name: {key: value for key, value in each.items() if value is not None} for name, each in sections.items()
    }


class Arguments:
    """Arguments with typed access and Megatron's defaults; None in a section of the query: they do not say it."""

    def __init__(self, found: Mapping[str, Setting], reading: Reading, num_gpus: int | None, *, older: bool) -> None:
        self.found = found
        self.reading = reading
        self.num_gpus = num_gpus or 0
        self.older = older

    def on(self, *names: str) -> bool:
        return any(name in self.found for name in names)

    def refuse(self, name: str, why: str) -> None:
        self.reading.refused.append(
            f"--{name} {' '.join(self.found[name].values) if name in self.found else ''}".strip() + f": {why}"
        )

    def lack(self, name: str, why: str) -> None:
        field = table(TABLE)[name].why
        self.reading.lack(field, f"{why}; add --set {field}=...")

    def text(self, name: str, default: str) -> str:
        setting = self.found.get(name)
        if setting is None:
            return default
        if setting.unknown:
            at = f"line {setting.line}: " if setting.line else ""
            self.lack(name, f"{at}{setting.written} is {', '.join(setting.unknown)}, which nothing sets here")
            return default
        if len(setting.values) != 1:
            raise InputError(f"--{name} takes one value, got {' '.join(setting.values) or 'none'}", field=f"--{name}")
        return setting.values[0]

    def number(self, name: str, default: int | None = None) -> int:
        if name not in self.found and default is None:
            self.lack(name, f"the command does not say --{name}")
        text = self.text(name, str(1 if default is None else default))
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
            if their.lower() == text.lower():
                return our
        self.refuse(name, "is not modelled")
        return next(iter(theirs))

    def model(self) -> dict[str, Any]:
        hidden, heads = self.number("hidden-size"), self.number("num-attention-heads")
        swiglu = self.on("swiglu") or self.text("glu-activation", "") == "swiglu"
        # validate_args: 4h, or two thirds of it in multiples of 64 under --swiglu.
        usual = int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden
        layers, bias, latent = self.number("num-layers"), not self.on("disable-bias-linear"), self.on("multi-latent-attention")
        positions = self.positions()
        grouped = self.on("group-query-attention", "num-key-value-heads") or (latent and self.on("num-query-groups"))
        groups = self.number("num-key-value-heads", self.number("num-query-groups", 1))
        model: dict[str, Any] = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": groups if grouped else heads,
            "head_dim": self.number("kv-channels", max(hidden // max(heads, 1), 1)),
            "intermediate_size": self.number("ffn-hidden-size", usual),
            "vocab_size": self.vocabulary(),
            "tie_word_embeddings": not self.on("untie-embeddings-and-output-weights"),
            "gated_mlp": swiglu or self.on("quick-geglu", "glu-activation"),
            "normalization": self.ours("normalization", words.NORMS, "LayerNorm"),
            "embedding_norm": True if self.on("embed-layernorm") else None,
            "position_embedding": positions,
            "attention_bias": bias or self.on("add-qkv-bias"),
            "attention_output_bias": False if self.on("add-qkv-bias") and not bias else None,
            "mlp_bias": bias,
            "max_position_embeddings": self.number("max-position-embeddings") if positions == "learned" else None,
            # Of latent attention it switches the norms of the latents, which are always there.
            "query_key_norm": "head" if self.on("qk-layernorm") and not latent else None,
            "attention_sinks": True if self.text("softmax-type", "vanilla") == "learnable" else None,
            "num_nextn_predict_layers": self.given("mtp-num-layers"),
            **self.window(layers),
        }
        if self.experts():
            width = self.number("moe-ffn-hidden-size", model["intermediate_size"])
            shared = self.number("moe-shared-expert-intermediate-size", 0)
            limited = self.given("moe-router-num-groups")
            model |= {
                "num_experts": self.experts(),
                "num_experts_per_tok": self.number("moe-router-topk", 1 if self.older else 2),
                "moe_intermediate_size": width,
                "num_shared_experts": 1 if shared % width else shared // width,
                "first_k_dense_replace": self.leading_dense_layers(layers),
                "n_group": limited,
                "topk_group": None if limited is None else self.number("moe-router-group-topk", limited),
                "shared_expert_intermediate_size": shared if shared % width else None,
                "shared_expert_gate": True if self.on("moe-shared-expert-gate") else None,
            }
        if latent:
            model |= {
                "kv_lora_rank": self.number("kv-lora-rank", 32),
                "qk_nope_head_dim": self.number("qk-head-dim", 128),
                "qk_rope_head_dim": self.number("qk-pos-emb-head-dim", 64),
                "v_head_dim": self.number("v-head-dim", 128),
                "q_lora_rank": self.given("q-lora-rank"),
            }
        return model

    def positions(self) -> str:
        if self.on("use-rotary-position-embeddings"):
            return "rotary"
        kind = self.text("position-embedding-type", "learned_absolute").lower()
        kinds = {"learned_absolute": "learned", "absolute": "learned", "rope": "rotary", "mrope": "rotary", "rotary": "rotary",
                 "none": "none", "alibi": "none"}  # fmt: skip
        if kind not in kinds:
            self.refuse("position-embedding-type", "is not modelled for decoders")
        return kinds.get(kind, "rotary")

    def window(self, layers: int) -> dict[str, int | None]:
        """--window-size left,right of the layers that --window-attn-skip-freq leaves; a query sees `left` keys and itself."""
        if not self.on("window-size"):
            return {}
        left = self.text("window-size", "0,0").strip("()").split(",")[0].strip()
        if not left.lstrip("-").isdecimal():
            raise InputError(f"--window-size takes two numbers, got {self.text('window-size', '')}", field="--window-size")
        if int(left) < 0:
            return {}
        pattern = self.layers("window-attn-skip-freq", layers, every=lambda n: [int((i + 1) % n != 0) for i in range(layers)])
        count = layers if pattern is None else sum(pattern)
        return {"sliding_window": int(left) + 1, "sliding_window_layers": None if count == layers else count}

    def experts(self) -> int:
        """Megatron-DeepSpeed's --num-experts takes one number a layer or one for all."""
        setting = self.found.get("num-experts")
        if setting is None:
            return 0
        values = set(setting.values)
        if len(values) != 1:
            self.refuse("num-experts", "layers with different numbers of experts are not modelled")
        if setting.unknown or not (text := setting.values[0] if setting.values else "").isdecimal():
            self.lack("num-experts", f"--num-experts is {' '.join(setting.values)}")
            return 0
        return int(text) if int(text) > 1 or not self.older else 0

    def layers(self, name: str, layers: int, *, every: Any) -> list[int] | None:
        """One number a layer of a flag that takes N or a list expression such as ([0]*3+[1]*58); None where it is not given."""
        if not self.on(name):
            return None
        text = self.text(name, "1").replace(" ", "")
        if text.isdecimal() and int(text) > 0:
            return list(every(int(text)))
        try:
            pattern = _list(ast.parse(text[:1_000], mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pattern = []
        if len(pattern) != layers or not set(pattern) <= {0, 1}:
            self.refuse(name, f"write a number, or 0 and 1 for each of {layers} layers, as ([0]*k+[1]*n)")
            return None
        return pattern

    def vocabulary(self) -> int:
        """Rows of the embedding: the vocabulary padded to a multiple of --make-vocab-size-divisible-by x TP."""
        if self.on("padded-vocab-size"):
            return self.number("padded-vocab-size")
        size = self.number("vocab-size") if self.on("vocab-size") else 0
        if not size:
            told = (
                self.found.get("tokenizer-model")
                or self.found.get("tokenizer-name-or-path")
                or self.found.get("tokenizer-type")
            )
            known = self.reading.hints.get("model.vocab_size", "")
            if not known.isdecimal():
                known = known or ("32000" if self.text("tokenizer-type", "") == "Llama2Tokenizer" else "")
                tokenizer = "the tokenizer" if told is None else " ".join((told.written, *told.values))
                self.reading.lack(
                    "model.vocab_size", f"{tokenizer} decides the vocabulary; add --set model.vocab_size={known or '...'}"
                )
                return 1
            size = int(known)
        size += self.number("vocab-extra-ids", 0)
        multiple = self.number("make-vocab-size-divisible-by", 128) * self.number("tensor-model-parallel-size", 1)
        return -(-size // max(multiple, 1)) * multiple

    def leading_dense_layers(self, layers: int) -> int:
        """--moe-layer-freq: 1, or k dense layers, then experts in all others."""
        pattern = self.layers("moe-layer-freq", layers, every=lambda n: [int(i % n == 0) for i in range(layers)]) or [1]
        dense = pattern.index(1) if 1 in pattern else layers
        if 0 in pattern[dense:]:
            self.refuse(
                "moe-layer-freq", f"only leading layers without experts are modelled: ([0]*k+[1]*n) with k + n = {layers}"
            )
        return dense

    def parallel(self) -> dict[str, Any]:
        tensor, stages = self.number("tensor-model-parallel-size", 1), self.number("pipeline-model-parallel-size", 1)
        ulysses = self.number("ds-sequence-parallel-size", 1)
        chunks, context = self.chunks(), self.number("context-parallel-size", ulysses)
        experts = bool(self.experts())
        communication = "a2a" if ulysses > 1 else self.ours("cp-comm-type", words.CONTEXT, "p2p") if context > 1 else None
        sizes = self.found.get("hierarchical-context-parallel-sizes")
        return {
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": stages,
            "virtual_pipeline_parallel_size": chunks,
            "context_parallel_size": context,
            "micro_batch_size": self.number("micro-batch-size"),
            "sequence_parallel": self.on("sequence-parallel") and tensor > 1,
            "recompute": self.recompute(),
            "zero_stage": self.zero_stage(),
            "data_parallel_shard_size": self.shard(),
            "rank_order": "tp-cp-ep-pp-dp" if self.on("use-tp-pp-dp-mapping") else None,
            "pipeline_layout": self.text(words.LAYOUT, "") or self.shorter_ends(stages=stages, chunks=chunks),
            "context_parallel_communication": communication,
            "hierarchical_context_parallel_sizes": [int(v) for v in sizes.values if v.isdecimal()]
            if sizes and communication == "a2a+p2p"
            else None,
            "expert_parallel_size": self.number("expert-model-parallel-size", 1) if experts else None,
            "expert_tensor_parallel_size": self.expert_tensor(tensor) if experts else None,
            "moe_token_dispatcher_type": self.dispatcher() if experts else None,
        }

    def expert_tensor(self, tensor: int) -> int:
        """Megatron-DeepSpeed splits experts by tensor parallelism only under a flag."""
        return self.number(
            "expert-tensor-parallel-size", tensor if not self.older or self.on("enable-expert-tensor-parallelism") else 1
        )

    def replicas(self) -> int:
        names = (
            "tensor-model-parallel-size",
            "pipeline-model-parallel-size",
            "context-parallel-size",
            "ds-sequence-parallel-size",
        )
        return max(self.num_gpus // math.prod(max(self.number(name, 1), 1) for name in names), 1)

    def shard(self) -> int | None:
        copies = self.number("num-distributed-optimizer-instances", 1)
        context = self.number("context-parallel-size", 1)
        return self.replicas() * context // copies // context if copies > 1 else None

    def chunks(self) -> int:
        stages = max(self.number("pipeline-model-parallel-size", 1), 1)
        if layout := self.text(words.LAYOUT, ""):
            return max(len(parse_layout(layout).chunks) // stages, 1)
        if self.on("num-layers-per-virtual-pipeline-stage"):
            ends = int(self.on(words.WITH_EMBEDDING)) + int(self.on(words.WITH_LOSS))
            per_round = self.number("num-layers-per-virtual-pipeline-stage") * stages
            return max((self.number("num-layers") + ends) // max(per_round, 1), 1)
        return self.number("num-virtual-stages-per-pipeline-rank", 1)

    def zero_stage(self) -> int:
        stages = {"no_shard": 0, "optim": 1} | {name: stage for stage, name in words.SHARDING.items()}
        if self.on("zero-stage"):
            return self.number("zero-stage")
        if self.on("use-torch-fsdp2"):
            return 2 if self.on("torch-fsdp2-no-reshard-after-forward") else 3
        if self.on("use-megatron-fsdp"):
            name = self.text("data-parallel-sharding-strategy", "no_shard")
            if name not in stages:
                raise InputError(
                    f"--data-parallel-sharding-strategy {name}: choose one of {', '.join(stages)}",
                    field="--data-parallel-sharding-strategy",
                )
            return stages[name]
        return int(self.on("use-distributed-optimizer"))

    def recompute(self) -> str | dict[str, Any]:
        if self.on("checkpoint-activations", "deepspeed-activation-checkpointing") and not self.on(
            "recompute-granularity", "recompute-method"
        ):
            each = self.number("recompute-num-layers", 1)
            return "full" if each == 1 else {"granularity": "full", "method": "uniform", "num_layers": each}
        usual = (
            "selective"
            if self.on("recompute-activations")
            else "full"
            if self.older and self.on("recompute-method")
            else "none"
        )
        granularity = self.text("recompute-granularity", usual)
        if granularity == "none" and self.on("moe-layer-recompute"):
            return {"granularity": "selective", "modules": ["moe"]}
        if granularity == "selective":
            setting = self.found.get("recompute-modules")
            modules = list(setting.values) if setting else ["core_attn"]
            return "selective" if modules == ["core_attn"] else {"granularity": "selective", "modules": modules}
        if granularity != "full":
            return granularity
        method, count = self.text("recompute-method", "uniform"), self.number("recompute-num-layers", 1)
        plain = method == "uniform" and count == 1
        return "full" if plain else {"granularity": "full", "method": method, "num_layers": count}

    def training(self) -> dict[str, Any]:
        aware = self.on("use-precision-aware-optimizer")
        first, second = (self.text(f"exp-avg{moment}-dtype", "fp32") if aware else "fp32" for moment in ("", "-sq"))
        capacity = self.on("moe-expert-capacity-factor") and not self.on("disable-moe-token-dropping")
        narrow = self.on("grad-reduce-in-bf16") or (aware and self.text("main-grads-dtype", "fp32") == "bf16")
        attention = self.attention()
        unfused = attention == "unfused" and self.on("no-masked-softmax-fusion") and self.on("no-bias-dropout-fusion")
        offload, fraction = self.offload()
        return {
            "sequence_length": self.number("seq-length"),
            "global_batch_size": self.number("global-batch-size", self.replicas() * self.number("micro-batch-size")),
            "precision": self.precision(),
            "fp8_recipe": self.fp8_recipe(),
            "parameter_precision": "fp8" if self.on("fp8-param-gather") else None,
            "cuda_graphs": self.cuda_graphs(),
            "framework": "megatron-core",
            "attention": attention,
            "kernel_fusion": False if unfused else None,
            "dropout": max(self.real("attention-dropout", 0.1), self.real("hidden-dropout", 0.1)),
            "optimizer": self.optimizer(),
            "cross_entropy": self.loss(),
            "overlap": self.overlap() or None,
            "gradient_precision": "bf16" if narrow else None,
            "optimizer_precision": first if aware and first != "fp32" else None,
            "exp_avg_sq_precision": second if second != first else None,
            "master_precision": "fp16" if aware and self.text("main-params-dtype", "fp32") == "fp16" else None,
            "offload": offload,
            "offload_fraction": fraction,
            "task": "sft" if self.on("sft") else None,
            "expert_capacity_factor": self.real("moe-expert-capacity-factor", 1.0) if capacity else None,
        }

    def optimizer(self) -> str:
        name = self.text("optimizer", "adam").removeprefix("dist_")
        if name not in ("adam", "sgd", "muon"):
            self.refuse("optimizer", "is not modelled; adam, sgd and muon are")
        return name

    def offload(self) -> tuple[str | None, float | None]:
        layers = self.number("cpu-offloading-num-layers", 0)
        if self.on("optimizer-cpu-offload", "cpu-optimizer"):
            fraction = self.real("optimizer-offload-fraction", 1.0)
            return "optimizer", fraction if fraction < 1.0 else None
        if layers > 0 or self.on("checkpoint-in-cpu"):
            share = layers / max(self.number("num-layers"), 1)
            return "activations", share if 0.0 < share < 1.0 else None
        return None, None

    def loss(self) -> str:
        if not self.on("cross-entropy-loss-fusion"):
            return "unfused"
        return "in_place" if self.text("cross-entropy-fusion-impl", "native") == "te" else "fused"

    def attention(self) -> str:
        """Transformer Engine's automatic choice is a fused kernel; the local implementation has none."""
        backend, spec = self.text("attention-backend", "auto"), self.found.get("spec")
        fused = any(name.startswith("use-flash-attn") for name in self.found)
        usual = "local" if self.older else "transformer_engine"
        local = self.text("transformer-impl", usual) == "local" or (spec is not None and spec.values == ("local",))
        if spec is not None and spec.values != ("local",) and "gpt_layer_specs" not in " ".join(spec.values):
            self.refuse("spec", "layers of one's own are not read")
        return "unfused" if (local and not fused) or backend in ("unfused", "local") else "flash"

    def overlap(self) -> dict[str, bool]:
        """Only what differs from the runs that the framework's constants come from, which hid what they could."""
        sequence = self.on("sequence-parallel") and self.number("tensor-model-parallel-size", 1) > 1
        zero = self.on("zero-stage") and not self.on("overlap-grad-reduce")  # DeepSpeed overlaps by its own file
        differs = {
            "tensor_parallel": sequence and not self.on("tp-comm-overlap"),
            "pipeline_parallel": self.on("no-overlap-p2p-communication"),
            "data_parallel": not self.on("overlap-grad-reduce") and not zero,
            "expert_parallel": self.on("overlap-moe-expert-parallel-comm"),
        }
        return {name: name == "expert_parallel" for name, differing in differs.items() if differing}

    def precision(self) -> str:
        if self.on("fp4-format"):
            return "nvfp4"
        if self.on("fp8-format", "fp8-hybrid", "fp8-e4m3"):
            return "mxfp8" if self.text("fp8-recipe", "delayed") == "mxfp8" else "fp8"
        return "bf16" if self.on("bf16") else "fp16" if self.on("fp16") else "fp32"

    def fp8_recipe(self) -> str | None:
        recipe = self.text("fp8-recipe", "delayed")
        return recipe if self.on("fp8-format") and recipe not in ("delayed", "mxfp8") else None

    def dispatcher(self) -> str:
        name = self.text("moe-token-dispatcher-type", "alltoall")
        if name == "allgather" and self.number("expert-model-parallel-size", 1) == 1:
            return "alltoall"  # nothing is sent
        if name not in ("alltoall", "flex", "alltoall_seq"):
            self.refuse("moe-token-dispatcher-type", "is not modelled; alltoall and flex are")
        return "flex" if name == "flex" or self.on("moe-enable-deepep") else "alltoall"

    def cuda_graphs(self) -> bool | None:
        """Only graphs of the whole iteration spare devices the wait for their host; those of parts of a layer do not."""
        if self.on("enable-cuda-graph"):
            return True
        setting = self.found.get("cuda-graph-scope")
        scope = list(setting.values) if setting else ["full"]
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


def _list(node: ast.expr) -> list[int]:
    """The list that sums and multiples of lists of numbers make. Raises ValueError."""
    if isinstance(node, ast.List) and all(isinstance(each, ast.Constant) and isinstance(each.value, int) for each in node.elts):
        return [int(each.value) for each in node.elts]  # type: ignore[attr-defined]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_list(node.left) + _list(node.right))[:20_000]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = (node.right, node.left) if isinstance(node.left, ast.Constant) else (node.left, node.right)
        if isinstance(right, ast.Constant) and isinstance(right.value, int) and 0 <= right.value <= 10_000:
            return (_list(left) * right.value)[:20_000]
    raise ValueError

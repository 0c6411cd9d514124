"""A serving configuration as the command of vLLM, SGLang or TensorRT-LLM that starts one replica, in the versions named."""

import json
import shlex
from collections.abc import Callable

from hp_tool.errors import UnsupportedError
from hp_tool.formats.setup import ServingSetup, Values, headline, one_word, option_words

VERSIONS = {"vllm": "0.12.0", "sglang": "0.5.6.post2", "trtllm": "1.0"}
WIDE = ("bf16", "fp16", "fp32")
NARROWED = {"vllm": {"fp8": "fp8"}, "sglang": {"fp8": "fp8"}}
"""Words of --quantization for weights of 16 bits that are narrowed while loading; narrow checkpoints say themselves what they
are."""
MODEL_TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Words of --dtype, the same in vLLM and SGLang."""


def vllm(setup: ServingSetup) -> tuple[str, Values]:
    """vllm serve, options as in vllm/engine/arg_utils.py."""
    c, w = setup.parallel, setup.workload
    ranks = c.tensor_parallel_size * c.attention_data_parallel_size
    if c.expert_parallel_size not in (1, ranks):
        raise UnsupportedError(
            f"vllm divides experts over all {ranks} ranks of a stage or over none; "
            f"set expert_parallel_size to {ranks} or 1, or choose sglang",
            field="parallel.expert_parallel_size",
        )
    return f"vllm serve {_model(setup)}", {
        "--tensor-parallel-size": c.tensor_parallel_size,
        "--pipeline-parallel-size": c.pipeline_parallel_size,
        "--max-num-seqs": c.max_num_seqs,
        "--max-num-batched-tokens": c.max_num_batched_tokens,
        "--max-model-len": setup.longest,
        "--gpu-memory-utilization": setup.memory_fraction,
        "--data-parallel-size": _above_one(c.attention_data_parallel_size),
        "--enable-expert-parallel": c.expert_parallel_size > 1,
        "--enable-eplb": c.redundant_experts > 0,
        "--eplb-config": json.dumps({"num_redundant_experts": c.redundant_experts}) if c.redundant_experts else None,
        "--all2all-backend": "deepep_low_latency" if _travels_by_deepep(setup) else None,
        "--enable-dbo": w.two_batch_overlap is True,
        **_number_formats(setup, engine="vllm", cache={"fp8": "fp8"}),
    }


def sglang(setup: ServingSetup) -> tuple[str, Values]:
    """sglang.launch_server, options as in sglang/srt/server_args.py; with attention data parallelism TP counts all ranks, and
    limits are divided by the attention groups.
    """
    c, w, groups = setup.parallel, setup.workload, setup.parallel.attention_data_parallel_size
    deepep = _travels_by_deepep(setup)
    if deepep and c.expert_parallel_size != c.tensor_parallel_size * groups:
        ranks = c.tensor_parallel_size * groups
        raise UnsupportedError(
            f"SGLang's DeepEP divides the experts over all {ranks} ranks of a stage; set expert_parallel_size to {ranks}",
            field="parallel.expert_parallel_size",
        )
    return f"python -m sglang.launch_server --model-path {_model(setup)}", {
        "--tp-size": c.tensor_parallel_size * groups,
        "--pp-size": c.pipeline_parallel_size,
        "--max-running-requests": c.max_num_seqs * groups,
        "--chunked-prefill-size": c.max_num_batched_tokens * groups,
        "--context-length": setup.longest,
        "--mem-fraction-static": setup.memory_fraction,
        "--enable-dp-attention": groups > 1,
        "--dp-size": _above_one(groups),
        "--ep-size": _above_one(c.expert_parallel_size),
        "--enable-eplb": c.redundant_experts > 0,
        "--ep-num-redundant-experts": c.redundant_experts or None,
        "--moe-a2a-backend": "deepep" if deepep else None,
        "--enable-two-batch-overlap": w.two_batch_overlap is True,
        **_number_formats(setup, engine="sglang", cache={"bf16": "bf16", "fp8": "fp8_e4m3"}),
    }


def trtllm(setup: ServingSetup) -> tuple[str, Values]:
    """trtllm-serve with the PyTorch backend, options as in tensorrt_llm/commands/serve.py, and in the file that
    --extra_llm_api_options names what has no option there (see `extra_options`). With attention data parallelism every rank of
    its tensor-parallel group attends to requests of its own: groups of several ranks have no word.
    """
    c, w = setup.parallel, setup.workload
    narrowing(setup, engine="trtllm")
    if c.attention_data_parallel_size > 1 and c.tensor_parallel_size > 1:
        raise UnsupportedError(
            "trtllm-serve gives every rank attention of its own, or none; set tensor_parallel_size to 1, or choose sglang",
            field="attention_data_parallel_size",
        )
    if setup.leaves_headroom:
        raise UnsupportedError(
            "trtllm-serve is told a share of the memory that weights leave, not of the device's; leave "
            "constraints.memory_headroom_fraction out, or choose vllm or sglang",
            field="constraints.memory_headroom_fraction",
        )
    if w.two_batch_overlap:
        raise UnsupportedError(
            "trtllm-serve has no two-batch overlap; leave it out, or choose vllm or sglang",
            field="inference.two_batch_overlap",
        )
    return f"trtllm-serve {_model(setup)}", {
        "--backend": "pytorch",
        "--tp_size": c.tensor_parallel_size * c.attention_data_parallel_size,
        "--pp_size": c.pipeline_parallel_size,
        "--max_batch_size": c.max_num_seqs,
        "--max_num_tokens": c.max_num_batched_tokens,
        "--max_seq_len": setup.longest,
        "--ep_size": _above_one(c.expert_parallel_size),
    }


def _travels_by_deepep(setup: ServingSetup) -> bool:
    """Whether the estimate sends tokens to experts by DeepEP's kernels: out of an NVLink domain, or in two-batch overlap."""
    c = setup.parallel
    ranks = c.tensor_parallel_size * c.attention_data_parallel_size
    several = c.attention_data_parallel_size > 1 and c.expert_parallel_size > 1
    return several and (ranks > setup.cluster.nvlink_domain_size or setup.workload.two_batch_overlap is True)


def _model(setup: ServingSetup) -> str:
    """The word after the command; one that nobody knows is asked for before anything starts."""
    return '"$MODEL"' if setup.model_path is None else shlex.quote(one_word(setup.model_path))


def _above_one(size: int) -> int | None:
    return size if size > 1 else None


def extra_options(setup: ServingSetup) -> dict[str, object]:
    """TensorRT-LLM's LlmArgs for its options file; empty where there is nothing to say."""
    options: dict[str, object] = {}
    if setup.parallel.attention_data_parallel_size > 1:
        options["enable_attention_dp"] = True
    if setup.parallel.redundant_experts:
        slots = (setup.model.num_experts or 0) + setup.parallel.redundant_experts
        options["moe_config"] = {"load_balancer": {"num_slots": slots, "layer_updates_per_iter": 1}}
    if setup.workload.kv_cache_precision == "fp8":
        options["kv_cache_config"] = {"dtype": "fp8"}
    return options


ENGINES: dict[str, Callable[[ServingSetup], tuple[str, Values]]] = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm}


def refuse_unsaid(setup: ServingSetup) -> None:
    """Raise UnsupportedError for what no engine's command says."""
    for name in ("speculative", "disaggregated"):
        if getattr(setup.workload, name) is not None:
            raise UnsupportedError(
                f"the command of one replica does not say inference.{name}: draft models and routers are set up by hand; leave "
                "it out of the query that is exported",
                field=f"inference.{name}",
            )


def command(setup: ServingSetup, *, engine: str) -> str:
    """A shell script that starts one replica. Raises UnsupportedError for what the engine's command cannot say."""
    refuse_unsaid(setup)
    start, options = ENGINES[engine](setup)
    lines = [" ".join((name, *map(shlex.quote, words))) for name, words in option_words(options).items()]
    file: tuple[str, ...] = ()
    if engine == "trtllm" and (extra := extra_options(setup)):
        lines.append('--extra_llm_api_options "$extra"')
        file = ('extra="$(mktemp --suffix=.yaml)"', "cat > \"$extra\" <<'END'", json.dumps(extra), "END")
    c = setup.parallel
    ranks = c.tensor_parallel_size * c.pipeline_parallel_size * c.attention_data_parallel_size
    return "\n".join(
        (
            "#!/usr/bin/env bash",
            f"# {engine} {VERSIONS[engine]}: {headline(setup)}; one of {setup.cluster.num_gpus // ranks} replicas.",
            *(
                (f': "${{MODEL:?set MODEL to the checkpoint in {setup.workload.precision}: a Hugging Face id or a folder}}"',)
                if setup.model_path is None
                else ()
            ),
            *file,
            " \\\n    ".join((start, *lines, '"$@"')),
            "",
        )
    )


def _number_formats(setup: ServingSetup, *, engine: str, cache: dict[str, str]) -> Values:
    """Weights and activations as the estimate took them, and the cache where the query asks for one. `auto`, a cache in the
    model's own type, is vLLM's only word for 16 and 32 bits: `bfloat16` is for models that cache in fp8 by themselves
    (vllm/config/cache.py).
    """
    weights, kept = setup.workload.precision, setup.workload.kv_cache_precision
    dtype, narrowed = MODEL_TYPES.get(weights, "bfloat16"), narrowing(setup, engine=engine)
    if kept is None:
        return {"--dtype": dtype, "--quantization": narrowed}
    word = cache.get(kept) or ("auto" if dtype == MODEL_TYPES.get(kept) else None)
    if word is None:
        raise UnsupportedError(
            f"{engine} {VERSIONS[engine]} has no word for a cache in {kept} beside weights in {weights}; "
            f"set inference.kv_cache_precision to {' or '.join(dict.fromkeys(('bf16', *cache)))}",
            field="inference.kv_cache_precision",
        )
    return {"--dtype": dtype, "--quantization": narrowed, "--kv-cache-dtype": word}


def narrowing(setup: ServingSetup, *, engine: str) -> str | None:
    """Return the word for weights that are narrowed while loading; None where the checkpoint's own are as predicted.

    Raises UnsupportedError where the engine would serve weights of another precision than the query's.
    """
    wanted, stored, words = setup.workload.precision, setup.stored_precision, NARROWED.get(engine, {})
    if stored is None:  # one's own checkpoint
        return words.get(wanted)
    if stored == wanted or (stored in WIDE and wanted in WIDE):
        return None
    if stored in WIDE and wanted in words:
        return words[wanted]
    raise UnsupportedError(
        f"no checkpoint of {setup.model.name} in {wanted} is known, and {engine} would serve {setup.model_path} in {stored}; "
        f"set inference.precision to {stored}, or name your own checkpoint, a folder or its id, as the model",
        field="inference.precision",
    )

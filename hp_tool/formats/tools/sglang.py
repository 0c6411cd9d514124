"""Read and write SGLang's server command (sglang/srt/server_args.py)."""

from hp_tool.domain.setups import ServingSetup
from hp_tool.errors import UnsupportedError
from hp_tool.formats.engine_formats import register_engine
from hp_tool.formats.engines import (
    EXPRESSED_FIELDS,
    Role,
    draft_settings,
    model_argument,
    pools_script,
    precision_options,
    replica_role,
    size_above_one,
    uses_deepep,
)
from hp_tool.formats.writing import Values, reject_inexpressible

VERSION = "0.5.6.post2"


def server_command(setup: ServingSetup) -> tuple[str, Values]:
    """Return the sglang.launch_server command and its options.

    With data-parallel attention, --tp counts all ranks, and limits apply to all attention groups
    together.
    """
    reject_inexpressible(setup, tool=f"sglang {VERSION}", expressed=EXPRESSED_FIELDS)
    c, w, groups = setup.parallel, setup.workload, setup.parallel.attention_data_parallel_size
    deepep = uses_deepep(setup)
    if deepep and c.expert_parallel_size != c.tensor_parallel_size * groups:
        ranks = c.tensor_parallel_size * groups
        raise UnsupportedError(
            f"SGLang's DeepEP shards the experts across all {ranks} ranks of a stage; set "
            f"expert_parallel_size to {ranks}",
            field="parallel.expert_parallel_size",
        )
    return f"python -m sglang.launch_server --model-path {model_argument(setup)}", {
        "--tp-size": c.tensor_parallel_size * groups,
        "--pp-size": c.pipeline_parallel_size,
        "--max-running-requests": c.max_num_seqs * groups,
        "--chunked-prefill-size": c.max_num_batched_tokens * groups,
        "--context-length": setup.longest,
        "--mem-fraction-static": setup.memory_fraction,
        "--enable-dp-attention": groups > 1,
        "--dp-size": size_above_one(groups),
        "--ep-size": size_above_one(c.expert_parallel_size),
        "--enable-eplb": c.redundant_experts > 0,
        "--ep-num-redundant-experts": c.redundant_experts or None,
        "--moe-a2a-backend": "deepep" if deepep else None,
        "--enable-two-batch-overlap": w.two_batch_overlap is True,
        **_speculation_options(setup),
        **precision_options(
            setup, engine="sglang", version=VERSION, cache={"bf16": "bf16", "fp8": "fp8_e4m3"}
        ),
    }


ALGORITHMS = {
    "ngram": "NGRAM",
    "mtp": "NEXTN",
    "eagle3": "EAGLE3",
    "eagle": "EAGLE",
    "model": "STANDALONE",
}


def _speculation_options(setup: ServingSetup) -> Values:
    """Return the options of speculative decoding with a single chain of drafted tokens.

    Source: docs/advanced_features/speculative_decoding.md.
    """
    if (how := draft_settings(setup)) is None:
        return {}
    method, numbers = how
    k, steps = numbers.num_speculative_tokens, method != "ngram"
    return {
        "--speculative-algorithm": ALGORITHMS[method],
        "--speculative-draft-model-path": numbers.draft_model,
        "--speculative-num-steps": k if steps else None,
        "--speculative-eagle-topk": 1 if steps else None,
        "--speculative-num-draft-tokens": k + 1,
    }


def pool_command(setup: ServingSetup, *, other: ServingSetup, mode: str) -> tuple[str, Values]:
    """Return the command of a prefill or decode replica.

    A prefill replica needs the parallel sizes of the decode replicas.
    """
    program, options = server_command(setup)
    options = {**options, "--disaggregation-mode": mode}
    if mode == "prefill":
        decode_options = server_command(other)[1]
        for name, flag in (
            ("--tp-size", "--disaggregation-decode-tp"),
            ("--dp-size", "--disaggregation-decode-dp"),
        ):
            options[flag] = decode_options[name] if decode_options[name] != options[name] else None
    return program, options


def pools_text(prefill: ServingSetup, decode: ServingSetup) -> str:
    """Return a script that starts one replica of either pool, or the router."""
    first = pool_command(prefill, other=decode, mode="prefill")
    second = pool_command(decode, other=prefill, mode="decode")
    return pools_script(
        tool=f"sglang {VERSION}",
        prefill=prefill,
        decode=decode,
        roles=[
            replica_role("prefill", prefill, first),
            replica_role("decode", decode, second),
            Role(
                name="router",
                meaning="behind it --prefill URL BOOTSTRAP_PORT (8998) and --decode URL of every "
                "replica",
                command=["python -m sglang_router.launch_router --pd-disaggregation"],
            ),
        ],
    )


register_engine(
    name="sglang",
    title="SGLang",
    version=VERSION,
    command=r"sglang\.launch_server|\bdynamo\.sglang\b|(?<![\w/.-])sglang\s+serve\b",
    rank=21,
    start=server_command,
    write_pools=pools_text,
    reads="`sglang.launch_server`, also in a Kubernetes manifest; two roles become separate pools",
    writes="the command of one replica; for separate pools, a script that starts one replica of "
    "either pool, or the router",
)

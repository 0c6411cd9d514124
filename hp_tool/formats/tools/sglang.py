"""Read and write SGLang's server command: options as in sglang/srt/server_args.py."""

from hp_tool.domain.setups import ServingSetup
from hp_tool.errors import UnsupportedError
from hp_tool.formats.engine_commands import reader
from hp_tool.formats.engines import (
    SAID,
    Role,
    above_one,
    command,
    drafts,
    model_word,
    number_formats,
    one_of,
    option_values,
    pools_command,
    replica,
    travels_by_deepep,
)
from hp_tool.formats.registry import Format, register
from hp_tool.formats.signs import Sign, words
from hp_tool.formats.writing import Values, refuse_unsaid

VERSION = "0.5.6.post2"


def start(setup: ServingSetup) -> tuple[str, Values]:
    """Return the command of sglang.launch_server, with options as in sglang/srt/server_args.py.

    With attention data parallelism TP counts all ranks, and limits are divided by the attention
    groups.
    """
    refuse_unsaid(setup, tool=f"sglang {VERSION}", expressed=SAID)
    c, w, groups = setup.parallel, setup.workload, setup.parallel.attention_data_parallel_size
    deepep = travels_by_deepep(setup)
    if deepep and c.expert_parallel_size != c.tensor_parallel_size * groups:
        ranks = c.tensor_parallel_size * groups
        raise UnsupportedError(
            f"SGLang's DeepEP divides the experts over all {ranks} ranks of a stage; set "
            f"expert_parallel_size to {ranks}",
            field="parallel.expert_parallel_size",
        )
    return f"python -m sglang.launch_server --model-path {model_word(setup)}", {
        "--tp-size": c.tensor_parallel_size * groups,
        "--pp-size": c.pipeline_parallel_size,
        "--max-running-requests": c.max_num_seqs * groups,
        "--chunked-prefill-size": c.max_num_batched_tokens * groups,
        "--context-length": setup.longest,
        "--mem-fraction-static": setup.memory_fraction,
        "--enable-dp-attention": groups > 1,
        "--dp-size": above_one(groups),
        "--ep-size": above_one(c.expert_parallel_size),
        "--enable-eplb": c.redundant_experts > 0,
        "--ep-num-redundant-experts": c.redundant_experts or None,
        "--moe-a2a-backend": "deepep" if deepep else None,
        "--enable-two-batch-overlap": w.two_batch_overlap is True,
        **_speculative(setup),
        **number_formats(
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


def _speculative(setup: ServingSetup) -> Values:
    """Return a chain of drafted tokens, verified with the previous one.

    Source: docs/advanced_features/speculative_decoding.md.
    """
    if (how := drafts(setup)) is None:
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


def pool_of(setup: ServingSetup, *, other: ServingSetup, mode: str) -> tuple[str, Values]:
    """Return `start` of a prefill or decoding replica; the prefill replica is given the ranks it
    sends to.
    """
    program, options = start(setup)
    options = {**options, "--disaggregation-mode": mode}
    if mode == "prefill":
        theirs = start(other)[1]
        for name, flag in (
            ("--tp-size", "--disaggregation-decode-tp"),
            ("--dp-size", "--disaggregation-decode-dp"),
        ):
            options[flag] = theirs[name] if theirs[name] != options[name] else None
    return program, options


def pools(prefill: ServingSetup, decode: ServingSetup) -> str:
    """Return a script that starts a replica of either pool, or the router."""
    first = replica(*pool_of(prefill, other=decode, mode="prefill"))
    second = replica(*pool_of(decode, other=prefill, mode="decode"))
    return pools_command(
        tool=f"sglang {VERSION}",
        prefill=prefill,
        decode=decode,
        roles=[
            Role(name="prefill", meaning=one_of(prefill.replicas), command=first),
            Role(name="decode", meaning=one_of(decode.replicas), command=second),
            Role(
                name="router",
                meaning="behind it --prefill URL BOOTSTRAP_PORT (8998) and --decode URL of every "
                "replica",
                command=["python -m sglang_router.launch_router --pd-disaggregation"],
            ),
        ],
    )


register(
    Format(
        name="sglang",
        title="SGLang",
        kind="inference",
        signs=(
            Sign(
                of="script",
                rank=21,
                holds=words(
                    r"sglang\.launch_server|\bdynamo\.sglang\b|(?<![\w/.-])sglang\s+serve\b"
                ),
            ),
        ),
        read=reader("sglang"),
        write=lambda setup: command(setup, tool=f"sglang {VERSION}", start=start),
        write_pools=pools,
        options=lambda setup: option_values(start(setup)[1]),
        usual_of="sglang",
        reads="`sglang.launch_server`, also in a Kubernetes manifest: a query of kind inference; "
        "of two roles, pools",
        writes="the command of one replica; of pools a script that starts one of either, or the "
        "router",
        checked="options and values recorded from the engine's own parser; read back by `import`",
    )
)

"""A real MCP client drives every tool, over a process and over HTTP with keys: script in, better
flags out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from hp_tool.domain.access import Scope
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.watch import StepBatch
from hp_tool.formats.exchange.reading import read_configuration
from hp_tool.formats.reading import ImportRefusedError
from hp_tool.questions import schema
from hp_tool.store import SqlStore, open_store
from hp_tool.watch import expected_pace
from hp_tool.watch.reports import take_steps
from service import keys
from service.agents import SKILL
from service.app import create_app
from service.settings import Settings
from tests.conftest import skip_or_fail
from tests.service.conftest import SMALL
from tests.service.coordinator import claim, finish, one_run
from tests.service.processes import hp_tool, served
from tests.service.test_watches import DENSE, batch, times

if TYPE_CHECKING:
    from mcp import Client

SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 \\
  --num-attention-heads 64 --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm \\
  --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128256 \\
  --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 128 --bf16 \\
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel \\
  --use-distributed-optimizer --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
"""  # noqa: E501
QUERY = {
    "model": "llama-3-70b",
    "gpu": "h100-sxm-80gb",
    "num_gpus": 64,
    "sequence_length": 8192,
    "global_batch_size": 128,
}
TOO_LARGE = QUERY | {"parallel": {"tensor_parallel_size": 2, "micro_batch_size": 1}}
SERVING = {
    "model": "qwen3-32b",
    "gpu": "h200-sxm-141gb",
    "num_gpus": 8,
    "inference": {
        "input_length": 4000,
        "output_length": 1000,
        "concurrency": 64,
        "precision": "fp8",
    },
}
MOST_CHARACTERS = 20_000


class Agent:
    """A client that notes which tools it called, and fails where an answer is an error or too
    long.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.called: set[str] = set()

    async def ask(self, tool: str, **arguments: Any) -> Any:
        result = await self.client.call_tool(tool, arguments)
        (content,) = result.content
        assert not result.is_error, content.text
        assert len(content.text) < MOST_CHARACTERS
        assert json.loads(content.text) == result.structured_content
        self.called.add(tool)
        return result.structured_content

    async def refused(self, tool: str, **arguments: Any) -> str:
        result = await self.client.call_tool(tool, arguments)
        assert result.is_error
        text: str = result.content[0].text
        return text


def figures_of(answer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every figure of an answer by its name."""
    if isinstance(answer, dict):
        for name, value in answer.items():
            if isinstance(value, dict) and "basis" in value:
                yield name, value
            else:
                yield from figures_of(value)
    elif isinstance(answer, list):
        for each in answer:
            yield from figures_of(each)


def changed(script: str, changes: list[dict[str, Any]]) -> str:
    """The script with the flags that an import proposes in place of its own."""
    lines = script.rstrip()
    for change in changes:
        old = f"{change['flag']} {change['from']}".rstrip() if change["from"] is not None else None
        new = f"{change['flag']} {change['to']}".rstrip() if change["to"] is not None else ""
        lines = lines.replace(old, new) if old and old in lines else f"{lines} {new}"
    return lines + "\n"


async def ask_all(agent: Agent, script: str) -> None:
    """What needs no search, as an agent would go about it."""
    read = await agent.ask("import_config", run={"command": script, "gpu": "h100-sxm-80gb"})
    assert read["running"]["feasible"] and read["gain_fraction"] > 0.05
    text = Path(script).read_text(encoding="utf-8") if Path(script[:200]).is_file() else script
    better = await agent.ask(
        "import_config", run={"command": changed(text, read["changes"]), "gpu": "h100-sxm-80gb"}
    )
    expected = read["better"]["figures"]["step_s"]
    assert better["running"]["figures"]["step_s"]["value"] == pytest.approx(
        expected["value"], rel=1e-3
    )
    assert "missing: cluster.gpu; add gpu h100-sxm-80gb (" in await agent.refused(
        "import_config", run={"command": SCRIPT}
    )

    ranked = await agent.ask("recommend", query=QUERY, top=3)
    best = ranked["recommendations"][0]
    assert (best["rank"], best["group"]) == (1, 1) and len(ranked["recommendations"]) == 3
    estimate = await agent.ask("estimate", query={**ranked["query"], "parallel": best["parallel"]})
    assert estimate["figures"] == best["figures"]
    for _, figure in figures_of(estimate):
        low, high = figure["interval"]
        assert low < figure["value"] < high
    # The fastest may exchange sequences as no measured run does; a plain layout is among those that
    # constants come from.
    plain = await agent.ask(
        "estimate",
        query={**QUERY, "parallel": {"tensor_parallel_size": 4, "pipeline_parallel_size": 4}},
    )
    assert {figure["basis"] for _, figure in figures_of(plain)} == {"fitted"}
    machines = [{"gpu": gpu, "num_gpus": 64} for gpu in ("h100-sxm-80gb", "a100-sxm-80gb")]
    rented = await agent.ask(
        "recommend",
        query={
            "model": "llama-3-8b",
            "sequence_length": 8192,
            "global_batch_size": 64,
            "cluster": machines,
        },
    )
    assert len(rented["recommendations"]) == 2
    uncommon = await agent.ask(
        "estimate", query={**QUERY, "gpu": "l40s-48gb", "training": {"optimizer": "muon"}}
    )
    assert {figure["basis"] for _, figure in figures_of(uncommon)} == {"extrapolated"}
    assert any("muon" in reason for reason in uncommon["extrapolated_because"])

    lost = await agent.ask("why_not", query=TOO_LARGE)
    assert not lost["feasible"] and "GiB" in lost["reasons"][0]
    for fix in lost["fixes"]:
        assert (
            fix["figures"]["step_s"]["interval"]
            and fix["figures"]["memory_total_bytes"]["basis"] == "fitted"
        )
    slower = await agent.ask("why_not", query={**QUERY, "parallel": read["query"]["parallel"]})
    assert slower["best"]["rank"] == 1 and slower["seconds_more_than_best_by_part"]["recompute"] > 0

    exported = await agent.ask(
        "export_config", query=ranked["query"], format="torchtitan", rerank=True
    )
    assert exported["framework"] == "torch-fsdp" and "tensor_parallel_degree" in exported["text"]
    served_by = await agent.ask("recommend", query=SERVING)
    assert {"ttft_s", "tpot_s", "output_tokens_per_second_per_gpu"} <= served_by["recommendations"][
        0
    ]["figures"].keys()
    sized = await agent.ask(
        "size", query={"cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64}, "days": 7}
    )
    assert sized["figures"]["effective_days"]["interval"][0] < 7.0
    assert all(
        isinstance(each["value"], int) for each in sized["shape"] if each["name"] == "vocab_size"
    )
    gemm = (
        '{"ph": "X", "cat": "kernel", "name": "sm90_xmma_gemm_bf16bf16_bf16f32", "tid": 7, '
        '"ts": %d, "dur": 100}'
    )
    trace, whole = f"[{gemm % 0}, {gemm % 100}]", {**QUERY, "parallel": best["parallel"]}
    explained = await agent.ask("explain_run", recordings=[trace], query=whole)
    assert (
        explained["measured_s"] == {"compute": 2e-4} and explained["predicted_s"]["compute"] > 2e-4
    )
    assert "no_trace" in await agent.refused("explain_run", recordings=["{}"])
    assert "h100-sxm-80gb" in (await agent.ask("catalogue", kind="gpus"))["gpus"]
    assert (await agent.ask("catalogue", kind="models", name="llama-3-70b"))[
        "num_hidden_layers"
    ] == 80
    assert "integer" in (await agent.ask("query_keys", section="parallel"))["tensor_parallel_size"]
    assert "did you mean parallel?" in await agent.refused(
        "estimate", query={**QUERY, "paralel": {}}
    )
    assert "no such argument; did you mean top?" in await agent.refused(
        "recommend", query=QUERY, tops=3
    )


async def watch_with(agent: Agent, store: SqlStore) -> None:
    """A job of ada's that becomes slower, and what to run without one of its nodes."""
    query = schema.parse_query(DENSE)
    expected = schema.to_dict(expected_pace(query))
    job = store.create_watch(
        name="pretrain", query=schema.query_mapping(query), expected=expected, owner="ada"
    ).id
    for times_s, first in ((times(200), 1), (1.3 * times(40, seed=1), 201)):
        take_steps(schema.parse(StepBatch, batch(times_s, first=first)), store=store, watch_id=job)
    assert [each["id"] for each in (await agent.ask("watched_jobs"))["jobs"]] == [job]
    told = await agent.ask("watched_jobs", watch_id=job, lost_nodes=1)
    assert told["status"] == "slower_than_it_was" and told["text"][0].startswith(
        "slower than it was"
    )
    assert told["after_loss"]["parallel"] and told["query"]["cluster"]["num_gpus"] < 32


async def search_with(agent: Agent, act: Callable[[str], None]) -> dict[str, Any]:
    """A search from start to result; `act` stands for its worker."""
    started = await agent.ask("start_search", query=SMALL, budget_runs=2)
    assert (await agent.ask("search_result", search_id=started["search_id"]))["ended"] is False
    act(started["search_id"])
    followed = await agent.ask("follow_search", search_id=started["search_id"], wait_s=10)
    assert followed["ended"]
    result: dict[str, Any] = await agent.ask("search_result", search_id=started["search_id"], top=1)
    return result | {"runs": followed.get("runs")}


@pytest.fixture(autouse=True)
def _sdk() -> None:
    if find_spec("mcp") is None:
        skip_or_fail(component="MCP", reason="the MCP SDK (the mcp extra) is not installed")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    opened = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    yield opened
    opened.close()


def test_an_agent_with_a_key_drives_every_tool_over_http(store: SqlStore) -> None:
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    def token(scope: Scope, owner: str = "ada") -> str:
        return keys.issue(store=store, owner=owner, scope=scope)[1]

    @asynccontextmanager
    async def agent(key: str) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http,
            Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client,
        ):
            yield Agent(client)

    def work(search_id: str) -> None:
        lease = claim(store, search_id)
        one_run(
            store,
            lease,
            Measurement(status="ok", step_s=0.4, step_s_spread=0.02, peak_memory_bytes=10**9),
        )
        finish(store, lease)

    async def drive() -> None:
        async with agent(token(Scope.SUBMIT)) as ada:
            await ask_all(ada, SCRIPT)
            await watch_with(ada, store)
            result = await search_with(ada, work)
            (measured,) = [row["measured"] for row in result["recommendations"]]
            assert measured["figures"]["step_s"] == {
                "value": 0.4,
                "interval": [0.39, 0.41],
                "basis": "measured",
            }
            assert result["runs"][0]["measured"]["status"] == "ok"
            waiting = await ada.ask("start_search", query=SMALL)
            async with agent(token(Scope.SUBMIT, owner="bob")) as bob:
                assert "not_found" in await bob.refused(
                    "follow_search", search_id=waiting["search_id"]
                )
            assert (await ada.ask("cancel_search", search_id=waiting["search_id"]))[
                "state"
            ] == "cancelled"
            tools = {tool.name for tool in (await ada.client.list_tools()).tools}
            assert ada.called == tools
            assert "no configuration or log of a supported format" in await ada.refused(
                "import_config", run={"command": __file__}
            )  # no path here
        async with agent(token(Scope.READ)) as reader:
            assert (await reader.ask("recommend", query=QUERY, top=1))["recommendations"]
            assert "forbidden" in await reader.refused("start_search", query=SMALL)
        with pytest.RaisesGroup(Exception, allow_unwrapped=True, flatten_subgroups=True):
            async with agent(token(Scope.ADMIN)[:-1]):
                pass

    with served(create_app(Settings(api_key="the operator's", poll_s=0.02), store=store)) as url:
        assert httpx2.post(f"{url}/mcp", json={}, timeout=60).status_code == 401
        assert (
            httpx2.post(
                f"{url}/mcp", json={}, headers={"Authorization": "Bearer hp_wrong"}, timeout=60
            ).status_code
            == 401
        )
        assert (
            httpx2.get(
                f"{url}/mcp", headers={"Authorization": "Bearer the operator's"}, timeout=60
            ).status_code
            == 405
        )
        anyio.run(drive)


@pytest.mark.components
def test_an_agent_drives_a_process_over_its_standard_streams(
    tmp_path: Path, store: SqlStore
) -> None:
    from mcp import Client, StdioServerParameters

    script = tmp_path / "train.sh"
    script.write_text(SCRIPT, encoding="utf-8")
    url = f"sqlite:///{tmp_path / 'hp.sqlite3'}"
    environment = {
        "HP_DATABASE_URL": url,
        "HP_RUNS_DIR": str(tmp_path / "runs"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = hp_tool("mcp")
    parameters = StdioServerParameters(
        command=command[0], args=command[1:], env=environment, cwd=tmp_path
    )

    async def drive() -> None:
        async with Client(parameters) as client:
            agent = Agent(client)
            read = await agent.ask(
                "import_config", run={"command": str(script), "gpu": "h100-sxm-80gb"}
            )
            assert read["changes"] and read["format"] == "megatron-lm"
            (skill,) = (await client.read_resource("hp-tool://skill")).contents
            assert skill.text == SKILL.read_text(encoding="utf-8")
            started = await agent.ask("start_search", query=SMALL, budget_runs=1)
            cancelled = await agent.ask("cancel_search", search_id=started["search_id"])
            assert cancelled["state"] == "cancelled" or cancelled["requested"] == "cancel"
            assert (await agent.ask("follow_search", search_id=started["search_id"], wait_s=30))[
                "ended"
            ]

    anyio.run(drive)


def test_the_skill_names_every_tool_and_lies_in_the_package(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from service.agents.server import CHANGING_TOOLS, READING_TOOLS

    text = SKILL.read_text(encoding="utf-8")
    assert {name for name in (*READING_TOOLS, *CHANGING_TOOLS) if f"`{name}`" not in text} <= {
        "cancel_search"
    }
    from hp_tool.cli.main import build

    build()(["mcp", "--skill"], standalone_mode=False)
    assert capsys.readouterr().out.strip() == str(SKILL)


def test_a_missing_sdk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from hp_tool.errors import MissingExtraError
    from service import agents

    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[mcp\]"):
        agents.require_sdk()


def test_an_agent_reads_which_argument_is_wrong() -> None:
    from mcp.server.mcpserver.exceptions import ToolError

    from service.agents.server import build
    from service.agents.tools import Tools

    server = build(
        Tools(
            connect=lambda context: nullcontext(None), own_files=False, run=lambda search_id: None
        )
    )  # type: ignore[arg-type, return-value]

    async def fault(name: str, arguments: dict[str, Any]) -> str:
        with pytest.raises(ToolError) as raised:
            await server.call_tool(name, arguments)
        return str(raised.value)

    wrong = anyio.run(fault, "catalogue", {"kind": "models", "contain": "llama"})
    assert (
        "contain: no such argument; did you mean contains?" in wrong
        and "takes kind" in wrong
        and "pydantic" not in wrong
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "vllm serve mistral-own -tp $RANKS",
            'add overrides {"model": "NAME"}, or its config.json',
        ),
        ("vllm serve mistral-own -tp $RANKS", 'add overrides {"inference.input_length": 4000}. '),
        (
            "vllm serve mistral-own -tp $RANKS",
            'nothing sets here (variables RANKS=...); add overrides {"parallel.tensor',
        ),
        (
            "# on our H200\ntorchrun pretrain_gpt.py --bf16",
            "cluster.gpu; add gpu h200-nvl-141gb (the file mentions h200)",
        ),
        ("torchrun --nproc-per-node $N pretrain_gpt.py --bf16", "(variables N=...); add num_gpus"),
        ("source more.sh\ntorchrun pretrain_gpt.py --bf16", "pass it with files"),
        ("torchrun pretrain_gpt.py --bf16 --odd 1", "(ignore NAME skips"),
    ],
)
def test_an_agent_reads_what_an_import_lacks_as_arguments(command: str, words: str) -> None:
    from service.agents.tools import with_tool_arguments

    with pytest.raises(ImportRefusedError) as refused:
        read_configuration(command)
    assert words in with_tool_arguments(refused.value)

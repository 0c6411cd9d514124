"""`hp-tool watch` on logs as trainers print them."""

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.watch.simulated import step_times
from hp_tool.cli import watch
from hp_tool.domain.watch import StepReport
from hp_tool.watch.logs import LogSteps, Watched
from hp_tool.watch.slowdowns.causes import grows
from tests.command_line import COMMAND, ROOT, hp_tool

QUERY = """
kind: training
model: llama-3-8b
cluster: {gpu: h100-sxm-80gb, num_gpus: 32, gpus_per_node: 8, price_per_gpu_hour: 2.5}
training: {sequence_length: 8192, global_batch_size: 256, precision: bf16}
parallel: {tensor_parallel_size: 2, micro_batch_size: 1}
"""


def megatron(times_s: np.ndarray, *, first: int = 1) -> str:
    return "".join(
        f" iteration {first + number:8d}/   90000 | elapsed time per iteration (ms): "
        f"{1e3 * seconds:.1f} | lm loss: 2.0E+00 |\n"
        for number, seconds in enumerate(times_s)
    )


@pytest.fixture
def times() -> np.ndarray:
    return 6.5 * step_times(np.random.default_rng(1), steps=400)


@pytest.fixture
def query(tmp_path: Path) -> Path:
    file = tmp_path / "query.yaml"
    file.write_text(QUERY)
    return file


def test_a_log_as_it_should_be_prints_nothing(tmp_path: Path, times: np.ndarray) -> None:
    log = tmp_path / "job.log"
    log.write_text(megatron(times))
    ended = hp_tool("watch", str(log))
    assert (ended.returncode, ended.stdout) == (0, "")


def test_reports_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "job.jsonl"
    lines = [json.dumps({"step": step, "step_s": 1.0}) for step in range(40)]
    log.write_text(
        "\n".join(
            [*lines[:20], '{"step": 20, "step_s": "fast"}', '{"step": 21,', *lines[22:], "saving"]
        )
        + "\n"
    )
    ended = hp_tool("watch", str(log))
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "skipped 2 JSON lines without a step time (step_s)" in ended.stderr


def test_a_slower_log_is_told_with_what_it_costs(
    tmp_path: Path, times: np.ndarray, query: Path
) -> None:
    log = tmp_path / "job.log"
    times[300:] *= 1.15
    log.write_text(megatron(times, first=5001))
    ended = hp_tool("watch", str(log), "--query", str(query))
    assert ended.returncode == 4
    assert "slower than it was: +14.9%" in ended.stdout
    assert "h per day" in ended.stdout
    verdict = json.loads(hp_tool("watch", str(log), "--query", str(query), "--json").stdout)
    assert abs(verdict["slowdown"]["since_step"] - 5301) <= 3
    assert verdict["loss_per_day"]["cost"] == pytest.approx(
        verdict["loss_per_day"]["gpu_hours"] * 2.5
    )


def test_a_job_slower_than_its_prediction_is_told(
    tmp_path: Path, times: np.ndarray, query: Path
) -> None:
    log = tmp_path / "job.log"
    log.write_text(megatron(5.0 * times))
    ended = hp_tool("watch", str(log), "--query", str(query))
    assert ended.returncode == 4
    assert ended.stdout.startswith("slower than it should be")


def test_a_folder_of_ranks_names_the_slow_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    own = 0.8 * np.exp(rng.normal(0.0, 0.02, (300, 4)))
    own[200:, 3] *= 1.4
    for rank in range(4):
        lines = (
            {
                "step": number,
                "step_s": each.max() + 0.1,
                "rank": rank,
                "parts_s": {"compute": each[rank]},
            }
            for number, each in enumerate(own)
        )
        (tmp_path / f"rank{rank}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ended = hp_tool("watch", str(tmp_path))
    assert "rank 3 of 4: compute time +4" in ended.stdout


@pytest.mark.parametrize(
    "line",
    [
        "step: {step} loss: 7.8 memory: 40.3GiB(42%) tps: {rate:.0f}",
        "global_step={step}, CurrSamplesPerSec={rate:.3f}",
    ],
)
def test_rates_tell_a_slowdown_without_a_query(line: str) -> None:
    log = LogSteps()
    first = log.feed(line.format(step=10, rate=4000.0))
    second = log.feed(line.format(step=20, rate=2000.0))
    assert first is not None
    assert second is not None
    assert second[1].step_s == pytest.approx(2 * first[1].step_s, rel=1e-3)
    assert (first[1].step, second[1].step) == (10, 20)
    assert log.feed("nothing of interest") is None
    assert not log.in_seconds


def test_equal_times_of_a_rounded_log_do_not_grow() -> None:
    assert not grows([0.2] * 100) and not grows([0.2, 0.3] * 50)
    assert grows([0.2] * 30 + [0.3] * 20 + [0.4] * 50)


def test_rates_alone_tell_no_seconds() -> None:
    watched = Watched(in_seconds=False)
    for step in range(1, 201):
        watched.add(0, None, StepReport(seq=step, step=step, step_s=1.2e-4 if step > 100 else 1e-4))
    verdict = watched.verdict()
    assert verdict.slowdown is not None and verdict.now is None and verdict.was is None
    assert verdict.text[0].startswith("slower than it was: +20.0%") and verdict.text[0].endswith(
        "sudden"
    )


def test_a_followed_log_may_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "job.log"
    log.write_text("one\ntwo\n")
    monkeypatch.setattr(watch, "POLL_S", 0.0)
    lines = watch._read_lines([log], follow=True)
    assert [next(lines)[1], next(lines)[1]] == ["one\n", "two\n"]
    log.write_text("new\n")
    assert next(lines)[1] == "new\n"
    log.unlink()
    monkeypatch.setattr(watch.time, "sleep", lambda _: log.write_text("last\n"))
    assert next(lines)[1] == "last\n"


def test_a_restart_from_a_checkpoint_goes_on_and_other_ranks_count_once() -> None:
    log = LogSteps()
    lines = [f"step: {step} loss: 7.8 tps: 4,000" for step in (50, 51, 51, 52, 51, 52, 20, 20, 21)]
    steps = [taken[1].step for line in lines if (taken := log.feed(line)) is not None]
    assert steps == [50, 51, 52, 20, 21]
    ranks = [
        log.feed(json.dumps({"step": 7, "step_s": 1.0, "rank": rank}))
        for log in (LogSteps(),)
        for rank in (0, 1, 1)
    ]
    assert [each is not None and each[0] for each in ranks] == [0, 1, False]


@pytest.mark.components
def test_lines_are_told_as_they_come_in_bounded_memory(times: np.ndarray) -> None:
    """A process that reads standard input: told before the input ends; 60,000 steps later it is no
    larger.
    """
    watching = subprocess.Popen(
        [*COMMAND, "watch", "-"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert watching.stdin is not None
    assert watching.stdout is not None
    try:
        slow = times.copy()
        slow[300:] *= 1.2
        watching.stdin.write(megatron(slow[:330]))
        watching.stdin.flush()
        assert watching.stdout.readline().startswith("slower than it was")
        before = _resident_kib(watching.pid)
        watching.stdin.write(megatron(np.tile(slow[330:], 850), first=331))
        watching.stdin.flush()
        watching.stdin.close()
        while watching.poll() is None:
            largest = _resident_kib(watching.pid) or before
            time.sleep(0.05)
        assert watching.returncode == 4
        assert largest < before + 8 * 1024
    finally:
        watching.kill()
        watching.wait()


def _resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(
        (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0
    )


def test_a_growing_log_is_followed(tmp_path: Path, times: np.ndarray) -> None:
    log = tmp_path / "job.log"
    slow = times.copy()
    slow[300:] *= 1.2
    text = megatron(slow)
    middle = text.index("iteration", len(text) // 2) + 40  # within a line
    log.write_text(text[:middle])
    program = textwrap.dedent("""
        import sys, threading, time
        from hp_tool.cli import watch
        watch.POLL_S = 0.01
        log, rest = sys.argv[1:]
        def grow():
            time.sleep(0.5)
            with open(log, "a") as stream:
                stream.write(open(rest).read())
        threading.Thread(target=grow, daemon=True).start()
        sys.argv = ["hp-tool", "watch", log, "--follow"]
        from hp_tool.cli.main import main
        main()
    """)
    rest = tmp_path / "rest.txt"
    rest.write_text(text[middle:])
    watching = subprocess.Popen(
        [sys.executable, "-c", program, str(log), str(rest)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    try:
        assert watching.stdout.readline().startswith("slower than it was")
    finally:
        watching.kill()
        watching.wait()


def test_a_lost_node_gives_the_best_of_the_rest_and_what_a_wait_is_worth(query: Path) -> None:
    answer = json.loads(
        hp_tool("watch", "--query", str(query), "--lost-nodes", "1", "--json").stdout
    )
    assert (answer["num_gpus"], answer["idle_gpus"]) == (24, 0)
    assert 0.5 < answer["pace"] < 0.8
    assert answer["worth_waiting_s"] == pytest.approx(
        answer["restart_s"] + answer["checkpoint_s"] / answer["pace"]
    )
    assert "waiting is worthwhile" in answer["text"]
    again = json.loads(hp_tool("estimate", "-", "--json", stdin=json.dumps(answer["query"])).stdout)
    assert again["estimate"]["time"]["step_s"] == answer["step_s"]


@pytest.mark.parametrize(
    "words",
    [
        ("watch",),
        ("watch", "/nowhere"),
        ("watch", "--lost-nodes", "1"),
        ("watch", "-", "--format", "x"),
    ],
)
def test_what_cannot_be_read_is_bad_input(words: tuple[str, ...]) -> None:
    assert hp_tool(*words).returncode == 2


def test_a_log_of_hugging_face_points_to_what_reports_its_steps(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    lines = (
        "{'loss': 2.3456, 'grad_norm': 1.2, 'learning_rate': 4.9e-05, 'epoch': 0.01}\n  1%|   "
        "| 10/1000 [00:12<20:03]\n"
    )
    log.write_text(lines * 3)
    ended = hp_tool("watch", str(log))
    assert ended.returncode == 2 and "HuggingFaceCallback from hp_tool.reporter" in ended.stderr

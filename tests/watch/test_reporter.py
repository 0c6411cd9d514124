"""The reporter inside a training: it never blocks, counts what it cannot keep, and needs nothing
but Python.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hp_tool import reporter as module
from hp_tool.reporter import HuggingFaceCallback, LightningCallback, Reporter
from tests.command_line import hp_tool
from tests.torch_or_skip import torch_or_skip


class Service(ThreadingHTTPServer):
    """Takes steps as the service does; answers with the statuses it is given first, and loses some
    answers.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses: list[int] = []
        self.came: list[dict[str, Any]] = []
        self.stored: dict[int, float] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/watches/w"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.came.append({"path": self.path, "key": self.headers["Authorization"], **body})
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if status == 200 or status == 504:  # taken, but a proxy loses the answer
            self.server.stored |= {each["seq"]: each["step_s"] for each in body["reports"]}
        self.send_response(status)
        self.end_headers()
        if status == 200:
            self.wfile.write(json.dumps({"acknowledged": max(self.server.stored)}).encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    server = Service()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_every_step_arrives_whatever_the_service_answers(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service.statuses = [503, 504, 413, 401]
    reporter = Reporter(service.url, api_key="secret", rank=3, every_s=0.005)
    for step in range(1200):
        reporter.step(1.0 + step, step=step)
    deadline = time.monotonic() + 30
    while not reporter.close(timeout_s=5.0):
        assert time.monotonic() < deadline
    assert service.stored == {seq: float(seq) for seq in range(1, 1201)}
    assert {each["path"] for each in service.came} == {"/v1/watches/w/steps"}
    assert {(each["key"], each["rank"]) for each in service.came} == {("Bearer secret", 3)}
    assert len({each["source"] for each in service.came}) == 1
    assert (
        max(len(each["reports"]) for each in service.came[3:]) <= module.AT_ONCE // 2
    )  # after 413
    assert "secret" not in capsys.readouterr().err


def test_a_service_that_is_away_costs_the_training_nothing() -> None:
    reporter = Reporter("http://127.0.0.1:9/v1/watches/w", capacity=100, every_s=0.01)
    begun = time.perf_counter()
    for _ in range(5000):
        reporter.step(1.0)
    assert time.perf_counter() - begun < 2.0
    assert reporter.dropped == 4900
    assert not reporter.close(timeout_s=0.2)


def test_what_was_dropped_is_told(service: Service) -> None:
    reporter = Reporter(service.url, capacity=10, every_s=5.0)
    for _ in range(25):
        reporter.step(1.0)
    assert reporter.close()
    assert (service.came[0]["dropped"], sorted(service.stored)) == (15, list(range(16, 26)))


def test_steps_and_parts_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    reporter = Reporter(file=str(tmp_path / "rank{rank}.jsonl"))

    def train_step() -> str:
        with reporter.part("forward"):
            time.sleep(0.02)
        time.sleep(0.01)
        return "loss"

    train_step = reporter.timed(train_step)
    assert [train_step() for _ in range(3)] == ["loss"] * 3
    lines = [json.loads(line) for line in (tmp_path / "rank2.jsonl").read_text().splitlines()]
    assert [each["seq"] for each in lines] == [1, 2, 3]
    assert all(
        each["rank"] == 2
        and each["step_s"] >= 0.03
        and 0.02 <= each["parts_s"]["forward"] < each["step_s"]
        for each in lines
    )


def test_watch_reads_what_the_reporter_writes(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    reporter = Reporter(file=str(file))
    for number in range(140):
        reporter.step((1.0 if number < 100 else 1.4) + 0.001 * (number % 5), step=number)
    ended = hp_tool("watch", str(file))
    assert ended.returncode == 4
    assert "since step 100, sudden" in ended.stdout


def test_the_file_stands_alone(tmp_path: Path) -> None:
    copy = tmp_path / "reporter.py"
    copy.write_text(Path(module.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    program = (
        "import sys, reporter; sys.exit(any(name.startswith(('hp_tool', 'torch', 'numpy')) "
        "for name in sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-S", "-c", program], cwd=tmp_path, check=False).returncode
        == 0
    )


def test_lightning_s_hooks_report_optimizer_steps(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    callback, trainer = LightningCallback(Reporter(file=str(file))), SimpleNamespace(global_step=0)
    callback.setup(trainer, None, stage="fit")  # a hook that it does not use
    for number in range(6):  # two batches make a step
        callback.on_train_batch_start(trainer, None, None, number)
        trainer.global_step = (number + 1) // 2
        callback.on_train_batch_end(trainer, None, None, None, number)
    callback.on_train_end(trainer, None)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3]
    assert callback.state_dict() == {}


@pytest.mark.components
def test_the_hugging_face_trainer_reports(tmp_path: Path) -> None:
    torch = torch_or_skip()
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    file = tmp_path / "steps.jsonl"

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            return {"loss": ((self.layer(x) - labels) ** 2).mean()}

    rows = [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(64)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=8,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        gradient_accumulation_steps=2,
    )
    callback = HuggingFaceCallback(Reporter(file=str(file)))
    transformers.Trainer(
        model=Model(), args=arguments, train_dataset=rows, callbacks=[callback]
    ).train()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == list(range(1, 9))

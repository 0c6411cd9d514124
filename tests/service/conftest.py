"""A service in this process over an empty store, and a small query to ask it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hp_tool.domain.ports import Store
from hp_tool.store import open_store
from service.app import create_app
from service.settings import Settings


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    yield opened
    opened.close()


@pytest.fixture
def settings() -> Settings:
    return Settings(max_body_bytes=20_000, poll_s=0.02)


@pytest.fixture
def http(store: Store, settings: Settings) -> Iterator[TestClient]:
    app = create_app(settings=settings, store=store)
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


@pytest.fixture
def query() -> dict[str, Any]:
    """A small GPT on two processes of this machine."""
    return {
        "id": "small",
        "kind": "training",
        "model": {
            "name": "gpt-tiny",
            "num_hidden_layers": 4,
            "hidden_size": 128,
            "num_attention_heads": 4,
            "vocab_size": 1024,
        },
        "cluster": {"gpu": "cpu", "num_gpus": 2},
        "training": {"sequence_length": 128, "global_batch_size": 8, "precision": "fp32"},
        "search": {"budget_runs": 4, "run_timeout_s": 120.0, "steps": 2, "warmup_steps": 1},
    }

"""One's own model, GPU or cluster is one file; and a look-up reads no more than it must."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hp_tool import catalog
from hp_tool.catalog import library
from hp_tool.cluster import diagnostics
from hp_tool.domain.query import OwnFile
from hp_tool.errors import InputError, NotFoundError

TINY = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of one's own, searched first."""
    monkeypatch.setenv("HP_CATALOG_DIR", str(tmp_path))
    for kind in ("models", "gpus", "clusters"):
        (tmp_path / kind).mkdir()
    library.clear_cache()
    yield tmp_path
    library.clear_cache()


def test_a_model_is_one_file_named_by_itself(own: Path) -> None:
    (own / "models" / "tiny.json").write_text(json.dumps(TINY))
    assert catalog.model("tiny").vocab_size == 512
    assert catalog.model("tiny").name == "tiny"
    assert {"tiny", "gpt3-175b"} <= set(catalog.names("models"))


def test_a_config_json_is_one_too(own: Path) -> None:
    config = {"model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 96, **TINY}
    (own / "models" / "tiny-llama.json").write_text(json.dumps(config))
    model = catalog.model("tiny-llama")
    assert (model.name, model.kv_heads, model.gated_mlp) == ("tiny-llama", 2, True)


def test_a_gpu_and_a_cluster_of_it(own: Path) -> None:
    (own / "gpus" / "mine.yaml").write_text(
        "source: my bench\n"
        "memory_bytes: 16e9\n"
        "memory_bandwidth_bytes_per_second: 1e12\n"
        "peak_flops_per_second: {bf16: 100e12}\n"
        "pcie_bandwidth_bytes_per_second: 32e9\n"
        "inter_node_bandwidth_bytes_per_second: 12.5e9\n"
        "power_w: 300\n"
    )
    (own / "clusters" / "lab.yaml").write_text(
        "entries:\n"
        "  lab:\n"
        "    {gpu: mine, gpus_per_node: 4, num_gpus: 16, inter_node_bandwidth_bytes_per_second: "
        "1.25e9, fabric: Ethernet}\n"
    )
    cluster = catalog.cluster("lab")
    assert (cluster.num_nodes, cluster.gpu.name, cluster.gpu.source) == (4, "mine", "my bench")
    assert cluster.gpu.memory_bytes == 16_000_000_000
    assert cluster.gpu.peak_flops_per_second == {"bf16": 100e12}


def test_own_entries_replace_built_in_ones(own: Path) -> None:
    (own / "models" / "own.yaml").write_text(f"entries:\n  gpt3-175b: {json.dumps(TINY)}\n")
    assert catalog.model("gpt3-175b").hidden_size == 64
    assert catalog.names("models").count("gpt3-175b") == 1


def test_several_folders_first_wins(
    own: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = tmp_path_factory.mktemp("second")
    (second / "models").mkdir()
    (own / "models" / "tiny.json").write_text(json.dumps(TINY))
    (second / "models" / "tiny.json").write_text(json.dumps(TINY | {"vocab_size": 1024}))
    (second / "models" / "other.json").write_text(json.dumps(TINY))
    monkeypatch.setenv("HP_CATALOG_DIR", os.pathsep.join((str(own), str(second))))
    assert catalog.model("tiny").vocab_size == 512
    assert catalog.model("other").name == "other"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "num_hidden_layers: 2\nhiden_size: 64\n",
            "bad.yaml: bad: unknown key 'hiden_size'; did you mean 'hidden_size'",
        ),
        ("[1, 2]\n", "bad.yaml must contain a mapping"),
        ("a: [1\n", "bad.yaml is not valid YAML"),
        ("entries: {bad: 3}\n", "bad.yaml: entry 'bad' must be a mapping"),
        ("entrys: {}\nentries: {}\n", "unknown key 'entrys'; a file has"),
    ],
)
def test_a_wrong_file_is_named(own: Path, text: str, message: str) -> None:
    (own / "models" / "bad.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        catalog.model("bad")


def test_a_path_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 9})
    )
    (tmp_path / "tiny.yaml").write_text("\n".join(f"{key}: {value}" for key, value in TINY.items()))
    assert catalog.model(OwnFile(folder)) == catalog.model(OwnFile(folder / "config.json"))
    assert catalog.model(OwnFile(folder)).name == "my-llama"
    assert catalog.model(OwnFile(tmp_path / "tiny.yaml")).name == "tiny"
    with pytest.raises(InputError, match="cannot be read"):
        catalog.model(OwnFile(tmp_path / "absent.json"))


def test_a_plain_name_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(InputError, match="send its content"):
        catalog.model(str(tmp_path / "config.json"))
    with pytest.raises(NotFoundError):
        catalog.model(str(tmp_path))


def test_one_look_up_parses_one_file() -> None:
    library.clear_cache()
    catalog.model("meta-llama/Llama-3.1-8B")
    assert library._entries.cache_info().currsize == 1


def test_a_folder_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HP_CATALOG_DIR", os.pathsep.join((str(tmp_path), str(tmp_path / "gone"))))
    with pytest.raises(NotFoundError, match=r"HP_CATALOG_DIR names .*/gone, which is not a folder"):
        library.entry("models", "house-model")
    assert [(check.name, check.status) for check in diagnostics.check_catalogue()] == [
        ("catalogue", "warning")
    ]

"""TensorRT-LLM's options file alone, as --extra_llm_api_options names it."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.errors import InputError
from hp_tool.formats.exchange import detect_format, read_configuration
from hp_tool.formats.reading import ImportRefusedError

OPTIONS = """
enable_attention_dp: {apart}
cuda_graph_config:
  enable_padding: true
  max_batch_size: 256
kv_cache_config:
  dtype: fp8
  free_gpu_memory_fraction: 0.8
  enable_block_reuse: false
moe_config:
  backend: CUTLASS
stream_interval: 20
print_iter_log: true
max_batch_size: 256
"""
GIVEN = {
    "model": "qwen3-30b-a3b",
    "cluster.gpu": "h200-sxm-141gb",
    "cluster.num_gpus": 8,
    "inference.input_length": 1000,
    "inference.output_length": 200,
}


def read(text: str, **given: Any) -> dict[str, Any]:
    return read_configuration(text, overrides=GIVEN | given).query


@pytest.mark.parametrize(
    ("apart", "field"),
    [
        ("false", "parallel.tensor_parallel_size"),
        ("true", "parallel.attention_data_parallel_size"),
    ],
)
def test_the_command_says_the_ranks(apart: str, field: str) -> None:
    text = OPTIONS.format(apart=apart)
    assert detect_format(text) == "trtllm"
    with pytest.raises(ImportRefusedError, match="command's --tp_size does") as caught:
        read(text)
    assert [each.field for each in caught.value.reading.missing] == [field]
    query = read(text, **{field: 8})
    assert query["parallel"][field.partition(".")[2]] == 8
    assert query["parallel"]["max_num_seqs"] == 256
    assert query["inference"]["kv_cache_precision"] == "fp8"
    assert query["inference"]["memory_fraction"] == 0.8


def test_ranks_in_the_file_are_read() -> None:
    text = OPTIONS.format(apart="true") + "tensor_parallel_size: 8\nmoe_expert_parallel_size: 8\n"
    parallel = read(text)["parallel"]
    assert (parallel["attention_data_parallel_size"], parallel["tensor_parallel_size"]) == (8, 1)
    assert parallel["expert_parallel_size"] == 8


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("disable_overlap_scheduler: true", "disable_overlap_scheduler"),
        ("cache_transceiver_config: {backend: UCX}", "cache_transceiver_config.backend"),
        ("of_my_own: 1", "of_my_own 1 is not known to trtllm"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(line: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        read(f"{OPTIONS.format(apart='false')}{line}\n", **{"parallel.tensor_parallel_size": 8})

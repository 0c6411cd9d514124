"""Dates of rows whose table states none: their release's, or those of the page that states them."""

from __future__ import annotations

import re
from collections.abc import Mapping

MLPERF = {
    "v3.0": "2023-06",
    "v3.1": "2023-11",
    "v4.0": "2024-06",
    "v4.1": "2024-11",
    "v5.0": "2025-06",
    "v5.1": "2025-11",
    "v6.0": "2026",
}
"""When MLCommons published the rounds."""
RELEASES = {
    "rl_nemo": {"0.4": "2025-11-20", "0.5": "2026-01-30", "0.6": "2026-04-29"},
    "inference_trtllm_throughput": {"0.17": "2025"},
    "inference_trtllm_throughput_2": {"1.0": "2025"},
}
"""Dates of releases that do not name their month, by table."""
PAGES = {
    "huggingface/transformers#48324": "2026-08",
    "huggingface/trl#6846": "2026-08",
    "benchmarks/llama3_h100_202412_torchtitan.md": "2024-12",
    "benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md": "2025-06",
    "benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md": "2025-06",
    "docs/performance.md@3faaa1a0d": "2024-08-23",
    "docs/performance.md@4d88a8a44": "2024-12-03",
    "docs/performance.md@395a52627": "2024-04-18",
    "torchtitan/components/quantization/mxfp8.md": "2026-04-28",
    "torchtitan/components/quantization/nvfp4.md": "2026-08-20",
    "mosaicml/llm-foundry": "2024-04-22",
    "InternLM/InternEvo": "2024-01-25",
    "QwenLM/Qwen3 ": "2025-05-20",
    "QwenLM/Qwen README.md": "2024-06-20",
    "Lightning-AI/litgpt tutorials/resource-tables.md": "2024-06-04",
    "Lightning-AI/litgpt tutorials/finetune_lora.md": "2025-03-18",
    "Lightning-AI/litgpt config_hub/finetune/README.md": "2024-09-27",
    "meta-pytorch/torchtune README.md": "2026-04-23",
    "torchtune docs/source/tutorials/lora_finetune.rst": "2024-11-16",
    "torchtune docs/source/tutorials/qlora_finetune.rst": "2026-04-13",
    "pytorch/ao torchao/optim/README.md": "2025-05-31",
    "pytorch/ao docs/source/workflows/training.md": "2026-03-03",
    "foundation-model-stack/fms-fsdp": "2024-05-09",
    "huggingface/peft": "2026-07-20",
    "verl-project/verl": "2026-05-25",
    "NVIDIA-NeMo/Automodel": "2026-06-12",
    "AMD-AGI/Primus": "2026-07-15",
    "MooreThreads/SimuMax": "2026-05-06",
    "systems/silicon_sample.csv": "2026-07-14",
    "accuracy_tracking/silicon_refs.csv": "2026-07-09",
    "MiniMax/MiniMax-M2.7.md": "2026-05-01",
    "Llama/Llama3.1.md": "2026-01-18",
    "Qwen/Qwen3.md": "2026-01-14",
    "DeepSeek/DeepSeek-R1.md": "2026-02-10",
    "Moonshotai/Kimi-K2.5.md": "2026-04-09",
    "MiniMax/MiniMax-M2.md": "2026-03-18",
    "MiniMax/MiniMax-M2.5.md": "2026-04-07",
    "ms-swift examples/megatron/benchmark/": "2026-01-17",
    "ms-swift examples/megatron/moe/deepseek_v3.sh": "2026-02-25",
    "ms-swift examples/megatron/muon.sh": "2026-03-25",
    "ms-swift examples/megatron/": "2026-02-23",
    "ms-swift examples/train/lora_sft.sh": "2026-03-27",
    "ms-swift examples/train/tuners/olora/": "2026-04-16",
    "ms-swift examples/train/tuners/pissa/": "2026-04-16",
    "modelscope/ms-swift": "2026-01-17",
    "Megatron-LM images/tables.tex": "2020-09-11",
    "Megatron-LM images/cases_april2021.png": "2021-04",
    "@d98e8a64dd": "2026-08-22",
    "@067f987df": "2026-08-22",
    "@5cb3444c4": "2026-07-20",
    "vllm-project/recipes": "2026-08-18",
    "noonghunna/club-3090": "2026-08-21",
    "NeMo-Framework-Launcher": "2025-04-18",
    "aiconfigurator_core/model_configs/": "2026-08-21",
    "llm-foundry scripts/train/yamls/": "2025-07-21",
    "ultrascale-playbook-data": "2025-03",
}
"""When the page that states a figure last changed, by a part of the source; the first that fits
counts.
"""
_ARXIV = re.compile(r"arXiv (\d\d)(\d\d)\.\d+")
_MONTHLY = re.compile(r"(?:NeMo|v)?(2\d)\.(0[1-9]|1[0-2])(?:\.\d+)*")


def date_of(table: str, row: Mapping[str, str], source: str) -> dict[str, str | None]:
    """Return {date, date_is} of a collected row."""
    for name in ("date", "measured"):
        if row[name]:
            return {"date": row[name], "date_is": "measured"}
    release = row["release"] or row["version"]
    known = RELEASES.get(table, {}).get(release) or MLPERF.get(row["round"])
    monthly = _MONTHLY.fullmatch(release)
    if monthly and not known:
        known = f"20{monthly[1]}-{monthly[2]}"
    if known:
        return {"date": known, "date_is": "release"}
    paper = _ARXIV.search(source)
    if paper:
        return {"date": f"20{paper[1]}-{paper[2]}", "date_is": "release"}
    if row["table_last_changed"]:
        return {"date": row["table_last_changed"], "date_is": "source"}
    page = next((date for part, date in PAGES.items() if part in source), None)
    return {"date": page, "date_is": "source" if page else None}

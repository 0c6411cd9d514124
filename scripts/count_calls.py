"""`python scripts/count_calls.py`: through how many files and calls estimates, a ranking and an export have to be followed.

Counted is a second call, after imports and caches; of a generator, each time it goes on, as sys.setprofile reports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hp_tool
from hp_tool import training
from hp_tool.cost.shared import forget_all

PACKAGE = Path(hp_tool.__file__).parent
DENSE = PACKAGE.parent / "examples" / "gpt3-175b.yaml"
EXPERTS: dict[str, Any] = {
    "kind": "training",
    "model": "mixtral-8x7b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    "training": {"sequence_length": 4096, "global_batch_size": 256},
    "parallel": {"tensor_parallel_size": 2, "pipeline_parallel_size": 4, "expert_parallel_size": 8},
}
INFEASIBLE: dict[str, Any] = {
    **EXPERTS,
    "model": "gpt3-175b",
    "parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 2},
}
"""Too large for the memory of its GPUs: the answer names what would make it fit."""
SERVING: dict[str, Any] = {
    "kind": "inference",
    "model": "qwen3-32b",
    "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
    "inference": {"input_length": 4000, "output_length": 1000, "concurrency": 64, "precision": "fp8", "engine": "vllm"},
}
QUESTIONS: dict[str, Callable[[], object]] = {
    # An estimate alone, then answers: with what today's recipe gives, and with what would make it fit.
    "dense": lambda: training.estimate(query=hp_tool.make_query(DENSE), with_fixes=False),
    "experts": lambda: training.estimate(query=hp_tool.make_query(EXPERTS), with_fixes=False),
    "answer": lambda: hp_tool.estimate(DENSE),
    "infeasible": lambda: hp_tool.estimate(INFEASIBLE),
    "serving": lambda: hp_tool.recommend(SERVING),
    "export": lambda: hp_tool.export(DENSE, format="megatron-lm"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What one call of a function passes through, inside hp_tool."""

    files: int
    functions: int
    calls: int
    calls_between_files: int
    """Caller and callee are both in hp_tool, in different files."""


def count_question(name: str) -> Counts:
    """Return the counts of one of QUESTIONS, asked a second time; what candidates share (`cost.shared`) is computed anew."""
    QUESTIONS[name]()
    forget_all()
    return count_calls(QUESTIONS[name])


def count_calls(function: Callable[[], object]) -> Counts:
    """Return the counts of one call."""
    calls: list[tuple[CodeType, CodeType]] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_back is not None:
            calls.append((frame.f_back.f_code, frame.f_code))

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(previous)
    inside = [(caller, callee) for caller, callee in calls if is_ours(callee)]
    return Counts(
        files=len({callee.co_filename for _, callee in inside}),
        functions=len({callee for _, callee in inside}),
        calls=len(inside),
        calls_between_files=sum(is_ours(caller) and caller.co_filename != callee.co_filename for caller, callee in inside),
    )


def is_ours(code: CodeType) -> bool:
    """Whether code is of hp_tool."""
    return Path(code.co_filename).is_relative_to(PACKAGE)


if __name__ == "__main__":
    dense = count_question("dense")
    for name in QUESTIONS:
        counts = count_question(name)
        ratios = f"{counts.files / dense.files:.2f} and {counts.calls_between_files / dense.calls_between_files:.1f} of dense"
        print(
            f"{name:10} files {counts.files}, calls between files {counts.calls_between_files}: {ratios}; calls {counts.calls}"
        )

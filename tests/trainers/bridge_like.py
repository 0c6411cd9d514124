"""A script with the arguments and log lines of Megatron-Bridge's run_script.py, whose one recipe is
a tiny GPT; it trains by Megatron Core, through the profiler's model and steps. Started by torchrun
on CPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys

from hp_tool.cluster.profiler.__main__ import profile
from hp_tool.domain.measurement import ProfileRequest
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload

RECIPE = {
    "model.num_layers": "4",
    "model.seq_length": "64",
    "model.tensor_model_parallel_size": "1",
    "model.pipeline_model_parallel_size": "1",
    "model.sequence_parallel": "false",
    "model.recompute_granularity": "null",
    "train.train_iters": "50",
    "train.micro_batch_size": "1",
    "train.global_batch_size": "16",
}
TAKEN_FROM_THE_RECIPE = (
    "ddp.",
    "comm_overlap.",
    "dataset.",
    "logger.",
    "mixed_precision",
    "model.",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model_family_name", "--model_recipe_name", "--gpu", "--compute_dtype"):
        parser.add_argument(name, required=True)
    parser.add_argument("--num_gpus", type=int, required=True)
    arguments, overrides = parser.parse_known_args()
    config = dict(RECIPE)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or (key not in RECIPE and not key.startswith(TAKEN_FROM_THE_RECIPE)):
            sys.exit(f"Could not override {key!r}: no such key in ConfigContainer")
        config[key] = value
    assert arguments.num_gpus == int(os.environ["WORLD_SIZE"])
    iterations, batch = int(config["train.train_iters"]), int(config["train.global_batch_size"])
    t, p = (
        int(config["model.tensor_model_parallel_size"]),
        int(config["model.pipeline_model_parallel_size"]),
    )
    granularity = config["model.recompute_granularity"]
    request = ProfileRequest(
        run_id="bridge",
        model=ModelSpec(
            num_hidden_layers=int(config["model.num_layers"]),
            hidden_size=128,
            num_attention_heads=4,
            vocab_size=512,
        ),
        training=TrainingWorkload(
            sequence_length=int(config["model.seq_length"]),
            global_batch_size=batch,
            precision="fp32",
        ),
        parallel=ParallelConfig(
            tensor_parallel_size=t,
            pipeline_parallel_size=p,
            data_parallel_size=arguments.num_gpus // (t * p),
            micro_batch_size=int(config["train.micro_batch_size"]),
            sequence_parallel=config["model.sequence_parallel"] == "true",
            recompute="none" if granularity == "null" else granularity,
        ),
        num_gpus=arguments.num_gpus,
        gpu="cpu",
        steps=iterations,
        warmup_steps=0,
        timeout_s=600.0,
        step_tolerance_fraction=0.0,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # its own words are not Bridge's
        trained = profile(request)
    if os.environ["RANK"] != "0":
        return
    for number, (time_s, loss) in enumerate(
        zip(trained.step_times_s, trained.losses, strict=True), start=1
    ):
        print(
            f" [2026-03-01 10:00:00] iteration {number:8d}/{iterations:8d} | consumed samples: "
            f"{number * batch:12d} | "
            f"elapsed time per iteration (ms): {1e3 * time_s:.1f} | learning rate: 3.000000E-07 | "
            f"global batch size: {batch:5d} | lm loss: {loss:.6E} | loss scale: 1.0 |",
            flush=True,
        )


if __name__ == "__main__":
    main()

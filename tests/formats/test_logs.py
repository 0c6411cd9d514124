"""Log lines of each trainer, in the forms their code prints them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hp_tool.cluster.logs import ServerStart, read_log, read_server_start
from hp_tool.domain.units import GIB, MIB
from hp_tool.errors import InputError
from hp_tool.formats.exchange import LoggedRun, summarize_log
from tests.command_line import hp_tool

MEGATRON = (
    " [2025-03-01 10:00:00.123] iteration       10/     500 | consumed samples:         1280 | "
    "elapsed time per iteration (ms): 18130.5 | throughput per GPU (TFLOP/s/GPU): 148.3 | learning "
    "rate: 1.2E-05 | "
    "global batch size:   128 | lm loss: 9.1E+00 | loss scale: 1.0 | grad norm: 1.234 |\n"
    "[Rank 0] (after 10 iterations) memory (MB) | allocated: 23455.1 | max allocated: 45678.2 | "
    "reserved: 50000.0 | "
    "max reserved: 51234.0\n"
    " [2025-03-01 10:01:00.123] iteration       20/     500 | consumed samples:         2560 | "
    "elapsed time per iteration (ms): 18010.0 | learning rate: 1.2E-05 |\n"
)
TITAN = (
    "[rank0]:[titan] 2025-03-01 10:00:00,123 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  "
    "7.8512  "
    "\x1b[38;2;180;60;0mgrad_norm:  1.2034  \x1b[36mmemory: 40.34GiB(42.45%)  \x1b[34mtps: 7,043  "
    "\x1b[35mtflops: 405.63  \x1b[33mmfu: 41.02%\x1b[39m\n"
)
DEEPSPEED = (
    "[2025-03-01 10:00:00,123] [INFO] [timer.py:260:stop] epoch=0/micro_step=80/global_step=10, "
    "RunningAvgSamplesPerSec=61.2, "
    "CurrSamplesPerSec=64.0, MemAllocated=10.25GB, MaxMemAllocated=20.5GB\n"
)


def test_megatron() -> None:
    facts = read_log(MEGATRON.splitlines(), reader="megatron-lm")
    assert facts.step_s == [18.1305, 18.010]
    assert facts.allocated_bytes == pytest.approx(45678.2 * MIB)
    assert facts.reserved_bytes == pytest.approx(51234.0 * MIB)
    assert not facts.out_of_memory


def test_torchtitan_with_colours() -> None:
    facts = read_log([TITAN], reader="torchtitan")
    assert facts.tokens_per_second_per_gpu == [7043.0]
    assert facts.reserved_bytes == pytest.approx(40.34 * GIB)


def test_deepspeed() -> None:
    facts = read_log(
        [DEEPSPEED, "steps: 10 loss: 2.3 iter time (s): 1.250 samples/sec: 102.4"],
        reader="deepspeed",
    )
    assert facts.samples_per_second == [64.0]
    assert facts.step_s == [1.25]
    assert facts.allocated_bytes == pytest.approx(20.5 * GIB)


BRIDGE = (
    "Step Time : 10.35s GPU utilization: 452.1MODEL_TFLOP/s/GPU\n"
    " [2026-03-01 10:00:00] iteration        2/      50 | consumed samples:          256 | elapsed "
    "time per iteration (ms): "
    "10500.0 | learning rate: 3.000000E-07 | global batch size:   128 | lm loss: 1.190000E+01 | "
    "loss scale: 1.0 | "
    "grad norm: 2.013 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    "[Rank 0] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 63.66 | "
    "mem-reserved-gigabytes: 182.2 | "
    "mem-max-allocated-gigabytes: 153.4 | mem-max-active-gigabytes: 169.96 | "
    "mem-max-reserved-gigabytes: 182.2\n"
)
NEMO_RL = (
    "========================= Step 1/4 =========================\n\n📊 Training Results:\n  • "
    "Loss: 0.0125\n"
    "  • Avg Reward: 0.5000\n\n⏱️  Timing:\n  • Total step time: 35.70s\n  • policy_training: "
    "10.97s (30.7%)\n"
    "  • generation: 4.95s (13.9%)\n"
)
SFT = "📊 Training Results:\n  • Loss: 2.0000\n\n⏱️  Timing:\n  • Total step time: 8.25s\n"
VERL = (
    "Epoch 1/1:  99%|#########9| 109/110 [1:14:27<01:11, 71.47s/it]step:71 - "
    "actor/pg_loss:np.float64(-0.25) - "
    "perf/max_memory_allocated_gb:np.float64(20.5) - perf/max_memory_reserved_gb:np.float64(25.75) "
    "- "
    "timing_s/gen:698.8 - timing_s/update_actor:327.5 - timing_s/step:1268.4 - "
    "perf/throughput:524.4\n"
)


def test_bridge_counts_memory_in_gigabytes() -> None:
    facts = read_log(BRIDGE.splitlines(), reader="megatron-bridge")
    assert (facts.step_s, facts.losses, facts.ends_at) == ([10.5], [11.9], {"step_s": [2]})
    assert (facts.allocated_bytes, facts.reserved_bytes) == (
        pytest.approx(153.4e9),
        pytest.approx(182.2e9),
    )


def test_of_reinforcement_learning_the_training_counts() -> None:
    facts = read_log((NEMO_RL + NEMO_RL).splitlines(), reader="nemo-rl")
    assert (facts.step_s, facts.losses) == ([10.97, 10.97], [0.0125, 0.0125])
    assert read_log(SFT.splitlines(), reader="nemo-rl").step_s == [8.25]  # all of a step trains
    facts = read_log(VERL.splitlines(), reader="verl")
    assert (facts.step_s, facts.ends_at, facts.losses) == ([327.5], {"step_s": [71]}, [-0.25])
    assert (facts.allocated_bytes, facts.reserved_bytes) == (
        pytest.approx(20.5 * GIB),
        pytest.approx(25.75 * GIB),
    )
    tuned = read_log(
        ["step:3 - train/loss:0.3 - train/lr:1e-05 - train/time(s):1.25"], reader="verl"
    )
    assert (tuned.step_s, tuned.losses) == ([1.25], [0.3])


@pytest.mark.parametrize(
    "reader", ["megatron-lm", "megatron-bridge", "nemo-rl", "torchtitan", "deepspeed", "verl"]
)
def test_out_of_memory_is_seen(reader: str) -> None:
    line = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert read_log([line], reader=reader).out_of_memory


SWIFT = (
    "{'loss': 1.6, 'grad_norm': 11.0, 'global_step/max_steps': '5/90', 'memory(GiB)': 6.5, "
    "'train_speed(iter/s)': 0.4}\n"
    "{'loss': 1.5, 'grad_norm': 8.8, 'global_step/max_steps': '10/90', 'memory(GiB)': 6.25, "
    "'train_speed(iter/s)': 0.5}\n"
)


def test_ms_swift_prints_the_mean_speed_since_the_start() -> None:
    facts = read_log(SWIFT.splitlines(), reader="trainer")
    assert facts.step_s == [2.5, 2.0] and facts.ends_at["step_s"] == [5, 10]
    assert facts.reserved_bytes == 6.5 * GIB and facts.losses == [1.6, 1.5]


def test_the_trainers_end_and_its_state_file() -> None:
    end = "{'train_runtime': 80.0, 'train_samples_per_second': 16.0, 'train_steps_per_second': 0.5}"
    facts = read_log([end], reader="trainer")
    assert (facts.step_s, facts.samples_per_second) == ([2.0], [16.0])
    slow = read_log(
        ['      "train_samples_per_second": 1.147,', '"train_steps_per_second": 0.005,'],
        reader="trainer",
    )
    assert (slow.step_s, slow.samples_per_second) == ([], [1.147])  # of 0.005 one digit counts


def test_torchtune() -> None:
    line = (
        "Step 7 | loss:1.57 lr:2e-05 tokens_per_second_per_gpu:5123.5 peak_memory_active:11.0 "
        "peak_memory_alloc:12.0 peak_memory_reserved:13.5 "
    )
    facts = read_log([line], reader="torchtune")
    assert facts.tokens_per_second_per_gpu == [5123.5]
    assert (facts.allocated_bytes, facts.reserved_bytes) == (12.0 * GIB, 13.5 * GIB)


@pytest.mark.parametrize(
    ("lines", "figures"),
    [
        (
            [
                "INFO [gpu_model_runner.py:2007] Model loading took 15.0 GiB and 4.1 seconds",
                "INFO [gpu_worker.py:349] Available KV cache memory: 55.00 GiB",
                "INFO [kv_cache_utils.py:1229] GPU KV cache size: 450,560 tokens",
                "INFO [gpu_model_runner.py:2911] Graph capturing finished in 3 secs, took 0.50 GiB",
            ],
            (15.0, 55.0, 450_560, 0.5),
        ),
        (
            [
                "[TP0] Load weight end. type=L, dtype=torch.bfloat16, avail mem=63.40 GB, mem "
                "usage=15.00 GB.",
                "[TP0] KV Cache is allocated. #tokens: 421888, K size: 25.75 GB, V size: 25.75 GB",
                "[TP1] KV Cache is allocated. #tokens: 421880, K size: 25.00 GB, V size: 25.00 GB",
                "[TP0] Capture cuda graph end. Time elapsed: 5.0 s. mem usage=0.25 GB. avail mem=1",
            ],
            (15.0, 51.5, 421_888, 0.25),
        ),
        (["nothing of a server"], (None, None, None, None)),
    ],
)
def test_servers_report_their_memory_when_they_start(
    lines: list[str], figures: tuple[float | None, ...]
) -> None:
    start = read_server_start(lines)
    sizes = (start.weights_bytes, start.kv_cache_bytes, start.graphs_bytes)
    gib = [None if each is None else each / GIB for each in sizes]
    assert (gib[0], gib[1], start.kv_cache_tokens, gib[2]) == figures


SWIFT_LINE = (
    "{'loss': 1.6, 'global_step/max_steps': '15/94', 'memory(GiB)': 5.5, "
    "'train_speed(iter/s)': 0.25}\n"
)
TRAINER_END = '{"train_steps_per_second": 0.5, "train_samples_per_second": 8.0}'
TUNE = "Step 3 | loss:1.5 lr:2e-05 tokens_per_second_per_gpu:512.5"
VLLM = (
    "INFO [gpu_worker.py:349] Available KV cache memory: 55.00 GiB\n"
    "INFO [kv_cache_utils.py:1229] GPU KV cache size: 450,560 tokens\n"
)


@pytest.mark.parametrize(
    ("text", "reader", "step_s", "tokens_per_second", "samples_per_second"),
    [
        (MEGATRON, "megatron-lm", 18.07025, None, None),
        (TITAN, "torchtitan", None, 7043.0, None),
        (DEEPSPEED, "deepspeed", None, None, 64.0),
        (SWIFT_LINE, "trainer", 4.0, None, None),
        (
            '{"train_steps_per_second": 0.5, "train_samples_per_second": 8.0}',
            "trainer",
            2.0,
            None,
            8.0,
        ),
        (
            "Step 3 | loss:1.5 lr:2e-05 tokens_per_second_per_gpu:512.5",
            "torchtune",
            None,
            512.5,
            None,
        ),
    ],
)
def test_a_log_alone_has_its_figures(
    text: str,
    reader: str,
    step_s: float | None,
    tokens_per_second: float | None,
    samples_per_second: float | None,
) -> None:
    summary = summarize_log(text.splitlines())
    assert summary.reader == reader and isinstance(summary.logged, LoggedRun)
    assert summary.logged.step_s == pytest.approx(step_s)
    assert summary.logged.tokens_per_second_per_gpu == tokens_per_second
    assert summary.samples_per_second == samples_per_second


def test_a_log_of_a_server_alone_has_its_memory_and_one_of_nothing_is_refused() -> None:
    summary = summarize_log(VLLM.splitlines())
    assert isinstance(summary.logged, ServerStart)
    assert summary.logged.kv_cache_bytes == 55 * GIB and summary.logged.kv_cache_tokens == 450_560
    with pytest.raises(InputError, match=r"no step time.*torchtitan.*vLLM and SGLang"):
        summarize_log(["hello", "step 3 was fine"])


def test_import_of_a_log_alone_says_what_a_comparison_needs(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(SWIFT_LINE)
    ended = hp_tool("import", "--log", str(log))
    assert ended.returncode == 0 and "Measured 4.00 s per step" in ended.stdout
    assert "5.5 GiB reserved" in ended.stdout and "hp-tool import CONFIGURATION" in ended.stdout
    answer = json.loads(hp_tool("import", "--log", str(log), "--json").stdout)
    assert answer["logged"]["step_s"] == 4.0
    assert answer["logged"]["reserved_bytes"] == 5.5 * GIB
    assert "no configuration given" in hp_tool("import").stderr


def test_a_log_outside_the_range_says_so(tmp_path: Path) -> None:
    script, log = tmp_path / "serve.sh", tmp_path / "run.log"
    script.write_text("vllm serve meta-llama/Llama-3.1-8B-Instruct\n")
    given = ("--gpu", "h100-sxm-80gb", "--set", "inference.input_length=1000")
    given = (*given, "--set", "inference.output_length=100", "--set", "inference.concurrency=8")
    log.write_text(VLLM)
    shown = hp_tool("import", str(script), "--log", str(log), *given).stdout
    assert "450,560 tokens; predicted" in shown and "so outside the range" in shown
    log.write_text("nothing of use\n")
    assert "nothing to compare" in hp_tool("import", str(script), "--log", str(log), *given).stdout
    script.write_text(
        "NPROC_PER_NODE=1 swift sft --model Qwen/Qwen3-0.6B --dataset d --max_length 1024 "
        "--packing true --per_device_train_batch_size 1 --gradient_accumulation_steps 1\n"
    )
    log.write_text(SWIFT_LINE)
    shown = hp_tool("import", str(script), "--log", str(log), "--gpu", "h100-sxm-80gb").stdout
    assert "so outside the range (hp-tool explain" in shown


def test_a_log_in_the_words_of_another_tool_is_read(tmp_path: Path) -> None:
    script, log = tmp_path / "run.sh", tmp_path / "run.log"
    script.write_text(
        "NPROC_PER_NODE=1 megatron sft --model Qwen/Qwen3-0.6B --dataset d --max_length 1024 "
        "--packing true --micro_batch_size 1 --global_batch_size 1\n"
    )
    log.write_text(MEGATRON)
    shown = hp_tool("import", str(script), "--log", str(log), "--gpu", "h100-sxm-80gb").stdout
    assert "Measured 18.07 s per step" in shown

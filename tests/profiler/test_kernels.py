"""The timing of kernels on one GPU: what of it can be held without one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.torch_or_skip import torch_or_skip

pytestmark = pytest.mark.components

SHAPE = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 128,
    "vocabulary": 100,
    "device": "cpu",
}


def test_micro_batches_in_flight_give_the_gradients_of_one_after_the_other() -> None:
    torch = torch_or_skip()
    from benchmarks.kernels.llama import Llama, MainGradients, step_1f1b

    torch.manual_seed(0)
    model = Llama(**SHAPE)
    gradients = MainGradients(model)
    batches = [torch.randint(100, (1, length)) for length in (16, 24, 8, 16, 32)]
    sums = []
    for in_flight in (1, 3):
        for buffer in gradients.buffers.values():
            buffer.zero_()
        step_1f1b(model, batches, in_flight=in_flight)
        assert all(parameter.grad is None for parameter in model.parameters())
        sums.append([buffer.clone() for buffer in gradients.buffers.values()])
    for one, three in zip(*sums, strict=True):
        assert one.abs().sum() > 0
        torch.testing.assert_close(one, three)


def test_adam_moves_the_16_bit_parameters_and_clears_the_gradients() -> None:
    torch = torch_or_skip()
    from benchmarks.kernels.llama import Adam, Llama, MainGradients, step_1f1b

    model = Llama(**SHAPE)
    optimizer = Adam(MainGradients(model))
    before = model.head.weight.detach().clone()
    for _ in range(30):
        step_1f1b(model, [torch.randint(100, (1, 16))], in_flight=1)
        optimizer.step()
    assert not torch.equal(before, model.head.weight)
    assert all(buffer.abs().sum() == 0 for buffer in optimizer.gradients.buffers.values())


def test_a_host_without_a_gpu_is_told_so() -> None:
    if torch_or_skip().cuda.is_available():
        pytest.skip("this host has a GPU")
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "no CUDA device" in run.stderr

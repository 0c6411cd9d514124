"""Launch scripts as people write them: variables, arrays, defaults, sums, Slurm headers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.errors import InputError
from hp_tool.formats import shell

SCRIPT = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8   # per node
NUM_NODES=${SLURM_NNODES:-4}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
TP=2; PP=4
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE   # one a GPU
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
)
MODEL_ARGS="
    --num-layers 12
    --hidden-size 512
"
MODEL_ARGS+=" --bf16"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} \\
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size=$PP \\
    --global-batch-size $((WORLD_SIZE * 2)) --data-path $DATA
"""


def test_a_script_with_all_of_them() -> None:
    flags = shell.flags(SCRIPT)
    assert flags["nproc-per-node"] == ["8"]
    assert flags["nnodes"] == ["4"]
    assert flags["num-layers"] == ["12"]
    assert flags["bf16"] == []
    assert flags["tensor-model-parallel-size"] == ["2"]
    assert flags["pipeline-model-parallel-size"] == ["4"]
    assert flags["global-batch-size"] == ["64"]
    assert flags["data-path"] == ["$DATA"]
    assert shell.num_gpus(SCRIPT) == 32


def test_slurm_headers_tell_the_devices() -> None:
    assert shell.num_gpus("#SBATCH --nodes=4\n#SBATCH --gres=gpu:h100:8\nsrun python pretrain_gpt.py --bf16") == 32
    assert shell.num_gpus("python pretrain_gpt.py --bf16") is None


def test_nothing_is_executed_and_quotes_must_close() -> None:
    assert shell.flags('x --name "$(touch /tmp/never)"')["name"] == ["$(touch /tmp/never)"]
    with pytest.raises(InputError, match="cannot be read as shell words"):
        shell.flags("x --name 'open")


@pytest.mark.parametrize("text", ["A=$A\nx --n $A", "A=$B\nB=$A\nx --n $A", "A=$((A*A*A))\nx --n $A", "x --n $((1/0))"])
def test_circles_end(text: str) -> None:
    assert "n" in shell.flags(text)


@given(st.text(alphabet=st.sampled_from("AB$(){}[]@=+*\"' -\n#\\1"), max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        shell.flags(text)
        shell.num_gpus(text)
    except InputError:
        pass

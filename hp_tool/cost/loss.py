"""What the loss keeps of the logits on the last stage."""

from __future__ import annotations

from hp_tool.domain.workload import TrainingWorkload


def logit_bytes(workload: TrainingWorkload, *, e: float) -> float:
    """Bytes a logit takes at the peak of the loss, `e` of them the logit itself.

    Megatron Core: its fp32 copy, overwritten with the gradient, fused or not. Plain torch (FSDP): the fp32 log-softmax that
    backward keeps, its gradient and that of the logits in fp32; a fused kernel (flash-attn's) the gradient alone, e bytes.
    """
    if workload.framework != "torch-fsdp":
        return e + 4.0
    return 2.0 * e if workload.cross_entropy == "fused" else e + 12.0

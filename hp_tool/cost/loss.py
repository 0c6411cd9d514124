"""What the loss keeps of the logits on the last stage."""

from __future__ import annotations

from hp_tool.domain.frameworks import facts
from hp_tool.domain.workload import TrainingWorkload


def logit_bytes(workload: TrainingWorkload, *, e: float) -> float:
    """Bytes a logit takes at the peak of the loss, `e` of them the logit itself.

    Megatron Core: its fp32 copy, overwritten with the gradient, fused or not. Plain torch (FSDP): the fp32 log-softmax that
    backward keeps, its gradient and that of the logits in fp32; a fused kernel (flash-attn's) the gradient alone, e bytes.
    nanotron: the fp32 logits and their softmax, in which the gradient is computed; the 16-bit logits are gone.
    """
    kept = facts(workload.framework)
    if kept.fused_loss_in_place and workload.cross_entropy == "fused":
        return 2.0 * e
    return e * kept.keeps_narrow_logits + 4.0 * kept.loss_copies

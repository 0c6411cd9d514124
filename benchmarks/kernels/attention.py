"""Time causal attention with the kernels of torch and of installed packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels.timing import median_ms

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
LONG = 65536
"""Length in tokens from which only a quarter of the heads run, to save time."""
TOKENS = 16384
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LATENT = (16, 16, 192, 128)
"""Heads, KV heads, query and key width, value width: an eighth of DeepSeek-V3's heads."""
SDPA = {
    "fa2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attention_kernels(names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield one row per kernel and length: the shape, and milliseconds of the forward pass and of
    both passes, or the error.
    """
    plain = [
        (
            HEADS // (4 if s >= LONG else 1),
            KV_HEADS // (4 if s >= LONG else 1),
            HEAD_DIM,
            HEAD_DIM,
            s,
        )
        for s in LENGTHS
    ]
    for name in names:
        for heads, kv_heads, d_qk, d_v, s in [*plain, *((*LATENT, s) for s in (4096, 16384))]:
            batch = max(1, TOKENS // s)
            row = {
                "kernel": name,
                "batch": batch,
                "length": s,
                "heads": heads,
                "kv_heads": kv_heads,
                "d_qk": d_qk,
                "d_v": d_v,
            }
            try:
                yield row | _time_passes(load_kernel(name), row)
            except Exception as error:
                # The row of a kernel that does not support a shape contains the error.
                torch.cuda.empty_cache()
                yield row | {"error": f"{type(error).__name__}: {error}"[:300]}


def load_kernel(name: str) -> Attention:
    """Return the attention function of a kernel for (b, s, heads, d) tensors; raise ImportError if
    the kernel is not installed.
    """
    if name == "fa3":
        from flash_attn_interface import flash_attn_func

        return lambda q, k, v: _first(flash_attn_func(q, k, v, causal=True))
    if name == "fa4":
        from flash_attn.cute.interface import flash_attn_func as flash_attn_4

        return lambda q, k, v: _first(flash_attn_4(q, k, v, causal=True))

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPA[name]):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )

    return sdpa


def _time_passes(attention: Attention, row: dict[str, Any]) -> dict[str, float]:
    b, s = row["batch"], row["length"]
    shapes = (
        (row["heads"], row["d_qk"]),
        (row["kv_heads"], row["d_qk"]),
        (row["kv_heads"], row["d_v"]),
    )
    q, k, v = (
        torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h, d in shapes
    )
    with torch.no_grad():
        forward = median_ms(lambda: attention(q, k, v))
    gradient = torch.randn_like(attention(q, k, v))

    def both() -> None:
        q.grad = k.grad = v.grad = None
        attention(q, k, v).backward(gradient)

    both_ms = median_ms(both)
    # Scores and values need 2 s^2 d FLOPs each; only the causal half is counted.
    flops = b * row["heads"] * s * s * (row["d_qk"] + row["d_v"])
    return {"forward_ms": forward, "both_ms": both_ms, "forward_flops": float(flops)}


def _first(output: Any) -> torch.Tensor:
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor

"""A linear layer's three matmuls, and its weight gradient by the ways in which trainings accumulate
it.

forward        y[m,n]  = x[m,k] w[n,k]^T
input          dx[m,k] = dy[m,n] w[n,k]
weight_bf16    dw[n,k] = dy^T x, written in 16 bits
weight_unfused the same, then added to an fp32 buffer by a kernel of its own (PyTorch's hooks; Megatron without fusion)
weight_fp32    dw written in fp32 (beta 0)
weight_fused   dw added to the fp32 buffer in the matmul (beta 1): cublasGemmEx as Apex and Megatron Core's
               gradient_accumulation_fusion call it
"""  # noqa: E501

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.timing import median_ms

LAYERS = {
    "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-3-70b, a quarter": ((2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168)),
    "llama-1b": ((6144, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "head of 128,256 words, an eighth": ((16032, 4096),),
}
TOKENS = (2048, 8192, 16384)
CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 14, 0, 68, 99


def weight_gradients() -> Iterator[dict[str, Any]]:
    """Yield one row per shape: tokens, n, k, and the milliseconds of each variant."""
    for model, shapes in LAYERS.items():
        for (n, k), m in ((shape, tokens) for shape in shapes for tokens in TOKENS):
            x, w, dy = (
                torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
                for shape in ((m, k), (n, k), (m, n))
            )
            buffer = torch.zeros(n, k, device="cuda", dtype=torch.float32)
            calls = {
                "forward": lambda x=x, w=w: torch.mm(x, w.t()),
                "input": lambda dy=dy, w=w: torch.mm(dy, w),
                "weight_bf16": lambda dy=dy, x=x: torch.mm(dy.t(), x),
                "weight_unfused": lambda dy=dy, x=x, into=buffer: into.add_(torch.mm(dy.t(), x)),
                "weight_fp32": lambda dy=dy, x=x, into=buffer: accumulate(
                    dy, x, into=into, beta=0.0
                ),
                "weight_fused": lambda dy=dy, x=x, into=buffer: accumulate(
                    dy, x, into=into, beta=1.0
                ),
                "add_only": lambda into=buffer, w=w: into.add_(w),
            }
            _check(dy, x, buffer)
            times = {f"{name}_ms": median_ms(call) for name, call in calls.items()}
            yield {"model": model, "tokens": m, "n": n, "k": k, "flops": 2 * m * n * k, **times}


def accumulate(dy: torch.Tensor, x: torch.Tensor, *, into: torch.Tensor, beta: float) -> None:
    """Add dy^T x of (m, n) and (m, k) bf16 tensors to `beta` times the (n, k) fp32 buffer."""
    (m, n), k = dy.shape, x.shape[1]
    one, scale = ctypes.c_float(1.0), ctypes.c_float(beta)
    status = _cublas().cublasGemmEx(
        ctypes.c_void_p(torch.cuda.current_blas_handle()),
        0,
        1,
        k,
        n,
        m,
        ctypes.byref(one),
        ctypes.c_void_p(x.data_ptr()),
        CUDA_R_16BF,
        k,
        ctypes.c_void_p(dy.data_ptr()),
        CUDA_R_16BF,
        n,
        ctypes.byref(scale),
        ctypes.c_void_p(into.data_ptr()),
        CUDA_R_32F,
        k,
        CUBLAS_COMPUTE_32F,
        CUBLAS_GEMM_DEFAULT_TENSOR_OP,
    )
    if status:
        raise RuntimeError(f"cublasGemmEx returned {status}")


def _check(dy: torch.Tensor, x: torch.Tensor, buffer: torch.Tensor) -> None:
    buffer.fill_(1.0)
    accumulate(dy, x, into=buffer, beta=1.0)
    exact = dy[:, :64].float().t() @ x.float() + 1.0
    error = (buffer[:64] - exact).norm() / exact.norm()
    if not error < 1e-2:
        raise RuntimeError(f"the fused weight gradient is off by {error:.1e}")


def _cublas(library: list[ctypes.CDLL] = []) -> ctypes.CDLL:  # noqa: B006  # loaded once
    if not library:
        torch.cuda.current_blas_handle()
        mapped = re.findall(r"\S*/libcublas\.so[.\d]*", Path("/proc/self/maps").read_text())
        library.append(ctypes.CDLL(mapped[0]))
    return library[0]

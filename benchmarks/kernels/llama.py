"""A plain Llama in torch, and the micro-batches of one pipeline stage's step."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Layer without rotary positions: RMSNorm, attention with grouped heads, RMSNorm, SwiGLU."""

    def __init__(self, *, hidden: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d = heads, kv_heads, hidden // heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.d, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = (
            nn.Linear(hidden, 2 * ffn, bias=False),
            nn.Linear(ffn, hidden, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (b, s, h) to (b, s, h)."""
        b, s, _ = x.shape
        sizes = [n * self.d for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (
            y.view(b, s, -1, self.d).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).split(sizes, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, -1))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        out: torch.Tensor = x + self.down(functional.silu(gate) * up)
        return out


class Llama(nn.Module):
    """Embedding, blocks, norm, head and loss, in bf16 on `device`."""

    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        ffn: int,
        vocabulary: int,
        device: str = "cuda",
    ) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, hidden), nn.RMSNorm(hidden)
        self.blocks = nn.ModuleList(
            Block(hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn) for _ in range(layers)
        )
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.to(device=device, dtype=torch.bfloat16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting (b, s) token ids."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), tokens.view(-1))


class MainGradients:
    """fp32 gradients of 16-bit parameters, to which each 16-bit gradient is added."""

    def __init__(self, model: nn.Module) -> None:
        self.buffers = {p: torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()}
        for parameter in self.buffers:
            parameter.register_post_accumulate_grad_hook(self._add)

    def _add(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.buffers[parameter].add_(parameter.grad)  # type: ignore[index]
        parameter.grad = None


class Adam:
    """Adam on fp32 master parameters, fused over tensors. It also writes the 16-bit parameters."""

    def __init__(self, gradients: MainGradients) -> None:
        self.gradients = gradients
        self.masters = [p.detach().float() for p in gradients.buffers]
        for master, gradient in zip(self.masters, gradients.buffers.values(), strict=True):
            master.grad = gradient
        self.adam = torch.optim.Adam(self.masters, lr=1e-5, fused=True)

    def step(self) -> None:
        """Update the master and 16-bit parameters, and set the gradients to zero."""
        self.adam.step()
        torch._foreach_copy_([p.data for p in self.gradients.buffers], self.masters)
        torch._foreach_zero_(list(self.gradients.buffers.values()))


def step_1f1b(model: Llama, batches: list[torch.Tensor], *, in_flight: int) -> None:
    """Run the forward and backward passes of `batches` in the order of a pipeline stage with
    `in_flight` micro-batches in flight.
    """
    losses: list[torch.Tensor] = []
    for batch in batches:
        losses.append(model(batch))
        if len(losses) == in_flight:
            losses.pop(0).backward()
    for loss in losses:
        loss.backward()

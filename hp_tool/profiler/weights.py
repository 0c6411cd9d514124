"""Initial weights that do not depend on how the model is divided.

A weight's value is a hash of its name and its place in the undivided matrix, so that any TP, PP and DP start from the same
model. The losses of all configurations must then agree, which checks every profile run.
"""

from __future__ import annotations

import math
import re
import zlib

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

_BLOCK = 2**20  # elements hashed at a time, so that initialisation never sets the peak of memory


@torch.no_grad()
def initialise(chunk: torch.nn.Module, *, config: TransformerConfig, tied: bool, seed: int) -> None:
    """Fill every matrix of one model chunk; biases stay 0 and norm weights 1, as Megatron leaves them."""
    for name, weight in chunk.named_parameters():
        if weight.dim() == 2:
            name = _global_name(name, chunk, tied=tied)
            std = config.init_method_std
            if "linear_proj" in name or "linear_fc2" in name:
                std /= math.sqrt(2 * config.num_layers)
            stride = 2 if config.gated_linear_unit and "linear_fc1" in name else 1
            place = {"dim": _partition_dim(weight), "shards": _shards(name), "stride": stride}
            _fill(weight.data, **place, std=std, seed=zlib.crc32(f"{seed}/{name}".encode()))


def _global_name(name: str, chunk: torch.nn.Module, *, tied: bool) -> str:
    """The name with the layer's number in the whole model; a tied output layer has the name of the embedding."""
    if tied and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    if match is None:
        return name
    number = chunk.decoder.layers[int(match[1])].layer_number
    return f"decoder.layers.{number}.{_global_expert(name[match.end() :], layer=chunk.decoder.layers[int(match[1])])}"


def _global_expert(name: str, *, layer: torch.nn.Module) -> str:
    """The name with an expert's number among those of all ranks, whatever this build calls the experts of this rank."""
    match = re.search(r"experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight|experts\.(linear_fc\d)\.weight(\d+)", name)
    if match is None:
        return name
    first = parallel_state.get_expert_model_parallel_rank() * layer.mlp.experts.num_local_experts
    return f"experts.{first + int(match[1] or match[4])}.{match[2] or match[3]}"


def _shards(name: str) -> tuple[int, int]:
    """(number of ranks that share a divided matrix, this rank's number among them); experts have their own group."""
    if ".experts." in name:
        return parallel_state.get_expert_tensor_parallel_world_size(), parallel_state.get_expert_tensor_parallel_rank()
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def _partition_dim(weight: torch.Tensor) -> int | None:
    """The dimension that tensor parallelism divides, None for a replicated matrix."""
    return weight.partition_dim if getattr(weight, "tensor_model_parallel", False) else None


def _fill(weight: torch.Tensor, *, dim: int | None, shards: tuple[int, int], stride: int, std: float, seed: int) -> None:
    """Uniform values of the given standard deviation in this rank's [rows, columns] part of a matrix."""
    size, rank = shards
    rows, columns = (torch.arange(n, device=weight.device) for n in weight.shape)
    width = weight.shape[1] * (size if dim == 1 else 1)
    if dim == 0:
        # stride 2: a gated MLP's rank holds its share of the gate and, below it, its share of the up projection.
        part = weight.shape[0] // stride
        rows = (rows // part * size + rank) * part + rows % part
    elif dim == 1:
        columns = columns + rank * weight.shape[1]
    block = max(1, _BLOCK // weight.shape[1])
    for start in range(0, weight.shape[0], block):
        place = rows[start : start + block, None] * width + columns
        weight[start : start + block] = (_hash(place, seed=seed) * 2 - 1) * (math.sqrt(3) * std)


def _hash(place: torch.Tensor, *, seed: int) -> torch.Tensor:
    """int64 -> float32 in [0, 1): the mixing steps of MurmurHash3's 32-bit finaliser after a Weyl sequence."""
    mask = 0xFFFFFFFF
    x = (place * 0x9E3779B1 + seed) & mask
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & mask
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & mask
    return ((x ^ (x >> 16)) >> 8).float() * 2.0**-24

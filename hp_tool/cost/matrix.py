"""A weight matrix on one rank.

Modules have Megatron Core's names. Column-parallel matrices are split by rows (outputs),
row-parallel matrices by columns (inputs). Replicated matrices are complete on every rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hp_tool.cost.arrays import Floats, Ints

Division = Literal["column", "row", "replicated"]
Shape = tuple[Floats, Floats]
"""(outputs n, inputs k) of y = W x on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The matrix W of y = W x on one rank. Sizes have shape (n,), or are plain numbers for a single
    candidate.
    """

    module: str
    """Megatron Core's module name: linear_qkv, linear_proj, router, ...; linear_fc1 and linear_fc2
    for dense MLPs, routed and shared experts.
    """
    outputs: tuple[Floats, ...]
    """Number of rows on this rank, one entry per fused part: (queries, keys, values) or (gate,
    up).
    """
    inputs: Floats
    """Number of columns on this rank."""
    source: str
    """Name of W's input tensor. Matrices with the same source share its saved copy."""
    division: Division
    ranks: Ints = 1
    """Number of ranks that the matrix is split across."""
    count: Floats = 1.0
    """Number of such matrices on the rank, one per local expert; 1 outside experts."""
    routed: bool = False
    """Whether the matrix belongs to a routed expert."""

    @property
    def rows(self) -> Floats:
        """Return the number of outputs on this rank."""
        return sum(self.outputs[1:], self.outputs[0])

    @property
    def shape(self) -> Shape:
        """Return (outputs, inputs) on this rank."""
        return self.rows, self.inputs

    @property
    def entries(self) -> Floats:
        """Return the number of entries of all `count` matrices on this rank."""
        return self.count * self.rows * self.inputs


def column(
    module: str, outputs: tuple[Floats, ...], inputs: Floats, *, source: str, ranks: Ints
) -> Matrix:
    return Matrix(
        module=module, outputs=outputs, inputs=inputs, source=source, division="column", ranks=ranks
    )


def replicated(module: str, outputs: float, inputs: float, *, source: str) -> Matrix:
    return Matrix(
        module=module, outputs=(outputs,), inputs=inputs, source=source, division="replicated"
    )


def entries(matrices: Iterable[Matrix]) -> Floats:
    """Return the number of entries of these matrices on one rank. This is their number of
    parameters without biases.
    """
    return sum((matrix.entries for matrix in matrices), 0.0)


def shapes(matrices: Iterable[Matrix]) -> list[Shape]:
    """Return the (outputs, inputs) of each matrix on one rank."""
    return [matrix.shape for matrix in matrices]


def shapes_by_source(matrices: Iterable[Matrix]) -> list[Shape]:
    """Return the shapes after fusing matrices that have the same source, as inference engines
    do.
    """
    fused: dict[str, Shape] = {}
    for matrix in matrices:
        rows, inputs = fused.get(matrix.source, (0.0, matrix.inputs))
        fused[matrix.source] = (rows + matrix.rows, inputs)
    return list(fused.values())

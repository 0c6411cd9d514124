"""Scaling laws N = N0 (C / C0)^a: how a compute budget C = 6 N D is divided between parameters N and tokens D."""

from __future__ import annotations

from dataclasses import dataclass

PETAFLOP_DAY = 8.64e19


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLaw:
    """Compute-optimal parameters and tokens."""

    name: str
    source: str
    exponent: float
    """a."""
    anchor_parameters: float
    """N0: the optimum at..."""
    anchor_flops: float
    """... C0."""
    fitted_parameters: tuple[float, float] | None = None
    """Sizes of the models it was fitted on; None: it is no fit."""

    def parameters(self, flops: float) -> float:
        """N that C FLOPs are best spent on."""
        return float(self.anchor_parameters * (flops / self.anchor_flops) ** self.exponent)

    def flops_of_parameters(self, parameters: float) -> float:
        """C at which N parameters are optimal."""
        return float(self.anchor_flops * (parameters / self.anchor_parameters) ** (1.0 / self.exponent))

    def flops_of_tokens(self, tokens: float) -> float:
        """C at which D tokens are optimal: D = C^(1-a) C0^a / 6 N0, solved for C."""
        scale = 6.0 * self.anchor_parameters * self.anchor_flops**-self.exponent
        return float((scale * tokens) ** (1.0 / (1.0 - self.exponent)))

    def extrapolated(self, parameters: float) -> bool:
        """Whether a model of this size is outside the fit."""
        return self.fitted_parameters is not None and not (self.fitted_parameters[0] <= parameters <= self.fitted_parameters[1])


# L(N, D) = E + A / N^alpha + B / D^beta: Hoffmann's third approach as refitted by arXiv 2404.10102 (240 of the paper's runs).
_E, _A, _B, _ALPHA, _BETA = 1.8172, 482.01, 2085.43, 0.3478, 0.3658
_G = (_ALPHA * _A / (_BETA * _B)) ** (1.0 / (_ALPHA + _BETA))
_CHINCHILLA_MODELS = (70e6, 16e9)


def _chinchilla(number: int, *, exponent: float, flops: float, table: str, doubt: str = "") -> ScalingLaw:
    """One of Hoffmann's three approaches."""
    return ScalingLaw(
        name=f"chinchilla-{number}",
        source=f"arXiv 2203.15556, approach {number}: exponent of table 2, anchored at the 67B row of table {table}{doubt}",
        exponent=exponent,
        anchor_parameters=67e9,
        anchor_flops=flops,
        fitted_parameters=_CHINCHILLA_MODELS,
    )


LAWS = {
    law.name: law
    for law in (
        _chinchilla(1, exponent=0.50, flops=5.76e23, table="3"),
        _chinchilla(2, exponent=0.49, flops=6.88e23, table="A3"),
        _chinchilla(3, exponent=0.46, flops=1.71e24, table="A3", doubt="; arXiv 2404.10102 found its optimizer stopped early"),
        ScalingLaw(
            name="chinchilla-corrected",
            source="arXiv 2404.10102: approach 3 of arXiv 2203.15556 refitted; N = G (C/6)^(beta / (alpha + beta))",
            exponent=_BETA / (_ALPHA + _BETA),
            anchor_parameters=_G,
            anchor_flops=6.0,
            fitted_parameters=_CHINCHILLA_MODELS,
        ),
        ScalingLaw(
            name="kaplan",
            source="arXiv 2001.08361, section 6 and table 6: N = 1.3e9 (C / PF-day)^0.73, N without embeddings; "
            "superseded by arXiv 2203.15556",
            exponent=0.73,
            anchor_parameters=1.3e9,
            anchor_flops=PETAFLOP_DAY,
            fitted_parameters=(768.0, 1.5e9),
        ),
    )
}


def over_trained(*, tokens_per_parameter: float) -> ScalingLaw:
    """D = r N whatever the compute, so N = sqrt(C / 6r): what serves many requests is trained past its optimum."""
    return ScalingLaw(
        name=f"{tokens_per_parameter:g} tokens per parameter",
        source="as asked",
        exponent=0.5,
        anchor_parameters=1.0,
        anchor_flops=6.0 * tokens_per_parameter,
    )


def loss(*, parameters: float, tokens: float) -> float:
    """Nats a token on MassiveText: L = E + A / N^alpha + B / D^beta (arXiv 2404.10102)."""
    return float(_E + _A / parameters**_ALPHA + _B / tokens**_BETA)


def compute_overhead(*, parameters: float, tokens: float) -> float:
    """6ND over the least compute that reaches the same loss by the same fit, minus 1.

    Along the optimum N = G (C/6)^a, D = (C/6)^(1-a) / G, so L - E = (A / G^alpha + B G^beta) (C/6)^-gamma with
    gamma = alpha beta / (alpha + beta); solved for C.
    """
    gamma = _ALPHA * _BETA / (_ALPHA + _BETA)
    reducible = loss(parameters=parameters, tokens=tokens) - _E
    least = 6.0 * ((_A * _G**-_ALPHA + _B * _G**_BETA) / reducible) ** (1.0 / gamma)
    return float(6.0 * parameters * tokens / least - 1.0)

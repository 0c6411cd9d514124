"""Published scaling laws, which divide compute between parameters and tokens, and rules for
starting hyperparameters.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from hp_tool.cost.flops import token_flops
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.sizing import Choice
from hp_tool.domain.workload import TrainingWorkload

PETAFLOP_DAY = 8.64e19


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLaw:
    """Compute-optimal number of parameters N = N0 (C / C0)^a, and tokens D from C = 6 N D, for C
    FLOPs.
    """

    name: str
    source: str
    exponent: float
    """Exponent a."""
    anchor_parameters: float
    """N0, the optimal number of parameters for C0 FLOPs."""
    anchor_flops: float
    """C0, a compute in FLOPs."""
    fitted_parameters: tuple[float, float] | None = None
    """Range of model sizes in the fit, in parameters; None if the law was not fitted."""

    def parameters(self, flops: float) -> float:
        """Return the compute-optimal number of parameters N for C FLOPs."""
        return float(self.anchor_parameters * (flops / self.anchor_flops) ** self.exponent)

    def flops_of_parameters(self, parameters: float) -> float:
        """Return the compute C in FLOPs for which N parameters are optimal."""
        return float(
            self.anchor_flops * (parameters / self.anchor_parameters) ** (1.0 / self.exponent)
        )

    def flops_of_tokens(self, tokens: float) -> float:
        """Return the compute C in FLOPs for which D tokens are optimal: D = C^(1-a) C0^a / 6 N0,
        solved for C.
        """
        scale = 6.0 * self.anchor_parameters * self.anchor_flops**-self.exponent
        return float((scale * tokens) ** (1.0 / (1.0 - self.exponent)))

    def extrapolated(self, parameters: float) -> bool:
        """Return whether a model of this size is outside the range of the fit."""
        return self.fitted_parameters is not None and not (
            self.fitted_parameters[0] <= parameters <= self.fitted_parameters[1]
        )


# L(N, D) = E + A / N^alpha + B / D^beta: Hoffmann et al.'s third approach, as refitted by arXiv
# 2404.10102 to 240 of the paper's runs.
_E, _A, _B, _ALPHA, _BETA = 1.8172, 482.01, 2085.43, 0.3478, 0.3658
_G = (_ALPHA * _A / (_BETA * _B)) ** (1.0 / (_ALPHA + _BETA))
_CHINCHILLA_MODELS = (70e6, 16e9)


def _chinchilla(
    number: int, *, exponent: float, flops: float, table: str, doubt: str = ""
) -> ScalingLaw:
    return ScalingLaw(
        name=f"chinchilla-{number}",
        source=f"arXiv 2203.15556, approach {number}: exponent of table 2, anchored at the 67B row "
        f"of table {table}{doubt}",
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
        _chinchilla(
            3,
            exponent=0.46,
            flops=1.71e24,
            table="A3",
            doubt="; arXiv 2404.10102 found its optimizer stopped early",
        ),
        ScalingLaw(
            name="chinchilla-corrected",
            source="arXiv 2404.10102: approach 3 of arXiv 2203.15556 refitted; N = G (C/6)^(beta / "
            "(alpha + beta))",
            exponent=_BETA / (_ALPHA + _BETA),
            anchor_parameters=_G,
            anchor_flops=6.0,
            fitted_parameters=_CHINCHILLA_MODELS,
        ),
        ScalingLaw(
            name="kaplan",
            source="arXiv 2001.08361, section 6 and table 6: N = 1.3e9 (C / PF-day)^0.73, N "
            "without embeddings; "
            "superseded by arXiv 2203.15556",
            exponent=0.73,
            anchor_parameters=1.3e9,
            anchor_flops=PETAFLOP_DAY,
            fitted_parameters=(768.0, 1.5e9),
        ),
    )
}


def over_trained_law(*, tokens_per_parameter: float) -> ScalingLaw:
    """Return the law with a fixed number r of tokens per parameter: D = r N, so N = sqrt(C / 6r).

    It describes models that are trained on more tokens than is compute-optimal.
    """
    return ScalingLaw(
        name=f"{tokens_per_parameter:g} tokens per parameter",
        source="set in the query",
        exponent=0.5,
        anchor_parameters=1.0,
        anchor_flops=6.0 * tokens_per_parameter,
    )


def predicted_loss(*, parameters: float, tokens: float) -> float:
    """Return the predicted loss on MassiveText in nats per token: L = E + A / N^alpha + B / D^beta
    (arXiv 2404.10102).
    """
    return float(_E + _A / parameters**_ALPHA + _B / tokens**_BETA)


def compute_overhead(*, parameters: float, tokens: float) -> float:
    """Return 6 N D divided by the smallest compute that reaches the same loss, minus 1.

    Along the optimum N = G (C/6)^a, D = (C/6)^(1-a) / G, so L - E = (A / G^alpha + B G^beta)
    (C/6)^-gamma with gamma = alpha beta / (alpha + beta); solved for C.
    """
    gamma = _ALPHA * _BETA / (_ALPHA + _BETA)
    reducible = predicted_loss(parameters=parameters, tokens=tokens) - _E
    least = 6.0 * ((_A * _G**-_ALPHA + _B * _G**_BETA) / reducible) ** (1.0 / gamma)
    return float(6.0 * parameters * tokens / least - 1.0)


_GPT3 = (
    (125e6, 6.0e-4, 0.5e6),
    (350e6, 3.0e-4, 0.5e6),
    (760e6, 2.5e-4, 0.5e6),
    (1.3e9, 2.0e-4, 1e6),
    (2.7e9, 1.6e-4, 1e6),
    (6.7e9, 1.2e-4, 2e6),
    (13e9, 1.0e-4, 2e6),
    (175e9, 0.6e-4, 3.2e6),
)
"""(parameters, learning rate, tokens per step) from arXiv 2005.14165, table 2.1."""
_WARMUP_STEPS, _WARMUP_SHARE = 2_000, 0.02
_INITIAL_STD = 0.02
_GPT3_CONFIG = "arXiv 2005.14165, appendix B"
_COMMON_SOURCE = f"{_GPT3_CONFIG}; the same in arXiv 2302.13971, section 2.3"
_OPTIMIZER = (
    Choice(
        name="adam_betas",
        value=(0.9, 0.95),
        rule="beta 2 below Adam's default of 0.999, for a shorter average of squared gradients",
        source=_COMMON_SOURCE,
    ),
    Choice(name="adam_eps", value=1e-8, rule="constant", source=_GPT3_CONFIG),
    Choice(
        name="weight_decay",
        value=0.1,
        rule="decoupled (AdamW), not on norms and biases",
        source=_COMMON_SOURCE,
    ),
    Choice(name="clip_grad", value=1.0, rule="global norm", source=_COMMON_SOURCE),
)


def hyperparameter_flops(*, model: ModelSpec, sequence_length: int, tokens: float) -> float:
    """Return the compute C in DeepSeek's laws in FLOPs: C = M D, where M is the non-embedding FLOPs
    per token.

    For a plain GPT, M is 72 L h^2 + 12 L h s (arXiv 2401.02954, section 3.2), which excludes the
    output layer.
    """
    flops = token_flops(
        model, TrainingWorkload(sequence_length=sequence_length, global_batch_size=1)
    )
    return 3.0 * (flops.layers + flops.attention) * tokens


def starting_hyperparameters(
    *,
    model: ModelSpec,
    parameters: float,
    tokens: float,
    sequence_length: int,
    global_batch_size: int,
) -> tuple[Choice, ...]:
    """Return starting values for the batch size, the learning rate and its schedule, Adam, weight
    decay, clipping and initialization.

    Tune them with a sweep on a small model. `parameters` is the number of active parameters. The
    learning-rate laws were fitted to dense models with Adam in the standard parametrization.
    """
    flops = hyperparameter_flops(model=model, sequence_length=sequence_length, tokens=tokens)
    steps = max(math.ceil(tokens / (global_batch_size * sequence_length)), 1)
    deepseek = "arXiv 2401.02954, equation 1, fitted on 1e17 to 2e19 FLOPs of dense models"
    outside = not FITTED_FLOPS[0] <= flops <= FITTED_FLOPS[1] or bool(model.num_experts)
    rate = Choice(
        name="learning_rate",
        value=float(0.3118 * flops**-0.1250),
        rule=f"0.3118 C^-0.1250 at C = {flops:.3g} non-embedding FLOPs; the peak, for the batch "
        "size of the same law",
        source=deepseek,
        extrapolated=outside,
        alternatives={
            "GPT-3, table 2.1 interpolated": interpolate_gpt3(
                "learning_rate", parameters=parameters
            )
        },
    )
    batch = Choice(
        name="global_batch_size",
        value=global_batch_size,
        unit="sequences",
        rule="0.2920 C^0.3271 tokens, rounded to sequences that replicas divide evenly, unless "
        "the query sets it",
        source=deepseek,
        extrapolated=outside,
        alternatives={
            "the law, in tokens": batch_tokens(flops=flops),
            "GPT-3, table 2.1 interpolated, in tokens": interpolate_gpt3(
                "batch_tokens", parameters=parameters
            ),
        },
    )
    warmup = min(_WARMUP_STEPS, math.ceil(_WARMUP_SHARE * steps))
    return (
        rate,
        batch,
        *_schedule_choices(steps=steps, warmup=warmup),
        *_OPTIMIZER,
        *_initialization_choices(model),
    )


def interpolate_gpt3(
    column: Literal["learning_rate", "batch_tokens"], *, parameters: float
) -> float:
    """Return the peak learning rate or the tokens per step of a GPT-3 model of this size.

    Interpolates log-log between rows of the table. Beyond its ends, the values are constant.
    """
    rows, place = _GPT3, 1 if column == "learning_rate" else 2
    inside = min(max(parameters, rows[0][0]), rows[-1][0])
    low, high = next((a, b) for a, b in itertools.pairwise(rows) if inside <= b[0])
    share = math.log(inside / low[0]) / math.log(high[0] / low[0])
    return float(low[place] * (high[place] / low[place]) ** share)


def _schedule_choices(*, steps: int, warmup: int) -> tuple[Choice, ...]:
    return (
        Choice(
            name="learning_rate_schedule",
            value="cosine to 10% of the peak over the whole training",
            rule="a cosine that outlasts the training by more than a quarter costs loss",
            source=f"{_GPT3_CONFIG}; arXiv 2203.15556, appendix B",
        ),
        Choice(
            name="train_steps",
            value=steps,
            unit="steps",
            rule="tokens / (batch x sequence length)",
            source="definition",
        ),
        Choice(
            name="warmup_steps",
            value=warmup,
            unit="steps",
            rule="linear over 2,000 steps, over 2% of a training shorter than 100,000",
            source="2,000: arXiv 2302.13971, section 2.3, and 2401.02954, section 2.3; 2% is "
            "common practice",
        ),
        Choice(
            name="batch_ramp",
            value="linear from 32,000 tokens over the first 4 to 12 billion tokens",
            rule="small batches suffice while gradients agree; without it the same loss takes more "
            "tokens at first",
            source=f"{_GPT3_CONFIG}; the same in three steps: arXiv 2407.21783, section 3.4.1",
        ),
    )


def _initialization_choices(model: ModelSpec) -> tuple[Choice, ...]:
    return (
        Choice(
            name="init_std",
            value=_INITIAL_STD,
            rule="normal, for matrices and embeddings",
            source="GPT-2 and Megatron-LM, --init-method-std",
            alternatives={
                "sqrt(1 / 3h), MT-NLG (arXiv 2201.11990)": math.sqrt(
                    1.0 / (3.0 * model.hidden_size)
                )
            },
        ),
        Choice(
            name="output_init_std",
            value=_INITIAL_STD / math.sqrt(2.0 * model.total_layers),
            rule="init_std / sqrt(2 L), for the matrices that write to the residual stream",
            source="GPT-2, section 2.3; Megatron-LM's scaled_init_method_normal",
        ),
        Choice(
            name="transfer",
            value="tune the learning rate on a narrow model and divide it by the ratio of widths "
            "for hidden matrices",
            rule="under muP the best rate does not move with width; under the parametrisation "
            "above it does",
            source="arXiv 2203.03466, table 8",
        ),
    )


FITTED_FLOPS = (1e17, 2e19)
"""Compute range of the runs to which DeepSeek's batch-size and learning-rate laws were fitted
(arXiv 2401.02954, section 3.1).
"""


def batch_tokens(*, flops: float) -> float:
    """Return the tokens per step: B = 0.2920 C^0.3271, where C is the non-embedding compute of the
    training run in FLOPs.

    Source: arXiv 2401.02954, equation 1.
    """
    return float(0.2920 * flops**0.3271)


def batch_sequences(*, flops: float, sequence_length: int, num_gpus: int) -> int:
    """Return `batch_tokens` in whole sequences, rounded by at most 11%.

    The result is 4, 5, 6 or 7 times a power of two times the odd part of num_gpus, so that it can
    be divided evenly among replicas on any part of the devices.
    """
    odd = num_gpus
    while odd % 2 == 0:
        odd //= 2
    groups = max(batch_tokens(flops=flops) / sequence_length / odd, 1.0)
    step = 2 ** max(math.floor(math.log2(groups)) - 2, 0)
    return int(odd * step * max(round(groups / step), 1))

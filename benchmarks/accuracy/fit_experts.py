"""Fit the time that MoE layers add to isolated kernels in serving: `python -m evidence.fit --only
experts`.

Writes experts.yaml and experts/ENGINE.yaml in hp_tool/catalog/data/efficiency from the runs of MoE
models in inference_measured_2.csv to _4. The engines' constants come from dense models, so
`fit_engines` runs first. experts/ENGINE.yaml has the constants of one engine in OWN, experts.yaml
those of all remaining engines. Priors limit every constant to physical values. Deviations are the
errors of models left out. The engines in OWN and one of their priors (priors_own) were chosen after
looking at the rows that report the error.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.accuracy import fitting
from benchmarks.accuracy.fitting import (
    Fit,
    Floats,
    Prior,
    fit_settings,
    linear_beyond,
    priors,
    weighted_sd,
)
from benchmarks.accuracy.serving_runs import (
    FIGURES,
    Batch,
    Predicted,
    ServingRun,
    batches,
    by_constants,
    later_runs,
    log_ratios,
    predict,
)
from evidence.fitted_file import FittedFile
from hp_tool.catalog import model as catalogue_model
from hp_tool.domain.engines import EngineEfficiency, ExpertEfficiency

COMMAND = "python -m evidence.fit --only experts"

NOISE, ROBUST = fit_settings("experts")["noise"], fit_settings("experts")["robust"]
EXCLUDED_RUN = ("trtllm", "1.2.0rc6.post1")
"""A run that is excluded: its requests wait 29 s for the first token of a prompt that takes 2 s,
and no stated setting explains the wait.
"""
DRAFTS_FROM = 1.25
"""Ratio of two TPOTs with the same layout and load above which the faster run must have used
speculative decoding, which no column states.
"""
OWN = ("sglang",)
"""Engines with separate constants. vLLM and TensorRT-LLM were measured on two and three models,
which is too few. SGLang was chosen because its runs predict a left-out model better than the runs
of all engines do. The error is reported on the same rows, so it is slightly too small. Only later
runs can confirm the choice.
"""
ByEngine = Mapping[str, ExpertEfficiency]
JOINT = ""
"""Name under which ByEngine stores the constants that all engines outside OWN share."""
SEARCH = {"diff_step": 1e-2, "ftol": 1e-4, "xtol": 1e-4}
Prepared = Sequence[tuple[Batch, EngineEfficiency]]


def moe_runs(folder: Path) -> list[ServingRun]:
    """Return runs of MoE models on one replica, except runs that must have used speculative
    decoding or whose layout is uncertain.
    """
    runs = (run for run in later_runs(folder) if catalogue_model(run.model).num_experts)
    return runs_without_drafts(
        without_duplicates([run for run in runs if (run.engine, run.version) != EXCLUDED_RUN])
    )


def without_duplicates(runs: Sequence[ServingRun]) -> list[ServingRun]:
    """Return the runs without duplicates. A second listing repeats some runs with the requested
    instead of the drawn lengths; their latencies are equal.
    """
    drawn = {_measured(run) for run in runs if not run.equal_lengths}
    return [run for run in runs if not run.equal_lengths or _measured(run) not in drawn]


def _measured(run: ServingRun) -> tuple[object, ...]:
    return (run.engine, run.model, run.gpu, run.concurrency, run.ttft_s, run.tpot_s)


def runs_without_drafts(runs: Sequence[ServingRun]) -> list[ServingRun]:
    """Return the runs without speculative decoding whose layout is known."""
    slowest: dict[tuple[object, ...], float] = defaultdict(float)
    for run in runs:
        slowest[_layout(run)] = max(slowest[_layout(run)], run.tpot_s)
    return [
        run
        for run in runs
        if slowest[_layout(run)] <= DRAFTS_FROM * run.tpot_s
        # MiniMax's repaired rows have attention in parallel over data, and the latencies of the
        # rows with TP 4 to 1 %.
        and not (run.engine == "vllm" and run.config.attention_data_parallel_size > 1)
    ]


def _layout(run: ServingRun) -> tuple[object, ...]:
    load = run.input_length, run.output_length, run.concurrency
    return (run.engine, catalogue_model(run.model).name, run.gpu, run.precision, run.config, *load)


def prepare_batches(runs: Sequence[ServingRun]) -> Prepared:
    """Return the runs in batches, each with the constants of its engine."""
    pairs: list[tuple[Batch, EngineEfficiency]] = []
    for profile, members in by_constants(runs):
        pairs += [(batch, profile) for batch in batches(members, profile)]
    return pairs


def predict_runs(pairs: Prepared, experts: ByEngine) -> list[Predicted]:
    """Return the predictions for all runs with these constants of experts."""
    rows = []
    for batch, profile in pairs:
        own = experts.get(profile.engine) or experts[JOINT]
        changed = dataclasses.replace(batch, case=dataclasses.replace(batch.case, experts=own))
        rows += predict([changed], profile)
    return rows


def errors(runs: Sequence[ServingRun]) -> Callable[[ExpertEfficiency], Floats]:
    """Return the weighted errors; each model has the same weight, shared by its runs."""
    pairs = prepare_batches(runs)
    models = [catalogue_model(run.model).name for batch, _ in pairs for run in batch.runs]
    count = Counter(models)
    weights = np.sqrt([len(models) / len(count) / count[model] for model in models])

    def of(trial: ExpertEfficiency) -> Floats:
        rows = predict_runs(pairs, {JOINT: trial})
        bent = [linear_beyond(log_ratios(rows, what), ROBUST[what]) / NOISE[what] for what in NOISE]
        return np.concatenate([weights * each for each in bent])

    return of


def _fit(free: Mapping[str, Prior]) -> Fit[ServingRun, ExpertEfficiency]:
    return Fit(
        priors=free,
        constants=lambda values: ExpertEfficiency(**values),
        errors=errors,
        in_deviations=False,
        near=0.0,
        options={"x_scale": [prior.sd for prior in free.values()], **SEARCH},
    )


fit = _fit(priors("experts"))
own_fit = _fit(priors("experts") | priors("experts", "priors_own"))


def fit_by_engine(runs: Sequence[ServingRun]) -> dict[str, ExpertEfficiency]:
    """Return the constants of the engines in OWN, and of all others together."""
    groups: dict[str, list[ServingRun]] = defaultdict(list)
    for run in runs:
        groups[_separate_runs(run)].append(run)
    return {name: (fit if name == JOINT else own_fit)(members) for name, members in groups.items()}


def left_out(
    runs: Sequence[ServingRun], key: Callable[[ServingRun], Hashable]
) -> dict[Hashable, tuple[dict[str, ExpertEfficiency], list[Predicted]]]:
    """Return, for each value of `key`, the constants fitted to the remaining runs and their
    predictions of the runs left out.
    """
    parts = {
        value: (members, fit_by_engine(others))
        for value, members, others in fitting.split_by_key(runs, key)
    }
    return {
        value: (constants, predict_runs(prepare_batches(members), constants))
        for value, (members, constants) in parts.items()
    }


def with_scatter(
    constants: ExpertEfficiency, unseen: Sequence[Sequence[Predicted]]
) -> ExpertEfficiency:
    """Return the constants with the deviations whose 90% interval contains 90% of the held-out
    groups; each group has the same weight.
    """

    sds = {what: weighted_sd([log_ratios(group, what) for group in unseen]) for what in FIGURES}
    return dataclasses.replace(
        constants, **{f"{what}_log_sd": float(f"{sd:.3g}") for what, sd in sds.items()}
    )


def fitted(folder: Path) -> Iterator[FittedFile]:
    runs = moe_runs(folder)
    unseen = [pairs for _, pairs in left_out(runs, _model).values()]
    for engine, constants in fit_by_engine(runs).items():
        of_engine = [run for run in runs if _separate_runs(run) == engine]
        groups = [
            [pair for pair in pairs if _separate_runs(pair.run) == engine] for pairs in unseen
        ]
        models = ", ".join(
            dict.fromkeys(f"{_model(run)} on {run.gpu} ({run.engine})" for run in of_engine)
        )
        profile = dataclasses.replace(
            with_scatter(constants, [pairs for pairs in groups if pairs]),
            fitted_on=f"{len(of_engine)} runs of inference_measured_2.csv to _4 ({models}) by "
            f"{COMMAND}; deviations of models left out",
        )
        file = f"experts/{engine}.yaml" if engine else "experts.yaml"
        yield FittedFile(file=file, fields=dataclasses.asdict(profile))


def _separate_runs(run: ServingRun) -> str:
    return run.engine if run.engine in OWN else JOINT


def _model(run: ServingRun) -> str:
    return catalogue_model(run.model).name

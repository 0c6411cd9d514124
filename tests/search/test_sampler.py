"""The sampler in plain Optuna: no store, no launcher."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import optuna
import pytest

from hp_tool.loop.calibration import fit_calibration, prior_for
from hp_tool.loop.search import sampler as sampler_module
from hp_tool.loop.search.sampler import CostModelSampler
from tests.search.search_tables import DEVICE_BYTES, make_table, true_step_s

optuna.logging.set_verbosity(optuna.logging.WARNING)


def make_objective(table, truth, oom):
    def objective(trial):
        params = {
            name: trial.suggest_categorical(name, choices)
            for name, choices in table.choices.items()
        }
        row = table.row_of(params)
        if row in oom:
            trial.set_constraint("memory", 1.0)
            return 1e6
        return float(truth[row])

    return objective


def test_it_finds_the_best_of_a_machine_unlike_the_model_in_few_trials():
    table = make_table()
    truth = true_step_s(table)
    oom = {row for row in range(len(table)) if table.memory_bytes[row] > 0.9 * DEVICE_BYTES}
    fits = [row for row in range(len(table)) if row not in oom]
    sampler = CostModelSampler(table=table, prior=prior_for(kind="gpu"), seed=0)
    study = optuna.create_study(sampler=sampler)
    study.optimize(make_objective(table, truth, oom), n_trials=8)
    assert study.best_value <= 1.02 * truth[fits].min()
    rows = [table.row_of(trial.params) for trial in study.trials]
    assert len(set(rows)) == len(rows), "a row was run twice"
    learnt = sampler.calibration(study=study).step_time.predict(
        parts_s=table.parts_s, layer_passes=table.layer_passes
    )
    predicted = np.sum(list(table.parts_s.values()), axis=0)
    unseen = [row for row in fits if row not in rows]
    before, after = (
        np.median(np.abs(np.log(guess[unseen] / truth[unseen])))
        for guess in (predicted, learnt.median_s)
    )
    assert after < 0.12 < 0.2 < before


def test_same_seed_same_trials():
    table, truth = make_table(), true_step_s(make_table())
    runs = []
    for _ in range(2):
        study = optuna.create_study(
            sampler=CostModelSampler(table=table, prior=prior_for(kind="gpu"), seed=5)
        )
        study.optimize(make_objective(table, truth, set()), n_trials=5)
        runs.append([trial.params for trial in study.trials])
    assert runs[0] == runs[1]


def test_out_of_memory_teaches_memory_and_failures_are_survived():
    table, truth = make_table(), true_step_s(make_table())
    sampler = CostModelSampler(table=table, prior=prior_for(kind="gpu"))
    study = optuna.create_study(sampler=sampler)
    first = study.ask(sampler.distributions)
    first_row = table.row_of(first.params)
    first.set_constraint("memory", 1.0)
    study.tell(first, 1e6)
    second = study.ask(sampler.distributions)
    assert table.memory_bytes[table.row_of(second.params)] < table.memory_bytes[first_row]
    study.tell(second, state=optuna.trial.TrialState.FAIL)
    study.optimize(make_objective(table, truth, set()), n_trials=3)
    rows = [table.row_of(trial.params) for trial in study.trials]
    assert len(set(rows)) == 5
    assert (
        sampler.calibration(study=study)
        .memory.predict(memory_bytes=table.memory_bytes)
        .fit_probability(table.device_bytes)[first_row]
        <= 0.5
    )


def test_parallel_asks_differ():
    table = make_table()
    sampler = CostModelSampler(table=table, prior=prior_for(kind="gpu"))
    study = optuna.create_study(sampler=sampler)
    rows = [table.row_of(study.ask(sampler.distributions).params) for _ in range(4)]
    assert len(set(rows)) == 4


def test_parameters_that_are_no_axes_and_an_exhausted_table_are_served():
    table = make_table()
    sampler = CostModelSampler(table=table, prior=prior_for(kind="gpu"))
    study = optuna.create_study(sampler=sampler)
    truth = true_step_s(table)
    study.optimize(make_objective(table, truth, set()), n_trials=len(table) + 1)
    assert table.row_of(study.trials[-1].params) == int(np.argmin(truth))
    assert 0.0 <= study.ask().suggest_float("learning_rate", 0.0, 1.0) <= 1.0


def test_maximising_is_refused():
    sampler = CostModelSampler(table=make_table(), prior=prior_for(kind="gpu"))
    with pytest.raises(ValueError, match="minimize"):
        optuna.create_study(direction="maximize", sampler=sampler).ask(sampler.distributions)


def test_the_documented_use_from_plain_optuna_works():
    page = (Path(__file__).parents[2] / "docs/search.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    asked = []

    def my_training_step_seconds(config):
        asked.append(config)
        return 1.0 + 0.1 * config.tensor_parallel_size

    namespace = {"my_training_step_seconds": my_training_step_seconds}
    exec(code.replace("n_trials=8", "n_trials=3"), namespace)
    assert len(set(asked)) == 3
    assert len(namespace["study"].trials) == 3


def test_nothing_is_fitted_again_before_another_trial_ends(monkeypatch):
    fits = []

    def counted(**given):
        fits.append(len(given["evidence"]))
        return fit_calibration(**given)

    monkeypatch.setattr(sampler_module, "fit_calibration", counted)
    table, truth = make_table(), true_step_s(make_table())
    sampler = CostModelSampler(table=table, prior=prior_for(kind="gpu"))
    study = optuna.create_study(sampler=sampler)
    study.optimize(make_objective(table, truth, set()), n_trials=3)
    study.ask(sampler.distributions)  # one that is under way
    for _ in range(2):
        assert sampler.proposal(study=study) is not None
        assert len(sampler.rivals(study=study, count=2)) == 2
        assert len(sampler.calibration(study=study).measurement_ids) == 3
    assert fits == [0, 1, 2, 3]

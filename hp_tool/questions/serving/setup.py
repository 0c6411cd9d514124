"""Setups of serving configurations. Exporters write them as files for engines."""

import dataclasses
import math

from hp_tool.catalog.efficiency import engine_efficiency
from hp_tool.catalog.models import stored_checkpoint
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.query import Query
from hp_tool.domain.serving import PoolConfig, ServingConfig
from hp_tool.domain.setups import ServingSetup
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.serving.disaggregated import pool_config, resolve_pools
from hp_tool.questions.serving.problem import ServingProblem, resolve_serving, resolve_workload


def serving_setup(configuration: Configuration) -> ServingSetup:
    """Return the setup of one serving configuration."""
    query, config = configuration.query, configuration.parallel
    problem, workload = resolve_serving(query), resolve_workload(query)
    assert isinstance(config, ServingConfig)  # Checked when the query was parsed.
    return _setup(query, problem, problem.cluster, workload, config)


def pool_setups(
    query: Query, *, prefill: PoolConfig, decode: PoolConfig
) -> tuple[ServingSetup, ServingSetup]:
    """Return the setups of the prefill pool and the decoding pool, each on its own devices."""
    problem, sides = resolve_pools(query)
    workload = dataclasses.replace(resolve_workload(query), disaggregated=None)
    first, second = (
        _setup(
            query,
            problem,
            _pool_devices(side, pool),
            workload,
            pool_config(pool, problem, query.parallel),
        )
        for side, pool in zip(sides, (prefill, decode), strict=True)
    )
    return first, second


def _pool_devices(side: ClusterSpec, pool: PoolConfig) -> ClusterSpec:
    used = pool.tensor_parallel_size * pool.attention_data_parallel_size * pool.replicas
    return dataclasses.replace(side, num_gpus=used)


def _setup(
    query: Query,
    problem: ServingProblem,
    cluster: ClusterSpec,
    workload: InferenceWorkload,
    config: ServingConfig,
) -> ServingSetup:
    stored = stored_checkpoint(query.model, precision=str(workload.precision))
    usual = engine_efficiency(
        engine=workload.engine, version=workload.engine_version, silicon=cluster.gpu.silicon
    )
    return ServingSetup(
        model=problem.model,
        model_path=None if stored is None else stored.path,
        stored_precision=None if stored is None else stored.precision,
        cluster=cluster,
        workload=workload,
        longest=_max_request_tokens(problem, workload.max_model_len),
        parallel=config,
        memory_fraction=problem.engine.memory_fraction,
        leaves_headroom=workload.memory_fraction is None
        and problem.engine.memory_fraction < usual.memory_fraction,
    )


def _max_request_tokens(problem: ServingProblem, stated: int | None) -> int:
    """Return the maximum number of tokens per request.

    It is that of the query or, by default, that of the load plus 10% for chat templates, rounded up
    to a multiple of 1,024 and at most the positions of the model.
    """
    if stated is not None:
        return stated
    roomy = math.ceil(1.1 * problem.longest_request / 1024) * 1024
    return min(roomy, problem.model.max_position_embeddings or roomy)

"""How many copies of a token travel to the experts' ranks, and over which links.

alltoall (Megatron Core's dispatcher of that name, NCCL): one copy for each of the token's k experts.
flex (DeepEP, HybridEP): one copy for each other node that holds any of them, and inside a node one for each rank that does;
results are added up on the way back, so combining moves as much (DeepEP, "normal kernels"; arXiv 2412.19437 section 3.2.2).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from hp_tool.cost.elementwise import Column
from hp_tool.cost.placement import Group, group_size, sharing
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import TokenDispatcher


def travelling_copies(
    *, model: ModelSpec, cluster: ClusterSpec, group: Group, dispatcher: TokenDispatcher
) -> tuple[Column, Column]:
    """(inside the NVLink domain, out of it) copies of a token that a rank sends, on average, for a uniform router.

    `group` are the e_p expert-parallel ranks, k of them in each of e_p / k domains.
    """
    size = group_size(group)
    k = sharing(group, block=cluster.nvlink_domain_size)
    if dispatcher == "alltoall":
        chosen = float(model.num_experts_per_tok or 1)
        return chosen * (k - 1.0) / size, chosen * (size - k) / size
    domains = size // k
    experts = model.num_experts or 1
    groups = model.n_group or 1
    used = functools.partial(
        used_share,
        experts=experts,
        chosen=model.num_experts_per_tok or 1,
        groups=groups,
        kept=min(model.topk_group or groups, groups),
    )
    # A copy that arrives in a domain is on one of the k ranks; the others get theirs over NVLink.
    return domains * (k - 1.0) * _of_each(size, used), (domains - 1.0) * _of_each(domains, used)


@functools.lru_cache(maxsize=4096)
def used_share(parts: int, *, experts: int, chosen: int, groups: int, kept: int) -> float:
    """Probability that a token has an expert in one of `parts` equal parts of the E experts.

    With k `chosen` of E drawn uniformly 1 - C(E - E/n, k) / C(E, k). Group-limited routing (DeepSeek) first draws `kept` of
    `groups` groups of neighbouring experts, then the k among theirs; real routers prefer groups with good experts instead.
    """
    eligible = kept * experts // groups
    untouched = 0.0
    together = max(groups // parts, 1)  # groups in a part; a part smaller than a group lies in one
    for drawn in range(max(kept - (groups - together), 0), min(together, kept) + 1):
        weight = math.comb(together, drawn) * math.comb(groups - together, kept - drawn) / math.comb(groups, kept)
        here = min(drawn * experts // groups, experts // parts)
        untouched += weight * math.comb(max(eligible - here, 0), chosen) / math.comb(eligible, chosen)
    return 1.0 - untouched


def _of_each(parts: Column, share: Callable[[int], float]) -> Column:
    """The share for each number of parts; few different ones occur."""
    if not isinstance(parts, np.ndarray):
        return share(int(parts))
    different, which = np.unique(parts, return_inverse=True)
    return np.array([share(int(one)) for one in different])[which]

"""Who is next: priority, then owner by owner, and no more on a cluster than it carries."""

from __future__ import annotations

from hp_tool.domain.states import SearchState
from hp_tool.store import SqlStore

QUERY = {"cluster": {"gpu": "h100-sxm-80gb"}, "search": {"launcher": "slurm"}}


def claimed(
    store: SqlStore, *, holder: str = "host:1", per_cluster: int | None = None
) -> str | None:
    found = store.claim_search(holder=holder, lease_s=60.0, per_cluster=per_cluster)
    return None if found is None else found[0].id


def end(store: SqlStore, search_id: str) -> None:
    lease = store.get_search(search_id=search_id).lease
    assert lease is not None
    store.finish_search(lease=lease, state=SearchState.SUCCEEDED)


def test_an_owner_with_many_searches_does_not_keep_the_others_waiting(store: SqlStore) -> None:
    """One worker, one search at a time: owners take turns, the oldest of each first."""
    of_ada = [store.create_search(query={}, owner="ada").id for _ in range(4)]
    of_bob = [store.create_search(query={}, owner="bob").id for _ in range(2)]
    of_nobody = [store.create_search(query={}).id]
    order = []
    while (taken := claimed(store)) is not None:
        order.append(taken)
        end(store, taken)
    assert order == [of_ada[0], of_bob[0], of_nobody[0], of_ada[1], of_bob[1], of_ada[2], of_ada[3]]


def test_of_several_workers_each_owner_gets_one_first(store: SqlStore) -> None:
    for _ in range(3):
        store.create_search(query={}, owner="ada")
    of_bob = store.create_search(query={}, owner="bob").id
    first, second = claimed(store), claimed(store)
    assert second == of_bob != first


def test_priority_goes_before_turns(store: SqlStore) -> None:
    of_ada = [store.create_search(query={}, owner="ada", priority=5).id for _ in range(2)]
    store.create_search(query={}, owner="bob")
    low = store.create_search(query={}, owner="carl", priority=-1).id
    order = [claimed(store) for _ in range(4)]
    assert order[:2] == of_ada
    assert order[3] == low


def test_a_cluster_carries_no_more_than_it_may(store: SqlStore) -> None:
    first, second = (store.create_search(query=QUERY).id for _ in range(2))
    other = store.create_search(query=QUERY | {"cluster": "lab"}).id
    assert store.get_search(search_id=other).cluster == "slurm:lab"
    assert [claimed(store, per_cluster=1) for _ in range(3)] == [first, other, None]
    assert claimed(store, per_cluster=2) == second
    end(store, first)
    end(store, second)
    third = store.create_search(query=QUERY).id
    assert claimed(store, per_cluster=1) == third


def test_each_host_is_a_cluster_of_its_own_to_the_local_launcher(store: SqlStore) -> None:
    searches = [store.create_search(query={"cluster": {"gpu": "cpu"}}).id for _ in range(3)]
    assert claimed(store, holder="a:1", per_cluster=1) == searches[0]
    assert claimed(store, holder="a:2", per_cluster=1) is None
    assert claimed(store, holder="b:1", per_cluster=1) == searches[1]

"""Links inside of hosts and between them: seconds of collectives, and ways that shard inside of each host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt import GraphoptError
from graphopt.rewriting.distributed.prediction.advice import plan_exchange
from graphopt.rewriting.distributed.prediction.link import HostLink, Link
from graphopt.rewriting.distributed.prediction.predict import predict_workload
from graphopt.rewriting.distributed.prediction.strategies import Sharded, ShardedParameters
from graphopt.rewriting.distributed.prediction.volume import all_gather, all_reduce, broadcast, reduce_scatter
from tests.support.exchanging import workload
from tests.support.properties import examples

FAST, SLOW = 1e9, 1e8
HOST = HostLink(8, FAST)
NET = Link(SLOW, host=HOST)
COLLECTIVES = (all_reduce, reduce_scatter, all_gather, broadcast)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_on_one_host_nothing_crosses_the_network(collective) -> None:  # type: ignore[no-untyped-def]
    for ranks in (2, 5, 8):
        found = collective(1e6, ranks)
        assert found.seconds(NET, ranks) == pytest.approx(found.seconds(Link(FAST), ranks))


def test_between_hosts_each_rank_sends_its_share() -> None:
    """Of an all-reduce over 4 hosts of 8: an eighth of the bytes, 2 · 3/4 times, over the network."""
    size, ranks = 8e6, 32
    assert all_reduce(size, ranks).seconds(NET, ranks) == pytest.approx(2 * 3 / 4 * size / 8 / SLOW)
    assert reduce_scatter(size, ranks).seconds(NET, ranks) == pytest.approx(3 / 4 * size / 8 / SLOW)
    assert all_gather(size, ranks).seconds(NET, ranks) == pytest.approx(3 * size / SLOW)
    assert broadcast(size, ranks).seconds(NET, ranks) == pytest.approx(size / SLOW)


def test_the_slower_of_the_two_decides() -> None:
    size, ranks = 8e6, 32
    network = Link(1e12, host=HOST)
    assert reduce_scatter(size, ranks).seconds(network, ranks) == pytest.approx(7 / 8 * size / FAST)


def test_rounds_are_those_of_a_host_and_those_between_hosts() -> None:
    link = Link(1e30, 1e-3, host=HostLink(8, 1e30, 1e-6))
    assert all_reduce(1.0, 32).seconds(link, 32) == pytest.approx(2 * (7e-6 + 3e-3))
    tree = replace(link, algorithm="tree")
    assert all_reduce(1.0, 32).seconds(tree, 32) == pytest.approx(2 * (3e-6 + 2e-3))


@given(
    hosts=st.integers(1, 2000),
    ranks=st.integers(2, 16),
    near=st.floats(1e3, 1e12),
    far=st.floats(1e3, 1e12),
    number=st.integers(0, 3),
)
@examples(20)
def test_links_of_one_speed_are_no_slower_than_one_link_and_faster_ones_never_slower(
    hosts: int, ranks: int, near: float, far: float, number: int
) -> None:
    world = hosts * ranks
    found = COLLECTIVES[number](1e6, world)

    def seconds(inside: float, outside: float) -> float:
        return found.seconds(Link(outside, host=HostLink(ranks, inside)), world)

    assert seconds(near, near) <= found.seconds(Link(near), world) * (1 + 1e-9)
    assert seconds(2 * near, far) <= seconds(near, far)
    assert seconds(near, 2 * far) <= seconds(near, far)
    assert seconds(near, far) <= found.seconds(Link(min(near, far)), world) * (1 + 1e-9)


WORK = workload((256, 256), (512, 256), (64,))
WORK = replace(WORK, gradients=tuple(replace(g, reads=(0.1 * g.place, 3.0 - g.ready)) for g in WORK.gradients))


def test_shards_inside_of_each_host_cross_the_network_as_sums_only() -> None:
    found = Sharded(host_ranks=8).messages(WORK, 32)
    scattered, summed = (
        [message.volume for message in found.beside if message.volume.reach == reach] for reach in ("host", "hosts")
    )
    assert len(scattered) == len(summed) > 0
    total = sum(g.bytes for g in WORK.gradients)
    assert sum(volume.sent for volume in scattered) == pytest.approx(7 / 8 * total)
    assert sum(volume.sent for volume in summed) == pytest.approx(2 * 3 / 4 * total / 8)
    assert all(message.volume.reach == "host" for message in found.late)
    assert found.update == 1 / 8
    assert Sharded(host_ranks=8).messages(WORK, 8) == Sharded().messages(WORK, 8)


def test_ways_inside_of_hosts_are_shown_where_there_are_several() -> None:
    def ways(ranks: int, link: Link) -> list[str]:
        return [found.strategy.by for found in plan_exchange(WORK, ranks, link).predictions]

    inside = ['ShardOptimizer(group="host", replicas="hosts")', 'ShardParameters(group="host", replicas="hosts")']
    assert [way for way in ways(32, NET) if "host" in way] == inside
    assert not any("host" in way for way in [*ways(8, NET), *ways(12, NET), *ways(32, Link(SLOW))])
    both = ShardedParameters(host_ranks=8, stay=True)
    assert both.by == 'ShardParameters(group="host", replicas="hosts", keep="1TB")'
    assert both.label == "sharded parameters, that stay, in each host"


def test_gathers_that_stay_inside_of_hosts_wait_less_for_a_slow_network() -> None:
    network = Link(1e4, host=HOST)
    across, inside = (predict_workload(WORK, 64, network, ShardedParameters(host_ranks=n)) for n in (0, 8))
    assert inside.exposed < across.exposed
    assert inside.step < across.step


def test_ten_thousand_ranks_are_planned_like_two() -> None:
    plan = plan_exchange(WORK, 10_240, NET)
    total = sum(g.bytes for g in WORK.gradients)
    assert plan.dense.alone == pytest.approx(2 * 1279 / 1280 * total / 8 / SLOW)


@pytest.mark.parametrize(
    ("given_", "message"),
    [((1, FAST), "2 ranks or more, got 1"), ((8, 0.0), "above 0, got 0.0"), ((8, FAST, -1.0), "at least 0, got -1.0")],
)
def test_figures_are_checked(given_: tuple[float, ...], message: str) -> None:
    with pytest.raises(GraphoptError, match=message):
        HostLink(*given_)  # type: ignore[arg-type]

"""torch_xla's SPMD planners through our writer and reader: one process holds many shards of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from xla import scenarios
from xla.hosts import Host
from xla.scenarios import Group, Layout

# The first use of a host waits until it has imported torch_xla.
pytestmark = pytest.mark.timeout(600)

GRID_OF_4 = ((2, 2), (0, 1))
ROWS_OF_4 = ((4, 1), (0, 1))
COLUMNS_OF_4 = ((1, 4), (0, 1))
TWO_REPLICAS_OF_2 = ((2, 2), (0, None))
GRID_OF_16 = ((4, 4), (0, 1))


def host_of(devices: int) -> Any:
    @pytest.fixture(scope="session")
    def host() -> Iterator[Host]:
        running = Host(devices)
        yield running
        running.close()

    return host


# Of the others the first four know nothing.
four, other_four, sixteen = host_of(4), host_of(4), host_of(16)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/run/step-1"


@pytest.fixture(params=["no_dist", "gloo"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Group | None]:
    """Makes no process group, or each time a new one of a single rank."""
    stores = iter("ab")
    return lambda: None if request.param == "no_dist" else (f"{tmp_path}/{next(stores)}", 0, 1)


@pytest.mark.parametrize(
    ("saved", "loaded", "items"),
    [(None, GRID_OF_4, 4), (GRID_OF_4, None, 4), (ROWS_OF_4, GRID_OF_4, 8)],
    ids=["whole to sharded", "sharded to whole", "rows to a grid"],
)
def test_loads_what_was_saved_sharded_otherwise(
    four: Host, url: str, group: Callable[[], Group | None], saved: Layout | None, loaded: Layout | None, items: int
) -> None:
    four.run(scenarios.save, url, saved, group())
    assert four.run(scenarios.load, url, loaded, group())["even"] == items


def test_loads_a_grid_of_sixteen_to_one_of_four_and_back(
    sixteen: Host, four: Host, tmp_path: Path, group: Callable[[], Group | None]
) -> None:
    sixteen.run(scenarios.save, f"file://{tmp_path}/sixteen", GRID_OF_16, group())
    assert four.run(scenarios.load, f"file://{tmp_path}/sixteen", GRID_OF_4, group())["even"] == 4 * 4
    four.run(scenarios.save, f"file://{tmp_path}/four", GRID_OF_4)
    assert sixteen.run(scenarios.load, f"file://{tmp_path}/four", GRID_OF_16)["even"] == 16


def test_saves_shards_that_were_copied_to_the_host_first(four: Host, url: str) -> None:
    four.run(scenarios.save_from_host, url, ROWS_OF_4)
    four.run(scenarios.load, url, COLUMNS_OF_4)


def test_saves_shards_of_which_several_devices_have_the_same(four: Host, url: str) -> None:
    four.run(scenarios.save_each_once, url, TWO_REPLICAS_OF_2)
    # Each replica is read for itself.
    assert four.run(scenarios.load, url, TWO_REPLICAS_OF_2)["even"] == 4
    four.run(scenarios.load, url, GRID_OF_4)
    four.run(scenarios.load_plain, url)


def test_loads_plain_tensors_to_shards_and_shards_to_plain_tensors(four: Host, tmp_path: Path) -> None:
    four.run(scenarios.save_plain, f"file://{tmp_path}/plain")
    four.run(scenarios.load, f"file://{tmp_path}/plain", GRID_OF_4)
    four.run(scenarios.save, f"file://{tmp_path}/sharded", ROWS_OF_4)
    four.run(scenarios.load_plain, f"file://{tmp_path}/sharded")


def test_saves_and_loads_on_two_hosts_that_hold_the_same_shards(
    four: Host, other_four: Host, url: str, tmp_path: Path
) -> None:
    hosts = (four, other_four)
    for rank, host in enumerate(hosts):
        host.start(scenarios.save, url, ROWS_OF_4, (f"{tmp_path}/a", rank, 2))
    for host in hosts:
        host.result()
    for rank, host in enumerate(hosts):
        host.start(scenarios.load, url, GRID_OF_4, (f"{tmp_path}/b", rank, 2))
    assert [host.result()["even"] for host in hosts] == [8, 8]

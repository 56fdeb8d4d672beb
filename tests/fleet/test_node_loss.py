"""A machine of the cluster is switched off: the run goes on where it can, or ends and can be resumed.

Each test has two nodes on this machine, each with places for one role only, and ends the second one.
Planted faults these tests catch: work that waits for ever for a worker without a place; a drafter
that knows only verifiers which are gone; rows that are lost with a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray  # noqa: F401  makes psutil importable
from psutil import Process
from ray.cluster_utils import Cluster

from tests.fleet.chaos import Command, calm, end, rows

NODE = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 100 * 2**20}
QUICK = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}
EXAMPLES = 400
ROLES = """
drafter: {{replicas: {drafters}, slots: 4, resources: {{drafting: 1}}}}
verifier: {{replicas: {verifiers}, resources: {{verifying: 1}}}}
placement: SPREAD
failure: {{silence_seconds: 8, start_seconds: 25}}
"""


class Nodes:
    """A head that stays, and a second node."""

    def __init__(self, head: dict[str, int], second: dict[str, int]) -> None:
        node = {**NODE, "resources": head, "_system_config": QUICK}
        self.cluster = Cluster(initialize_head=True, head_node_args=node)
        self._second = second
        self.add()

    def add(self) -> None:
        """Start the second node, or one in its place."""
        self._node = self.cluster.add_node(**{**NODE, "resources": self._second})

    def lose(self) -> None:
        """End all processes of the second node at once."""
        infos = [info for kind in self._node.all_processes.values() for info in kind]
        end([Process(info.process.pid) for info in infos])


@pytest.fixture
def nodes() -> Iterator[Callable[..., Nodes]]:
    """Starts the nodes; arguments are what the head and the second one have."""
    started: list[Nodes] = []

    def start(head: dict[str, int], second: dict[str, int]) -> Nodes:
        started.append(Nodes(head, second))
        return started[-1]

    yield start
    for one in started:
        one.cluster.shutdown()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[2])
        return calm(tmp_path_factory.mktemp("calm") / "run", EXAMPLES)


def wait(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def begun(folder: Path, nodes: Nodes, drafters: int, verifiers: int) -> Command:
    """A command that has finished some shards."""
    roles = ROLES.format(drafters=drafters, verifiers=verifiers)
    command = Command(folder, EXAMPLES, nodes.cluster.address, roles)
    wait(lambda: command.shards > 1 or command.process.poll() is not None, 120)
    assert command.process.poll() is None, command.said
    return command


@pytest.mark.ray
@pytest.mark.endurance
@pytest.mark.parametrize("role", ["drafting", "verifying"])
def test_a_worker_without_a_place_leaves_its_work_to_the_other(
    nodes: Any, expected: Any, tmp_path: Path, role: str
) -> None:
    there = {"drafting": 1, "verifying": 1}
    two = nodes(
        {**there, **({"verifying": 2} if role == "drafting" else {"drafting": 2})}, {role: 1}
    )
    command = begun(tmp_path / "folder", two, 2, 2)
    two.lose()
    assert command.process.wait(180) == 0, command.said
    assert rows(command.output).equals(expected)


@pytest.mark.ray
@pytest.mark.endurance
@pytest.mark.parametrize("role", ["drafting", "verifying"])
def test_the_only_worker_of_a_role_is_waited_for_and_then_the_run_ends_and_is_resumed(
    nodes: Any, expected: Any, tmp_path: Path, role: str
) -> None:
    other = "verifying" if role == "drafting" else "drafting"
    two = nodes({other: 1}, {role: 1})
    command = begun(tmp_path / "folder", two, 1, 1)
    two.lose()
    lost = time.monotonic()
    assert command.process.wait(180) == 1, command.said
    # To notice that the node is gone, to find the worker silent, and `start_seconds` twice at most.
    assert time.monotonic() - lost < 15 + 10 + 2 * 25
    said = " ".join(command.said.split())
    assert "no drafter is left" in said
    assert "run the same command again to resume" in said
    assert "Traceback" not in said
    two.add()
    command.give()
    assert command.process.wait(180) == 0, command.said
    assert rows(command.output).equals(expected)


@pytest.mark.ray
@pytest.mark.endurance
def test_workers_move_to_a_node_that_comes(nodes: Any, expected: Any, tmp_path: Path) -> None:
    two = nodes({"drafting": 1}, {"verifying": 1})
    command = begun(tmp_path / "folder", two, 1, 1)
    two.lose()
    two.add()
    assert command.process.wait(180) == 0, command.said
    assert rows(command.output).equals(expected)

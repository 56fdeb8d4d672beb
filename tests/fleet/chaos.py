"""Random failures, from a seed: what is done to a run, when, and whether the rows survive it.

    python -m tests.fleet.chaos --runs 20 --seed 7

Each run is `speccascade run` of the tiny pair in a process of its own, with two drafters and two
verifiers on Ray. Everything is done to it from outside, by process id. Where the command itself is
ended, the same command is given again. In the end its determined columns must be those of an
undisturbed run, each row once, and no process may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import ray  # noqa: F401  makes psutil importable
from psutil import NoSuchProcess, Process, wait_procs
from ray.cluster_utils import Cluster

from pipeline.config import load_job
from pipeline.results.schema import determined_columns
from pipeline.results.writer import finished_shards, read_rows
from pipeline.run import prepare, run
from tests.fleet.conftest import REPOSITORY
from tests.fleet.test_same_rows import Silent

SPECCASCADE = Path(sys.executable).with_name("speccascade")
LIMIT_SECONDS = 400
"""A run that takes longer hangs."""

JOB = [
    "dataset.shard_size=10",
    "allow_custom_code=true",
    "max_error_share=1",
    "strategies=[drafter, verifier, spec_decode, {use: token_cascade.chow, alpha: 0.3}, "
    "{use: spec_cascade.opt, alpha: [0.2, 0.6]}, "
    "{use: custom, target: 'tests.targets:raises_when_told', alpha: 0.5}]",
]
CLUSTER = """
drafter: {replicas: 2, slots: 4, num_cpus: 0.5}
verifier: {replicas: 2, num_cpus: 0.5}
placement: SPREAD
failure: {silence_seconds: 8, start_seconds: 120, attempts: 4}
"""


@dataclass(frozen=True)
class Act:
    """What is done, in which phase, and how many seconds after it has begun."""

    name: str
    phase: str
    delay: float

    def __str__(self) -> str:
        """As it is printed."""
        return f"{self.name} while {self.phase}, after {self.delay:.1f} s"


@dataclass
class Report:
    """What came of a run."""

    seed: str
    acts: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    """Seconds from each act to the next finished shard, or to the end."""
    seconds: float = 0.0
    positions: int | None = None
    """What all workers computed; None where the command was ended, and its accounts with it."""
    problem: str = ""

    def told(self, undisturbed: Report) -> str:
        """One line for a run, beside one to which nothing was done."""
        recovered = ", ".join(f"{seconds:.1f}" for seconds in self.recoveries)
        repeated = self.repeated(undisturbed)
        return (
            f"seed {self.seed}: {'; '.join(self.acts)} | recovered after {recovered or '-'} s, "
            f"{self.seconds - undisturbed.seconds:+.0f} s in all, repeated work "
            f"{'unknown' if repeated is None else f'{repeated:+.0%}'} | {self.problem or 'pass'}"
        )

    def repeated(self, undisturbed: Report) -> float | None:
        """Positions computed beyond those of an undisturbed run, as a share."""
        if self.positions is None or undisturbed.positions is None:
            return None
        return self.positions / undisturbed.positions - 1


class Command:
    """The command under test, given as often as it takes."""

    def __init__(
        self, folder: Path, examples: int, address: str | None, workers: str = CLUSTER
    ) -> None:
        self.output = folder / "run"
        self.told = folder / "raise"
        folder.mkdir(parents=True)
        (folder / "cluster.yaml").write_text(workers)
        given = [*JOB, f"dataset.limit={examples}", f"output={self.output}"]
        given.append(f"cluster={folder / 'cluster.yaml'}")
        self._arguments = [argument for one in given for argument in ("--set", one)]
        self._environment = {**os.environ, "CHAOS_FILE": str(self.told)}
        if address:
            self._environment["RAY_ADDRESS"] = address
        self._log = folder / "log.txt"
        self.give()

    def give(self) -> None:
        """Start it, or start it again."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(SPECCASCADE), "run", "jobs/g2p.yaml", *self._arguments],
                cwd=REPOSITORY,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is ignored by what a shell runs in the background; here it must be heard.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    @property
    def shards(self) -> int:
        """How many shards are finished."""
        return len(finished_shards(self.output))

    @property
    def said(self) -> str:
        """Its output so far."""
        return self._log.read_text(errors="replace")


class Chaos:
    """One run and what is done to it."""

    def __init__(self, command: Command, random_: random.Random, node: Any) -> None:
        self._command, self._random, self._node = command, random_, node
        self._deadline = time.monotonic() + LIMIT_SECONDS

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait; False if the command ended before."""
        while not condition():
            if self._command.process.poll() is not None:
                return False
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"it hangs after {LIMIT_SECONDS} s")
            time.sleep(0.05)
        return True

    def do(self, act: Act, report: Report) -> None:
        """Wait for the moment, act, and wait until it goes on."""
        shards = self._command.shards
        if act.phase == "decoding" and not self.until(lambda: self._command.shards > shards):
            report.acts.append(f"{act} (too late)")
            return
        due = time.monotonic() + act.delay
        if not self.until(lambda: time.monotonic() > due):
            report.acts.append(f"{act} (too late)")
            return
        shards, began = self._command.shards, time.monotonic()
        ACTS[act.name](self)
        report.acts.append(str(act))
        self.until(lambda: self._command.shards > shards)
        report.recoveries.append(time.monotonic() - began)

    def finish(self) -> None:
        """Wait for the end."""
        self.until(lambda: False)
        if self._command.process.returncode:
            raise RuntimeError(f"exit status {self._command.process.returncode}")

    # --- acts ---------------------------------------------------------------------------------------

    def worker(self, role: str, sent: signal.Signals) -> None:
        """Send a signal to one of a role's workers."""
        found: list[Process] = []
        self.until(lambda: bool(found.extend(workers(role)) or found))
        if found:
            self._random.choice(found).send_signal(sent)

    def driver(self, sent: signal.Signals) -> None:
        """End the command by a signal, and give it again."""
        process = self._command.process
        process.send_signal(sent)
        status = process.wait(60)
        expected = 130 if sent in (signal.SIGINT, signal.SIGTERM) else -sent
        if status not in (expected, 0):
            raise RuntimeError(f"exit status {status} after {sent.name}")
        self._command.give()

    def raising(self) -> None:
        """Have a worker raise at the next block."""
        self._command.told.touch()

    def node(self) -> None:
        """End the second node with all its workers, as a machine that is switched off."""
        if self._node is not None:
            end(
                [
                    Process(info.process.pid)
                    for infos in self._node.all_processes.values()
                    for info in infos
                ]
            )
            self._node = None


ACTS: dict[str, Callable[[Chaos], None]] = {
    "drafter killed": partial(Chaos.worker, role="DrafterActor", sent=signal.SIGKILL),
    "verifier killed": partial(Chaos.worker, role="VerifierActor", sent=signal.SIGKILL),
    "drafter hangs": partial(Chaos.worker, role="DrafterActor", sent=signal.SIGSTOP),
    "verifier hangs": partial(Chaos.worker, role="VerifierActor", sent=signal.SIGSTOP),
    "worker raises": Chaos.raising,
    "driver killed": partial(Chaos.driver, sent=signal.SIGKILL),
    "driver terminated": partial(Chaos.driver, sent=signal.SIGTERM),
    "driver interrupted": partial(Chaos.driver, sent=signal.SIGINT),
    "node lost": Chaos.node,
}
OF_DRIVER = [name for name in ACTS if name.startswith("driver")]


def workers(role: str) -> list[Process]:
    """The actors' processes of a role that this process is the ancestor of."""
    found = []
    for process in Process().children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ray::{role}"):
                found.append(process)
        except (NoSuchProcess, IndexError):
            continue
    return found


def end(processes: Sequence[Process]) -> None:
    """Kill processes and all below them, and wait until they are gone."""
    everyone = list(processes)
    for process in processes:
        try:
            everyone += process.children(recursive=True)
        except NoSuchProcess:
            continue
    for process in everyone:
        try:
            process.kill()
        except NoSuchProcess:
            continue
    wait_procs(everyone, timeout=20)


def drawn(random_: random.Random) -> list[Act]:
    """One to three acts; whatever is done to the command itself may be done while it starts, too."""
    names = random_.choices([name for name in ACTS if name != "node lost"], k=random_.randint(1, 3))
    if random_.random() < 0.25:
        names[random_.randrange(len(names))] = "node lost"
    acts = []
    for name in names:
        starting = name in OF_DRIVER and random_.random() < 0.4
        phase, longest = ("starting", 12.0) if starting else ("decoding", 3.0)
        acts.append(Act(name, phase, random_.uniform(0, longest)))
    return acts


def rows(output: Path) -> pa.Table:
    """The determined columns in dataset order."""
    table = read_rows(output)
    return table.select([name for name in determined_columns(table.schema) if name != "job"])


def positions(output: Path) -> int:
    """What all workers computed, in all their lives, as the last command counted it."""
    found = json.loads((output / "workers.json").read_text())["workers"]
    return sum(worker["positions_stepped"] + worker["positions_prefilled"] for worker in found)


def calm(folder: Path, examples: int) -> pa.Table:
    """The rows of an undisturbed run, in one process."""
    given = [*JOB, f"dataset.limit={examples}", f"output={folder}", "fleet=local"]
    run(prepare(load_job(REPOSITORY / "jobs/g2p.yaml", given)), Silent())
    return rows(folder)


def chaotic(
    seed: str, folder: Path, examples: int, expected: pa.Table, acts: Sequence[Act] | None = None
) -> Report:
    """One run. Its folder is kept if it fails."""
    random_ = random.Random(seed)
    acts = drawn(random_) if acts is None else acts
    report = Report(seed)
    cluster = _two_nodes() if any(act.name == "node lost" for act in acts) else None
    before = Process().children(recursive=True)
    began = time.monotonic()
    command = Command(folder, examples, cluster.address if cluster else None)
    try:
        chaos = Chaos(command, random_, cluster.worker_nodes.copy().pop() if cluster else None)
        for act in acts:
            chaos.do(act, report)
        chaos.finish()
        report.seconds = time.monotonic() - began
        _check(command, expected, before)
        if not any(act.name in OF_DRIVER for act in acts):
            report.positions = positions(command.output)
    except Exception as error:  # whatever it is, it is this run's result
        report.problem = f"FAIL {type(error).__name__}: {error}; {command.said[-2000:]}"
    finally:
        end([process for process in Process().children(recursive=True) if process not in before])
        if cluster:
            cluster.shutdown()
    if not report.problem:
        shutil.rmtree(folder)
    return report


def _check(command: Command, expected: pa.Table, before: Sequence[Process]) -> None:
    if not rows(command.output).equals(expected):
        raise AssertionError("the rows are not those of an undisturbed run")
    left = [process for process in Process().children(recursive=True) if process not in before]
    _, alive = wait_procs(left, timeout=20)
    if alive:
        raise AssertionError(f"left behind: {alive}")


def _two_nodes() -> Cluster:
    """A cluster of this process, with room for all workers on the node that stays."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "include_dashboard": False,
            "object_store_memory": 100 * 2**20,
            # A node that is gone is to be noticed in seconds.
            "_system_config": {
                "health_check_initial_delay_ms": 1000,
                "health_check_period_ms": 1000,
                "health_check_timeout_ms": 3000,
                "health_check_failure_threshold": 3,
            },
        },
    )
    cluster.add_node(num_cpus=4, object_store_memory=100 * 2**20)
    return cluster


def main() -> int:
    """Runs, one after the other, and what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--examples", type=int, default=600)
    given = parser.parse_args()
    os.chdir(REPOSITORY)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    expected = calm(folder / "calm", given.examples)
    print(f"seed {given.seed}; {expected.num_rows} rows expected; {folder}", flush=True)
    undisturbed = chaotic("-", folder / "undisturbed", given.examples, expected, acts=[])
    print(undisturbed.told(undisturbed), flush=True)
    reports = []
    for number in range(given.runs):
        seed = f"{given.seed}/{number}"
        reports.append(chaotic(seed, folder / str(number), given.examples, expected))
        print(reports[-1].told(undisturbed), flush=True)
    passed = [report for report in reports if not report.problem]
    recoveries = [seconds for report in passed for seconds in report.recoveries]
    overtime = [report.seconds - undisturbed.seconds for report in passed]
    repeated = [share for r in passed if (share := r.repeated(undisturbed)) is not None]
    print(
        f"{len(passed)} of {len(reports)} passed; medians: recovered after "
        f"{median(recoveries or [0]):.1f} s, {median(overtime or [0]):+.0f} s in all, repeated work "
        f"{median(repeated or [0]):+.0%}; an undisturbed run takes {undisturbed.seconds:.0f} s"
    )
    if len(passed) < len(reports):
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

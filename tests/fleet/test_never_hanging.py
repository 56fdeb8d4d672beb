"""Whatever is wrong with the workers, a run ends: soon, with a reason, and with nothing left behind.

Planted faults these tests catch: a constructor that fails and is tried twenty times; an error with a
traceback for a sentence; a verifier that is gone and waited for; a model that never ends its work;
an example that takes its process with it, and then its neighbours or the run; resources or processes
that outlive a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
import ray  # makes psutil importable
from psutil import Process, wait_procs
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError

from pipeline.config import FailureConfig
from pipeline.fleet import actors, calls
from pipeline.fleet.errors import FleetLostError, StartError
from pipeline.fleet.interface import FleetPlan
from pipeline.results.writer import read_rows
from pipeline.run import prepare, run
from pipeline.workers.drafter import Bank, DrafterWorker
from pipeline.workers.verifier import VerifierWorker
from pipeline.workers.wire import VerifyReply, VerifyRequest
from tests.fleet.conftest import REPOSITORY
from tests.fleet.test_failures import Chaos, disturbed
from tests.fleet.test_same_rows import Silent, rows_of

SPECCASCADE = Path(sys.executable).with_name("speccascade")
SOME = "strategies=[drafter, verifier, {use: spec_cascade.opt, alpha: [0.2, 0.6]}]"


@pytest.fixture
def given_back(ray_cluster: None) -> Any:
    """The cluster's resources are all free again after the test."""
    before = ray.cluster_resources()["CPU"]
    yield
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU") != before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ray.available_resources().get("CPU") == before


@pytest.fixture
def failing_cluster(cluster_file: Any) -> Callable[..., str]:
    """Writes a cluster config with other limits; arguments are those and the replicas."""

    def write(limits: str, drafters: int = 1, verifiers: int = 1) -> str:
        roles = f"{{replicas: {drafters}, slots: 4}}", f"{{replicas: {verifiers}}}"
        return str(cluster_file(roles[0], f"{roles[1]}\nfailure: {{{limits}}}"))

    return write


@pytest.mark.ray
@pytest.mark.parametrize("role", ["drafter", "verifier"])
def test_weights_that_cannot_be_loaded_end_the_run_with_their_name(
    g2p_job: Any, tmp_path: Path, given_back: None, role: str
) -> None:
    folder = tmp_path / role
    shutil.copytree(f"jobs/g2p/{role}", folder)
    prepared = prepare(g2p_job("fleet=ray", f"models.{role}.path={folder}"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    started = time.monotonic()
    with pytest.raises(StartError) as caught:
        run(prepared, Silent())
    assert time.monotonic() - started < 60
    said = str(caught.value)
    assert said.startswith(f"models.{role}.path: {role}-0 cannot load {folder}: ")
    assert "Error" in said
    assert "\n" not in said
    assert "File" not in said


@pytest.mark.ray
def test_a_model_that_loads_too_slowly_is_not_waited_for(
    g2p_job: Any, failing_cluster: Any, given_back: None
) -> None:
    job = g2p_job("fleet=ray", f"cluster={failing_cluster('start_seconds: 0.5')}")
    with pytest.raises(StartError, match=r"within 0\.5 s; raise failure\.start_seconds"):
        run(prepare(job), Silent())


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("role", ["drafter", "verifier"])
def test_a_worker_that_may_not_be_started_again_ends_the_run_which_is_resumed(
    g2p_job: Any, failing_cluster: Any, tmp_path: Path, given_back: None, role: str
) -> None:
    cluster = failing_cluster("restarts: 0, silence_seconds: 4")
    many = [SOME, "dataset.limit=240", "dataset.shard_size=10"]
    job = g2p_job("fleet=ray", f"cluster={cluster}", *many)
    chaos = Chaos((1, f"{role}-0", signal.SIGKILL))
    started = time.monotonic()
    with pytest.raises(FleetLostError, match=r"no drafter is left: .*run the same command again"):
        run(prepare(job), chaos)
    assert not chaos.acts
    assert time.monotonic() - started < 90
    assert rows_of(job).equals(rows_of(g2p_job(*many, f"output={tmp_path / 'calm'}")))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("role", ["drafter", "verifier"])
def test_the_others_carry_on_for_a_worker_that_is_gone(
    g2p_job: Any, failing_cluster: Any, tmp_path: Path, given_back: None, role: str
) -> None:
    cluster = failing_cluster("restarts: 0, silence_seconds: 4", drafters=2, verifiers=2)
    many = [SOME, "dataset.limit=240", "dataset.shard_size=10"]
    table, finished = disturbed(
        g2p_job("fleet=ray", f"cluster={cluster}", *many), (1, f"{role}-0", signal.SIGKILL)
    )
    assert table.equals(rows_of(g2p_job(*many, f"output={tmp_path / 'calm'}")))
    assert finished.restarts == 0
    assert len(finished.workers) == 4, "of the dead one it is known what it did"
    again = finished.retries if role == "drafter" else sum(w.retries for w in finished.workers)
    assert again > 0


class PoisonedDrafter(DrafterWorker):
    """Its process ends when it drafts for a certain prompt."""

    poison: tuple[int, ...] = ()

    def draft(self, bank: Bank) -> VerifyRequest | VerifyReply:
        if any(task and task.example.prompt_ids == self.poison for task in bank.seats.tasks):
            os._exit(1)
        return super().draft(bank)


class PoisonedVerifier(VerifierWorker):
    """Its process ends when it is given a certain prompt."""

    poison: tuple[int, ...] = ()

    def verify(self, request: VerifyRequest) -> VerifyReply:
        if any(opening.prompt_ids == self.poison for opening in request.openings):
            os._exit(1)
        return super().verify(request)


@dataclass(frozen=True)
class PoisonedPlan(FleetPlan):
    """A plan of workers of which one role does not survive a prompt."""

    role: str = ""
    poison: tuple[int, ...] = ()

    def load_drafter(self, name: str) -> DrafterWorker:
        worker = super().load_drafter(name)
        if self.role == "drafter":
            PoisonedDrafter.poison, worker.__class__ = self.poison, PoisonedDrafter
        return worker

    def load_verifier(self) -> VerifierWorker:
        worker = super().load_verifier()
        if self.role == "verifier":
            PoisonedVerifier.poison, worker.__class__ = self.poison, PoisonedVerifier
        return worker


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("role", ["drafter", "verifier"])
def test_an_example_that_ends_every_process_is_a_row_with_an_error_and_no_other_is(
    g2p_job: Any,
    failing_cluster: Any,
    tmp_path: Path,
    given_back: None,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
) -> None:
    cluster = failing_cluster("attempts: 2, silence_seconds: 4", drafters=2)
    some = [SOME, "dataset.limit=12", "dataset.shard_size=3", "max_error_share=1"]
    calm = rows_of(g2p_job(*some, f"output={tmp_path / 'calm'}"))
    prompt = next(row["prompt_ids"] for row in calm.to_pylist() if row["example_id"] == "tempest")
    plan = partial(PoisonedPlan, role=role, poison=tuple(prompt))
    monkeypatch.setattr("pipeline.run.FleetPlan", plan)
    with by_value():
        job = g2p_job("fleet=ray", f"cluster={cluster}", *some)
        finished = run(prepare(job), Silent())
    rows = read_rows(Path(job.output)).to_pylist()
    bad = [row for row in rows if row["error_code"]]
    assert [row["example_id"] for row in bad] == ["tempest"] * 4
    assert {row["error_code"] for row in bad} == {"worker_failed"}
    assert all("every one of 3 attempts failed: " in row["error"] for row in bad)
    assert all(row["verifier_calls"] is None and row["prediction"] is None for row in bad)
    expected = [row for row in calm.to_pylist() if row["example_id"] != "tempest"]
    columns = expected[0].keys()
    good = [{name: row[name] for name in columns} for row in rows if not row["error_code"]]
    assert good == expected
    assert {row["attempts"] for row in rows if row["shard"] == 0} == {3}
    assert finished.retries >= 3
    assert finished.restarts >= 2, "the last one may not be back yet"
    told = json.loads((Path(job.output) / "workers.json").read_text())
    assert (told["retries"], told["restarts"]) == (finished.retries, finished.restarts)


@contextmanager
def by_value() -> Iterator[None]:
    """Classes of this module travel to the actors whole: those need not find the module."""
    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(here)


class Answering:
    """An actor's handle, as far as the watch uses it: each call is answered by the next answer."""

    def __init__(self, *answers: float | Exception) -> None:
        self.answers = list(answers)

    @property
    def seconds_at_work(self) -> Answering:
        return self

    async def remote(self) -> float:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer == inf:
            await asyncio.sleep(60)
        return answer


@pytest.mark.parametrize(
    ("answer", "hangs"),
    [
        (0.0, False),
        (9.0, False),
        (11.0, True),
        (inf, True),
        (ActorUnavailableError("", None), False),
    ],
)
def test_a_worker_hangs_that_is_silent_or_does_not_end_its_work(
    answer: float | Exception, hangs: bool
) -> None:
    limits = FailureConfig(block_seconds=10, silence_seconds=0.2)
    assert asyncio.run(calls._hangs("drafter-0", Answering(answer), limits)) is hangs


def test_a_model_thread_knows_how_long_it_works() -> None:
    async def seconds() -> tuple[float, float, float]:
        thread = actors._ModelThread(1)
        before = thread.seconds_at_work
        work = asyncio.ensure_future(thread(lambda: time.sleep(0.5)))
        await asyncio.sleep(0.25)
        during = thread.seconds_at_work
        await work
        return before, during, thread.seconds_at_work

    before, during, after = asyncio.run(seconds())
    assert (before, after) == (0, 0)
    assert during > 0.1


PHASES = {
    "connecting": ("starting the workers", 0.3),
    "loading": ("starting the workers", 9.0),
    "decoding": ("decoding", 0.5),
    "writing": ("", 0.0),
}
"""What has been said when the signal is sent, and how many seconds ago."""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in_any_phase_ends_the_run_in_seconds_and_leaves_no_process(
    tmp_path: Path, phase: str, sent: signal.Signals
) -> None:
    output = tmp_path / "run"
    sets = [f"output={output}", "dataset.limit=1500", "dataset.shard_size=20"]
    running = subprocess.Popen(
        [str(SPECCASCADE), "run", "jobs/g2p.yaml", *(x for one in sets for x in ("--set", one))],
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert running.stdout is not None
    words, seconds = PHASES[phase]
    said = ""
    while words not in said or (not words and not list(output.glob("rows/shard-*"))):
        said += running.stdout.readline() if words else ""
        assert running.poll() is None, said + running.stdout.read()
    time.sleep(seconds)
    others = Process(running.pid).children(recursive=True)
    started = time.monotonic()
    # A terminal sends Ctrl-C to all processes of the group.
    os.killpg(running.pid, sent) if sent == signal.SIGINT else running.send_signal(sent)
    said += running.communicate(timeout=60)[0]
    assert time.monotonic() - started < 30
    assert running.returncode == 130, said
    assert "run the same command again to resume" in said
    assert "Traceback" not in said
    _, alive = wait_procs(others, timeout=20)
    assert alive == []
    for path in output.glob("rows/*"):
        assert ds.dataset(path).count_rows() == 200

"""What a fleet is: drafters that decode shards, wherever they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from pipeline.config import ClusterConfig, ModelsConfig
from pipeline.models.loading import load_model, load_tokenizer
from pipeline.models.stopping import StopStrings
from pipeline.protocol.custom_code import import_from
from pipeline.records import Setting, Shard, ShardResult, Span, StepTimes, Strategy, WorkerStats
from pipeline.workers.drafter import DrafterWorker
from pipeline.workers.engine import Compute, DrafterEngine, VerifierEngine, VerifierLink
from pipeline.workers.ledger import Ledger
from pipeline.workers.transport import Transport
from pipeline.workers.verifier import VerifierWorker


class Drafter(Protocol):
    """A drafter that can be given shards."""

    @property
    def name(self) -> str:
        """As it stands in the rows."""

    async def take(self, shard: Shard) -> int:
        """Queue a shard; its ticket comes back when there is room for another.

        Raises:
            Whatever went wrong; all shards under way at this drafter are then lost.
        """

    async def outcomes(self, ticket: int) -> ShardResult:
        """All outcomes of a shard that was taken. Raises as `take` does."""

    async def recover(self) -> None:
        """Make it ready for shards after it failed. Raises if it is gone for good."""


class Fleet(Protocol):
    """Drafters and verifiers, from the start of the workers to their end (`async with`)."""

    async def __aenter__(self) -> Fleet:
        """Start the workers; all models are loaded when this returns."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the workers and give back what they held."""

    @property
    def drafters(self) -> Sequence[Drafter]:
        """The drafters to lease shards to."""

    async def stats(self) -> list[WorkerStats]:
        """What each worker did so far, in all its lives."""

    async def timeline(self) -> list[Span]:
        """All that the workers did, where the plan asks to keep it."""

    @property
    def restarts(self) -> int:
        """How often a worker was started again so far."""

    async def step_times(self) -> StepTimes:
        """How long one pass of each model takes at batch 1, measured now on the first of each role."""


@dataclass(frozen=True)
class FleetPlan:
    """All that a worker is built from. It is small and pickles, so any process can build one."""

    models: ModelsConfig
    vocabulary: int
    strategies: tuple[Strategy, ...]
    settings: tuple[Setting, ...]
    cluster: ClusterConfig
    trace: bool = False
    transport: Transport = "float32"
    code_folder: str = ""
    """Where custom targets are imported from."""
    timeline: bool = False
    """Whether workers remember each piece of work."""

    def drafter_names(self) -> list[str]:
        """drafter-0, drafter-1, ..."""
        return self.cluster.drafter_names()

    def verifier_names(self) -> list[str]:
        """verifier-0, verifier-1, ..."""
        return self.cluster.verifier_names()

    def verifiers_of(self, drafter: int) -> list[int]:
        """The verifiers of a drafter, bank by bank, round robin.

        Those that it is linked to; without links all banks of the fleet are dealt to all verifiers.
        """
        cluster, banks = self.cluster, range(self.cluster.banks)
        if cluster.links:
            verifiers = self.verifier_names()
            linked = cluster.links[self.drafter_names()[drafter]]
            return [verifiers.index(linked[bank % len(linked)]) for bank in banks]
        drafters, others = cluster.drafter.count, cluster.verifier.count
        return [(drafter + bank * drafters) % others for bank in banks]

    def all_verifiers(self) -> list[list[int]]:
        """The verifiers of all drafters, in their order."""
        return [self.verifiers_of(drafter) for drafter in range(self.cluster.drafter.count)]

    def load_drafter(self, name: str) -> DrafterWorker:
        """Load the drafter in this process."""
        import_from(self.code_folder)
        role = self.cluster.drafter
        model = load_model(self.models.drafter, self.vocabulary, role.num_gpus)
        stop = self.settings[0].stop
        return DrafterWorker(
            name,
            model,
            self.strategies,
            self.settings,
            self.cluster.banks,
            role.slots,
            StopStrings(load_tokenizer(self.models.verifier), stop) if stop else None,
            self.transport,
            self.trace,
        )

    def load_verifier(self) -> VerifierWorker:
        """Load the verifier in this process."""
        import_from(self.code_folder)
        model = load_model(self.models.verifier, self.vocabulary, self.cluster.verifier.num_gpus)
        return VerifierWorker(model, self.strategies, self.settings, self.trace)

    def drafter_engine(
        self,
        name: str,
        verifiers: Sequence[VerifierLink],
        compute: Compute,
        node: str,
        spares: Sequence[VerifierLink] = (),
    ) -> DrafterEngine:
        """Load a drafter in this process and put its banks between it and its verifiers."""
        worker = self.load_drafter(name)
        ledger = Ledger(name, node, worker.model.effort, self.timeline)
        return DrafterEngine(worker, verifiers, compute, ledger, spares)

    def verifier_engine(self, name: str, compute: Compute, node: str) -> VerifierEngine:
        """Load a verifier in this process."""
        worker = self.load_verifier()
        ledger = Ledger(name, node, worker.model.effort, self.timeline)
        return VerifierEngine(worker, compute, ledger)

"""The whole fleet in this process, one piece of work at a time: the debugger and the test bed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

from pipeline.fleet.interface import FleetPlan
from pipeline.models.determinism import prepare_numerics
from pipeline.models.memory import keep_freed_memory
from pipeline.records import Shard, ShardResult, Span, StepTimes, WorkerStats
from pipeline.workers.engine import DrafterEngine, VerifierEngine, VerifierLink
from pipeline.workers.ledger import Ledger

Result = TypeVar("Result")


class LocalFleet:
    """The same workers as on Ray, without Ray. Rows are identical."""

    def __init__(self, plan: FleetPlan) -> None:
        self._plan = plan
        self._drafters: list[LocalDrafter] = []
        self._verifiers: list[VerifierEngine] = []

    async def __aenter__(self) -> LocalFleet:
        """Load all models."""
        plan = self._plan
        roles = (plan.cluster.drafter, plan.cluster.verifier)
        keep_freed_memory()
        prepare_numerics(threads=max(1, int(max(role.num_cpus for role in roles))))
        self._verifiers = [
            plan.verifier_engine(name, _inline, node="local") for name in plan.verifier_names()
        ]
        for index, name in enumerate(plan.drafter_names()):
            links = [_link(self._verifiers[number]) for number in plan.verifiers_of(index)]
            engine = plan.drafter_engine(name, links, _inline, node="local")
            self._drafters.append(LocalDrafter(name, engine))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the banks."""
        for drafter in self._drafters:
            await drafter.engine.close()

    @property
    def drafters(self) -> Sequence[LocalDrafter]:
        """The drafters to lease shards to."""
        return self._drafters

    async def stats(self) -> list[WorkerStats]:
        """What each worker did so far."""
        return [ledger.stats for ledger in self._ledgers()]

    async def timeline(self) -> list[Span]:
        """All that the workers did."""
        return [span for ledger in self._ledgers() for span in ledger.spans]

    @property
    def restarts(self) -> int:
        """None: what fails here fails the run."""
        return 0

    async def step_times(self) -> StepTimes:
        """Measured on the first drafter and the first verifier."""
        drafting = await self._drafters[0].engine.step_seconds()
        return StepTimes(drafting, await self._verifiers[0].step_seconds())

    def _ledgers(self) -> list[Ledger]:
        drafters = [drafter.engine.ledger for drafter in self._drafters]
        return drafters + [verifier.ledger for verifier in self._verifiers]


class LocalDrafter:
    """A drafter in this process."""

    def __init__(self, name: str, engine: DrafterEngine) -> None:
        self.name = name
        self.engine = engine

    async def take(self, shard: Shard) -> int:
        """Queue a shard; its ticket comes back when there is room for another."""
        return await self.engine.take(shard)

    async def outcomes(self, ticket: int) -> ShardResult:
        """All outcomes of a shard that was taken."""
        return await self.engine.outcomes(ticket)

    async def recover(self) -> None:
        """Forget what was under way."""
        await self.engine.recover()


def _link(verifier: VerifierEngine) -> VerifierLink:
    return VerifierLink(verifier.ledger.name, verifier.verify)


async def _inline(work: Callable[[], Result]) -> Result:
    """Run the work here, but let other coroutines (the other banks, the progress bar) go first."""
    await asyncio.sleep(0)
    return work()

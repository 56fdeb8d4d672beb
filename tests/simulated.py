"""A fleet without models: real engines, queues, slots and leases, with sleeps for the model work.

What is left when nothing is computed is the pipeline itself, so a laptop can run 64 actors with
thousands of lanes. A verifier's tokens are a hash of (example, position, strategy), so that outcomes
are data here too, and do not depend on the fleet.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config import ClusterConfig, DrafterRole, ModelConfig, ModelsConfig, VerifierRole
from pipeline.fleet.interface import FleetPlan
from pipeline.fleet.local import LocalDrafter
from pipeline.fleet.scheduler import Lease, Scheduler
from pipeline.models.interface import ModelBank
from pipeline.models.toy import TableModel
from pipeline.protocol.accounting import Count
from pipeline.protocol.blocks import Sum, Thought
from pipeline.records import Example, Setting, Shard, Strategy, WorkerStats
from pipeline.workers.drafter import Bank, DrafterWorker
from pipeline.workers.engine import DrafterEngine, VerifierEngine, VerifierLink
from pipeline.workers.ledger import Ledger
from pipeline.workers.verifier import VerifierWorker
from pipeline.workers.wire import VerifyReply, VerifyRequest

Result = TypeVar("Result")

END = 0
"""The token that ends a text."""
MAX_ROUNDS = 64
"""A text has a token for each round, and at most so many."""

_MODELS = ModelsConfig(drafter=ModelConfig(path="-"), verifier=ModelConfig(path="-"))
_MIX = np.uint64(0xBF58476D1CE4E5B9)


@dataclass(frozen=True)
class Shape:
    """A fleet, what its models would take for a full bank, and what it decodes."""

    drafters: int = 1
    verifiers: int = 1
    banks: int = 3
    slots: int = 32
    draft_seconds: float = 0.005
    verify_seconds: float = 0.020
    link_seconds: float = 0.001
    """One way between a drafter and a verifier."""
    strategies: int = 1
    rounds: float = 8.0
    """What a text needs in the mean; the distribution is geometric."""
    splits: float = 0.05
    """How likely a strategy leaves the others of its lane in a round."""
    shard_size: int = 50
    seed: int = 0
    slow: Mapping[str, float] = field(default_factory=dict)
    """Workers that take so many times as long."""

    def plan(self) -> FleetPlan:
        """The plan of a real fleet of this shape, which deals banks to verifiers."""
        cluster = ClusterConfig(
            drafter=DrafterRole(replicas=self.drafters, banks=self.banks, slots=self.slots),
            verifier=VerifierRole(replicas=self.verifiers),
        )
        # No strategy asks the drafter's model, so the real worker runs without computing anything.
        strategies = tuple(Strategy("verifier", alpha=float(s)) for s in range(self.strategies))
        setting = Setting(block_size=1, max_new_tokens=MAX_ROUNDS, eos_token_ids=(END,))
        return FleetPlan(_MODELS, 1, strategies, (setting,), cluster)

    def shards(self, examples: int) -> Iterator[Shard]:
        """So many examples, made when they are asked for."""
        for index, first in enumerate(range(0, examples, self.shard_size)):
            numbers = range(first, min(first + self.shard_size, examples))
            yield Shard(index, tuple(Example(str(n), None, (), (1,)) for n in numbers))


class SleepingModel(TableModel):
    """No numbers, only time: what its passes would take is noted here until its worker sleeps it.

    Args:
        bank_seconds: what a pass over a full bank takes; a part of a bank takes its part.
    """

    def __init__(self, bank_seconds: float) -> None:
        super().__init__(torch.zeros(1, 1))
        self.bank_seconds = bank_seconds
        self.due = 0.0

    def work(self, share: float) -> None:
        """A pass over a share of a bank."""
        self.due += self.bank_seconds * share


class SleepingCompute:
    """In place of a model thread: one piece of work at a time, each as long as its model says."""

    def __init__(self, model: SleepingModel) -> None:
        self.busy_seconds = 0.0
        self.cpu_seconds = 0.0
        """What the worker's own accounts cost, which stay real."""
        self._model = model
        self._turn = asyncio.Lock()

    async def __call__(self, work: Callable[[], Result]) -> Result:
        """The result of the work, when its time is over."""
        async with self._turn:
            clock = asyncio.get_running_loop().time
            started = clock()
            cpu = time.process_time()
            result = work()
            self.cpu_seconds += time.process_time() - cpu
            due, self._model.due = self._model.due, 0.0
            await asyncio.sleep(due)
            self.busy_seconds += clock() - started
            return result


class SimulatedDrafter(DrafterWorker):
    """The real drafter, whose drafts take time instead of work."""

    model: SleepingModel
    most_waiting = 0
    """The most lanes that ever waited for a slot, new examples aside."""

    def draft(self, bank: Bank) -> VerifyRequest | VerifyReply:
        """What the real one asks of a verifier when no strategy needs its model."""
        request = super().draft(bank)
        assert isinstance(request, VerifyRequest)
        self.model.work(len(request.starts) / self.slots)
        waiting = sum(len(lanes) for bank in self.banks for lanes in bank.waiting.values())
        self.most_waiting = max(self.most_waiting, waiting)
        return request


class SimulatedVerifier(VerifierWorker):
    """The real verifier's accounts of banks and rounds, with verdicts out of a hash."""

    model: SleepingModel

    def __init__(self, model: SleepingModel, plan: FleetPlan, shape: Shape) -> None:
        super().__init__(model, plan.strategies, plan.settings)
        self._shape = shape

    def _judge(self, cache: ModelBank, request: VerifyRequest) -> VerifyReply:
        self.model.work(len(request.starts) / request.slots)
        rows, strategies = request.pair_rows, request.pair_strategies
        keys, written = request.keys[rows], request.starts[rows]
        shape = self._shape
        splits = uniform(shape.seed, keys, written, strategies) < shape.splits
        ends = uniform(shape.seed, keys, written) < 1 / shape.rounds
        tokens = np.where(ends, END, np.where(splits, 2 + strategies, 1))
        return one_token_each(request.round, tokens)


@dataclass
class SimulatedFleet:
    """Drafters and verifiers in this process, each with a clock of its own."""

    shape: Shape
    drafters: list[LocalDrafter] = field(default_factory=list)
    verifiers: list[VerifierEngine] = field(default_factory=list)
    workers: list[SimulatedDrafter] = field(default_factory=list)
    models: dict[str, SleepingModel] = field(default_factory=dict)
    computes: dict[str, SleepingCompute] = field(default_factory=dict)

    async def __aenter__(self) -> SimulatedFleet:
        """Start the workers."""
        plan = self.shape.plan()
        for name in plan.verifier_names():
            compute = self._compute(name, self.shape.verify_seconds)
            verifier = SimulatedVerifier(self.models[name], plan, self.shape)
            self.verifiers.append(VerifierEngine(verifier, compute, self._ledger(name)))
        for index, name in enumerate(plan.drafter_names()):
            compute = self._compute(name, self.shape.draft_seconds)
            role, model = plan.cluster.drafter, self.models[name]
            what = (plan.strategies, plan.settings, plan.cluster.banks, role.slots)
            self.workers.append(SimulatedDrafter(name, model, *what))
            links = [self._link(self.verifiers[number]) for number in plan.verifiers_of(index)]
            engine = DrafterEngine(self.workers[-1], links, compute, self._ledger(name))
            self.drafters.append(LocalDrafter(name, engine))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the banks."""
        await asyncio.gather(*(drafter.engine.close() for drafter in self.drafters))

    def leases(self, shards: Iterator[Shard]) -> AsyncIterator[Lease]:
        """Decode shards, as the driver of a run does."""
        return Scheduler(self.drafters).leases(shards)

    def stats(self, role: str) -> list[WorkerStats]:
        """What the workers of a role did: of `drafter` or `verifier`."""
        engines = [drafter.engine for drafter in self.drafters] + self.verifiers
        found = [engine.ledger.stats for engine in engines]
        return [stats for stats in found if stats.name.startswith(role)]

    def busy_seconds(self, role: str) -> list[float]:
        """How long the models of a role's workers were at work."""
        return [c.busy_seconds for name, c in self.computes.items() if name.startswith(role)]

    def _compute(self, name: str, bank_seconds: float) -> SleepingCompute:
        self.models[name] = SleepingModel(bank_seconds * self.shape.slow.get(name, 1.0))
        self.computes[name] = SleepingCompute(self.models[name])
        return self.computes[name]

    def _ledger(self, name: str) -> Ledger:
        return Ledger(name, "simulated", self.models[name].effort)

    def _link(self, verifier: VerifierEngine) -> VerifierLink:
        async def verify(request: VerifyRequest) -> VerifyReply:
            await asyncio.sleep(self.shape.link_seconds)
            reply = await verifier.verify(request)
            await asyncio.sleep(self.shape.link_seconds)
            return reply

        return VerifierLink(verifier.ledger.name, verify)


class SimulatedClock(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else is to be done.

    Sleeping costs nothing and lasts exactly as long as it says, so a run gives the same numbers on
    any machine, however busy. A deadlock is an error instead of a wait.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self._jump))

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self._now

    def _jump(self, seconds: float) -> None:
        self._now += seconds


class _Jumping(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """A selector that lets simulated time pass instead of waiting."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[Any]:
        """What is ready now."""
        ready = super().select(0)
        if timeout is None and not ready:
            raise RuntimeError("deadlock: every coroutine waits for another")
        if not ready:
            self._jump(timeout or 0.0)
        return ready


def simulate(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedClock) as runner:
        return runner.run(main)


def one_token_each(round_number: int, tokens: NDArray[np.int64]) -> VerifyReply:
    """A reply that gives each pair one token."""
    pairs = len(tokens)
    return VerifyReply(
        round=round_number,
        tokens=tokens[:, None],
        num_tokens=np.ones(pairs, dtype=np.int64),
        counts=np.eye(len(Count), dtype=np.int64)[[Count.ROUNDS] * pairs],
        sums=np.zeros((pairs, len(Sum))),
        failed=np.zeros(pairs, dtype=np.int64),
        origins=np.zeros((pairs, 1), dtype=np.int64),
        deferred=np.zeros((pairs, 1), dtype=bool),
        thoughts=np.zeros((pairs, 0, len(Thought)), dtype=np.float32),
    )


def uniform(seed: int, *parts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniforms in [0, 1) that are a function of seed and parts, element by element."""
    state = np.full(len(parts[0]), seed, dtype=np.uint64)
    for part in parts:
        state = (state + part.astype(np.uint64) + np.uint64(1)) * _MIX
        state ^= state >> np.uint64(29)
    return (state * _MIX >> np.uint64(11)) * 2.0**-53

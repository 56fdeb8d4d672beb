"""Ten thousand rounds leave no trace: neither in the processes' memory nor in Ray's object store.

Planted faults these tests catch: a request or a reply that someone keeps; a list that grows by an
entry a round; a worker that writes into the arrays it was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import ray  # makes psutil importable
from psutil import Process

from pipeline.config import ClusterConfig, DrafterRole, ModelConfig, ModelsConfig
from pipeline.fleet.interface import FleetPlan
from pipeline.fleet.ray_fleet import RayFleet
from pipeline.fleet.scheduler import Scheduler
from pipeline.records import Example, Sampling, Setting, Shard, Strategy
from pipeline.workers.transport import Packed
from pipeline.workers.wire import VerifyReply, VerifyRequest
from tests.loop import drive, workers
from tests.tiny import EOS, hf_model, slot_model

VOCABULARY = 16_384
"""Two drafted tokens are then more than 100 KB, which Ray sends through its object store."""
SETTING = Setting(2, 64, Sampling(1.0), eos_token_ids=(EOS,))
ROUNDS, WARM = 10_000, 2_000
GROWTH = 10 * 2**20
"""Bytes from the warm fleet to the end; a kilobyte a round is 7 MB, one request a thousandth of them."""


@dataclass(frozen=True)
class Memory:
    """Bytes at a time: private memory of each process, and what the object store holds."""

    rounds: int
    private: dict[str, int]
    stored: int


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> FleetPlan:
    """One drafter and one verifier, as small as can be but for the vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    paths = []
    for seed, name in enumerate(("drafter", "verifier")):
        model = hf_model("llama", seed)
        model.resize_token_embeddings(VOCABULARY)
        model.save_pretrained(folder / name)
        paths.append(ModelConfig(path=str(folder / name)))
    return FleetPlan(
        models=ModelsConfig(drafter=paths[0], verifier=paths[1]),
        vocabulary=VOCABULARY,
        strategies=(Strategy("spec_decode"), Strategy("spec_cascade.token_v1", 0.0)),
        settings=(SETTING,),
        cluster=ClusterConfig(drafter=DrafterRole(slots=1, banks=3)),
    )


def endless() -> Iterator[Shard]:
    """Shards as long as someone asks."""
    index = 0
    while True:
        examples = (Example(f"{index}", None, (), (2, 5 + index % 50)),)
        yield Shard(index, examples)
        index += 1


async def measured(plan: FleetPlan) -> list[Memory]:
    """The memory every thousand rounds, until enough are done."""
    found: list[Memory] = []
    async with RayFleet(plan) as fleet:
        async for lease in Scheduler(fleet.drafters).leases(endless()):
            if lease.shard.index % 10:
                continue
            drafter, verifier = await fleet.stats()
            if drafter.rounds >= WARM + len(found) * 1000:
                pids = {"drafter": drafter.pid, "verifier": verifier.pid, "driver": None}
                found.append(Memory(drafter.rounds, _private(pids), _stored()))
            if drafter.rounds >= ROUNDS + WARM:
                return found
    raise AssertionError("there are endless shards")


def _private(pids: dict[str, int | None]) -> dict[str, int]:
    infos = {name: Process(pid).memory_info() for name, pid in pids.items()}
    return {name: info.rss - info.shared for name, info in infos.items()}


def _stored() -> int:
    name = "object_store_memory"
    return int(ray.cluster_resources()[name] - ray.available_resources()[name])


@pytest.mark.ray
@pytest.mark.endurance
def test_memory_is_flat_over_ten_thousand_rounds(plan: FleetPlan, ray_cluster: None) -> None:
    memories = asyncio.run(measured(plan))
    assert memories[-1].rounds - memories[0].rounds >= ROUNDS - 1000
    for name, before in memories[0].private.items():
        assert memories[-1].private[name] - before < GROWTH, memories
    # Of three banks and what is on its way; a request holds 128 KB.
    assert max(memory.stored for memory in memories) < 50 * 128 * 1024, memories


def test_what_was_sent_is_as_it_was_sent() -> None:
    """Arrays that came over Ray are read-only, and a request may be sent again."""
    prompts = [(2, 5, 6), (2, 9), (2, 7, 7, 8)]
    strategies = [Strategy("spec_decode"), Strategy("spec_cascade.opt", 0.2)]
    setting = replace(SETTING, block_size=3, max_new_tokens=12)
    drafting, verifying = workers(
        slot_model("llama"), slot_model("llama", 1), prompts, strategies, setting
    )

    def verify(request: VerifyRequest) -> VerifyReply:
        received = deepcopy(request)
        for array in _arrays(received):
            array.flags.writeable = False
        reply = verifying.verify(received)
        for array, sent in zip(_arrays(received), _arrays(request), strict=True):
            np.testing.assert_array_equal(array, sent)
        return reply

    assert len(drive(drafting, verify)) == 6


def _arrays(record: Any) -> Iterator[np.ndarray[Any, Any]]:
    for value in vars(record).values():
        if isinstance(value, np.ndarray):
            yield value
        elif isinstance(value, Packed):
            yield from _arrays(value)

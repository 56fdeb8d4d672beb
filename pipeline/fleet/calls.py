"""Calls of actors that may just be starting again, and the watch over workers that hang."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError
from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential_jitter

from pipeline.config import FailureConfig

Result = TypeVar("Result")

_LOG = logging.getLogger(__name__)


async def when_available(call: Callable[[], Awaitable[Result]], seconds: float) -> Result:
    """Call an actor that may just be starting again.

    Raises:
        TimeoutError: time is up.
        ActorDiedError: it will not come back.
    """
    tries = AsyncRetrying(
        retry=retry_if_exception_type(ActorUnavailableError),
        wait=wait_exponential_jitter(multiplier=0.2, max=5),
    )
    async with asyncio.timeout(seconds):
        async for attempt in tries:
            with attempt:
                return await call()
    raise AssertionError("the last attempt returns or raises")


async def keep_alive(name: str, actor: ActorHandle, limits: FailureConfig) -> None:
    """Start a worker again that hangs, which Ray does not see; give up one that does not come back."""
    while True:
        await asyncio.sleep(limits.silence_seconds / 4)
        try:
            if await _hangs(name, actor, limits):
                await asyncio.to_thread(ray.kill, actor, no_restart=False)
            await when_available(actor.ready.remote, limits.start_seconds)
        except TimeoutError:
            _LOG.error("%s was not back within %g s and is given up", name, limits.start_seconds)
            await asyncio.to_thread(ray.kill, actor)
            return
        except RayActorError:
            return  # gone for good; whoever calls it hears so


async def _hangs(name: str, actor: ActorHandle, limits: FailureConfig) -> bool:
    """Whether a worker's process does not answer, or its model does not end. Raises `ActorDiedError`."""
    try:
        call = actor.seconds_at_work.remote()
        seconds = await asyncio.wait_for(call, limits.silence_seconds)
    except TimeoutError:
        _LOG.warning("%s was silent for %g s; starting it again", name, limits.silence_seconds)
        return True
    except ActorUnavailableError:
        return False
    if seconds > limits.block_seconds:
        _LOG.warning("%s was at one block for %g s; starting it again", name, seconds)
        return True
    return False

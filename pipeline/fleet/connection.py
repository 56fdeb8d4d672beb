"""The Ray that a run works on: the cluster it was pointed to, or one of its own.

A Ray of a run's own listens on the loopback interface only and answers to a token that is drawn for
this run alone. The token is handed on in the environment of Ray's processes and stands in no file.
Its workers look for modules where this process does, not first of all in the working directory.
"""

from __future__ import annotations

import os
import secrets
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path

import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import AuthenticationTokenLoader, Config
from ray.exceptions import AuthenticationError
from ray.job_config import JobConfig

from pipeline.config import JobError

_TOKEN_BYTES = 32
_CHOICES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Any of these set means that the user decides how processes of Ray know each other."""


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Be connected to Ray; a Ray that this process is connected to already is taken as it is.

    Args:
        address: a cluster, as `ray.init` takes it; None is `RAY_ADDRESS`, else a Ray of one's own.
            A cluster that happens to run on this machine is not joined: anyone could have put it there.

    Raises:
        JobError: there is no such cluster, or it does not let us in.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    with ExitStack() as stack:
        job_config = None
        if address == "local":
            stack.enter_context(_token_of_its_own())
            stack.enter_context(_loopback_only())
            # A job of a "client" is the kind whose workers do not look in the working directory first,
            # where a file may bear the name of a module of Python.
            job_config = JobConfig(_client_job=True, _py_driver_sys_path=_own_folder())
        _start(address, job_config)
        stack.callback(ray.shutdown)
        yield


def _start(address: str, job_config: JobConfig | None) -> None:
    try:
        ray.init(
            address=address,
            job_config=job_config,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (ConnectionError, AuthenticationError) as error:
        raise JobError(
            f"RAY_ADDRESS is '{address}', but no Ray cluster there lets us in; if it asks for a "
            "token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"
        ) from error


def _own_folder() -> list[str]:
    """The folder of this project, if this process was told to look there before Python's own modules."""
    folder = Path(__file__).parents[2]
    ahead = takewhile(lambda path: path != sysconfig.get_path("stdlib"), sys.path)
    return [str(folder)] if folder in {Path(path).resolve() for path in ahead} else []


@contextmanager
def _token_of_its_own() -> Iterator[None]:
    """Token authentication with a fresh token, unless the user has chosen otherwise."""
    if any(name in os.environ for name in _CHOICES):
        yield
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(_TOKEN_BYTES)
    _read_environment_again()
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]
        _read_environment_again()


def _read_environment_again() -> None:
    """Ray keeps what it read of the environment when it was imported, and the last token."""
    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Let no socket of a Ray that is started meanwhile be reached from other machines.

    `ray.init` replaces a loopback address that it is given by one that other machines can reach. It does
    not where clusters are not supported, as on macOS; the constant says whether they are.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before

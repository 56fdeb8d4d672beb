"""What is wrong with a job, said in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from pipeline.redaction import redact

Item = TypeVar("Item")


class JobError(ValueError):
    """A job that cannot run, said in one sentence that names the field and the remedy.

    What it quotes of the job, or of a library, is rid of credentials.
    """

    def __init__(self, sentence: str, others: Sequence[JobError] = ()) -> None:
        super().__init__(redact(sentence))
        self.others = tuple(others)
        """What else is wrong with the job, as far as it was looked for."""

    @property
    def all(self) -> list[JobError]:
        """This one and the others, each without the others that it brings."""
        return [JobError(str(self)), *(one for other in self.others for one in other.all)]


def one_line(error: BaseException) -> str:
    """What an error says, as a sentence can go on with it."""
    return " ".join(str(error).split()) or type(error).__name__


def all_of(makers: Iterable[Callable[[], Item]]) -> list[Item]:
    """What all of them make.

    Raises:
        JobError: the first that one of them raised; it brings those of the others.
    """
    made: list[Item] = []
    problems: list[JobError] = []
    for make in makers:
        try:
            made.append(make())
        except JobError as error:
            problems.append(error)
    if problems:
        raise JobError(str(problems[0]), [*problems[0].others, *problems[1:]]) from problems[0]
    return made

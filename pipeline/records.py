"""The nouns that travel between the parts of the pipeline.

All of them are frozen: a change is a new value. Nothing here imports torch, Ray or a file format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Bonus = Literal["verifier", "target"]
FinishReason = Literal["stop", "length", "error"]

SKIPPED = "prompt_skipped"
"""The code of an example that the job asked to skip: a row without an outcome, but no error."""


@dataclass(frozen=True)
class Strategy:
    """One way to combine drafter and verifier: a `use:` name with its parameters.

    `alpha` trades quality for cost: a larger alpha always means fewer deferrals to the verifier.
    """

    use: str
    alpha: float | None = None
    beta: float | str | None = None
    normalize: str | None = None
    fallback: float | None = None
    rollback: float | None = None
    target: str | None = None
    """`module:function` of a custom target distribution."""

    @property
    def label(self) -> str:
        """The strategy as people write it, for example `spec_cascade.opt(alpha=0.2)`."""
        given = {
            name: value
            for name, value in vars(self).items()
            if name != "use" and value is not None and (name, value) not in _UNSAID
        }
        said = [
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in given.items()
        ]
        return f"{self.use}({', '.join(said)})" if said else self.use


_UNSAID = {("beta", 1.0), ("normalize", "none")}
"""Parameters that go without saying in a label."""


@dataclass(frozen=True)
class Sampling:
    """What turns logits into the sampling distribution. Temperature 0 is greedy (one-hot)."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


@dataclass(frozen=True)
class Setting:
    """The decoding setting of a run: everything but the strategy that decides the tokens."""

    block_size: int
    max_new_tokens: int
    sampling: Sampling = Sampling()
    """The verifier's, and that of the row."""
    drafter_sampling: Sampling | None = None
    """The drafter's, where it differs."""
    bonus: Bonus = "verifier"
    seed: int = 0
    repeats: int = 1
    eos_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    @property
    def drafting(self) -> Sampling:
        """What the drafter samples with."""
        return self.drafter_sampling or self.sampling

    @property
    def draft_length(self) -> int:
        """Tokens a full draft block holds: one more than `block_size` when the bonus is judged."""
        return self.block_size + (self.bonus == "target")


@dataclass(frozen=True)
class RowError:
    """Why an example or a lane could not be decoded: a stable code and a sentence."""

    code: str
    message: str


@dataclass(frozen=True)
class Example:
    """One prompt with its stable id, its references and its token ids (empty when `error` is set)."""

    example_id: str
    prompt: str | None
    references: tuple[str, ...]
    prompt_ids: tuple[int, ...]
    error: RowError | None = None


@dataclass(frozen=True)
class Shard:
    """A range of dataset examples: the unit of leasing, writing and resuming."""

    index: int
    examples: tuple[Example, ...]


@dataclass(frozen=True)
class Counts:
    """What one outcome cost, as if its strategy had run alone.

    `verifier_calls` is forward passes of the verifier on this sequence and `verifier_tokens` the
    positions it scored. `accepted_histogram[k]` is the number of rounds that accepted k drafted tokens.
    """

    drafter_calls: int = 0
    verifier_calls: int = 0
    verifier_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    deferred: int = 0
    bonus_tokens: int = 0
    rounds: int = 0
    accepted_histogram: tuple[int, ...] = ()


Source = Literal["draft", "residual", "bonus", "verifier"]


@dataclass(frozen=True)
class TokenTrace:
    """Where one token came from, and what both models thought there.

    Confidences are untempered probabilities of the emitted token; the maxima are those of the whole
    distributions. The drafter's are None behind a block taken whole, where it was not asked.
    """

    source: Source
    deferred: bool
    accepted: bool
    """Whether it is a drafted token that was kept."""
    drafter_confidence: float | None
    verifier_confidence: float | None
    drafter_max: float | None
    verifier_max: float | None
    total_variation: float | None


@dataclass(frozen=True)
class Risk:
    """Sums over the judged positions of a speculative outcome, for the paper's deferral risk.

    `expected_rejected` is the sum of the probabilities that the draft is rejected: r D_TV (Lemma 3)
    for cascades, sum max(0, q - target) in general. `expected_loss` is the plug-in 0-1 loss, the sum
    of (1 - r)(1 - max q) + r (1 - max p), as in eqs. 3 and 8 without their cost terms.
    """

    expected_rejected: float = 0.0
    expected_loss: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """A finished (example, repeat, strategy): tokens, counts and why it ended.

    `wall_seconds` runs from the opening of its first lane to its end; lanes share rounds, so it is
    a measurement, not a cost. An error keeps the tokens that were emitted before it.
    """

    example_id: str
    repeat: int
    strategy: Strategy
    output_ids: tuple[int, ...]
    finish_reason: FinishReason
    counts: Counts
    error: RowError | None = None
    wall_seconds: float = 0.0
    setting: int = 0
    """Index into the run's settings."""
    risk: Risk = Risk()
    log_confidence: float = 0.0
    """Log of the drafter's untempered probability of the text, for the drafter alone."""
    trace: tuple[TokenTrace, ...] = ()


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one forward pass at batch 1, from which a run's latency is modelled.

    A drafter pass is one token; a verifier pass is a whole block, which at batch 1 costs hardly more
    than one token where the weights, not the tokens, bound the time.
    """

    drafter_seconds: float
    verifier_seconds: float


@dataclass(frozen=True)
class WorkerStats:
    """What a worker did so far, physically: shared rounds count once however many strategies ride.

    Positions are those of one lane in one pass of the model. Transfer is the part of a drafter's round
    trips in which the verifier neither worked on the block nor had it queue.
    """

    name: str
    node: str = ""
    pid: int = 0
    rounds: int = 0
    lane_rounds: int = 0
    pair_rounds: int = 0
    """Rounds that the strategies would have needed alone; over `lane_rounds` it is the saving."""
    outcomes: int = 0
    busy_seconds: float = 0.0
    wait_seconds: float = 0.0
    """Between the first piece of work and the last, not busy."""
    queue_seconds: float = 0.0
    """Of a verifier: how long blocks waited for it, all together."""
    transfer_seconds: float = 0.0
    retries: int = 0
    """Blocks that were sent again because a verifier was lost."""
    bytes_sent: int = 0
    positions_stepped: int = 0
    """Drafted or scored, idle slots too."""
    positions_prefilled: int = 0
    """Computed when a slot was opened, encoded prompts too."""
    positions_reused: int = 0
    """Taken over from another slot instead."""


@dataclass(frozen=True)
class Span:
    """One thing that a worker did, for a timeline."""

    worker: str
    act: str
    """`draft`, `verify`, or `in flight` for a block on its way to verdicts."""
    bank: str
    start: float
    """Seconds since 1970."""
    seconds: float


@dataclass(frozen=True)
class ShardResult:
    """All outcomes of one shard and where they were made."""

    shard: int
    outcomes: tuple[Outcome, ...] = field(repr=False)
    drafter: str
    verifier: str
    node: str

"""The training loop of a pair: the verifier learns from text, the drafter from text and verifier.

Data parallel over processes of one thread each. Every process draws the same global batches and
works on its own rows; losses are divided by the global token count and gradients summed, so the
number of processes changes rounding only.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration
from transformers.utils.logging import disable_progress_bar

from jobs.training.batches import TokenPair, endless_batches, make_batch
from jobs.training.models import (
    Architecture,
    Batch,
    distillation_loss,
    new_model,
    overlap_loss,
    save_folder,
    target_logits,
    target_tokens,
)
from jobs.training.optimizers import (
    Rates,
    clip,
    flat_gradient,
    optimizers_for,
    set_rates,
    share_of_peak,
)
from jobs.training.screen import Measured, Screen

POLISH_RATE = 0.25
POLISH_LIKELIHOOD = 0.1


@dataclass(frozen=True)
class Plan:
    """What to train and for how long; `knots` are (part of the run, share of the peak rates)."""

    drafter: Architecture
    verifier: Architecture
    drafter_rates: Rates
    verifier_rates: Rates
    steps: int
    knots: tuple[tuple[float, float], ...]
    tokens_per_step: int
    teacher_mix: float
    validate_every: int
    polish_steps: int = 0
    seed: int = 1

    @property
    def all_steps(self) -> int:
        """Steps of both models and of the drafter alone."""
        return self.steps + self.polish_steps

    def rate_at(self, step: int) -> float:
        """The share of the peak rates: along the knots, then falling to 0 while polishing."""
        if step < self.steps:
            return share_of_peak((step + 0.5) / self.steps, self.knots)
        return POLISH_RATE * (self.all_steps - step) / self.polish_steps


@dataclass(frozen=True)
class Task:
    """The data of a run and where it saves."""

    plan: Plan
    train: list[TokenPair]
    validation: list[TokenPair]
    tokenizer: PreTrainedTokenizerFast
    folder: Path
    log: Path
    processes: int


class Learner:
    """One model with its optimizers and its flat gradient."""

    def __init__(self, model: T5ForConditionalGeneration, rates: Rates) -> None:
        self.model = model.train()
        self.gradient = flat_gradient(model)
        self.optimizers = optimizers_for(model, rates)

    def step(self, share: float) -> None:
        """Applies the summed gradient of all processes and clears it."""
        if distributed.is_initialized():
            distributed.all_reduce(self.gradient)
        clip(self.gradient)
        set_rates(self.optimizers, share)
        for optimizer in self.optimizers:
            optimizer.step()
        self.gradient.zero_()


def own_rows(rows: list[int], rank: int, processes: int) -> list[int]:
    """The rows of one process; a batch smaller than the group gives each process a row."""
    return rows[rank::processes] or rows[:1]


def learn(
    task: Task, verifier: Learner, drafter: Learner, pairs: list[TokenPair], total: int
) -> float:
    """Adds the gradients of one process's rows; returns the verifier's loss sum."""
    batch = make_batch(pairs)
    tokens = target_tokens(batch)
    with torch.autocast("cpu", torch.bfloat16):
        teacher = target_logits(verifier.model, batch)
        loss = functional.cross_entropy(teacher.float(), tokens, reduction="sum")
        guess = target_logits(drafter.model, batch)
        drafted = distillation_loss(guess, teacher.detach(), tokens, task.plan.teacher_mix)
    torch.autograd.backward((loss + drafted) / total)
    return loss.item()


def polish(
    task: Task, verifier: Learner, drafter: Learner, pairs: list[TokenPair], total: int
) -> float:
    """Adds the drafter's gradients for being accepted by the finished verifier."""
    batch = make_batch(pairs)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            teacher = target_logits(verifier.model, batch)
        guess = target_logits(drafter.model, batch)
        rejected = overlap_loss(guess, teacher)
        drafted = distillation_loss(guess, teacher, target_tokens(batch), task.plan.teacher_mix)
    torch.autograd.backward((rejected + POLISH_LIKELIHOOD * drafted) / total)
    return rejected.item()


def agreement(verifier: torch.Tensor, drafter: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Sums of verifier NLL, drafter NLL, one minus total variation, and tokens."""
    scores = [functional.log_softmax(logits.float(), -1) for logits in (verifier, drafter)]
    losses = [functional.nll_loss(score, tokens, reduction="sum") for score in scores]
    shared = torch.minimum(scores[0].exp(), scores[1].exp()).sum()
    return torch.stack([*losses, shared, torch.tensor(float(len(tokens)))])


@torch.no_grad()
def validate(task: Task, verifier: Learner, drafter: Learner, rank: int) -> list[float]:
    """Verifier NLL, drafter NLL and teacher-forced acceptance on the validation pairs."""
    total = torch.zeros(4)
    pairs = sorted(task.validation, key=lambda pair: len(pair[1]))[rank :: task.processes]
    with torch.autocast("cpu", torch.bfloat16):
        for start in range(0, len(pairs), 64):
            batch: Batch = make_batch(pairs[start : start + 64])
            logits = [target_logits(learner.model, batch) for learner in (verifier, drafter)]
            total += agreement(logits[0], logits[1], target_tokens(batch))
    if distributed.is_initialized():
        distributed.all_reduce(total)
    return (total[:3] / total[3]).tolist()


def save_pair(task: Task, verifier: Learner, drafter: Learner) -> None:
    """Writes both models' folders."""
    save_folder(verifier.model, task.tokenizer, task.folder / "verifier")
    save_folder(drafter.model, task.tokenizer, task.folder / "drafter")


def steps_of(task: Task, rank: int, verifier: Learner, drafter: Learner) -> Iterator[float]:
    """Takes every step of the plan; yields this process's loss per token.

    The loss is the verifier's, or in the polishing steps the share of drafts that it rejects.
    """
    plan = task.plan
    source = endless_batches(task.train, plan.tokens_per_step, plan.seed)
    for step in range(plan.all_steps):
        rows = next(source)
        total = sum(len(task.train[row][1]) for row in rows)
        mine = own_rows(rows, rank, task.processes)
        own = sum(len(task.train[row][1]) for row in mine)
        act = learn if step < plan.steps else polish
        loss = act(task, verifier, drafter, [task.train[row] for row in mine], total)
        share = plan.rate_at(step)
        if step < plan.steps:
            verifier.step(share)
        drafter.step(share)
        yield loss / own


def run(rank: int, task: Task) -> None:
    """Trains as one process of the group; the first process shows progress and saves."""
    torch.set_num_threads(1)
    disable_progress_bar()
    if task.processes > 1:
        store = f"file://{task.folder.resolve()}/rendezvous"
        distributed.init_process_group("gloo", store, rank=rank, world_size=task.processes)
    plan, vocabulary = task.plan, len(task.tokenizer)
    verifier = Learner(new_model(plan.verifier, vocabulary, plan.seed), plan.verifier_rates)
    drafter = Learner(new_model(plan.drafter, vocabulary, plan.seed + 1), plan.drafter_rates)
    start, recent = time.monotonic(), 0.0
    with Screen(task.log, plan.all_steps, silent=rank > 0) as screen:
        for step, loss in enumerate(steps_of(task, rank, verifier, drafter), start=1):
            recent = loss if step == 1 else 0.98 * recent + 0.02 * loss
            screen.stepped(recent)
            if step % plan.validate_every == 0 or step == plan.all_steps:
                measured = validate(task, verifier, drafter, rank)
                screen.validated(Measured(step, time.monotonic() - start, recent, *measured))
                if rank == 0:
                    save_pair(task, verifier, drafter)
    if task.processes > 1:
        distributed.destroy_process_group()


def train(task: Task) -> None:
    """Trains a pair and leaves it in the task's folder, with a log of its validations."""
    task.folder.mkdir(parents=True, exist_ok=True)
    task.log.parent.mkdir(parents=True, exist_ok=True)
    task.log.unlink(missing_ok=True)
    rendezvous = task.folder / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    if task.processes == 1:
        run(0, task)
    else:
        spawn(run, args=(task,), nprocs=task.processes)  # type: ignore[no-untyped-call]
        rendezvous.unlink(missing_ok=True)

"""How a plan is shown: one screen of tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline.planning.balance import Advice
from pipeline.planning.plan import Cost, Details, Group, Plan, Throughput


def print_plan(console: Console, plan: Plan) -> None:
    """Show a plan: actors, memory, calls, traffic, time, and what is wrong."""
    if plan.details is not None:
        details = plan.details
        console.print(_head(details), soft_wrap=True)
        console.print(_actors(details.groups))
        console.print(_calls(details.cost))
        for sentence in _sentences(details):
            console.print(escape(sentence), highlight=False, soft_wrap=True)
    for problem in plan.problems:
        said = "problem" if problem.is_refused else "doubtful, though a run would go on"
        console.print(
            f"[red]{said}:[/red] {escape(problem.sentence)}", highlight=False, soft_wrap=True
        )
    if not plan.problems:
        console.print("No problem was found.")


def _head(details: Details) -> str:
    prepared, prompts = details.prepared, details.prompts
    count = prepared.num_examples
    examples = "an unknown number of" if count is None else str(count)
    settings = f", {len(prepared.settings)} settings" if len(prepared.settings) > 1 else ""
    return escape(
        f"{prepared.job.name}: {examples} examples, {len(prepared.strategies)} strategies{settings}; "
        f"of the first {prompts.looked_at} prompts the longest has {prompts.longest} tokens"
    )


def _actors(groups: tuple[Group, ...]) -> Table:
    table = Table("actors", "each needs", "where", "weights", "caches", "passes, about", "together")
    on_gpus = any(group.gpu_bytes for group in groups)
    if on_gpus:
        table.add_column("on each GPU")
    for column in table.columns[3:]:
        column.justify = "right"
    for group in groups:
        needs = str(group.bundle).partition(" needs ")[2]
        memory = group.memory
        table.add_row(
            group.bundle.actor if group.count == 1 else f"{group.count} {group.role}s",
            escape(needs),
            ", ".join(f"node {node} x {count}" for node, count in sorted(group.nodes.items()))
            or "-",
            *map(_bytes, (memory.weights, memory.caches, memory.passes, memory.total)),
            *([_bytes(group.gpu_bytes) if group.gpu_bytes else "-"] if on_gpus else []),
        )
    return table


def _calls(cost: Cost) -> Table:
    table = Table("strategies", "drafter calls / text", "verifier calls / text")
    if cost.texts is not None:
        table.add_column("verifier calls, all texts")
    for column in table.columns[1:]:
        column.justify = "right"
    strategies = sum(calls.strategies for calls in cost.calls)
    for calls in cost.calls:
        cells = [f"{calls.strategies} {calls.execution.value}", f"{calls.drafter:.1f}"]
        cells.append(f"{calls.verifier:.1f}")
        if cost.rows is not None:
            cells.append(f"{cost.rows / strategies * calls.strategies * calls.verifier:,.0f}")
        table.add_row(*cells)
    return table


def _sentences(details: Details) -> Iterator[str]:
    cost, assumed = details.cost, details.cost.assumed
    where = "As in the rows that are there" if cost.is_found else "Assumed"
    length = "in the mean" if cost.is_found else "as long as max_new_tokens allows"
    yield (
        f"{where}: {assumed.acceptance:.0%} of drafted tokens accepted; texts of {assumed.tokens:.0f} "
        f"tokens, {length}."
    )
    if cost.block_bytes:
        yield (
            f"Wire: {_bytes(cost.block_bytes)} a round as {details.prepared.transport}, "
            f"{cost.block.lanes} lanes of {cost.block.columns} drafted tokens."
        )
    if details.throughput is None:
        yield (
            "Time: nothing is known of the models' speed; give --drafter-seconds and "
            "--verifier-seconds, or --measure, or run the job once."
        )
    else:
        yield from _time(details, details.throughput)


def _time(details: Details, found: Throughput) -> Iterator[str]:
    rounds, forecast = found.rounds, found.forecast
    shared = f", {rounds.sharing:.1f} texts a lane" if rounds.sharing > 1 else ", no lane shared"
    yield (
        f"Steps, from {rounds.source}: drafter {_seconds(rounds.steps.drafter)} a token, verifier "
        f"{_seconds(rounds.steps.verifier)} a block, transfer {_seconds(rounds.steps.transfer)}; "
        f"{rounds.lanes:.1f} lanes a round{shared}."
    )
    whole = f"{_duration(forecast.seconds)} of decoding, " if details.cost.texts is not None else ""
    yield (
        f"Simulated: {whole}{found.texts_per_second:,.1f} texts a second; drafters busy "
        f"{forecast.drafter_share:.0%}, verifiers {forecast.verifier_share:.0%}."
    )
    if found.advice is not None:
        yield _bottleneck(found, found.advice)


def _bottleneck(found: Throughput, advice: Advice) -> str:
    drafting, verifying = found.forecast.drafter_share, found.forecast.verifier_share
    who = "the drafters are" if drafting > verifying else "the verifiers are"
    if max(drafting, verifying) < 0.8:
        who = "the way between them is"
    block = (
        f"blocks of {advice.block_size} would give {advice.gain:.0%} more tokens an actor-second"
    )
    if advice.gain < 0.01:
        block = "no other block size would give more tokens an actor-second"
    return (
        f"Bottleneck: {who} it; {advice.drafters} : {advice.verifiers} drafters to verifiers keep both "
        f"busy, and {block}, if a block of any size costs the verifier the same."
    )


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"

"""The program `speccascade`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

# The libraries behind a run take seconds to import, so each command imports what it needs: `--help`
# and a mistyped option answer at once.

app = typer.Typer(
    help="Evaluate speculative cascades: which way to combine a small drafter and a large verifier "
    "gives which quality at which cost?",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job: one YAML file.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The output folder of a run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Override a key of the job before it is checked, for example "
        "`--set decoding.temperature=0` or `--set strategies.2.alpha=[0.1,0.2]`. Repeatable.",
    ),
]


@app.callback()
def _program() -> None:
    """Keep the commands commands, however many there are."""


@app.command()
def run(
    job_file: JobFile,
    overrides: Overrides = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write what each worker did when, as a Chrome trace: open it in "
            "https://ui.perfetto.dev or chrome://tracing.",
        ),
    ] = None,
) -> None:
    """Run a job and report on it.

    The job names a dataset, a pair of models and the strategies to compare. Rows land as Parquet in
    its `output` folder, one file a shard. Run the same command again to carry on where a run was
    stopped; a finished run is only reported on again.

    Example: `speccascade run jobs/demo.yaml --set dataset.limit=100 --set output=runs/small`
    """
    from jobs.progress import RunProgress, print_workers
    from pipeline.config import load_job
    from pipeline.run import prepare
    from pipeline.run import run as run_prepared

    console = Console()
    job = load_job(job_file, overrides or [])
    prepared = prepare(job)
    _describe(console, job.name, prepared.num_examples, len(prepared.strategies), job.fleet)
    try:
        with RunProgress(console) as progress:
            finished = run_prepared(prepared, progress, timeline)
    except KeyboardInterrupt:
        console.print("Stopped. Finished shards are kept; run the same command again to resume.")
        raise typer.Exit(130) from None
    console.print(
        f"{finished.shards_written} shards written in {finished.seconds:.1f} s"
        + (f", {finished.shards_found} found done" if finished.shards_found else "")
    )
    if finished.shards_written:
        print_workers(console, finished)
    if timeline is not None:
        console.print(f"Timeline: {timeline}", soft_wrap=True)
    report(Path(job.output))


@app.command()
def report(run_folder: RunFolder) -> None:
    """Report on a run from its Parquet files: tables of strategies and a cost-quality plot.

    Example: `speccascade report runs/demo`
    """
    from pipeline.report.report import write_report
    from pipeline.report.table import print_summary

    console = Console()
    written = write_report(run_folder)
    print_summary(written.summary, console)
    console.print(f"Table: {written.csv}", soft_wrap=True)
    for plot in written.plots:
        console.print(f"Plot:  {plot}", soft_wrap=True)


@app.command()
def trace(
    run_folder: RunFolder,
    example: Annotated[str, typer.Option(metavar="ID", help="The example's id.")],
    strategy: Annotated[
        str,
        typer.Option(
            metavar="S",
            help="A strategy as the report writes it, for example `spec_cascade.opt(alpha=0.2)`, "
            "or a `use:` name, which stands for all its parameters.",
        ),
    ],
    setting: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            help="The number of a setting in job order, from 0. Repeatable; all by default.",
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(metavar="N", help="Which repetition, from 0.")] = 0,
) -> None:
    """Show who wrote each token of a text: the drafter, a residual, a bonus, the verifier.

    Under the text stand both models' confidences in each token. The job must have said `trace: true`.

    Example: `speccascade trace runs/g2p --example brackeen --strategy spec_cascade.opt`
    """
    from pipeline.report.trace import find_traces, print_traces

    traces = find_traces(run_folder, example, strategy, setting or (), repeat)
    print_traces(traces, _decoder(run_folder), Console())


@app.command()
def strategies() -> None:
    """List the strategies a job can name: their parameters, what they sample from, and their source.

    Example: `speccascade strategies`
    """
    from rich.table import Table

    from pipeline.protocol.strategies import KINDS

    console = Console()
    console.print("q is the drafter's distribution, p the verifier's.")
    table = Table("use", "what it samples from", show_lines=True)
    for use, kind in KINDS.items():
        takes = [f"  {name}: {allowed}" for name, allowed in kind.takes.items()]
        table.add_row(escape("\n".join([use, *takes])), escape(" ".join(kind.about.split())))
    console.print(table)


def main() -> None:
    """Run the program; a job that cannot run ends in one sentence and exit status 2."""
    from pipeline.config import JobError

    try:
        app()
    except JobError as error:
        Console(stderr=True).print(
            f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(2)


def _decoder(run_folder: Path) -> Callable[[list[int]], str]:
    """Token ids to text as the run's verifier spells them, with special tokens."""
    from pipeline.config import JobError, ModelConfig
    from pipeline.models.loading import load_tokenizer
    from pipeline.results.manifest import manifest_file, read_manifest

    manifest = read_manifest(run_folder)
    if manifest is None:
        raise JobError(f"{manifest_file(run_folder)} is missing; it names the tokenizer of the run")
    model = ModelConfig.model_validate(manifest.job["models"]["verifier"])
    try:
        tokenizer = load_tokenizer(model)
    except (OSError, ValueError) as error:
        raise JobError(
            f"models.verifier.path: the run's tokenizer {model.path} cannot be loaded from "
            f"{Path.cwd()}; call from the folder that the job was run in"
        ) from error
    return lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _describe(
    console: Console, name: str, examples: int | None, strategies: int, fleet: str
) -> None:
    counted = "an unknown number of" if examples is None else str(examples)
    where = "Ray actors" if fleet == "ray" else "this process"
    console.print(f"{name}: {counted} examples, {strategies} strategies, in {where}")

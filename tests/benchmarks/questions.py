"""Prompts for a chat model, written out of parts, so that a benchmark needs no data set.

No question to measure on is one to learn from, but its topic and its form each occur there with others:
a small drafter is good at a narrow field, and that is what speculation lives on.
"""

from __future__ import annotations

import random
from itertools import product

FORMS = (
    "What is {}?",
    "Explain {} to a child.",
    "Why does {} matter?",
    "Tell me about the history of {}.",
    "Give three facts about {}.",
    "Write a short story about {}.",
    "How does {} work?",
    "What should a beginner know about {}?",
)
TOPICS = (
    "photosynthesis", "the steam engine", "jazz", "gravity", "bread", "the Roman Empire",
    "electricity", "chess", "the moon", "vaccines", "democracy", "the printing press", "honey bees",
    "volcanoes", "the violin", "algebra", "the internet", "coffee", "dinosaurs", "the heart",
    "glass", "football", "the ocean", "money", "sleep", "the telescope", "rain", "language",
    "the bicycle", "salt", "evolution", "the brain", "poetry", "magnets", "cities", "the compass",
    "cheese", "earthquakes", "the piano", "trade",
)  # fmt: skip
UNSEEN = 32


def questions() -> list[str]:
    """Questions to learn from."""
    return _asked()[UNSEEN:]


def unseen_questions() -> list[str]:
    """Questions to measure on."""
    return _asked()[:UNSEEN]


def chat_prompt(question: str) -> str:
    """The question as SmolLM2 reads it, without the long system message its template would add."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def _asked() -> list[str]:
    asked = [form.format(topic) for topic, form in product(TOPICS, FORMS)]
    random.Random(0).shuffle(asked)
    return asked

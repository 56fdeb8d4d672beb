"""How long one forward pass takes, for modelled latency."""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from pipeline.models.interface import Effort, LanguageModel, SlotContent

_PROMPT = 16
_PASSES = 9


def seconds_per_pass(model: LanguageModel, width: int) -> float:
    """Median seconds of one forward pass over `width` tokens of a single lane."""
    bank = model.bank(1, lone=True)
    bank.effort = Effort()  # what is timed is no work of the run
    bank.open([SlotContent(0, [0] * _PROMPT)])
    tokens = torch.zeros(1, width, dtype=torch.long, device=model.device)
    start = np.zeros(1, dtype=np.int64)
    seconds = []
    for _ in range(_PASSES + 1):
        started = time.perf_counter()
        bank.feed(tokens, start, keep=width).cpu()  # the copy waits for the device
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])  # the first pass allocates

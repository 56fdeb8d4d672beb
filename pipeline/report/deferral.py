"""Deferral: how often a strategy turns to the verifier, what that costs, and what theory expects.

All from the rows' sums over *judged* positions, those whose drafted token went through the
acceptance test (accepted + rejected; a bonus token is not judged). Equations and lemmas are those
of arXiv 2405.19261; r is 1 where the rule defers, q the drafter's and p the verifier's
distribution. A strategy that judges nothing (the two models alone, sequential cascades) has a
deferral rate only.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

DEFERRAL = {
    "judged": (
        "positions",
        "accepted + rejected: positions whose drafted token went through the acceptance test",
    ),
    "deferral_rate": (
        "deferrals a position",
        "share of the positions a rule looked at (emitted tokens, without the bonus tokens of whole "
        "blocks) at which it deferred; null for a target without a choice between the models",
    ),
    "rejection_rate": ("rejections a judged position", "rejected / judged"),
    "expected_rejection_rate": (
        "rejections a judged position",
        "mean rejection probability: r D_TV(p, q) for a cascade (Lemma 3), sum max(0, q - target) "
        "for any target",
    ),
    "rejection_gap_error": (
        "rejections a judged position",
        "standard error of rejection_rate - expected_rejection_rate, over rows",
    ),
    "deferral_risk": (
        "loss a judged position",
        "eq. 3, plug-in: (1 - r)(1 - max q) + r (1 - max p + alpha), the cost of deferring being alpha",
    ),
    "speculative_risk": (
        "loss a judged position",
        "eq. 8, plug-in: as deferral_risk, the cost of deferring being alpha D_TV(p, q)",
    ),
}
"""What the summary says of deferral: unit and meaning of each column.

The two risks take the 0-1 loss with each model's untempered confidence in the place of the true
distribution, also for the entropy rules. They are null without an alpha or a choice between models.
"""

RISK_COLUMNS = ("expected_rejected", "expected_loss")


def deferral(good: pd.DataFrame, totals: dict[str, int], key: dict[str, Any]) -> dict[str, Any]:
    """The columns of `DEFERRAL` for one strategy.

    Args:
        good: its rows without an error.
        totals: their sums of the counts.
        key: its parameters.
    """
    judged = totals["accepted"] + totals["rejected"]
    rejection, loss = (_total(good[name]) for name in RISK_COLUMNS)
    alpha = key["alpha"] if loss is not None else None
    has_choice = judged == 0 or loss is not None
    return {
        "judged": judged,
        "deferral_rate": ratio(totals["deferred"], _decided(totals, key)) if has_choice else None,
        "rejection_rate": ratio(totals["rejected"], judged),
        "expected_rejection_rate": ratio(rejection, judged),
        "rejection_gap_error": ratio(_gap_error(good), judged),
        "deferral_risk": ratio(_risk(loss, alpha, totals["deferred"]), judged),
        "speculative_risk": ratio(_risk(loss, alpha, rejection), judged),
    }


def ratio(part: float | None, whole: int) -> float | None:
    """A rate; None without a numerator or with an empty denominator."""
    return part / whole if whole and part is not None else None


def _decided(totals: dict[str, int], key: dict[str, Any]) -> int:
    """Positions at which the rule had a say.

    A bonus token follows its block, and no rule looked at it; but a fallback of BiLD is a deferral
    that ends the block, and its token is counted as a bonus.
    """
    falls_back = key["fallback"] is not None
    return totals["output_tokens"] - (0 if falls_back else totals["bonus_tokens"])


def _total(values: pd.Series[Any]) -> float | None:
    """The sum; None if no row has a value."""
    known = values.dropna().astype(float)
    return math.fsum(known) if len(known) else None


def _risk(loss: float | None, alpha: float | None, cost: float | None) -> float | None:
    if loss is None or alpha is None or cost is None:
        return None
    return loss + alpha * cost


def _gap_error(good: pd.DataFrame) -> float | None:
    """Standard error of the sum of rejected - expected_rejected.

    The difference has mean zero in each row, whatever its text, so the squares estimate its variance.
    """
    known = good[good["expected_rejected"].notna()]
    if not len(known):
        return None
    gaps = known["rejected"].astype(float) - known["expected_rejected"].astype(float)
    return math.sqrt(math.fsum(gaps**2))

"""An example of a target distribution of one's own: `use: custom` in a job with `allow_custom_code: true`.

    - {use: custom, target: "jobs.custom_target:geometric_mean"}
    - {use: custom, target: "jobs.custom_target:geometric_mean", alpha: [0.2, 0.5, 0.8]}

A target is a function T(q, p) that says what a speculative strategy samples from at a position, given
the drafter's distribution q and the verifier's p. It is called as

    target(drafter_probs, verifier_probs, alpha)

- `drafter_probs` and `verifier_probs` are the *sampling* distributions (after temperature, top-k,
  top-p and min-p), float32 (M, V): M positions, of any texts in any order, and V tokens. At temperature 0
  they are one-hot.
- `alpha` is the strategy's, (M, 1); NaN where the job gives none.
- It returns (M, V): rows that are not negative and sum to one. A row that is no distribution ends that
  text with the error code `target_invalid`.
- It looks at each row alone and keeps no state, else rows would depend on what is batched with them; it
  has no loop over rows, since it is called once for many; it does not change its arguments.

The drafted token x is then accepted with probability min(1, T(x) / q(x)), and what is emitted has exactly
the law T. Any module will do that lies below the folder a job is run in.
"""

from __future__ import annotations

from torch import Tensor

_EVEN = 0.5


def geometric_mean(drafter_probs: Tensor, verifier_probs: Tensor, alpha: Tensor) -> Tensor:
    """The product of experts q^alpha p^(1 - alpha), normalised.

    alpha runs from 0, the verifier, to 1, the drafter; without one both count alike. Where the two
    have no token in common, as greedy models that disagree, the target is the verifier's.
    """
    weight = alpha.nan_to_num(_EVEN)
    product = drafter_probs**weight * verifier_probs ** (1 - weight)
    total = product.sum(dim=-1, keepdim=True)
    return verifier_probs.where(total == 0, product / total)

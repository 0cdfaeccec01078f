"""The objectives once more, one token at a time in float64, derivatives by hand.

Written from docs/learner.md, not from rl/learner/losses.py, and shares nothing with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LIMIT = 20.0


@dataclass
class Reference:
    """What an objective must come to."""

    loss: float
    gradient: np.ndarray  # d loss / d logprob
    clipped: np.ndarray
    # Sums of absolute terms: what rounding is measured by where terms cancel.
    size: float
    gradient_size: np.ndarray


def reference(name, normalisation, knobs, logp, mu, adv, mask, sequences) -> Reference:
    """The objective `name` of the tokens, summed by token or by sequence mean."""
    n = len(logp)
    out = Reference(0.0, np.zeros(n), np.zeros(n, dtype=bool), 0.0, np.zeros(n))
    for sequence in set(sequences):
        own = [i for i in range(n) if sequences[i] == sequence and mask[i]]
        share = 1 / len(own) if own and normalisation == "sequences" else 1.0
        tokens = [(logp[i], mu[i], adv[i]) for i in own]
        terms, jacobian, clipped = WHOLE[name](tokens, **knobs)
        for row, i in enumerate(own):
            out.loss += share * terms[row]
            out.size += abs(share * terms[row])
            out.clipped[i] = clipped[row]
            for column, j in enumerate(own):
                out.gradient[j] += share * jacobian[row][column]
                out.gradient_size[j] += abs(share * jacobian[row][column])
    return out


def log_ratio(lp, mu):
    """(ln r clamped, its derivative)."""
    raw = lp - mu
    if raw > LIMIT:
        return LIMIT, 0.0
    if raw < -LIMIT:
        return -LIMIT, 0.0
    return raw, 1.0


def by_token(rule):
    """The sequence's terms, their derivatives and clips, from a rule for a single token."""

    def whole(tokens, **knobs):
        found = [rule(lp, mu, a, *log_ratio(lp, mu), **knobs) for lp, mu, a in tokens]
        jacobian = np.diag([slope for _, slope, _ in found])
        return [term for term, _, _ in found], jacobian, [clip for _, _, clip in found]

    return whole


def trust_region(lp, mu, a, x, dx, clip_low, clip_high, kl_weight):
    moved = math.exp(lp) - math.exp(mu)
    clipped = moved > clip_high if a > 0 else moved < -clip_low
    push = 0.0 if clipped else a * math.exp(x)
    return kl_weight * x * x - push, (2 * kl_weight * x - push) * dx, clipped


def importance_sampling(lp, mu, a, x, dx):
    return -math.exp(x) * a, -math.exp(x) * a * dx, False


def surrogate(ratio, a, clip_low, clip_high):
    """(-min(r A, clip(r) A), its derivative in r, whether clip(r) A is the lesser)."""
    bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
    if bounded * a < ratio * a:
        return -bounded * a, 0.0, True
    return -ratio * a, -a, False


def ppo_clip(lp, mu, a, x, dx, clip_low, clip_high):
    term, slope, clipped = surrogate(math.exp(x), a, clip_low, clip_high)
    return term, slope * math.exp(x) * dx, clipped


def capped(lp, mu, a, x, dx, ratio_cap):
    weight = min(math.exp(x), ratio_cap)
    return -weight * a * lp, -weight * a, math.exp(x) > ratio_cap


def icepop(lp, mu, a, x, dx, clip_low, clip_high):
    inside = 1 - clip_low < math.exp(x) < 1 + clip_high
    weight = math.exp(x) if inside else 0.0
    return -weight * a * lp, -weight * a, not inside


def gspo(tokens, clip_low, clip_high):
    pairs = [log_ratio(lp, mu) for lp, mu, _ in tokens]
    count = max(len(tokens), 1)
    ratio = math.exp(sum(x for x, _ in pairs) / count)
    found = [surrogate(ratio, a, clip_low, clip_high) for _, _, a in tokens]
    jacobian = [[slope * ratio * dx / count for _, dx in pairs] for _, slope, _ in found]
    return [term for term, _, _ in found], jacobian, [clip for _, _, clip in found]


WHOLE = {
    "trust_region": by_token(trust_region),
    "importance_sampling": by_token(importance_sampling),
    "ppo_clip": by_token(ppo_clip),
    "cispo": by_token(capped),
    "tis": by_token(capped),
    "icepop": by_token(icepop),
    "gspo": gspo,
}

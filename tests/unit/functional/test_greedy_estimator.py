from __future__ import annotations

import torch

from rlhf_lightning.functional import GreedyEstimator
from tests.unit.functional import slow
from tests.unit.functional.cases import close, mask_of
from tests.unit.functional.estimators import columns_of
from tests.unit.functional.rows import laid_out
from tests.unit.functional.slow import limited

BETA, GAMMA, CLIP = 0.3, 0.9, 0.7


def test_against_python(case: str, dtype: torch.dtype) -> None:
    mask = mask_of(case)
    columns = columns_of(mask, dtype)
    names = ("scores", "log_probs", "ref_log_probs")
    rows = zip(*(slow.rows_of(columns[name], mask) for name in names), strict=True)
    official, verl, kls = [], [], []
    for (scores, new, ref), greedy in zip(rows, columns["greedy_scores"].tolist(), strict=True):
        d = [p - q for p, q in zip(new, ref, strict=True)]
        margin = limited(sum(scores) - greedy, -CLIP, CLIP)
        official.append([margin * GAMMA ** (len(d) - t) - BETA * x for t, x in enumerate(d)])
        rewards = [s - BETA * x for s, x in zip(scores, d, strict=True)]
        verl.append([x - greedy for x in slow.returns(rewards, GAMMA)])
        kls.append(d)
    found = GreedyEstimator(gamma=GAMMA, clip=CLIP, kl_coef=BETA)(columns)
    close(found["advantages"], laid_out(mask, official))
    close(found["row_kl"], [sum(d) / max(len(d), 1) for d in kls])
    as_verl = GreedyEstimator(form="verl", gamma=GAMMA, kl_coef=BETA)(columns)
    close(as_verl["advantages"], laid_out(mask, verl))


def test_by_hand() -> None:
    rows = {
        "response_mask": torch.tensor([[True, True, False]]),
        "scores": torch.tensor([[0.0, 3.0, torch.nan]]),
        "greedy_scores": torch.tensor([1.0]),
        "log_probs": torch.tensor([[-1.0, -1.0, torch.nan]]),
        "ref_log_probs": torch.tensor([[-2.0, -4.0, torch.nan]]),
    }
    close(GreedyEstimator()(rows)["advantages"], [[2.0, 2.0, 0.0]])
    official = GreedyEstimator(kl_coef=0.1)(rows)
    close(official["advantages"], [[1.9, 1.7, 0.0]])  # its own penalty of 0.1 and 0.3
    verl = GreedyEstimator(form="verl", kl_coef=0.1)(rows)
    close(verl["advantages"], [[1.6, 1.7, 0.0]])  # the penalties to come
    close(official["row_kl"], [2.0])
    close(official["row_scores"], [3.0])

"""From outcomes to advantages with OpenRLHF's experience maker."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace

import torch
from openrlhf.models.utils import compute_approx_kl  # type: ignore[import-not-found]
from openrlhf.trainer.ppo_utils.experience import Experience  # type: ignore[import-not-found]
from openrlhf.trainer.ppo_utils.experience_maker import (  # type: ignore[import-not-found]
    RemoteExperienceMaker,
)
from torch import Tensor

from tests.parity import cases
from tests.parity.cases import Batch
from tests.parity.references import Formula, Found, shrunk

GROUPED = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo")


def advantages(
    batch: Batch, *, estimator: str, gamma: float = 1.0, kl_coef: float = 0.0, clip: float | None = None
) -> Found:
    """All rows in one experience, groups of three neighbours where the estimator has groups."""
    outcomes = batch["even_outcomes" if estimator in GROUPED else "outcomes"]
    kl = compute_approx_kl(batch["old_log_probs"], batch["ref_log_probs"], kl_estimator="k1")
    experience = Experience(
        rewards=outcomes.clone(),
        values=batch["values"],
        action_mask=batch.mask.long(),
        kl=kl,
        index=list(range(len(outcomes))),
    )
    num_samples = cases.GROUP_SIZE if estimator in GROUPED else 1
    limits = None if clip is None else (-clip, clip)
    _maker(estimator, gamma, kl_coef, num_samples, limits).compute_advantages_and_returns([experience])
    found = {"advantages": experience.advantages}
    return found | ({"returns": experience.returns} if estimator in ("gae", "reinforce") else {})


def alone(estimator: str) -> Tensor:
    """The advantage of one answer, of one token, without others to its prompt."""
    one = torch.ones(1, 1)
    experience = Experience(
        rewards=torch.tensor([0.75]), action_mask=one.long(), kl=torch.zeros(1, 1), index=[0]
    )
    _maker(estimator, 1.0, 0.0, 1, None).compute_advantages_and_returns([experience])
    found: Tensor = experience.advantages.flatten()
    return found


def equal_scores() -> Tensor:
    scores = torch.tensor(cases.EQUAL_SCORES)
    experience = Experience(
        rewards=scores,
        action_mask=torch.ones(len(scores), 1).long(),
        kl=torch.zeros(len(scores), 1),
        index=list(range(len(scores))),
    )
    _maker("group_norm", 1.0, 0.0, len(scores), None).compute_advantages_and_returns([experience])
    found: Tensor = experience.advantages.flatten()
    return found


def _maker(
    estimator: str, gamma: float, kl_coef: float, num_samples: int, limits: tuple[float, float] | None
) -> RemoteExperienceMaker:
    """An experience maker without actors."""
    advantage = SimpleNamespace(estimator=estimator, gamma=gamma, lambd=0.9, no_std_norm=False)
    maker = object.__new__(RemoteExperienceMaker)
    maker.args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        reward=SimpleNamespace(clip_range=limits),
        rollout=SimpleNamespace(n_samples_per_prompt=num_samples),
    )
    maker.strategy = SimpleNamespace(args=maker.args)
    maker.advantage_estimator, maker.kl_ctl = estimator, SimpleNamespace(value=kl_coef)
    return maker


ADVANTAGES: Mapping[str, Formula] = {
    "gae": partial(advantages, estimator="gae", gamma=0.97),
    "gae_kl": partial(advantages, estimator="gae", gamma=0.97, kl_coef=0.2),
    "gae_small": partial(shrunk, formula=partial(advantages, estimator="gae")),
    "gae_clipped": partial(advantages, estimator="gae", kl_coef=0.2, clip=0.5),
    "reinforce": partial(advantages, estimator="reinforce", gamma=0.9),
    "reinforce_kl": partial(advantages, estimator="reinforce", gamma=0.9, kl_coef=0.2),
    "flash_reinforce": partial(advantages, estimator="flash_reinforce"),
    **{name: partial(advantages, estimator=name) for name in GROUPED},
    "group_norm_small": partial(shrunk, formula=partial(advantages, estimator="group_norm")),
    **{f"{name}_kl": partial(advantages, estimator=name, kl_coef=0.2) for name in GROUPED},
}

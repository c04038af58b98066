"""Every loss on one batch, and an algorithm that only takes their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller import DP_METRIC, ONE_TO_ALL, Batch, Metrics, register
from rlhf_lightning.engines import FSDPEngine
from rlhf_lightning.functional import (
    CISPOLoss,
    CostLoss,
    DistillationLoss,
    DPOLoss,
    GeometricPolicyLoss,
    KTOLoss,
    Loss,
    OffPolicyCorrection,
    PairwiseLoss,
    PolicyLoss,
    ReinforceLoss,
    SAPOLoss,
    SequencePolicyLoss,
    SFTLoss,
    SimPOLoss,
    StepLoss,
    ValueLoss,
)
from rlhf_lightning.workers import Actor, Critic, Role, Scorer
from rlhf_lightning.workers.actor import SEQUENCES

PAIRS, PROMPT, RESPONSE, CANDIDATES = 4, 5, 6, 3
Gradients = dict[str, Tensor]
CORRECTION = OffPolicyCorrection(level="sequence", high=1.5)
LOSSES: Mapping[str, tuple[str, Loss]] = {
    "ppo": ("actor", PolicyLoss(entropy_coef=0.1, kl_coef=0.1)),
    "sequence means": ("actor", PolicyLoss(aggregation="seq-mean-token-mean", dual_clip=3.0)),
    "sequence sums": ("actor", PolicyLoss(aggregation="seq-mean-token-sum-norm", horizon=RESPONSE)),
    "corrected": ("actor", PolicyLoss(correction=CORRECTION)),
    "gspo": ("actor", SequencePolicyLoss()),
    "gmpo": ("actor", GeometricPolicyLoss()),
    "cispo": ("actor", CISPOLoss()),
    "sapo": ("actor", SAPOLoss()),
    "reinforce": ("actor", ReinforceLoss()),
    "sft": ("actor", SFTLoss()),
    "dpo": ("actor", DPOLoss(label_smoothing=0.1, sft_coef=0.1)),
    "ipo": ("actor", DPOLoss(kind="ipo")),
    "hinge": ("actor", DPOLoss(kind="hinge")),
    "kto": ("actor", KTOLoss(undesirable_weight=0.7)),
    "simpo": ("actor", SimPOLoss()),
    "distillation": ("actor", DistillationLoss(beta=0.3)),
    "value": ("critic", ValueLoss()),
    "reward model": ("reward", PairwiseLoss(margin=True, centering=0.1)),
    "cost model": ("reward", CostLoss()),
    "process reward": ("reward", StepLoss()),
}
"""Name -> the role that learns from it, and the loss with its options on."""


def columns() -> dict[str, Tensor]:
    """Pairs of rows of all lengths; one row is fully masked, and one has a gap."""
    noise = torch.Generator().manual_seed(0)
    rows = 2 * PAIRS
    prompts = torch.tensor([5, 5, 3, 3, 4, 4, 1, 1])
    lengths = torch.tensor([6, 2, 4, 4, 1, 5, 3, 0])
    mask = torch.arange(RESPONSE) < lengths[:, None]
    mask[0, 2] = False
    wide = {
        name: torch.randn(rows, RESPONSE, generator=noise)
        for name in ("advantages", "returns", "values", "log_probs", "ref_log_probs", "rollout_log_probs")
    }
    for name in ("log_probs", "ref_log_probs", "rollout_log_probs"):
        wide[name] = 0.2 * wide[name] - 5.5  # about the model's own: it knows nothing of 264 tokens
    same = torch.randint(0, 250, (PAIRS, PROMPT), generator=noise).repeat_interleave(2, dim=0)
    candidates = torch.rand(rows, RESPONSE, 250, generator=noise).topk(CANDIDATES, dim=2).indices.int()
    likely = torch.rand(rows, RESPONSE, CANDIDATES, generator=noise).log() - 1.5
    return {
        **wide,
        "candidate_ids": candidates,
        "candidate_ref_log_probs": likely,
        "prompt_ids": same,
        "prompt_mask": torch.arange(PROMPT) >= PROMPT - prompts[:, None],
        "response_ids": torch.randint(0, 250, (rows, RESPONSE), generator=noise),
        "response_mask": mask,
        "labels": torch.arange(rows) % 2 == 0,
        "safe": torch.arange(rows) % 3 == 0,
        "margins": torch.rand(rows, generator=noise),
        "kl_baseline": torch.full((rows,), 0.1),
        "step_mask": mask & (torch.arange(RESPONSE) % 2 == 1),
        "step_labels": torch.rand(rows, RESPONSE, generator=noise),
    }


@dataclass(frozen=True, kw_only=True)
class Probed(Role):
    """A role whose gradients can be taken out."""

    @register(transfer=DP_METRIC, reads=SEQUENCES)
    def add(self, rows: TensorDict, *, loss: Loss) -> Mapping[str, float]:
        """Accumulate the gradient of a loss."""
        return self.accumulate(rows, loss=loss, temperature=1.0)

    @register(transfer=ONE_TO_ALL)
    def take(self) -> Gradients:
        """The whole gradients, which are then zero again."""
        engine = self.engine
        assert isinstance(engine, FSDPEngine)
        found = {}
        for name, weight in engine._weights.masters.items():
            if weight.grad is not None:
                found[name] = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
                weight.grad = None
        self.engine.accumulated = False  # else a run ends where no update takes it
        return {name: gradient.clone() for name, gradient in found.items()}


@dataclass(frozen=True, kw_only=True)
class ProbedActor(Probed, Actor):
    """An actor."""


@dataclass(frozen=True, kw_only=True)
class ProbedCritic(Probed, Critic):
    """A critic."""


@dataclass(frozen=True, kw_only=True)
class ProbedScorer(Probed, Scorer):
    """A reward model."""


class Probe(RLHFAlgorithm):
    """Takes the gradient of every loss, and learns nothing."""

    actor: ProbedActor = field(default_factory=ProbedActor)
    critic: ProbedCritic = field(default_factory=ProbedCritic)
    reward: ProbedScorer = field(default_factory=ProbedScorer)

    def step(self, batch: Batch) -> Metrics:
        """Fill `gradients`, `values` and, for all rows and for one pair, `judged`, by the losses' names."""
        self.gradients: dict[str, Gradients] = {}
        self.values: dict[str, Mapping[str, float]] = {}
        self.judged: dict[str, list[Mapping[str, float]]] = {}
        rows, roles = Batch.of(columns()), self.roles()
        pair = Batch.of({name: column[:2] for name, column in columns().items()})
        for name, (owner, loss) in LOSSES.items():
            role = roles[owner]
            assert isinstance(role, Probed)
            if isinstance(role, ProbedActor | ProbedScorer):
                self.judged[name] = [role.compute_loss(some, loss=loss).fetch() for some in (rows, pair)]
            self.values[name] = role.add(rows, loss=loss).fetch()
            self.gradients[name] = role.take().fetch()[0]
        return Metrics()

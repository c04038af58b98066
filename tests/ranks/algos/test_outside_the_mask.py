"""Scores where no token of a response is mean nothing: in no number of an iteration, nor of a validation."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from tensordict import TensorDict

from rlhf_lightning import algos
from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.callbacks import Rollouts, SampledValidation
from rlhf_lightning.controller import DP, Batch, register
from rlhf_lightning.data import TaskData
from rlhf_lightning.running import Scaling
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Cost, Reward
from rlhf_lightning.workers.actor import SEQUENCES
from rlhf_lightning.workers.reward import SCORED, CutOff
from tests.unit.algos.short import trainer

READ = (*SEQUENCES, "rows")
SAMPLING = Sampling(max_new_tokens=16)
"""Long enough for the embedded model to end some answer before another."""


def strays(found: TensorDict, name: str, rows: TensorDict) -> TensorDict:
    """The columns with numbers where no token is."""
    mask = rows["response_mask"]
    assert not mask.all()
    return found.set(name, found[name] + 100.0 * torch.arange(16) * ~mask)


@dataclass(frozen=True, kw_only=True)
class StrayReward(Reward):
    """Scores what is no token, too."""

    @register(transfer=DP, reads=READ, returns=SCORED)
    def compute_reward(self, rows: TensorDict, *, cut_off: CutOff | None = None) -> TensorDict:
        found = super().compute_reward(cast(Batch, rows), cut_off=cut_off)
        return strays(cast(TensorDict, found), "scores", rows)


@dataclass(frozen=True, kw_only=True)
class StrayCost(Cost):
    """Finds costs in what is no token, too."""

    @register(transfer=DP, reads=READ, returns=("costs",))
    def compute_cost(self, rows: TensorDict) -> TensorDict:
        return strays(cast(TensorDict, super().compute_cost(cast(Batch, rows))), "costs", rows)


def algorithm(kind: type[RLHFAlgorithm], *, stray: bool) -> RLHFAlgorithm:
    """One whose answers are scored by their length."""
    reward, cost = (StrayReward, StrayCost) if stray else (Reward, Cost)
    options: dict[str, object] = {"actor": Actor(sampling=SAMPLING), "reward": reward(functions="length")}
    names = {each.name for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    usual = {"group_size": 2, "scaling": Scaling(rewards=True), "cost": cost(functions="length")}
    if kind is algos.SafeRLHF:
        del usual["scaling"]
    return kind(**options, **{name: value for name, value in usual.items() if name in names})


def numbers(kind: type[RLHFAlgorithm], root: Path, *, stray: bool) -> dict[str, object]:
    """What two iterations and a validation log, but seconds, and the lines of the answers."""
    callbacks: list[Callback] = [Rollouts(), SampledValidation(2)]
    usual = {"limit_val_batches": 1, "val_check_interval": 2, "check_val_every_n_epoch": None}
    run = trainer(Local(), root, steps=2, callbacks=callbacks, **usual)
    run.fit(algorithm(kind, stray=stray), datamodule=TaskData(batch_size=4, num_rows=16, num_val_rows=4))
    lines = [file.read_text() for file in sorted((root / "rollouts").iterdir())]
    found: dict[str, object] = {"lines": [json.loads(line) for text in lines for line in text.splitlines()]}
    assert found["lines"]
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    return found | {n: v for n, v in metrics.items() if not n.startswith(("time/", "throughput/", "memory/"))}


@pytest.mark.parametrize(
    "kind", [algos.GRPO, algos.PPO, algos.ReMax, algos.DAPO, algos.SafeRLHF], ids=lambda kind: kind.__name__
)
def test_they_are_in_no_number(kind: type[RLHFAlgorithm], tmp_path: Path) -> None:
    plain = numbers(kind, tmp_path / "plain", stray=False)
    assert {"reward/mean", "val/reward", "val/mean@2", "lines"} <= plain.keys()
    assert numbers(kind, tmp_path / "stray", stray=True) == plain


class Priced(algos.GRPO):
    """Takes a price for each token from held-out scores, in every column."""

    def evaluate(self, batch: Batch) -> Batch:
        """As GRPO does, less the price."""
        rows = super().evaluate(batch)
        self.seen = rows["scores"].sum(dim=1), rows["response_mask"].sum(dim=1)
        return rows | {"scores": rows["scores"] - 1.0}


class Summed(algos.GRPO):
    """Gives one number for each held-out answer."""

    def evaluate(self, batch: Batch) -> Batch:
        """As GRPO does, added up."""
        rows = super().evaluate(batch)
        return rows | {"scores": rows["scores"].sum(dim=1)}


def validated(kind: type[algos.GRPO], root: Path) -> tuple[algos.GRPO, float]:
    """The algorithm, and what it makes of four held-out answers."""
    own = kind(actor=Actor(sampling=SAMPLING), reward=Reward(functions="length"))
    run = trainer(Local(), root, limit_val_batches=1)
    (found,) = run.validate(own, datamodule=TaskData(batch_size=4, num_rows=4, num_val_rows=4), verbose=False)
    return own, found["val/reward"]


def test_a_price_of_a_token_is_paid_for_tokens(tmp_path: Path) -> None:
    own, reward = validated(Priced, tmp_path)
    scores, lengths = cast(Priced, own).seen
    assert reward == pytest.approx(float((scores - lengths).mean()))


def test_one_number_for_each_answer_is_answered_as_in_a_loss(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"shape \[4\] where the mask is \[4, 16\].* make x\[:, None\]"):
        validated(Summed, tmp_path)

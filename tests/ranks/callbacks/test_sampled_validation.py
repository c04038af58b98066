"""Several answers to each held-out prompt."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from tensordict import TensorDict

from rlhf_lightning.algos import GRPO, SFT
from rlhf_lightning.callbacks import SampledValidation
from rlhf_lightning.controller import MICRO_DP, register
from rlhf_lightning.data import TaskData
from rlhf_lightning.functional import expected_best
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reward
from rlhf_lightning.workers.actor import ANSWERS, PROMPTS
from tests.unit.algos.short import trainer
from tests.unit.algos.small import trained, write_model


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_best_of_all_choices(k: int) -> None:
    scores = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    scores[1, 2:] = scores[1, 0]
    choices = [list(choice) for choice in combinations(range(5), k)]
    expected = torch.stack([scores[:, choice].max(dim=1).values for choice in choices]).mean(dim=0)
    torch.testing.assert_close(expected_best(scores, k), expected)


def test_of_zeros_and_ones_it_is_pass_at_k() -> None:
    """Chen 2021: 1 - C(n - c, k) / C(n, k), here with n = 4, c = 1, k = 2."""
    assert float(expected_best(torch.tensor([[0.0, 1.0, 0.0, 0.0]]), 2)) == pytest.approx(1 - 3 / 6)
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"k={k} of 4 answers"):
            expected_best(torch.zeros(1, 4), k)


CALLS: list[list[float]] = []
"""What `scored` has said."""


def scored(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """A number for each text."""
    CALLS.append([float(sum(map(ord, response)) % 17) for response in responses])
    return CALLS[-1]


class Weights(Callback):
    """The weights at the end."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = trained(pl_module)["actor"]


def grpo(root: Path) -> GRPO:
    actor = Actor(
        path=write_model(root), optimizer=OptimizerSpec(lr=0.1), sampling=Sampling(max_new_tokens=6)
    )
    return GRPO(actor=actor, reward=Reward(functions=scored), group_size=2)


def prompts() -> TaskData:
    return TaskData(batch_size=4, num_rows=8, num_val_rows=6)


def validated(root: Path, *callbacks: Callback, **options: object) -> pl.Trainer:
    often: dict[str, object] = {"val_check_interval": 2, "limit_val_batches": None}
    run = trainer(Local(), root, steps=2, callbacks=list(callbacks), **often | options)
    run.fit(grpo(root), datamodule=prompts())
    return run


def test_it_logs_what_the_reward_says(tmp_path: Path) -> None:
    plain, sampled = Weights(), Weights()
    CALLS.clear()
    metrics = validated(tmp_path, SampledValidation(4), sampled).callback_metrics
    drawn = [call for call in CALLS if len(call) in (16, 8)][-2:]
    scores = torch.tensor([score for call in drawn for score in call]).view(6, 4)
    assert [len(call) for call in CALLS].count(16) == 1, "the sanity check draws none"
    assert len(set(scores[0].tolist())) > 1, "the answers to a prompt differ"
    assert float(metrics["val/mean@4"]) == pytest.approx(float(scores.mean()))
    for k in (2, 4):
        assert float(metrics[f"val/best@{k}"]) == pytest.approx(float(expected_best(scores, k).mean()))
    assert "val/best@3" not in metrics
    validated(tmp_path, plain)
    assert all(torch.equal(weight, sampled.found[name]) for name, weight in plain.found.items())


@pytest.mark.parametrize("options", [{"temperature": 1e-6}, {"top_p": 1e-6}])
def test_answers_of_a_validation_may_be_drawn_otherwise(tmp_path: Path, options: dict[str, float]) -> None:
    """As good as greedily here, while the run draws at temperature 1."""
    CALLS.clear()
    metrics = validated(tmp_path, SampledValidation(4, **options)).callback_metrics
    drawn = [call for call in CALLS if len(call) in (16, 8)][-2:]
    assert all(len(set(call[n : n + 4])) == 1 for call in drawn for n in range(0, len(call), 4))
    assert float(metrics["val/mean@4"]) == pytest.approx(float(metrics["val/reward"]))


@dataclass(frozen=True, kw_only=True)
class Own(Actor):
    """Has a method from before calls had a `sampling`."""

    @register(transfer=MICRO_DP, reads=(*PROMPTS, "row_ids"), returns=ANSWERS)
    def generate_sequences(self, rows: TensorDict, *, greedy: bool = False) -> TensorDict:  # type: ignore[override]
        return self.answer(rows, greedy=greedy)


def test_an_actor_of_ones_own_that_cannot_draw_otherwise_is_refused_at_the_start(tmp_path: Path) -> None:
    own = Own(path=write_model(tmp_path), sampling=Sampling(max_new_tokens=2))
    algorithm = GRPO(actor=own, reward=Reward(functions=scored), group_size=2)
    drawing = trainer(Local(), tmp_path, callbacks=[SampledValidation(2)], limit_val_batches=1)
    (found,) = drawing.validate(algorithm, datamodule=prompts(), verbose=False)
    assert "val/mean@2" in found
    run = trainer(Local(), tmp_path, callbacks=[SampledValidation(top_p=0.7)], limit_val_batches=1)
    with pytest.raises(ValueError, match=r"\(temperature=None, top_p=0\.7\): Own\.generate_sequences has no"):
        run.fit(algorithm, datamodule=prompts())


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"SampledValidation\(samples=1\)"):
        SampledValidation(1)
    with pytest.raises(
        ValueError, match=r"SampledValidation\(temperature=0\): the answers to a prompt would"
    ):
        SampledValidation(temperature=0)
    with pytest.raises(ValueError, match=r"top_p=2: must lie in \(0, 1\]"):
        SampledValidation(top_p=2)
    with pytest.raises(ValueError, match="limit_val_batches=0 nothing is ever validated"):
        validated(tmp_path, SampledValidation(), limit_val_batches=0)
    trainer = pl.Trainer(strategy=Local(), callbacks=[SampledValidation()], logger=False, max_steps=1)
    with pytest.raises(ValueError, match="SampledValidation: SFT has no role `reward`"):
        trainer.fit(SFT(), datamodule=TaskData(batch_size=4, num_rows=8, completions=True))

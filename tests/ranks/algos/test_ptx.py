"""A pre-training loss in the actor's optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import GRPO, PPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import (
    CompletionData,
    MixedData,
    PreferenceData,
    PromptData,
    StepData,
    TaskData,
    TextData,
    UnpairedData,
)
from rlhf_lightning.engines import FSDPEngine
from rlhf_lightning.functional import Counts, Loss, PolicyLoss, SFTLoss
from rlhf_lightning.spec import ModelSpec, OptimizerSpec, Sampling
from rlhf_lightning.workers import Actor, Critic, Reward
from tests.unit.algos.short import grpo, refusal
from tests.unit.algos.small import Keep, run, write_rows


def ppo(path: str, coef: float) -> PPO:
    fast = OptimizerSpec(lr=1e-3)
    return PPO(
        actor=Actor(path=path, optimizer=fast, sampling=Sampling(max_new_tokens=6)),
        critic=Critic(optimizer=fast),
        reward=Reward(functions="length"),
        ptx_loss=SFTLoss(coef=coef),
    )


def prompts() -> TaskData:
    return TaskData(batch_size=6, num_rows=24, num_val_rows=0)


def mixed(tmp_path: Path) -> MixedData:
    texts = write_rows(
        tmp_path / "texts.jsonl", [{"text": f"text number {n} of the corpus"} for n in range(40)]
    )
    return MixedData(main=prompts(), ptx=TextData(path=texts, block_tokens=16, batch_size=3))


def test_with_coefficient_0_it_is_ppo_bit_for_bit(model: str, tmp_path: Path) -> None:
    plain = run(ppo(model, 0.0), prompts())
    beside = run(ppo(model, 0.0), mixed(tmp_path))
    for name, weight in plain.weights["actor"].items():
        assert torch.equal(weight, beside.weights["actor"][name]), name


def test_with_a_coefficient_it_learns_the_text_too(model: str, tmp_path: Path) -> None:
    kept: Keep = run(ppo(model, 1.0), mixed(tmp_path), steps=4)
    losses = [numbers["ptx/loss"] for numbers in kept.numbers]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("size", "parts"), [(0, [3, 3]), (3, [1, 2, 1, 2]), (1, [1, 1, 1] * 4)])
def test_each_step_of_an_epoch_learns_text_of_its_own(
    size: int, parts: list[int], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[torch.Tensor] = []
    accumulate = Actor.accumulate

    def noting(self: Actor, rows: TensorDict, **options: object) -> dict[str, float]:
        if isinstance(options["loss"], SFTLoss):
            assert options["temperature"] == 1
            learned.append(rows["response_ids"])
        return accumulate(self, rows, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Actor, "accumulate", noting)
    algorithm = ppo(model, 1.0)
    algorithm.mini_batch_size, algorithm.epochs = size, 2
    run(algorithm, mixed(tmp_path), steps=1)
    assert [len(ids) for ids in learned] == parts
    epoch = torch.cat(learned[: len(learned) // (4 if size == 1 else 2)])
    assert len(epoch.unique(dim=0)) == 3, "all three blocks, each once"


class Mine(PPO):
    """Whose advantages owe nothing to PPO's."""

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        advantages = batch["scores"].sum(dim=1, keepdim=True) * batch["response_mask"]
        batch |= {"advantages": advantages, "returns": advantages}
        return batch, Metrics()


def test_ones_own_advantages_learn_text_and_begin_each_iteration_anew(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")  # under which no two iterations happen to agree
    plain = ppo(model, 1.0)
    mine = Mine(**{field.name: getattr(plain, field.name) for field in fields(plain)})
    mine.stop_kl, mine.mini_batch_size = 0.0, 3
    kept = run(mine, mixed(tmp_path), steps=3)
    for name in ("ptx/loss", "actor/loss"):
        assert len({numbers[name] for numbers in kept.numbers}) == 3, name


def test_text_is_learned_at_temperature_1(model: str, tmp_path: Path) -> None:
    def first(temperature: float) -> float:
        algorithm = ppo(model, 1.0)
        algorithm.actor = replace(
            algorithm.actor, sampling=Sampling(max_new_tokens=6, temperature=temperature)
        )
        return run(algorithm, mixed(tmp_path), steps=1).numbers[0]["ptx/loss"]

    assert first(0.5) == pytest.approx(first(1.0), rel=1e-5)


def test_text_that_is_not_there_is_refused(model: str) -> None:
    with pytest.raises(ValueError, match="mixeddata"):
        run(ppo(model, 1.0), prompts())


@pytest.mark.parametrize(
    ("kind", "bad"),
    [(PreferenceData, "pairs"), (UnpairedData, "labels"), (StepData, "labels"), (CompletionData, "")],
)
def test_bad_answers_are_not_imitated(kind: type[PromptData], bad: str, tmp_path: Path) -> None:
    row = {"prompt": "a", "response": "b", "chosen": "b", "rejected": "c", "label": False}
    second = kind.from_rows([{**row, "steps": ["b"], "labels": [0]}], batch_size=1)
    told = refusal(ppo("embedded", 0.1), tmp_path, data=MixedData(main=prompts(), ptx=second))
    assert told.startswith(
        f"ptx_loss imitates every answer, and data.ptx, {kind.__name__}, gives {bad}: "
    ) or (told == "started" and not bad)


class Reading(GRPO):
    """Whose step may read the second batch."""

    def step(self, batch: Batch) -> Metrics:
        return super().step(batch)


@pytest.mark.parametrize(
    ("algorithm", "advice"),
    [
        (ppo("embedded", 0.0), "PPO does not learn from these rows. Type --algo.ptx_loss.coef 0.1."),
        (grpo(), "GRPO does not learn from these rows. Type the class of data.main as --data."),
        (ppo("embedded", 0.1), ""),
        (grpo(Reading), ""),
    ],
)
def test_a_second_batch_that_nothing_reads_is_said(
    algorithm: RLHFAlgorithm, advice: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert refusal(algorithm, tmp_path, data=mixed(tmp_path)) == "started"
    assert [r.getMessage() for r in caplog.records if "data.ptx" in r.getMessage()] == (
        [f"data.ptx: {advice}"] if advice else []
    )


def rows(seed: int, *, width: int) -> TensorDict:
    noise = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 250, (4, 3 + width), generator=noise)
    mask = torch.ones(4, width, dtype=torch.bool)
    columns = {
        "prompt_ids": ids[:, :3],
        "prompt_mask": torch.ones(4, 3, dtype=torch.bool),
        "response_ids": ids[:, 3:],
        "response_mask": mask,
        "log_probs": -torch.rand(4, width, generator=noise),
        "advantages": torch.randn(4, width, generator=noise),
    }
    return TensorDict(columns, batch_size=4)


def gradients(path: str, parts: Sequence[tuple[TensorDict, Loss]]) -> dict[str, torch.Tensor]:
    engine = FSDPEngine(ModelSpec(path=path))
    for batch, loss in parts:
        engine.accumulate(batch, loss, Counts.of(batch["response_mask"]), temperature=1.0)
    with engine.gathered() as module:
        return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def test_the_gradient_is_the_sum_of_both(model: str) -> None:
    policy, text = (rows(0, width=5), PolicyLoss()), (rows(1, width=7), SFTLoss(coef=0.3))
    first, second, both = (gradients(model, parts) for parts in ([policy], [text], [text, policy]))
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, first[name] + second[name], atol=1e-6, rtol=1e-5)
    assert max(float(g.abs().max()) for g in second.values()) > 1e-3

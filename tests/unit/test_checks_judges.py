"""What is refused of rewards and costs before anything is placed, by the names of their fields."""

from __future__ import annotations

import json
import logging
from dataclasses import field
from pathlib import Path

import pytest
from tensordict import TensorDict

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import PPO, SafeRLHF
from rlhf_lightning.controller import DP, Batch, Metrics, register
from rlhf_lightning.data import TaskData
from rlhf_lightning.spec import LoRA, Sampling
from rlhf_lightning.workers import Actor, Cost, Critic, Reward
from rlhf_lightning.workers.reward import CutOff
from tests.unit.algos.short import Started, refusal, trainer
from tests.unit.algos.small import write_judge, write_model


class Twofold(RLHFAlgorithm):
    """A process reward model beside a reward, and a cost of another name."""

    actor: Actor = field(default_factory=lambda: Actor(sampling=Sampling(max_new_tokens=2)))
    reward: Reward = field(default_factory=Reward)
    prm: Reward = field(default_factory=lambda: Reward(per_token="steps"))  # noqa: S106
    toxicity: Cost = field(default_factory=Cost)

    def step(self, batch: Batch) -> Metrics:
        return Metrics()


LENGTH = Reward(functions="length")


@pytest.mark.parametrize(
    ("roles", "told"),
    [
        (
            {},
            "prm.per_token=steps: a model scores the steps, and this reward has none. Type --algo.prm.path "
            "DIRECTORY, that of a process reward model, or --algo.prm.per_token outcome.",
        ),
        (
            {"prm": Reward()},
            "prm: it has neither functions nor a model, and there is no default. Type "
            "--algo.prm.functions exact_match (or your own, ",
        ),
        (
            {"prm": LENGTH},
            "toxicity: it has neither functions nor a model, and there is no default. Type "
            "--algo.toxicity.functions too_long (or your own, such as mypackage.mymodule.myfunction), or "
            "--algo.toxicity.path DIRECTORY, that of a cost model.",
        ),
        ({"prm": Reward(functions="length", truncated_penalty=-1.0)}, "prm.truncated_penalty=-1.0: it is"),
        ({"prm": LENGTH, "toxicity": Cost(functions="length", clip=0.0)}, "toxicity.clip=0.0: no score"),
        ({"prm": LENGTH, "toxicity": Cost(functions=["length"] * 2)}, "toxicity.functions: length is named"),
        (
            {"prm": LENGTH, "toxicity": Cost(functions="too_lon")},
            "toxicity function 'too_lon': it is not a short",
        ),
        ({"prm": LENGTH, "toxicity": Cost(functions="length")}, "started"),
        ({"reward": Reward(clip=-1.0)}, "reward.clip=-1.0: no score is left."),
        (
            {"reward": Reward(lora=LoRA(rank=8))},
            "reward.lora: nothing reads it, as no model scores. Type --algo.reward.path DIRECTORY, that of a "
            "reward model, or leave it out.",
        ),
        (
            {"prm": LENGTH, "toxicity": Cost(functions="length", dtype="bfloat16")},
            "toxicity.dtype: nothing reads it, as no model scores. Type --algo.toxicity.path DIRECTORY",
        ),
    ],
)
def test_a_judge_is_called_by_its_field(roles: dict[str, Reward | Cost], told: str, tmp_path: Path) -> None:
    assert refusal(Twofold(**roles), tmp_path).startswith(told)  # type: ignore[arg-type]


def test_a_model_of_steps_beside_a_reward(tmp_path: Path) -> None:
    prm = Reward(per_token="steps", path=write_judge(tmp_path / "prm"))  # noqa: S106
    assert refusal(Twofold(prm=prm, toxicity=Cost(functions="length")), tmp_path) == "started"


@pytest.mark.parametrize("name", ["reward", "cost"])
def test_a_judge_that_has_learned_nothing_is_refused(name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "fresh")
    cost = Cost(path=path)
    algorithm = SafeRLHF(cost=cost) if name == "cost" else PPO(reward=Reward(path=path))
    told = refusal(algorithm, tmp_path)
    assert told.startswith(f"{name}.path={path}: holds a config.json without weights, and a fresh model")
    assert refusal(PPO(critic=Critic(path=path)), tmp_path) == "started"


@pytest.mark.parametrize(
    ("pad", "steps", "warned"), [(258, False, True), (256, False, False), (258, True, False)]
)
def test_a_judge_that_pads_with_its_end_token_is_said(
    pad: int, steps: bool, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers are read there here; where transformers reads them, in the token before."""
    path = Path(write_judge(tmp_path / "judge"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"pad_token_id": pad}))
    reward = Reward(path=str(path), per_token="steps" if steps else "outcome")
    with caplog.at_level(logging.WARNING):
        assert refusal(PPO(reward=reward), tmp_path) == "started"
    found = [record.getMessage() for record in caplog.records if "pad" in record.getMessage()]
    assert [message.partition(". ")[0] for message in found] == [
        f"reward.path={str(path)!r}: its config.json pads rows with the end token '<eos>' (pad_token_id=258)"
    ] * warned


class Verdict(Reward):
    """Scores in a way of its own."""

    @register(transfer=DP, reads=("response_mask",), returns=("scores",))
    def compute_reward(self, rows: TensorDict, *, cut_off: CutOff | None = None) -> TensorDict:
        return TensorDict({"scores": rows["response_mask"].float()}, batch_size=rows.batch_size)


class Harm(Cost):
    """Scores in a way of its own."""

    @register(transfer=DP, reads=("response_mask",), returns=("costs",))
    def compute_cost(self, rows: TensorDict) -> TensorDict:
        return TensorDict({"costs": rows["response_mask"].float()}, batch_size=rows.batch_size)


def test_one_that_scores_by_itself_is_told_nothing(tmp_path: Path) -> None:
    assert refusal(Twofold(prm=Verdict(), toxicity=Harm()), tmp_path) == "started"


def test_a_cost_must_be_told_what_it_scores(tmp_path: Path) -> None:
    for cost in (Cost(), Cost(functions=[])):
        told = refusal(SafeRLHF(cost=cost), tmp_path)
        assert told.startswith("cost: it has neither functions nor a model, and there is no default.")
        assert "--algo.cost.functions too_long" in told
        assert "--algo.cost.path DIRECTORY" in told


def test_a_critic_is_of_a_family_that_has_heads(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"model_type": "granite"}))
    short = Actor(path=path, sampling=Sampling(max_new_tokens=2))
    told = refusal(PPO(actor=short, reward=LENGTH), tmp_path)
    assert told.startswith(f"critic.path={path}: a model of type granite, for which transformers has no seq")
    assert refusal(PPO(actor=short, reward=LENGTH, critic=Critic(path="embedded")), tmp_path) == "started"


def test_a_critic_that_is_not_built_is_of_any_family(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"model_type": "granite"}))
    run = trainer(Started(), tmp_path, limit_val_batches=None)
    data = TaskData(batch_size=2, num_rows=4, num_val_rows=2)
    for start in (run.validate, run.predict):
        with pytest.raises(RuntimeError, match="started"):
            start(PPO(actor=Actor(path=path), reward=LENGTH), datamodule=data)

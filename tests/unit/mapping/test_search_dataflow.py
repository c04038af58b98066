"""The dataflow is read from the algorithm: what is called, on how many rows, and what waits for what."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerState
from tensordict import TensorDict

from rlhf_lightning import algos
from rlhf_lightning.algos import GRPO, GSPO, KTO, PPO, SFT, ReMax
from rlhf_lightning.controller import DP, RANK_ZERO, Batch, Metrics, register
from rlhf_lightning.data import PromptData, RowData, TaskData
from rlhf_lightning.functional import PolicyLoss, SequencePolicyLoss
from rlhf_lightning.mapping.dataflow import Dataflow
from rlhf_lightning.mapping_inputs import read_dataflow
from rlhf_lightning.reporting import row_numbers
from rlhf_lightning.running import KLPenalty
from rlhf_lightning.strategies import Auto
from rlhf_lightning.workers import Actor, Cost, Critic, Judge, Reward
from tests.unit.algos.short import trainer

Read = dict[str, set[tuple[str, str, int, int]]]


def read(flow: Dataflow) -> Read:
    return {s.name: {(w.role, w.kind, w.rows, w.calls) for w in s.work} for s in flow.stages}


def model_reward() -> Reward:
    return Reward(path="embedded")


def test_ppo_after_its_warm_up() -> None:
    algorithm = PPO(reward=model_reward(), mini_batch_size=8, epochs=2, critic_warmup_steps=50)
    assert read(read_dataflow(algorithm, 32)) == {
        "generation": {("actor", "generate", 32, 1)},
        "preparation": {
            ("critic", "infer", 32, 1),
            ("reference", "infer", 32, 1),
            ("reward", "infer", 32, 1),
        },
        "training": {("critic", "train", 64, 8), ("actor", "train", 64, 8)},
    }


def test_the_algorithm_itself_is_left_alone() -> None:
    algorithm = PPO(kl=KLPenalty(target=0.1))
    read_dataflow(algorithm, 4)
    assert float(algorithm.running.kl_coef) == pytest.approx(0.05)
    assert all(role.binding.caller is None for role in algorithm.roles().values())


def test_a_group_of_answers_and_a_reward_of_functions() -> None:
    flow = read_dataflow(GRPO(group_size=4), 8)
    assert read(flow)["generation"] == {("actor", "generate", 32, 1)}
    assert read(flow)["preparation"] == {("reference", "infer", 32, 1), ("reward", "function", 32, 1)}
    assert flow.roles == ("actor", "reference")
    assert flow.rows == 32


@pytest.mark.parametrize("name", ["DAPO", "GRPO", "ReMax", "ReinforcePP"])
@pytest.mark.parametrize(("in_loss", "in_reward"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.1)])
def test_the_reference_is_asked_only_where_a_divergence_counts(
    name: str, in_loss: float, in_reward: float
) -> None:
    options = {"policy_loss": PolicyLoss(kl_coef=in_loss), "reward_kl_coef": in_reward}
    algorithm = getattr(algos, name)(**options)
    flow = read_dataflow(algorithm, 16)
    assert ("reference" in flow.roles) is bool(in_loss or in_reward)
    assert algorithm.uncalled() == (() if in_loss or in_reward else ("reference",))


def test_an_actor_that_scores_its_answers_again() -> None:
    """One more pass, within the call that answers, for which the others wait; not of greedy answers."""
    found = read_dataflow(GSPO(group_size=4, policy_loss=SequencePolicyLoss(kl_coef=0.1)), 8)
    assert read(found) == {
        "generation": {("actor", "generate", 32, 1)},
        "preparation": {("actor", "infer", 32, 1)},
        "preparation 2": {("reference", "infer", 32, 1), ("reward", "function", 32, 1)},
        "training": {("actor", "train", 32, 1)},
    }
    baseline = read_dataflow(ReMax(actor=Actor(recompute_log_probs=True), group_size=4), 8)
    actor = [(w.kind, w.rows) for s in baseline.stages for w in s.work if w.role == "actor"]
    assert actor == [("generate", 8), ("generate", 32), ("infer", 32), ("train", 32)]


def test_training_alone() -> None:
    assert read(read_dataflow(SFT(mini_batch_size=4), 8)) == {"training": {("actor", "train", 8, 2)}}


def test_answers_to_other_prompts() -> None:
    found = read(read_dataflow(KTO(), 8))
    assert {work for stage in found.values() for work in stage if work[1] == "infer"} == {
        ("reference", "infer", 16, 2),
        ("actor", "infer", 8, 1),
    }


@pytest.mark.parametrize("name", algos.__all__)
def test_every_algorithm_can_be_read(name: str) -> None:
    options = {"cost": Cost(functions="too_long")} if name == "SafeRLHF" else {}
    algorithm = getattr(algos, name)(**options)
    flow = read_dataflow(algorithm, 16)
    models = [role for role, model in algorithm.roles().items() if not isinstance(model, Judge)]
    assert [role for role in models if role not in flow.roles] == [
        role for role in algorithm.uncalled() if role in models
    ]
    assert [stage.name for stage in flow.stages][-1].startswith("training")
    assert {w.role for w in flow.stages[-1].work} >= ({"actor"} if "actor" in flow.roles else {flow.roles[0]})


class Greedy(PPO):
    """A second, greedy generation as the baseline, as in ReMax."""

    def step(self, batch: Batch) -> Metrics:
        greedy = batch | self.actor.generate_sequences(batch, greedy=True)
        batch |= self.actor.generate_sequences(batch)
        batch |= self.reference.compute_ref_log_prob(batch)
        batch |= self.reward.compute_reward(batch)
        baseline = self.reward.compute_reward(greedy)["scores"]
        batch |= {"advantages": batch["scores"] - baseline}
        return self.actor.update_actor(batch, loss=self.policy_loss)


def test_two_generations_share_a_stage() -> None:
    flow = read_dataflow(Greedy(reward=model_reward()), 8)
    assert read(flow) == {
        "generation": {("actor", "generate", 16, 2)},
        "preparation": {("reference", "infer", 8, 1), ("reward", "infer", 16, 2)},
        "training": {("actor", "train", 8, 1)},
    }
    assert flow.rows == 8


class Revising(PPO):
    """Answers, has the answer judged, and answers once more; a second judge reads the first one's values."""

    judge: Critic

    def step(self, batch: Batch) -> Metrics:
        batch |= self.actor.generate_sequences(batch)
        batch |= self.critic.compute_values(batch)
        mean = batch["values"].mean()
        again = batch | {"row_ids": batch["row_ids"] + int(mean)}
        batch |= self.actor.generate_sequences(again)
        batch |= self.critic.compute_values(batch)
        batch["values"].mean()
        return self.judge.update_critic(
            batch | {"returns": batch["values"]} | self.judge.compute_values(batch), loss=self.value_loss
        )


def test_what_waits_comes_a_stage_later() -> None:
    flow = read_dataflow(Revising(judge=Critic()), 8)
    assert [(s.name, [w.role for w in s.work]) for s in flow.stages] == [
        ("generation", ["actor"]),
        ("preparation", ["critic"]),
        ("generation 2", ["actor"]),
        ("preparation 2", ["critic"]),
        ("preparation 3", ["judge"]),
        ("training", ["judge"]),
    ]


class Whole(GRPO):
    """Learns from whole answers by their turns, and looks at what the update said."""

    def step(self, batch: Batch) -> Metrics:
        """One update, and another one where the first changed little."""
        batch = batch.repeat(self.group_size)
        batch |= self.actor.generate_sequences(batch)
        batch |= self.reward.compute_reward(batch)
        batch = batch.take((~batch["row_truncated"]).nonzero()[:, 0].tolist())
        each = batch["scores"].sum(1) / batch["row_turns"]
        batch |= {"advantages": each[:, None] * batch["response_mask"]}
        metrics = self.actor.update_actor(batch, loss=self.policy_loss)
        if metrics.fetch()["actor/approx_kl"] < 0.1:
            metrics |= self.actor.update_actor(batch, loss=self.policy_loss)
        return metrics


def test_a_step_reads_what_answers_and_updates_say() -> None:
    once = read(read_dataflow(Whole(policy_loss=PolicyLoss(), group_size=2), 4))["training"]
    assert once == {("actor", "train", 16, 2)}
    assert read(read_dataflow(PPO(stop_kl=0.1), 4)) == read(read_dataflow(PPO(), 4))


class Hinted(GRPO):
    """Reads a field of the rows."""

    def step(self, batch: Batch) -> Metrics:
        """As GRPO does, where all rows have hints."""
        hints = [cast(dict[str, int], row)["hint"] for row in batch.objects("rows")]
        return super().step(batch) if hints == [0, 1, 2, 0] else Metrics()


def test_the_raw_rows_are_those_of_the_data(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "a", "hint": {n}}}\n' for n in range(3)))
    data = PromptData(path=str(file), tokenizer="embedded", batch_size=3)
    data.setup("fit")
    algorithm = Hinted(group_size=2)
    with pytest.raises(ValueError, match=r"KeyError: 'hint'\. Most metrics are missing there"):
        read_dataflow(algorithm, 4)
    algorithm._trainer = cast(Trainer, SimpleNamespace(datamodule=data, state=TrainerState()))
    assert read(read_dataflow(algorithm, 4)) == read(read_dataflow(GRPO(group_size=2), 4))


class Adaptive(GRPO):
    """Reads a metric of a built-in loss that no recorded update reports."""

    def step(self, batch: Batch) -> Metrics:
        """As GRPO does, and looks at the divergence."""
        metrics = super().step(batch)
        return metrics | {"mine/kl": metrics.fetch()["actor/kl_loss"]}


def test_built_in_metrics_may_be_missing_too() -> None:
    with pytest.raises(ValueError, match=r"KeyError: 'actor/kl_loss'\. Most metrics are missing there"):
        read_dataflow(Adaptive(group_size=2), 4)


class Logged(GRPO):
    """Logs numbers of its own, as Lightning has it."""

    def step(self, batch: Batch) -> Metrics:
        self.log("mine/rows", float(len(batch)), on_step=True)
        self.log_dict({"mine/one": 1.0})
        return super().step(batch)


def test_a_step_may_log() -> None:
    algorithm = Logged(group_size=2)
    assert read(read_dataflow(algorithm, 4)) == read(read_dataflow(GRPO(group_size=2), 4))
    assert not {"log", "log_dict"} & {*vars(algorithm)}


class SetUp(GRPO):
    """Reads what its `setup` makes."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.register_buffer("rates", torch.zeros(4))

    def step(self, batch: Batch) -> Metrics:
        return super().step(batch | {"rates": cast(torch.Tensor, self.rates)})


def test_what_setup_makes_is_told_to_be_missing() -> None:
    with pytest.raises(ValueError, match=r"no attribute 'rates'\. `rlhf map` does not run `setup`, and what"):
        read_dataflow(SetUp(), 4)


class ByRow(GRPO):
    """Reads what its `setup` makes for each row of the data."""

    def setup(self, stage: str) -> None:
        """Make rates, once."""
        super().setup(stage)
        assert not hasattr(self, "rates")
        data = cast(RowData, self.trainer.datamodule)  # type: ignore[attr-defined]
        self.register_buffer("rates", torch.zeros(len(data.train_rows)))

    def step(self, batch: Batch) -> Metrics:
        return super().step(batch | {"rates": cast(torch.Tensor, self.rates)[row_numbers(batch)]})


class StartedAuto(Auto):
    """Fails once it is to start."""

    def setup(self, trainer: Trainer) -> None:
        raise RuntimeError("started")


def test_a_copy_is_set_up_before_its_step_is_read(tmp_path: Path) -> None:
    """And the algorithm itself afterwards, as ever."""
    algorithm, run = ByRow(), trainer(StartedAuto(devices=1), tmp_path)
    with pytest.raises(RuntimeError, match=r"^started$"):
        run.fit(algorithm, datamodule=TaskData(batch_size=4, num_rows=8))
    assert cast(torch.Tensor, algorithm.rates).shape == (8,)


class Broken(PPO):
    def step(self, batch: Batch) -> Metrics:
        return Metrics.of({"x": float(batch["images"].sum())})


def test_a_step_that_fails_is_named() -> None:
    with pytest.raises(ValueError, match=r"Broken: its dataflow is read.*no column 'images'"):
        read_dataflow(Broken(), 4)


@dataclass(frozen=True, kw_only=True)
class Own(Actor):
    """An actor with methods of a user."""

    @register(transfer=RANK_ZERO)
    def share(self) -> float:
        """A number of the model."""
        return 0.5

    @register(transfer=DP, reads=("response_mask",), returns=("row_length", "length"))
    def measure(self, rows: TensorDict) -> TensorDict:
        """A number for each row, under two names."""
        length = rows["response_mask"].sum(dim=1).float()
        return TensorDict({"row_length": length, "length": length}, batch_size=rows.batch_size)


class Measured(GRPO):
    """Learns from what its own methods say."""

    actor: Own = field(default_factory=Own)
    reads: str = "row_length"

    def step(self, batch: Batch) -> Metrics:
        """One update by the lengths, or by the model's number."""
        batch |= self.actor.generate_sequences(batch)
        batch |= self.actor.measure(batch)
        each = self.actor.share().fetch() if self.reads == "share" else batch[self.reads]
        batch |= {"advantages": (each * torch.ones(len(batch)))[:, None] * batch["response_mask"]}
        return self.actor.update_actor(batch, loss=PolicyLoss())


def test_a_column_of_ones_own_is_by_row_where_its_name_says_so() -> None:
    assert read(read_dataflow(Measured(), 4))["training"] == {("actor", "train", 4, 1)}


class Told(Measured):
    """Asks for the model's number, and does not wait for it."""

    def step(self, batch: Batch) -> Metrics:
        self.actor.share()
        return super().step(batch)


def test_methods_of_ones_own_that_read_no_prompts_run_no_model() -> None:
    """One counts the tokens of a mask, and one has no rows: neither is a pass."""
    work = [work for stage in read_dataflow(Told(), 4).stages for work in stage.work]
    mine = sorted((each.kind, each.rows) for each in work if each.role == "actor")
    assert mine == [("function", 0), ("function", 4), ("generate", 4), ("train", 4)]


@pytest.mark.parametrize("reads", ["length", "share"])
def test_a_step_that_needs_values_of_its_own_is_told_to_place_its_models(reads: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"Measured: its dataflow is read.*Values and columns of methods of your own are made up there: "
        r"where `step` needs true ones, give a run the placement, --strategy\.mapping\.pools "
        r"'\[\{roles: \[actor, reference, reward\], devices: N\}\]' or several such pools, or another str",
    ):
        read_dataflow(Measured(reads=reads), 4)

"""What an algorithm refuses before anything is placed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import field
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from rlhf_lightning.algorithm import Columns, RLHFAlgorithm
from rlhf_lightning.algos import GRPO, PPO, RewardModel, SafeRLHF
from rlhf_lightning.callbacks import SampledValidation, SampleTable, ValidateFirst
from rlhf_lightning.controller import Batch, Metrics, WorkerError
from rlhf_lightning.data import PromptData, TaskData
from rlhf_lightning.rewards import Environment
from rlhf_lightning.spec import LoRA, OptimizerSpec, Sampling
from rlhf_lightning.strategies import Colocated, HybridEngine3D, Local
from rlhf_lightning.strategies.hybrid3d import Parallel3D, Sizes
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, Cost, Critic, Reference, Reward
from tests.unit.algos.short import Started, refusal, trainer
from tests.unit.algos.small import write_model, write_rows


class Unjudged(RLHFAlgorithm):
    """Answers, and has nothing that scores answers."""

    actor: Actor = field(default_factory=lambda: Actor(sampling=Sampling(max_new_tokens=2)))

    def step(self, batch: Batch) -> Metrics:
        self.actor.generate_sequences(batch)
        return Metrics()


class InItsOwnWay(Unjudged):
    """Validates without scores."""

    def validation_step(self, batch: Columns, batch_idx: int) -> None:
        """Nothing."""


def test_held_out_answers_need_a_reward(tmp_path: Path) -> None:
    told = refusal(Unjudged(), tmp_path)
    assert told.startswith("Unjudged has no field `reward: Reward`, which scores held-out answers.")


def test_a_judge_has_a_head(tmp_path: Path) -> None:
    judged = {"reward": PPO(reward=Reward(path="embedded")), "cost": SafeRLHF(cost=Cost(path="embedded"))}
    for role, algorithm in judged.items():
        told = refusal(algorithm, tmp_path)
        assert told.startswith(f"{role}.path=embedded: its weights have no score.weight, the head")
    assert refusal(PPO(critic=Critic(path="embedded")), tmp_path) == "started"


def test_attention_that_cannot_be_packed_is_known_from_the_configuration(tmp_path: Path) -> None:
    capped = Path(write_model(tmp_path / "capped"))
    config = json.loads((capped / "config.json").read_text())
    (capped / "config.json").write_text(json.dumps(config | {"attn_logit_softcapping": 50.0}))
    told = refusal(PPO(reference=Reference(path=str(capped))), tmp_path)
    assert told.startswith(f"reference.path={capped}: a model of type llama, which caps its attention logits")


def test_what_speaks_is_no_judge(tmp_path: Path) -> None:
    scalar = Path(write_model(tmp_path / "scalar"))
    save_file({"score.weight": torch.ones(1, 8)}, scalar / "model.safetensors")
    assert refusal(PPO(actor=Actor(path=str(scalar))), tmp_path).startswith(
        f"actor.path={scalar}: its weights have score.weight, the head of a reward, cost or value model."
    )
    told = refusal(PPO(reference=Reference(path=str(scalar))), tmp_path)
    assert told.startswith(f"reference.path={scalar}: its weights have score.weight")


@pytest.mark.parametrize(
    ("held_out", "limit", "message"),
    [
        ({"data_source": "other"}, None, "no function scores the data source 'other'"),
        ({"data_source": "known"}, None, "exact_match compares with the row's field 'answer'"),
        ({"data_source": "other"}, 0, "started"),
    ],
)
def test_rewards_are_tried_out_on_held_out_rows(
    held_out: dict[str, object], limit: int | None, message: str, tmp_path: Path
) -> None:
    row: dict[str, object] = {"prompt": "a", "answer": "b", "data_source": "known"}
    path, val_path = tmp_path / "rows.jsonl", tmp_path / "val.jsonl"
    write_rows(path, [row] * 4)
    write_rows(val_path, [{"prompt": "a", **held_out}])
    data = PromptData(path=str(path), val_path=str(val_path), batch_size=2)
    judge = Reward(by_source={"known": {"exact_match": 1.0}})
    assert message in refusal(PPO(reward=judge), tmp_path, data=data, limit=limit)


def test_environments_are_tried_out_on_held_out_rows(tmp_path: Path) -> None:
    path, val_path = tmp_path / "rows.jsonl", tmp_path / "val.jsonl"
    data = PromptData(
        path=write_rows(path, [{"prompt": "a", "answer": "b", "hint": "c"}] * 4),
        val_path=write_rows(val_path, [{"prompt": "a", "answer": "b"}]),
        batch_size=2,
    )
    speaking = Actor(environment=Environment(function=f"{__name__}.hint"))
    assert "KeyError" in refusal(PPO(actor=speaking), tmp_path, data=data)
    assert refusal(PPO(actor=speaking), tmp_path, data=data, limit=0) == "started"


def hint(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[str]:
    """What comes after a first answer."""
    return [str(row["hint"]) for row in rows]


def test_nothing_to_validate_on_and_nobody_to_answer(tmp_path: Path) -> None:
    run = pl.Trainer(strategy=Started(), logger=False, default_root_dir=tmp_path)
    data = TaskData(batch_size=2, num_rows=4, num_val_rows=0)
    with pytest.raises(ValueError, match=r"^validate: TaskData holds no rows out .*data\.num_val_rows"):
        run.validate(PPO(), datamodule=data)
    with pytest.raises(ValueError, match=r"^validate: trainer\.limit_val_batches=0 leaves nothing to"):
        trainer(Started(), tmp_path, limit_val_batches=0).validate(PPO(), datamodule=TaskData(batch_size=2))
    for callback in (SampleTable(), SampledValidation(), ValidateFirst()):
        run = pl.Trainer(strategy=Started(), logger=False, callbacks=callback, default_root_dir=tmp_path)
        with pytest.raises(ValueError, match=rf"^{type(callback).__name__}: TaskData holds no rows out"):
            run.fit(PPO(), datamodule=data)
    run = pl.Trainer(strategy=Started(), logger=False, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=r"RewardModel has no field `actor: Actor`"):
        run.predict(RewardModel(), datamodule=data)


def test_a_path_in_place_of_an_actor_is_no_lack_of_one() -> None:
    with pytest.raises(ValueError, match=r"^GRPO\(actor='embedded'\): has to be of type Actor"):
        GRPO(actor="embedded")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "algorithm", "told"),
    [
        (
            HybridEngine3D(),
            PPO(critic=Critic(lora=LoRA(rank=4))),
            "critic.lora with strategy.settings.engine=megatron: only the FSDP engine trains adapters",
        ),
        (
            Colocated(devices=1),
            PPO(reference=Reference(lora=LoRA(rank=4))),
            "reference.lora: this model is not trained. Leave it out.",
        ),
        (HybridEngine3D(devices=3, parallel=Parallel3D(roles={"critic": Sizes(t=3)})), PPO(), "t=3"),
        (
            Colocated(devices=1),
            PPO(critic=Critic(lora=LoRA(rank=4, target_modules=("foo",)))),
            "critic.lora.target_modules: LlamaForSequenceClassification has no linear layers called 'foo'",
        ),
        (Colocated(devices=1), PPO(critic=Critic(lora=LoRA(path="x"))), "critic.lora.path=x: there is no"),
    ],
    ids=["megatron", "frozen", "heads", "layers", "adapters"],
)
def test_roles_that_follow_the_actor_are_checked_as_it_is(
    strategy: Strategy, algorithm: PPO, told: str, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    run = pl.Trainer(strategy=strategy, logger=False, default_root_dir=tmp_path, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r".") as error:
        run.fit(algorithm, datamodule=TaskData(batch_size=3, num_rows=6, num_val_rows=0))
    assert told in str(error.value)


def test_stop_tokens_are_tokens_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"stop_token_ids=\[3, -5\]: a token's number is not negative"):
        Sampling(stop_token_ids=(3, -5))
    for token, told in (
        (264, "actor.sampling.stop_token_ids=[7, 264]: the model has the tokens 0 to 263"),
        (263, "started"),
    ):
        stops = Actor(sampling=Sampling(stop_token_ids=(7, token), max_new_tokens=2))
        assert refusal(PPO(actor=stops), tmp_path).startswith(told)


@pytest.mark.parametrize("texts", [("",), ["ok", ""]], ids=repr)
def test_texts_to_stop_at_are_a_list_of_texts(texts: object) -> None:
    with pytest.raises(ValueError, match=r"sampling.stop_strings=.*give a list of texts, none of them empty"):
        Sampling(stop_strings=texts)  # type: ignore[arg-type]
    assert Sampling(stop_strings=["</answer>"]).stop_strings == ("</answer>",)  # type: ignore[arg-type]


def test_a_judge_has_one_output(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write_model(tmp_path / "model"), num_labels=2)
    classifier = AutoModelForSequenceClassification.from_config(config)
    path = str(tmp_path / "model")
    classifier.save_pretrained(path)
    for algorithm in (PPO(reward=Reward(path=path)), PPO(critic=Critic(path=path))):
        told = refusal(algorithm, tmp_path)
        assert f".path={path}: is a classifier of 2 classes (score.weight is [2, " in told


def test_the_same_tokenizer_elsewhere_and_none_are_taken(tmp_path: Path) -> None:
    same = write_model(tmp_path / "same")
    assert refusal(PPO(critic=Critic(path=same)), tmp_path) == "started"
    assert Reward(path=same, tokenizer="embedded").retelling is None
    path = write_model(tmp_path / "without")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (Path(path) / file).unlink()
    assert refusal(PPO(critic=Critic(path=path)), tmp_path) == "started"


def test_without_held_out_rows_none_is_needed(tmp_path: Path) -> None:
    assert refusal(Unjudged(), tmp_path, held_out=0) == "started"
    assert refusal(Unjudged(), tmp_path, limit=0) == "started"
    assert refusal(InItsOwnWay(), tmp_path) == "started"


class Bare(Unjudged):
    """A role without its type."""

    critic = Critic()


class Several(Unjudged):
    """Roles in a tuple."""

    judges: tuple[Reward, ...] = field(default_factory=lambda: (Reward(), Reward()))


class Named(Unjudged):
    """Roles in a dictionary."""

    judges: dict[str, Reward] = field(default_factory=lambda: {"a": Reward()})


class Empty(Unjudged):
    """A constructor that forgets its base."""

    def __init__(self) -> None:
        self.mine = 1


class Stepping(Unjudged):
    """Lightning's way of an iteration."""

    def training_step(self, batch: Columns, batch_idx: int) -> None:  # type: ignore[misc]
        """Nothing."""


class Optimizing(Unjudged):
    """Lightning's way of an optimizer."""

    def configure_optimizers(self) -> None:  # type: ignore[misc, override]
        """None."""


class Speaking(RLHFAlgorithm):
    """Two that answer, neither of them the actor."""

    generator: Actor = field(default_factory=Actor)
    judge: Actor = field(default_factory=Actor)

    def step(self, batch: Batch) -> Metrics:
        return Metrics()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            Bare,
            "Bare.critic is not a field, so nothing places it. Write `critic: Critic = "
            "field(default_factory=",
        ),
        (Several, "Several.judges holds roles in a tuple, where nothing places them. Give each a field"),
        (Named, "Named.judges holds roles in a dict, where nothing places them."),
        (Empty, "Empty has no field with a model to train, such as `actor`. A constructor of its own calls"),
        (
            lambda: PPO(reference=Reference(optimizer=OptimizerSpec(lr=1e-3))),
            "reference.optimizer: nothing trains this model, so nothing reads it. Leave it out.",
        ),
        (Stepping, "Stepping.training_step replaces what runs an algorithm. Write step(self, batch): it"),
        (
            Optimizing,
            "Optimizing.configure_optimizers replaces what runs an algorithm. Each model has an AdamW",
        ),
        (
            Speaking,
            "Speaking has no field called actor, and answers as generator and judge. Call one of them",
        ),
    ],
)
def test_fields_that_cannot_be(make: Callable[[], RLHFAlgorithm], told: str, tmp_path: Path) -> None:
    assert refusal(make(), tmp_path).startswith(told)


class Unwritten(RLHFAlgorithm):
    """A class whose `step` has another name."""

    actor: Actor = field(default_factory=Actor)

    def steps(self, batch: Batch) -> Metrics:
        """Nobody calls it."""
        return Metrics()


def test_a_step_is_asked_for_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"Unwritten has no step, so nothing would be learned\. Write `def step"
    ):
        fit(Unwritten(), tmp_path)  # type: ignore[abstract]


class Returning(Unjudged):
    """A `step` that returns something else."""

    returned: object = None

    def step(self, batch: Batch) -> Metrics:
        return self.returned  # type: ignore[return-value]


def fit(algorithm: RLHFAlgorithm, root: Path) -> pl.Trainer:
    run = pl.Trainer(
        strategy=Local(), logger=False, max_steps=1, default_root_dir=root, enable_checkpointing=False
    )
    run.fit(algorithm, datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=0))
    return run


class Exhausted(Unjudged):
    """A `step` that takes from an iterator which has nothing."""

    def step(self, batch: Batch) -> Metrics:
        return next(iter(()))


def test_a_step_that_comes_to_the_end_of_an_iterator_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"Exhausted\.step took from an iterator that had come to its end"):
        fit(Exhausted(), tmp_path)


def test_what_a_step_returns(tmp_path: Path) -> None:
    assert (
        fit(Returning(returned={"mine/number": torch.tensor(2.0)}), tmp_path).logged_metrics["mine/number"]
        == 2
    )
    with pytest.raises(
        TypeError, match=r"Returning\.step returned a NoneType\. Return what the updates returned"
    ):
        fit(Returning(), tmp_path)
    many = r"metric 'mine/scores': tensor\(\[0\., 0\.\]\) is not a single number"
    with pytest.raises(TypeError, match=many):
        fit(Returning(returned={"mine/scores": torch.zeros(2)}), tmp_path)


class Spoiled(PPO):
    """Advantages of one number a response, or that are none."""

    none: bool = False

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Put them in the place of the right ones."""
        found, metrics = super().compute_advantage(batch)
        advantages = found["advantages"]
        wrong = torch.full_like(advantages, math.nan) if self.none else advantages[:, 0]
        return found | {"advantages": wrong}, metrics


def spoiled(model: str, *, none: bool) -> Spoiled:
    actor = Actor(path=model, sampling=Sampling(max_new_tokens=2))  # as many tokens as rows
    return Spoiled(actor=actor, reward=Reward(functions="length"), none=none)


def test_a_number_for_each_response_is_no_column(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"a column of shape \[2\] where the mask is \[2, 2\]"):
        fit(spoiled(write_model(tmp_path), none=False), tmp_path)


def test_a_skipped_step_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = fit(spoiled(write_model(tmp_path), none=True), tmp_path)
    assert run.logged_metrics["actor/skipped_steps"] == 1
    (told,) = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert told.startswith("an optimizer step was skipped: ")
    assert "actor/grad_norm" in told
    assert "critic" not in told


def test_a_role_set_in_a_constructor_is_no_field(tmp_path: Path) -> None:
    algorithm = Unjudged()
    algorithm.second = Critic()  # type: ignore[assignment]
    assert refusal(algorithm, tmp_path).startswith("Unjudged.second is not a field")

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.types import STEP_OUTPUT
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.algos import GRPO, SFT
from rlhf_lightning.callbacks import SecondReward
from rlhf_lightning.controller import DP, register
from rlhf_lightning.controller.device import Placement
from rlhf_lightning.data import TaskData
from rlhf_lightning.rewards import HTTPOptions
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reward, Role
from tests.unit.algos.short import trainer
from tests.unit.callbacks.module import Tiny, data, fit, trainer_in
from tests.unit.rewards.services import Answer, service
from tests.unit.rlhf import Rlhf

CHARACTERS = {"length": 256.0}
"""A point for each character."""
Validation = list[tuple[list[float], list[int]]]
"""Scores and lengths of the answers, batch by batch."""
SANITY: Validation = [([1000.0], [1]), ([-1000.0], [90])]
FIRST: Validation = [([0.0, 10.0], [2, 4]), ([5.0], [3])]
SPREAD = (50 / 3) ** 0.5, (2 / 3) ** 0.5
"""Standard deviations over the rows of FIRST: scores 0 10 5, lengths 2 4 3."""


class Scripted(Tiny):
    """The validation after step 2 n hands out the n-th entry of a script; number 0 is the sanity check's."""

    def __init__(self, *script: Validation) -> None:
        super().__init__()
        self.script = [SANITY, *script]

    def validation_step(self, batch: Tensor, batch_idx: int) -> STEP_OUTPUT:
        scores, lengths = self.script[self.global_step // 2][batch_idx]
        rows = [{"prompt": "p", "data_source": "any"} for _ in lengths]
        return {"answers": ["x" * length for length in lengths], "scores": scores, "rows": rows}


class Keep(Callback):
    """The metrics after each validation."""

    def __init__(self) -> None:
        self.numbers: list[tuple[float, float]] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = trainer.callback_metrics
        if not trainer.sanity_checking:
            self.numbers.append((float(found["val/second_reward"]), float(found["val/reward_gap"])))


def logged(root: Path, *script: Validation) -> list[tuple[float, float]]:
    """Second reward and gap after each validation of a script."""
    keep = Keep()
    fit(trainer_in(root, [SecondReward(CHARACTERS), keep], steps=2 * len(script)), Scripted(*script))
    return keep.numbers


def test_numbers_by_hand(tmp_path: Path) -> None:
    """Each change in its own unit, over all rows: the second batch has fewer than the first."""
    up, down = [([10.0, 10.0], [2, 2]), ([10.0], [2])], [([5.0, 2.0], [1, 1]), ([5.0], [4])]
    (first, none), (second, apart), (third, back) = logged(tmp_path, FIRST, up, down)
    assert (first, none) == (3.0, 0.0)
    assert second == 2.0
    assert apart == pytest.approx(5 / SPREAD[0] + 1 / SPREAD[1])
    assert third == 2.0
    assert back == pytest.approx(-1 / SPREAD[0] + 1 / SPREAD[1])


def test_rewards_of_other_scales_that_rise_together_have_no_gap(tmp_path: Path) -> None:
    both: Validation = [([0.0, 600.0], [1, 7]), ([200.0], [3])]
    more: Validation = [([700.0, 900.0], [8, 10]), ([300.0], [4])]
    assert [gap for _, gap in logged(tmp_path, both, more)] == [0.0, pytest.approx(0.0, abs=1e-6)]


def test_a_change_has_no_unit_where_all_rows_scored_the_same(tmp_path: Path) -> None:
    same: Validation = [([1.0, 1.0], [2, 4]), ([1.0], [3])]
    later: Validation = [([3.0, 3.0], [2, 4]), ([3.0], [3])]
    assert logged(tmp_path, same, later)[1] == (3.0, 2.0)


HACKED: list[Validation] = [[([float(n), n + 2.0], [9 - n, 11 - n]), ([n + 1.0], [10 - n])] for n in range(6)]
"""The training reward rises by 1 a validation, the second falls by as much; both spread by (2/3)^0.5."""


@pytest.mark.parametrize(
    ("stopping", "step"),
    [
        (EarlyStopping("val/reward_gap", divergence_threshold=4.0, patience=1000), 6),  # 2 * 2.45 > 4
        (EarlyStopping("val/second_reward", mode="max", patience=3), 8),  # best at the first, then 3 worse
        (EarlyStopping("val/second_reward", mode="min", patience=3), 12),  # never: the script's end
    ],
    ids=["gap", "second", "never"],
)
@pytest.mark.parametrize("before", [True, False])
def test_lightnings_early_stopping_reads_it(
    tmp_path: Path, stopping: EarlyStopping, step: int, before: bool
) -> None:
    callbacks: list[Callback] = [SecondReward(CHARACTERS), deepcopy(stopping)]
    trainer = trainer_in(tmp_path, callbacks if before else callbacks[::-1], steps=12)
    fit(trainer, Scripted(*HACKED))
    assert trainer.global_step == step


def test_a_resumed_run_goes_on_from_the_same_baseline(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    whole, resumed = Keep(), Keep()
    callbacks: list[Callback] = [SecondReward(CHARACTERS), whole, saver]
    fit(trainer_in(tmp_path, callbacks, steps=8, checkpoints=True), Scripted(*HACKED))
    again = trainer_in(tmp_path, [SecondReward(CHARACTERS), resumed], steps=8)
    fit(again, Scripted(*HACKED), str(tmp_path / "step=3.ckpt"))
    assert resumed.numbers == whole.numbers[1:]


def test_a_second_run_has_a_baseline_of_its_own(tmp_path: Path) -> None:
    second, keep = SecondReward(CHARACTERS), Keep()
    fit(trainer_in(tmp_path, [second], steps=12), Scripted(*HACKED))
    fit(trainer_in(tmp_path, [second, keep], steps=2), Scripted(FIRST))
    assert [gap for _, gap in keep.numbers] == [0.0]


def test_a_validation_alone_has_no_gap(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, [SecondReward(CHARACTERS)])
    (found,) = trainer.validate(Scripted(FIRST), data(), verbose=False)
    assert "val/second_reward" in found
    assert "val/reward_gap" not in found


def trainer_on(strategy: Local, root: Path, second: SecondReward, *, limit: float = 1.0) -> pl.Trainer:
    """Four iterations, of which every second is validated and saved."""
    stopping = EarlyStopping("val/reward_gap", divergence_threshold=1.0, patience=1000)
    saving = ModelCheckpoint(root, filename="{step}", save_top_k=-1, monitor="val/second_reward")
    often: dict[str, object] = {"val_check_interval": 2, "limit_val_batches": limit}
    callbacks = [second, stopping, saving]
    return trainer(strategy, root, steps=4, callbacks=callbacks, enable_checkpointing=True, **often)


def grpo(**options: object) -> GRPO:
    """The embedded model on its way to longer answers."""
    actor = Actor(optimizer=OptimizerSpec(lr=1e-3), sampling=Sampling(max_new_tokens=8))
    reward = Reward(functions={"length": 1.0}, **options)  # type: ignore[arg-type]
    return GRPO(actor=actor, reward=reward, group_size=2)


def digits(*, held_out: int = 6, completions: bool = False) -> TaskData:
    return TaskData(batch_size=4, num_rows=16, num_val_rows=held_out, min_digits=3, completions=completions)


def test_on_an_algorithm_and_through_its_checkpoint(tmp_path: Path) -> None:
    """The answers are those that the reward role scored: without special tokens."""
    runs = [trainer_on(Local(), tmp_path, SecondReward(CHARACTERS)) for _ in range(2)]
    runs[0].fit(grpo(), datamodule=digits())
    runs[1].fit(grpo(), datamodule=digits(), ckpt_path=tmp_path / "step=2.ckpt")
    (share, characters, gap), resumed = (
        [float(run.callback_metrics[f"val/{name}"]) for name in ("reward", "second_reward", "reward_gap")]
        for run in runs
    )
    assert characters == pytest.approx(256 * share)
    assert gap == pytest.approx(0.0, abs=1e-4)
    assert resumed == [share, characters, gap]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "SecondReward: no function is named. Type --trainer.callbacks.functions"),
        (
            ("--trainer.callbacks.functions=a_name",),
            "SecondReward: reward function 'a_name': it is not a short name. Short names: exact_match",
        ),
    ],
    ids=["none", "unknown"],
)
def test_functions_that_the_command_line_refuses(
    rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in rlhf.refused(
        "fit", "--algo", "ppo", "--data.num_rows", "200", "--trainer.callbacks=SecondReward", *words
    )


class Unstartable(Local):
    """Fails where devices would start."""

    def start(self, roles: Mapping[str, Role]) -> dict[str, Placement]:
        raise AssertionError("the devices were started")


def test_loaders_of_which_none_is_held_out_are_refused(tmp_path: Path) -> None:
    run, loader = trainer_in(tmp_path, [SecondReward("length")]), data()
    with pytest.raises(
        ValueError, match=r"^SecondReward: there are no held-out rows.* val_dataloaders=\.\.\."
    ):
        run.fit(Scripted(), loader)


def test_refused_before_any_worker_starts(tmp_path: Path) -> None:
    def refused(
        second: SecondReward, *, limit: float = 1.0, data: TaskData | None = None, sft: bool = False
    ) -> str:
        trainer = trainer_on(Unstartable(), tmp_path, second, limit=limit)
        with pytest.raises(ValueError, match=r"^SecondReward") as caught:
            trainer.fit(SFT() if sft else grpo(), datamodule=data or digits(completions=sft))
        return str(caught.value)

    assert "reward function 'json.loads': it takes (s, *," in refused(SecondReward("json.loads"))
    assert "reward function builtins.pow: TypeError over 3 rows" in refused(SecondReward("builtins.pow"))
    assert "no function scores the data source" in refused(SecondReward(by_source={"x": CHARACTERS}))
    assert "(functions=['length']): that is the training reward" in refused(SecondReward("length"))
    exact = SecondReward("exact_match")
    assert "limit_val_batches=0 nothing is ever validated" in refused(exact, limit=0.0)
    assert "SecondReward: TaskData holds no rows out" in refused(exact, data=digits(held_out=0))
    assert "SFT has no role `reward: Reward`" in refused(exact, sft=True)
    with pytest.raises(AssertionError, match="the devices were started"):
        trainer_on(Unstartable(), tmp_path, exact).fit(grpo(), datamodule=digits())


@pytest.mark.parametrize(
    "options", [{"truncated_penalty": 0.5}, {"clip": 1.0}, {"by_source": {"x": CHARACTERS}}], ids=list
)
def test_the_functions_of_a_reward_that_does_more_are_another_reward(
    options: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="the devices were started"):
        trainer_on(Unstartable(), tmp_path, SecondReward("length")).fit(grpo(**options), datamodule=digits())


@dataclass(frozen=True, kw_only=True)
class Halving(Reward):
    """Scores in its own way, whatever its functions."""

    @register(transfer=DP, reads=("response_mask",), returns=("scores",))
    def compute_reward(self, rows: TensorDict) -> TensorDict:  # type: ignore[override]
        """Half a point a token."""
        return TensorDict({"scores": rows["response_mask"] / 2}, batch_size=rows.batch_size)


def test_a_reward_that_scores_in_its_own_way_is_another_one(tmp_path: Path) -> None:
    assert Halving().scores_by_itself
    assert not Reward().scores_by_itself
    own = GRPO(reward=Halving(), actor=grpo().actor)
    with pytest.raises(AssertionError, match="the devices were started"):
        trainer_on(Unstartable(), tmp_path, SecondReward("exact_match")).fit(own, datamodule=digits())


def test_a_service_is_asked_as_the_callback_says(tmp_path: Path) -> None:
    with service(Answer(silent=True)) as asked:
        second = SecondReward(asked.url, http=HTTPOptions(timeout_s=0.1, retries=0))
        with pytest.raises(ValueError, match=r"^SecondReward: .* tries: 1, .*read timeout=0\.1\)"):
            trainer_in(tmp_path, [second]).validate(Scripted(FIRST), data(), verbose=False)


def test_a_weight_that_is_no_number() -> None:
    with pytest.raises(ValueError, match="SecondReward: reward functions: length has the weight inf"):
        SecondReward({"length": float("inf")})


def test_a_module_that_hands_over_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Tiny\.validation_step returned \['prompts', .* with answers, "):
        trainer_in(tmp_path, [SecondReward("length")]).validate(Tiny(), data())
    with pytest.raises(ValueError, match=r"Tiny\.validation_step returned Tensor\. Return a dictionary"):
        trainer_in(tmp_path, [SecondReward("length")]).validate(Tiny(torch.ones(1)), data())
    uneven = {"answers": ["a"], "scores": [1.0, 2.0], "rows": [{}]}
    with pytest.raises(ValueError, match=r"returned \['answers', 'rows', 'scores'\].* lists of one length"):
        trainer_in(tmp_path, [SecondReward("length")]).validate(Tiny(uneven), data())

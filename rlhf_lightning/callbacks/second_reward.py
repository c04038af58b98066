"""Makes reward hacking visible: a second reward of held-out answers, and its gap to the training reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from statistics import fmean, pstdev
from typing import cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.data import row_data
from rlhf_lightning.data_checks import check_validates
from rlhf_lightning.retold import retold
from rlhf_lightning.rewards import Functions, HTTPOptions, RewardSpec, Sources, preflight, score
from rlhf_lightning.trainer_habits import begins_anew
from rlhf_lightning.workers import Reward

REWARD, SECOND, GAP = "val/reward", "val/second_reward", "val/reward_gap"
_READ = ("answers", "scores", "rows")


class SecondReward(Callback):
    """Score the held-out answers of each validation with a second reward too, and log the gap between both.

    It logs `val/second_reward`, the mean over the rows, and `val/reward_gap`: the change of the training
    reward since the first validation less that of the second reward. Each change is that of the mean, in
    standard deviations over the rows of the first validation, so that rewards of different scales compare;
    where all rows scored the same then, the change is taken as it is. The gap is 0 at the first validation,
    stays near 0 while both rewards rise together, and grows where the training reward rises alone. Validate
    from early on (`val_check_interval`): what was hacked before the first validation is not seen.

    The first validation travels in checkpoints, so a resumed run goes on from the same baseline.

    Raises:
        ValueError: no function is named, or a weight is not a finite number.
    """

    def __init__(
        self,
        functions: Functions = None,
        *,
        by_source: Sources | None = None,
        http: HTTPOptions | None = None,
    ) -> None:
        """Say what the second reward is.

        Args:
            functions: a name, dotted path or http address, a list of them, or a mapping of them to weights.
            by_source: mapping of data source to functions, in the same forms; they score such rows instead.
            http: how functions that are services are asked; as by default where None.
        """
        super().__init__()
        with _naming_callback():
            self.spec = _spec(functions or {}, by_source or {}, http or HTTPOptions())
        self._scores: dict[str, list[float]] = {REWARD: [], SECOND: []}
        self._first: dict[str, tuple[float, float]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin anew, unless the trainer goes on, and refuse what cannot work, before any worker starts.

        Raises:
            ValueError: the algorithm has no reward to compare with or the same one, nothing is held out, or a
                function does not exist or does not work on the held-out rows.
        """
        if stage not in ("fit", "validate"):
            return
        if begins_anew(trainer, stage):
            self._first = {}
        if isinstance(pl_module, RLHFAlgorithm):
            self._check_reward(pl_module)
        check_validates(trainer, stage, name="SecondReward")
        data = row_data(trainer)
        with _naming_callback():
            preflight(self.spec, data.held_out_rows if data else [])

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the scores of the validation before."""
        self._scores = {REWARD: [], SECOND: []}

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, *_: object
    ) -> None:
        """Score the answers of a batch, but not in the sanity check.

        Raises:
            ValueError: the module hands over no answers, scores and rows, or a function failed.
        """
        if trainer.sanity_checking:
            return
        with _naming_callback():
            answers, scores, rows = _handed_over(outputs, type(pl_module).__name__)
            prompts = [str(row.get("prompt", "")) for row in rows]
            self._scores[SECOND] += score(self.spec, prompts, answers, rows)["scores"]
        self._scores[REWARD] += scores

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the second reward and the gap, in time for EarlyStopping and ModelCheckpoint."""
        if not self._scores[SECOND]:
            return
        means, changes = dict[str, float](), dict[str, float]()
        for name, values in self._scores.items():
            means[name] = fmean(values)
            first, unit = self._first.setdefault(name, (means[name], pstdev(values) or 1.0))
            changes[name] = (means[name] - first) / unit
        found = {SECOND: means[SECOND], GAP: changes[REWARD] - changes[SECOND]}
        if trainer.state.fn != "fit":  # `validate` has no first validation to compare with
            del found[GAP]
        pl_module.log_dict(found, batch_size=len(self._scores[SECOND]))

    def state_dict(self) -> dict[str, object]:
        """Hand the first validation to a checkpoint."""
        return {"first": dict(self._first)}

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Continue from that of a checkpoint."""
        self._first = {name: (mean, unit) for name, (mean, unit) in state_dict["first"].items()}

    def _check_reward(self, algorithm: RLHFAlgorithm) -> None:
        reward = algorithm.placed().get("reward")
        if not isinstance(reward, Reward):
            raise ValueError(
                f"SecondReward: {type(algorithm).__name__} has no role `reward: Reward` that scores answers, "
                "so there is nothing to compare with. Leave the callback out."
            )
        mine, its = self.spec, reward.spec
        same = (mine.defaults(), mine.sources()) == (its.defaults(), its.sources())
        changed = reward.path or reward.clip is not None or reward.truncated_penalty
        if same and not (changed or reward.scores_by_itself):
            raise ValueError(
                f"SecondReward(functions={mine.names()}): that is the training reward, so the gap would "
                "always be 0. Name another."
            )


def _spec(functions: Functions, by_source: Sources, http: HTTPOptions) -> RewardSpec:
    if not functions and not by_source:
        raise ValueError(
            "no function is named. Type --trainer.callbacks.functions exact_match, or your own, such as "
            "mypackage.mymodule.myfunction."
        )
    return RewardSpec(functions=functions, by_source=by_source, http=http)


def _handed_over(outputs: object, module: str) -> tuple[list[str], list[float], list[dict[str, object]]]:
    """Answers, scores and raw rows out of what a validation step returned."""
    found = [outputs.get(name) for name in _READ] if isinstance(outputs, Mapping) else []
    lengths = {len(column) for column in found if isinstance(column, list)}
    if len(lengths) != 1 or not all(isinstance(column, list) for column in found):
        what = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise ValueError(
            f"{module}.validation_step returned {what}. Return a dictionary with {', '.join(_READ)}, lists "
            "of one length, as RLHFAlgorithm's does."
        )
    return cast("tuple[list[str], list[float], list[dict[str, object]]]", found)


def _naming_callback() -> AbstractContextManager[None]:
    """Put the callback's name before errors about its reward."""
    return retold(lambda said: f"SecondReward: {said}")

"""Held-out prompts answered several times, as in training: the mean score, and the best of k."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.algorithm import Columns, RLHFAlgorithm
from rlhf_lightning.controller import Batch
from rlhf_lightning.data_checks import check_validates
from rlhf_lightning.functional import expected_best, masked_sum
from rlhf_lightning.workers import Reward


class SampledValidation(Callback):
    """Draw n answers to each held-out prompt of a validation, and log what they score.

    It logs `val/mean@n`, the mean over all answers, and `val/best@k` for k = 2, 4, 8, ... up to n: the mean
    over prompts of the best score among k answers (pass@k where scores are 0 and 1). The answers are drawn as
    the actor's are in training, with `actor.sampling`, by the weights of the moment. `val/reward` stays that
    of the greedy answer.

    Raises:
        ValueError: fewer than two answers.
    """

    def __init__(self, samples: int = 8) -> None:
        """Say how many answers.

        Args:
            samples: n, answers to each prompt.
        """
        super().__init__()
        if samples < 2:
            raise ValueError(
                f"SampledValidation(samples={samples}): a mean over draws has at least 2 of them. Try 8."
            )
        self.samples = samples

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work, before any worker starts.

        Raises:
            ValueError: the algorithm has no reward, all answers to a prompt would be the same, or nothing is
                validated.
        """
        if stage not in ("fit", "validate"):
            return
        if not (
            isinstance(pl_module, RLHFAlgorithm) and isinstance(pl_module.placed().get("reward"), Reward)
        ):
            raise ValueError(
                f"SampledValidation: {type(pl_module).__name__} has no role `reward` that scores answers. "
                "Leave the callback out."
            )
        pl_module.refuse_greedy("SampledValidation")
        check_validates(trainer, stage, name="SampledValidation")

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Columns, *_: object
    ) -> None:
        """Answer and score a batch, but not in the sanity check."""
        assert isinstance(pl_module, RLHFAlgorithm)
        if trainer.sanity_checking:
            return
        rows = pl_module.answers_to(Batch.of(batch), self.samples)
        rows |= pl_module.main_actor.generate_sequences(rows)
        rows |= pl_module.main_reward.compute_reward(rows)
        scores = masked_sum(rows["scores"], rows["response_mask"], dim=1).unflatten(0, (-1, self.samples))
        found = {f"val/mean@{self.samples}": scores.mean()}
        k = 2
        while k <= self.samples:
            found[f"val/best@{k}"] = expected_best(scores, k).mean()
            k *= 2
        pl_module.log_dict(found, batch_size=len(scores))

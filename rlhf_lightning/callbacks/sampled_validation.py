"""Held-out prompts answered several times, as in training: the mean score, and the best of k."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.algorithm import Columns, RLHFAlgorithm
from rlhf_lightning.controller import Batch
from rlhf_lightning.data_checks import check_validates
from rlhf_lightning.functional import expected_best, masked_sum
from rlhf_lightning.spec import Sampling
from rlhf_lightning.workers import Reward


class SampledValidation(Callback):
    """Draw n answers to each held-out prompt of a validation, and log what they score.

    It logs `val/mean@n`, the mean over all answers, and `val/best@k` for k = 2, 4, 8, ... up to n: the mean
    over prompts of the best score among k answers (pass@k where scores are 0 and 1). The answers are drawn as
    the actor's are in training, with `actor.sampling`, by the weights of the moment. `val/reward` stays that
    of the greedy answer.

    Raises:
        ValueError: fewer than two answers, or ones that are all the same.
    """

    def __init__(
        self, samples: int = 8, *, temperature: float | None = None, top_p: float | None = None
    ) -> None:
        """Say how many answers, and how they are drawn.

        Args:
            samples: n, answers to each prompt.
            temperature: of these answers; None is that of `actor.sampling`.
            top_p: of these answers; None is that of `actor.sampling`.
        """
        super().__init__()
        if samples < 2:
            raise ValueError(
                f"SampledValidation(samples={samples}): a mean over draws has at least 2 of them. Try 8."
            )
        if temperature is not None and temperature <= 0:
            raise ValueError(
                f"SampledValidation(temperature={temperature}): the answers to a prompt would be the same. "
                "Try 0.6, or leave it out."
            )
        self.samples, self.temperature, self.top_p = samples, temperature, top_p
        self.drawn_by(Sampling())  # refuses what is outside its range

    def drawn_by(self, own: Sampling) -> Sampling:
        """How the answers are drawn, by what the actor's own sampling says and the options of this class."""
        temperature = own.temperature if self.temperature is None else self.temperature
        return replace(own, temperature=temperature, top_p=own.top_p if self.top_p is None else self.top_p)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a run without a reward or a validation, and answers that cannot differ, or be drawn so."""
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
        actor = pl_module.main_actor
        takes = signature(type(actor).generate_sequences).parameters
        if self.drawn_by(actor.sampling) != actor.sampling and "sampling" not in takes:
            raise ValueError(
                f"SampledValidation(temperature={self.temperature}, top_p={self.top_p}): "
                f"{type(actor).__name__}.generate_sequences has no parameter `sampling`. Let it take one, as "
                "Actor's does, or leave both out."
            )

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Columns, *_: object
    ) -> None:
        """Answer and score a batch, but not in the sanity check."""
        assert isinstance(pl_module, RLHFAlgorithm)
        if trainer.sanity_checking:
            return
        rows = pl_module.answers_to(Batch.of(batch), self.samples)
        actor = pl_module.main_actor
        if (sampling := self.drawn_by(actor.sampling)) == actor.sampling:
            rows |= actor.generate_sequences(rows)
        else:
            rows |= actor.generate_sequences(rows, sampling=sampling)
        rows |= pl_module.main_reward.compute_reward(rows)
        scores = masked_sum(rows["scores"], rows["response_mask"], dim=1).unflatten(0, (-1, self.samples))
        found = {f"val/mean@{self.samples}": scores.mean()}
        k = 2
        while k <= self.samples:
            found[f"val/best@{k}"] = expected_best(scores, k).mean()
            k *= 2
        pl_module.log_dict(found, batch_size=len(scores))

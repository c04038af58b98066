"""An algorithm of your own, outside the package: rlhf fit --algo examples.custom_algorithm.Mine."""

from rlhf_lightning.algos import PPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import at_last_valid, masked_sum


class Mine(PPO):
    """PPO with centred scores: the mean of the batch is subtracted from what each response earns."""

    centre: float = 1.0
    """Share of the batch's mean score that is subtracted."""

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Centre the scores, then do as PPO does."""
        scores, mask = batch["scores"], batch["response_mask"]
        mean = masked_sum(scores, mask, dim=1).mean().expand(len(scores))
        centred = scores - at_last_valid(self.centre * mean, mask)
        return super().compute_advantage(batch | {"scores": centred})

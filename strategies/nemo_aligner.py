"""The actor's side and the critic's side apart, generating as they train (NeMo-Aligner's placement)."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_lightning.controller import ResourcePool
from rlhf_lightning.options import unless_given
from rlhf_lightning.parallel import Generation
from rlhf_lightning.strategies.hybrid3d import HybridEngine3D, Parallel3D, Sizes
from rlhf_lightning.strategies.split import ACTOR_SIDE, two_sides
from rlhf_lightning.strategies.standalone import SHARING, models_of


class NeMoAligner(HybridEngine3D):
    """Two pools, {actor, reference} and {everything else}; the actor generates in its training layout.

    Nothing moves between training and generation, and generation has the tensor shards of training.
    """

    strategy_name = "nemo-aligner"

    parallel: Sizes = unless_given(factory=Sizes)  # type: ignore[assignment]
    """Pipeline stages and tensor shards of every model; by default not divided."""

    def __post_init__(self) -> None:
        super().__post_init__()
        p, t = self.parallel.p, self.parallel.t
        self.parallel = Parallel3D(p=p, t=t, generate=Generation(p, t))

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """Halve the devices, where both sides have models.

        Raises:
            ValueError: they are not two equal halves, or no whole copies of the models fit there.
        """
        name, each, models = type(self).__name__, self._fewest_devices(roles), models_of(self, roles)
        fewest = each * len({model in ACTOR_SIDE for model in models})
        total = devices or fewest
        if total % fewest:
            raise ValueError(
                f"{name}(devices={total}): p={self.parallel.p} x t={self.parallel.t} = {each} ranks a "
                f"replica want a multiple of {fewest} devices, the same number on each side. "
                f"Try devices={max(1, total // fewest) * fewest}{SHARING * (total < fewest)}."
            )
        return two_sides(roles, total, models=models, actor_devices=total // 2, name=name)

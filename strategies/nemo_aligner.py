"""The actor's side and the critic's side apart, generating as they train (NeMo-Aligner's placement)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhf_lightning.controller.cluster import ResourcePool
from rlhf_lightning.parallel import Generation
from rlhf_lightning.strategies.hybrid3d import HybridEngine3D, Parallel3D, Sizes
from rlhf_lightning.strategies.split import two_sides
from rlhf_lightning.workers import Settings


class NeMoAligner(HybridEngine3D):
    """Two pools, {actor, reference} and {everything else}; the actor generates in its training layout.

    Nothing moves between training and generation, and generation has the tensor shards of training.

    Args:
        parallel: pipeline stages and tensor shards of every model; by default not divided.
        devices: as for every strategy.
        address: as for every strategy.
        settings: as for every strategy; the engine is always Megatron's.
        offload: as for every strategy.
        timeout_s: as for every strategy.
    """

    strategy_name = "nemo-aligner"

    def __init__(
        self,
        *,
        parallel: Sizes | None = None,
        devices: int | None = None,
        address: str | None = None,
        settings: Settings | None = None,
        offload: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        sizes = parallel or Sizes()
        super().__init__(
            parallel=Parallel3D(p=sizes.p, t=sizes.t, generate=Generation(sizes.p, sizes.t)),
            devices=devices,
            address=address,
            settings=settings,
            offload=offload,
            timeout_s=timeout_s,
        )

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """Halve the devices.

        Raises:
            ValueError: they are not two equal halves.
        """
        known = self.algorithm.roles()
        each = math.lcm(*(s.p * s.t for s in (self._sizes(known[name], name) for name in roles)))
        total = devices or 2 * each
        if total % 2:
            raise ValueError(
                f"NeMoAligner(devices={total}): {total} devices are not two equal halves. "
                f"Try devices={total + 1}."
            )
        return two_sides(roles, total, actor_devices=total // 2)

"""Where each rank of a model stands: layouts of pipeline, tensor and data parallel ranks; their groups."""

from rlhf_lightning.parallel.layout import ParallelLayout
from rlhf_lightning.parallel.world import World, WorldSpec, subgroups

__all__ = ["ParallelLayout", "World", "WorldSpec", "subgroups"]

"""Where each rank of a model stands, training and generating; its groups; how parameters are divided."""

from rlhf_lightning.parallel.groups import ModelGroups, all_ranks, named_groups
from rlhf_lightning.parallel.layout import Generation, GenerationLayout, ParallelLayout, Sharding
from rlhf_lightning.parallel.link import Link, Moved
from rlhf_lightning.parallel.scope import Scope, need_all_ranks, need_all_rows, serving
from rlhf_lightning.parallel.sharding import Sharded, even_stages, holds
from rlhf_lightning.parallel.world import Seat, World, WorldSpec, subgroups

__all__ = [
    "Generation",
    "GenerationLayout",
    "Link",
    "ModelGroups",
    "Moved",
    "ParallelLayout",
    "Scope",
    "Seat",
    "Sharded",
    "Sharding",
    "World",
    "WorldSpec",
    "all_ranks",
    "even_stages",
    "holds",
    "named_groups",
    "need_all_ranks",
    "need_all_rows",
    "serving",
    "subgroups",
]

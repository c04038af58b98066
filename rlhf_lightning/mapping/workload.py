"""What an iteration has to do: rows, tokens and updates, and the recipe by which engines compute them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf_lightning.parallel.layout import Sharding


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Rows and tokens of one iteration, and how engines compute them."""

    prompt: int = 1024
    """Width of the prompts, padding included."""
    response: int = 1024
    """Most tokens of a response."""
    batch: int = 1024
    """Rows of an iteration: prompts times the responses of each."""
    mini_batches: int = 8
    """Optimizer steps of an iteration, each over its part of the batch."""
    real_prompt: float = 0.0
    """Mean tokens of a prompt without its padding, which is all that generation computes; 0: a quarter of
    `prompt`."""
    lengths: tuple[int, ...] = ()
    """Lengths of responses, tokens: a sample of their distribution; empty: all have `response` tokens."""
    packed: bool = False
    """Whether padding is left out of training and scoring too."""
    max_resident: int = 256
    """Most sequences that a generation engine decodes at once; 0: no limit."""
    micro_batch_tokens: int = 8192
    """Tokens computed at once in training and scoring; a longer row is computed alone. Fewer let pipelines
    start sooner: docs/simulators.md shows what depends on it."""
    kept_tokens: int = 0
    """Tokens of a scoring pass on a device whose activations stay for the update that follows."""
    recompute: bool = True
    """Whether the backward pass computes the activations of each layer again."""
    sequence_parallel: bool = False
    """Whether tensor shards also share the activations between their matrix products."""
    chunks: int = 1
    """Runs of layers in a pipeline stage; of several, the schedule is interleaved."""
    fused_attention: bool = True
    """Whether attention keeps its scores out of memory."""
    sharding: Sharding = "states"
    """What data-parallel ranks divide among themselves instead of each holding all of it."""
    shared_by: int = 0
    """Data-parallel ranks that divide one copy, so that there are several (hybrid sharding); 0: all ranks."""
    held_once: bool = True
    """Whether an actor's training shard is a part of its generation shard, in the same memory (HybridFlow
    section 5.3: no redundancy). Megatron's distributed optimizer holds it a second time in a buffer."""
    kv_limit: float = 0.0
    """Most bytes of keys and values on a device; 0: what is free, within `generation_share`."""
    generation_share: float = 1.0
    """Share of a device's memory that weights, buffers, keys and values of a generation may take together."""
    reserves: bool = False
    """Whether the generation engine takes that share, or `kv_limit`, at once and whole, as vLLM on a GPU,
    which does not start where less is free; else what its rows fill."""
    reshards: bool = True
    """With sharding `full`: whether a layer is freed after its forward pass, and gathered again for the
    backward pass. Else it stays until then, or in scoring to the end."""
    keeps_gradients: bool = True
    """Whether gradients stay on the devices from one update to the next, while other models compute."""
    defers: bool = False
    """With sharding `full`: whether gradients are reduced once an update rather than once a micro-batch."""
    element: int = 2
    """Bytes of a parameter and of an activation in the computation: 2 for bfloat16, 4 for float32."""
    masters: bool = True
    """Whether there are float32 master weights beside the parameters; not where these are float32, unless the
    engine steps copies."""
    masters_beside: bool = False
    """With sharding `full`: whether masters lie beside the shards, as with ZeRO; else they are the shards, as
    with FSDP."""
    follows: bool = False
    """Whether the weights of a model that does not learn change, so that it has masters, as those of a
    reference with `decay` do."""
    lora_rank: int = 0
    """Rank of the adapters that are all that learns; 0: the whole model learns."""
    states_on_host: bool = False
    """Whether masters and moments are in the host's memory, as with ZeRO's `offload_optimizer`."""
    parameters_on_host: bool = False
    """Whether weights are there too while no layer needs them, as with ZeRO's `offload_parameters`."""
    offload: bool = False
    """Whether weights, gradients and states of a model are moved to the host while another model computes."""
    one_stage: bool = False
    """Whether generation has one pipeline stage, as vLLM's here."""

    def __post_init__(self) -> None:
        names = ("prompt", "response", "batch", "mini_batches", "micro_batch_tokens", "element")
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"workload.{name}={getattr(self, name)}: must be at least 1.")
        if self.max_resident < 0:
            raise ValueError(f"--max-resident {self.max_resident}: type 0 for no limit.")
        if not 0 <= self.real_prompt <= self.prompt:
            raise ValueError(
                f"--real-prompt {self.real_prompt:g}: must lie between 0 and --prompt {self.prompt}."
            )
        if self.lengths and not 1 <= min(self.lengths) <= max(self.lengths) <= self.response:
            raise ValueError(f"workload.lengths: must lie between 1 and response={self.response}.")
        if self.mini_batches > self.batch:
            raise ValueError(f"workload.mini_batches={self.mini_batches}: exceeds the {self.batch} rows.")

    def sharers(self, d: int) -> int:
        """How many of d data-parallel ranks divide one copy of what is sharded."""
        return 1 if self.sharding == "none" else min(d, self.shared_by or d)

    @property
    def micro_batch(self) -> int:
        """Most rows of a micro-batch."""
        return max(1, int(self.micro_batch_tokens // self.row_tokens))

    def micro_batches(self, d: int, *, parts: int = 1) -> tuple[int, int]:
        """Micro-batches, and rows of each, of the fullest of d replicas for 1 / parts of the batch."""
        rows = math.ceil(self.batch / (parts * d))
        size = min(rows, self.micro_batch)
        return math.ceil(rows / size), size

    @property
    def prompt_tokens(self) -> float:
        """Mean tokens of a prompt that generation computes."""
        return self.real_prompt or self.prompt / 4

    @property
    def response_lengths(self) -> tuple[int, ...]:
        """Lengths of responses, equally likely."""
        return self.lengths or (self.response,)

    @property
    def row_tokens(self) -> float:
        """Tokens of a row in training and scoring."""
        if not self.packed:
            return float(self.prompt + self.response)
        return self.prompt_tokens + sum(self.response_lengths) / len(self.response_lengths)

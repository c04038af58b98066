"""What the native generator asks of a model: a whole Hugging Face module, or a rank's part of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf_lightning.engines.host_linear import packed
from rlhf_lightning.engines.native.kv import Cached
from rlhf_lightning.engines.native.rotary import is_steady
from rlhf_lightning.engines.packed.attention import IMPLEMENTATION
from rlhf_lightning.engines.packed.record import Record
from rlhf_lightning.spec import EXPERTS


class Drawn(NamedTuple):
    """The next tokens of n rows."""

    token: Tensor
    """[n] int64."""
    log_prob: Tensor
    """[n] float32, natural log, at the sampling temperature, before truncation."""


class Output(NamedTuple):
    """What a decoder computed."""

    logits: Tensor | None
    """[1, K, V] of the K kept tokens; None on a rank that does not draw."""


class _Copy(Protocol):
    """Communication between the ranks that share one copy of a model."""

    def share(self, drawn: Drawn | None, count: int) -> Drawn:
        """The `count` tokens that one rank drew, on every rank of the copy; None on the others."""
        ...

    def least(self, number: int) -> int:
        """The smallest of the numbers of all ranks of the copy."""
        ...


class Decoder(_Copy, Protocol):
    """A causal language model or one rank's part of it; all ranks that share a copy call it alike."""

    @property
    def config(self) -> PreTrainedConfig:
        """Of the whole model."""
        ...

    def __call__(
        self, *, input_ids: Tensor, position_ids: Tensor, sequences: Cached, keep: Tensor | None
    ) -> Output:
        """Compute T tokens.

        Args:
            input_ids: [1, T] int64.
            position_ids: [1, T] int64.
            sequences: what each token attends to; it keeps keys and values.
            keep: [K] int64, the tokens whose logits are wanted; None for all.
        """
        ...

    @property
    def record(self) -> Record | None:
        """Records matrix products that an update may reuse; None: nothing is recorded."""
        ...

    @property
    def replays(self) -> bool:
        """Whether its steps can be captured in a CUDA graph: they wait for no other rank or GPU result."""
        ...

    def kept_bytes(self, dtype: torch.dtype | None) -> int:
        """Bytes of one token's keys and values on this rank, stored in a dtype; None: as computed."""
        ...

    def evaluating(self, *, beside_bytes: int = 0) -> AbstractContextManager[None]:
        """Without dropout and gradient checkpointing, and ready for steps of few tokens, for a while.

        Args:
            beside_bytes: memory of a GPU that will be needed for keys and values; 0: what is left then.
        """
        ...


def logits_of(
    decoder: Decoder, ids: Tensor, places: Tensor, sequences: Cached, *, keep: Tensor | None = None
) -> Tensor | None:
    """One forward of tokens [T] at places [T]: the logits [kept tokens, V], on the rank that draws."""
    output = decoder(input_ids=ids[None], position_ids=places[None], sequences=sequences, keep=keep)
    return None if output.logits is None else output.logits[0]


class WholeDecoder:
    """A Hugging Face causal language model prepared by `use_interface`, whole on this rank.

    Raises:
        ValueError: it is not prepared.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        name, attention = type(module).__name__, module.config._attn_implementation
        if attention != IMPLEMENTATION:
            raise ValueError(
                f"NativeGenerator({name}): its attention is {attention!r}. Call use_interface(module) first."
            )
        self.module = module

    @property
    def record(self) -> Record | None:
        """Nobody wants its products."""
        return None

    @property
    def replays(self) -> bool:
        """See `Decoder.replays`; experts are chosen by the host, but for some kernels of some GPUs."""
        config = self.config.get_text_config()
        return is_steady(config) and not any(getattr(config, name, None) for name in EXPERTS)

    @property
    def config(self) -> PreTrainedConfig:
        """See `Decoder.config`."""
        return self.module.config

    def __call__(
        self, *, input_ids: Tensor, position_ids: Tensor, sequences: Cached, keep: Tensor | None
    ) -> Output:
        """See `Decoder.__call__`."""
        output = self.module(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,  # the sequences are one
            sequences=sequences,
            logits_to_keep=0 if keep is None else keep,
        )
        return Output(cast(Tensor, output.logits))

    def kept_bytes(self, dtype: torch.dtype | None) -> int:
        """See `Decoder.kept_bytes`."""
        text = self.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        element = (dtype or next(self.module.parameters()).dtype).itemsize
        return int(2 * text.num_hidden_layers * heads * size * element)

    def share(self, drawn: Drawn | None, count: int) -> Drawn:
        """What this rank drew."""
        assert drawn is not None
        return drawn

    def least(self, number: int) -> int:
        """This rank's."""
        return number

    @contextmanager
    def evaluating(self, *, beside_bytes: int = 0) -> Iterator[None]:
        """See `Decoder.evaluating`."""
        del beside_bytes  # nothing is copied there
        training = self.module.training
        self.module.train(False)
        try:
            with packed(self.module):
                yield
        finally:
            self.module.train(training)

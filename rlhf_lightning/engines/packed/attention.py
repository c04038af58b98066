"""Attention over packed sequences (concatenated in one row of tokens), for any Hugging Face decoder.

    module(input_ids=[1, T], position_ids=[1, T], use_cache=False, sequences=Packed([3, 2, ...]))

transformers passes the keyword `sequences` on to the attention function registered here, and that object
decides which token attends to which: `Packed` in training and scoring, `kv.Prefill` and `kv.Step` in
generation. The model itself sees neither a mask nor padding.

T is the number of tokens of all sequences, H heads, K key-value heads, D the size of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, groupby
from typing import NoReturn, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from rlhf_lightning.engines.packed.flash import Spans, has_flash_attention, without_cudnn
from rlhf_lightning.engines.packed.layer import Layer

IMPLEMENTATION = "rlhf"
"""Name under which the attention function is registered with transformers."""

ADVICE = "Take a decoder with plain causal attention, such as Llama, Qwen2, Qwen3, Mistral or GPT-2."
"""What to do about a model whose sequences cannot be packed."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_OPTIONS = ("sequences", "scaling")
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


class Sequences(Protocol):
    """Which tokens of a model call form a sequence, and so which token attends to which."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """Attend: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
        ...


class Packed:
    """Whole sequences, concatenated: a token attends to its own sequence, up to and including itself.

    Flash attention takes them as they are. Without it, sequences are computed in groups, each padded to its
    longest. With `waste` 0 a group is a run of neighbours of equal length, a view of the tokens without any
    padding; with more, a group holds sequences of similar length.

    Example:
        `Packed([3, 2]).position_ids` is `[[0, 1, 2, 0, 1]]`.
    """

    def __init__(
        self, lengths: Sequence[int], *, device: torch.device | str = "cpu", waste: float | None = None
    ) -> None:
        """Plan the groups.

        Args:
            lengths: number of tokens of each sequence; none is 0.
            device: where the tokens are.
            waste: most padding of a group per token of it; None: 0 on a CPU, where calls are cheap and copies
                are not, and 0.25 elsewhere.
        """
        self.lengths = tuple(int(length) for length in lengths)
        self._device = torch.device(device)
        without_cudnn(self._device)
        self.position_ids = _aranges(self.lengths)[None].to(device)
        """[1, T] int64, the position of each token in its sequence."""
        self._waste = (0.0 if self._device.type == "cpu" else 0.25) if waste is None else waste
        self._bands: dict[tuple[int, int], Tensor] = {}
        self.needed: Tensor | None = None
        """[any] int64, the tokens whose outputs are needed, see `last_mlp`; None: all or nearly all."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """Attend: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
        if has_flash_attention(query, value):
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            return self._spans.attend(q, k, v, layer)[None]
        groups, place = self._grouped
        spread = [self._spread(x) for x in (query, key, value)]
        sizes = [count * length for count, length in groups]
        outputs = []
        for (count, length), *parts in zip(groups, *(torch.split(x, sizes, 1) for x in spread), strict=True):
            q, k, v = (x.unflatten(1, (count, length)).transpose(0, 1) for x in parts)
            outputs.append(self._causal(q, k, v, layer).transpose(1, 2).flatten(0, 1))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return (output if place is None else output.index_select(0, place))[None]

    @cached_property
    def _spans(self) -> Spans:
        starts = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32).to(self._device)
        longest = max(self.lengths)
        return Spans(queries=starts, keys=starts, most_queries=longest, most_keys=longest)

    @cached_property
    def _grouped(self) -> tuple[list[tuple[int, int]], Tensor | None]:
        """(count, padded length) of each group, and [T] the index of each token among the padded ones."""
        if not self._waste:
            return _runs(self.lengths), None
        groups, place = _padded(self.lengths, self._waste)
        return groups, None if place is None else place.to(self._device)

    def _spread(self, x: Tensor) -> Tensor:
        """[1, H, T, D] -> [H, P, D], with P the number of tokens of all groups, padding included."""
        groups, place = self._grouped
        if place is None:
            return x[0]
        tokens = x[0].transpose(0, 1)
        padded = tokens.new_zeros(sum(c * n for c, n in groups), *tokens.shape[1:])
        return padded.index_copy(0, place, tokens).transpose(0, 1)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """Causal attention of [count, H, length, D]; a mask only where a window is shorter than `length`."""
        groups, length = query.shape[1] // key.shape[1], query.shape[2]
        band = self._band(length, layer.window, query.device) if 0 < layer.window < length else None
        if groups > 1 and query.is_cuda and (band is not None or query.dtype == torch.float32):
            # In these cases no fused kernel takes grouped heads, and the unfused one stores length x length.
            key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
        dtype = torch.float32 if query.is_cpu else query.dtype  # on a CPU bfloat16 kernels are slower
        output = scaled_dot_product_attention(
            query.to(dtype),
            key.to(dtype),
            value.to(dtype),
            attn_mask=band,
            is_causal=band is None,
            scale=layer.scaling,
            enable_gqa=groups > 1,
        )
        return output.to(query.dtype)

    def _band(self, length: int, window: int, device: torch.device) -> Tensor:
        """[length, length] bool: token i attends to j if i - window < j <= i."""
        if (length, window) not in self._bands:
            place = torch.arange(length, device=device)
            distance = place[:, None] - place
            self._bands[length, window] = (distance >= 0) & (distance < window)
        return self._bands[length, window]


def _aranges(lengths: Sequence[int]) -> Tensor:
    """[3, 2] -> [0, 1, 2, 0, 1]."""
    return torch.cat([torch.arange(length) for length in lengths])


def _runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(count, length) of each run of neighbours of equal length."""
    return [(len(list(run)), length) for length, run in groupby(lengths)]


def _padded(lengths: Sequence[int], waste: float) -> tuple[list[tuple[int, int]], Tensor | None]:
    """(count, padded length) of groups of similar length, and [T] each token's index among padded ones."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    groups: list[tuple[int, int]] = []
    start = [0] * len(lengths)
    end = used = 0
    for row in order:
        count, length = groups[-1] if groups else (0, 0)
        if groups and (count + 1) * length <= (1 + waste) * (used + lengths[row]):
            groups[-1], used = (count + 1, length), used + lengths[row]
        else:
            length, used = lengths[row], lengths[row]
            groups.append((1, length))
        start[row], end = end, end + length
    if len(set(lengths)) <= 1:
        return groups, None
    return groups, _aranges(lengths) + torch.repeat_interleave(torch.tensor(start), torch.tensor(lengths))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer, with the signature that it requires.

    There is no dropout: a policy ratio compares two passes, which must compute the same function.
    """
    name = type(module).__name__
    sequences, scaling = (options.get(option) for option in _OPTIONS)
    if sequences is None:
        raise ValueError(
            f"{name} was called without `sequences`, which say what tokens form a sequence: its model does"
            f" not pass them on, or was not given them (sequences=Packed(lengths), position_ids). {ADVICE}"
        )
    unknown = [option for option in _UNSUPPORTED if options.get(option) is not None]
    unknown += ["a mask of its own"] * (attention_mask is not None)
    unknown += ["attention to later tokens"] * (not _is_causal(module, options))
    if unknown:
        raise ValueError(f"{name} asks for {' and '.join(unknown)}, which packed attention lacks. {ADVICE}")
    layer = Layer(
        number=cast(int, module.layer_idx),
        scaling=query.shape[-1] ** -0.5 if scaling is None else cast(float, scaling),
        window=_window(module, options),
    )
    return cast(Sequences, sequences).attend(query, key, value, layer), None


def _is_causal(module: nn.Module, options: Mapping[str, object]) -> object:
    """Whether a layer attends to no later token: as an option of the call says, else the layer itself."""
    causal = options.get("is_causal")
    return getattr(module, "is_causal", True) if causal is None else causal


def _window(module: nn.Module, options: Mapping[str, object]) -> int:
    """Keys that a token sees, itself included; 0: all. Two mixtures of experts tell it to the mask alone."""
    if "sliding_window" in options:
        window = options["sliding_window"]
    elif type(module).__name__ == "PhimoeAttention":
        window = getattr(module.config, "sliding_window", None)
    else:  # on those layers of Qwen2-MoE that have one
        window = getattr(module, "sliding_window", None)
    return cast(int, window or 0)


AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(_attention))


def use_interface(module: PreTrainedModel) -> None:
    """Make every attention layer of the model attend through the `sequences` of a call.

    Raises:
        ValueError: the model's attention cannot take packed sequences.
    """
    config = module.config
    if reason := why_not_packed(config) or _refusal(module):
        raise ValueError(f"{type(module).__name__} (model_type={config.model_type}) {reason}. {ADVICE}")
    module.set_attn_implementation(IMPLEMENTATION)


def why_not_packed(config: PreTrainedConfig) -> str:
    """Why models of this configuration cannot take packed sequences; empty where it gives no reason."""
    config = config.get_text_config()
    types = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    softcap = getattr(config, "attn_logit_softcapping", None)
    reasons = {
        "is an encoder-decoder, not a causal language model": bool(config.is_encoder_decoder),
        f"has layers of type {', '.join(types)}": bool(types),
        f"caps its attention logits at {softcap}": softcap is not None,
        "is not causal": getattr(config, "is_causal", True) is False
        or getattr(config, "use_bidirectional_attention", None) is True,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def try_first_layer(module: PreTrainedModel) -> None:
    """Call a model on the meta device up to the attention of its first layer; it is not to be used after.

    Raises:
        ValueError: the model's attention cannot take packed sequences.
    """
    use_interface(module)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    with suppress(_ReachedError, RuntimeError):  # not all of a model may be there for the meta device
        module(input_ids=tokens, position_ids=tokens, sequences=_Probe(), use_cache=False)


class _ReachedError(Exception):
    """The attention of a layer was reached with all that it needs."""


class _Probe:
    """Sequences that end the call where they are attended to."""

    def attend(self, *_: object) -> NoReturn:
        raise _ReachedError


def _refusal(module: PreTrainedModel) -> str:
    """Why this model's class cannot take packed sequences; empty if it can."""
    reasons = {
        "keeps a state beside keys and values": module._is_stateful,
        "computes its attention by itself, not through transformers' AttentionInterface": not (
            module._supports_attention_backend and module._can_set_attn_implementation()
        ),
        "has attention sinks": any(name.endswith("sinks") for name, _ in module.named_parameters()),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")

"""A penalty for responses that come close to the length limit."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_lightning.functional.masked import widened


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Soft overlong punishment, DAPO (arXiv 2503.14476) eq. 13: min(-(l - (max - buffer)) / buffer f, 0).

    Args:
        lengths: [B] tokens of each response, replies of an environment in it included.
        max_tokens: the longest that a response can be, tokens.
        buffer: the last stretch before that, in which the penalty grows from 0 to `factor`, tokens.
        factor: largest penalty.

    Returns:
        [B] float32, 0 or negative.

    Raises:
        ValueError: the buffer is empty or longer than a response can be.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(
            f"overlong_penalty(max_tokens={max_tokens}, buffer={buffer}): the buffer is the last part of the "
            f"longest response, so 0 < buffer <= {max_tokens}. Try a fifth of max_new_tokens, as DAPO has."
        )
    return (-(widened(lengths) - (max_tokens - buffer)) / buffer * factor).clamp(max=0)


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """Options of `overlong_penalty`; `GroupEstimator` takes the batch's width for the longest response."""

    buffer: int
    """Tokens before the limit in which the penalty grows."""
    factor: float = 1.0
    """Largest penalty, at the limit."""

    def __post_init__(self) -> None:
        if self.buffer < 1 or self.factor < 0:
            raise ValueError(
                f"Overlong(buffer={self.buffer}, factor={self.factor}): buffer must be at least 1 token and "
                "factor not negative. Try a fifth of max_new_tokens, and 1.0."
            )

    def penalty(self, lengths: Tensor, *, max_tokens: int) -> Tensor:
        """`overlong_penalty` of responses of these lengths, [B] float32."""
        return overlong_penalty(lengths, max_tokens=max_tokens, buffer=self.buffer, factor=self.factor)

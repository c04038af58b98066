"""Generation with a model's weights as they are; `slots` has the rows that are being decoded.

B is the number of rows, P the width of the prompts, R that of the responses (`max_new_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad

from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.huggingface.sizes import explaining_positions, max_positions
from rlhf_lightning.engines.native.config import Native
from rlhf_lightning.engines.native.decoder import Decoder
from rlhf_lightning.engines.native.kv_gpu import free_bytes
from rlhf_lightning.engines.native.slots import Means, Slots, capacity_of
from rlhf_lightning.engines.native.slots_gpu import GPUSlots
from rlhf_lightning.engines.prompts import Prompt, begun, read_prompts
from rlhf_lightning.engines.sampling import uniform
from rlhf_lightning.parallel.shares import shares
from rlhf_lightning.spec import Sampling

_CACHE_SHARE = 0.7
"""Share of a GPU's free memory for keys and values; the rest is for the passes over prompts."""


class NativeGenerator:
    """Generates with a decoder.

    Where several ranks share one copy of the model, each has a generator and calls it with the same rows; one
    rank draws the tokens, and all return the same answers.
    """

    def __init__(
        self, decoder: Decoder, *, device: torch.device | str, ends: Ends, config: Native | None = None
    ) -> None:
        self.decoder, self.ends = decoder, ends
        self.device, self.config = torch.device(device), config or Native()

    def generate(self, rows: TensorDict, *, sampling: Sampling, seed: int) -> TensorDict:
        """See `GenerationEngine.generate`."""
        ((_, answers),) = self.finished(rows, sampling=sampling, seed=seed, parts=1)
        return answers

    def finished(
        self, rows: TensorDict, *, sampling: Sampling, seed: int, parts: int
    ) -> Iterator[tuple[Tensor, TensorDict]]:
        """See `GenerationEngine.finished`."""
        numbers, prompts = self._numbers(rows, sampling, seed), self._prompts(rows, sampling)
        with self.decoder.prepared(cache_bytes=self._planned_bytes(prompts, sampling)):
            slots = self._slots(prompts, sampling, numbers)
            for size in shares(len(rows), parts):
                while len(slots.ended) < size:
                    slots.advance()
                slots.end_record()
                ended = torch.tensor(sorted(slots.ended[:size]), dtype=torch.int64)
                del slots.ended[:size]
                yield ended, slots.responses.tensors(ended).to(rows["prompt_ids"].device)

    def resume(
        self,
        rows: TensorDict,
        *,
        sampling: Sampling,
        seed: int,
        pause: Callable[[Tensor], bool],
        at_once: int = 0,
    ) -> TensorDict:
        """See `GenerationEngine.resume`."""
        numbers, rows = self._numbers(rows, sampling, seed), begun(rows, width=sampling.max_new_tokens)
        ended, prompts = rows["ended"].cpu().clone(), self._prompts(rows, sampling)
        with self.decoder.prepared(cache_bytes=self._planned_bytes(prompts, sampling)):
            slots = self._slots(prompts, sampling, numbers, at_once=at_once)
            slots.go_on(rows)
            while not pause(ended) and not bool(ended.all()):
                slots.advance()
                slots.settle()
                ended[slots.ended] = True
            slots.pause()
            slots.end_record()
        answers = slots.responses.tensors(torch.arange(len(rows)))
        answers["ended"] = ended
        return answers.to(rows["prompt_ids"].device)

    def _numbers(self, rows: TensorDict, sampling: Sampling, seed: int) -> Tensor:
        """The random number in [0, 1) that each token is drawn with: [B + 1, R] float64, nobody's last."""
        row_ids = pad(rows["row_ids"].to(self.device), (0, 1))[:, None]
        return uniform(seed, row_ids, torch.arange(sampling.max_new_tokens, device=self.device))

    def _planned_bytes(self, prompts: Sequence[Prompt], sampling: Sampling) -> int:
        """Most bytes of keys and values, where the number of slots is configured; else 0."""
        slots = min(self.config.slots, len(prompts))
        return slots * capacity_of(prompts, sampling) * self.decoder.kv_bytes_per_token(self.config.dtype)

    def _most_slots(self, capacity: int) -> int:
        """Most rows of `capacity` tokens decoded at once, equal on all ranks of a copy; 0: any number."""
        if self.config.slots or self.device.type != "cuda":
            return self.config.slots
        row_bytes = capacity * self.decoder.kv_bytes_per_token(self.config.dtype)
        return self.decoder.least(max(1, int(_CACHE_SHARE * free_bytes(self.device) / row_bytes)))

    def _prompts(self, rows: TensorDict, sampling: Sampling) -> list[Prompt]:
        config, width = self.decoder.config, sampling.max_new_tokens
        positions = max_positions(config) or 2**40
        with explaining_positions(config):
            return read_prompts(rows, positions=positions, new_tokens=width, owner="the model")

    def _slots(
        self, prompts: list[Prompt], sampling: Sampling, numbers: Tensor, *, at_once: int = 0
    ) -> Slots:
        """Slots for these rows, all of them waiting at their prompts."""
        room = self._most_slots(capacity_of(prompts, sampling))
        means = Means(decoder=self.decoder, device=self.device, ends=self.ends, config=self.config)
        kind = GPUSlots if self.device.type == "cuda" else Slots
        return kind(means, prompts, sampling, numbers, most=min(filter(None, (room, at_once)), default=0))

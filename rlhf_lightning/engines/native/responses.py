"""The responses of a native generation so far, on the device that decodes.

B is the number of rows, R the width of the responses.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor


class Responses:
    """Tokens, log-probabilities and lengths of B responses.

    Args:
        size: B.
        width: R.
        pad_token_id: fills the ids behind a response.
        device: where ids and log-probabilities are; lengths are on the host.
    """

    def __init__(self, size: int, width: int, pad_token_id: int, device: torch.device) -> None:
        self.ids = torch.full((size + 1, width), pad_token_id, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(size + 1, width, device=device)
        """[B + 1, R], as `ids`: in the last row is what slots draw that nobody has."""
        self.lengths = torch.zeros(size, dtype=torch.int64)

    def record(self, row: Tensor, column: Tensor, token: Tensor, log_prob: Tensor) -> None:
        """Store tokens and their log-probabilities at (row, column); each argument is [n]."""
        self.ids[row, column] = token
        self.log_probs[row, column] = log_prob

    def begin(self, rows: TensorDict) -> None:
        """Copy the beginnings of responses that rows have, as returned by `begun`."""
        mask = rows["response_mask"].to(self.ids.device)
        self.ids[:-1][mask] = rows["response_ids"].to(self.ids.device)[mask]
        self.log_probs[:-1][mask] = rows["log_probs"].to(self.ids.device)[mask]
        self.lengths = mask.sum(1).cpu()

    def tensors(self, rows: Tensor) -> TensorDict:
        """The columns that `GenerationEngine.generate` returns, of rows [n] int64."""
        where, lengths = rows.to(self.ids.device), self.lengths[rows].to(self.ids.device)
        mask = torch.arange(self.ids.shape[1], device=self.ids.device) < lengths[:, None]
        values = {"response_ids": self.ids[where], "response_mask": mask, "log_probs": self.log_probs[where]}
        return TensorDict(values, batch_size=[len(rows)])

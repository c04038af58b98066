from __future__ import annotations

import pytest

from rlhf_lightning.functional import ReinforceLoss


@pytest.mark.parametrize("fields", [{"clip_low": 0.1}, {"clip_high": 0.28}, {"dual_clip": 3.0}])
def test_there_is_nothing_to_clip(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"no ratio to clip.*try PolicyLoss"):
        ReinforceLoss(**fields)  # type: ignore[arg-type]

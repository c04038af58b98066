"""What Megatron says of GPUs where there is none, and PyTorch of Megatron."""

from __future__ import annotations

import warnings

import pytest

from rlhf_lightning.engines.megatron import silence

SAID = (
    "Transformer Engine and Apex are not installed. Falling back to Torch optimizers.",
    "When using sequence parallelism it is recommended to set the environment variable "
    "CUDA_DEVICE_MAX_CONNECTIONS to 1 for maximum speedup",
    "When using async grad allreduce it is recommended to set the environment variable "
    "CUDA_DEVICE_MAX_CONNECTIONS to 1 for maximum speedup",
)


OLD = "`torch.distributed.all_gather_into_tensor` is deprecated. Please use another."


@pytest.mark.parametrize(("on_host", "left"), [(True, []), (False, list(SAID))])
def test_advice_for_gpus_is_left_out_and_other_warnings_stay(on_host: bool, left: list[str]) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        silence(on_host=on_host)
        for words in (*SAID, "When using this, beware"):
            warnings.warn(words, UserWarning, stacklevel=1)
        for words in (OLD, "beware of tomorrow"):
            warnings.warn(words, FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in heard] == [
        *left,
        "When using this, beware",
        "beware of tomorrow",
    ]

"""What Megatron says of GPUs where there is none."""

from __future__ import annotations

import warnings

from rlhf_lightning.engines.megatron import silence_on_host

SAID = (
    "Transformer Engine and Apex are not installed. Falling back to Torch optimizers.",
    "When using sequence parallelism it is recommended to set the environment variable "
    "CUDA_DEVICE_MAX_CONNECTIONS to 1 for maximum speedup",
    "When using async grad allreduce it is recommended to set the environment variable "
    "CUDA_DEVICE_MAX_CONNECTIONS to 1 for maximum speedup",
)


def test_advice_for_gpus_is_left_out_and_other_warnings_stay() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        silence_on_host()
        for words in (*SAID, "When using this, beware"):
            warnings.warn(words, UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in heard] == ["When using this, beware"]

"""Lightning callbacks: samples, curves, a second reward, predictions, traces, checkpoints, a demo's end."""

from rlhf_lightning.callbacks.demo_summary import DemoSummary
from rlhf_lightning.callbacks.last_checkpoint import LastCheckpoint
from rlhf_lightning.callbacks.predicted_times import PredictedTimes
from rlhf_lightning.callbacks.reward_curve import RewardCurve
from rlhf_lightning.callbacks.sample_table import SampleTable
from rlhf_lightning.callbacks.sampled_validation import SampledValidation
from rlhf_lightning.callbacks.second_reward import SecondReward
from rlhf_lightning.callbacks.trace import Trace

__all__ = [
    "DemoSummary",
    "LastCheckpoint",
    "PredictedTimes",
    "RewardCurve",
    "SampleTable",
    "SampledValidation",
    "SecondReward",
    "Trace",
]

"""Lightning callbacks for runs of this project; those that write files share `output`.

look at answers     SampleTable, Rollouts, SampledValidation, SecondReward (reward hacking)
look at numbers     RewardCurve, DemoSummary, PredictedTimes, Trace, Progress
checkpoints, order  LastCheckpoint, ValidateFirst
"""

from rlhf_lightning.callbacks.demo_summary import DemoSummary
from rlhf_lightning.callbacks.last_checkpoint import LastCheckpoint
from rlhf_lightning.callbacks.predicted_times import PredictedTimes
from rlhf_lightning.callbacks.progress import Progress
from rlhf_lightning.callbacks.reward_curve import RewardCurve
from rlhf_lightning.callbacks.rollouts import Rollouts
from rlhf_lightning.callbacks.sample_table import SampleTable
from rlhf_lightning.callbacks.sampled_validation import SampledValidation
from rlhf_lightning.callbacks.second_reward import SecondReward
from rlhf_lightning.callbacks.trace import Trace
from rlhf_lightning.callbacks.validate_first import ValidateFirst

__all__ = [
    "DemoSummary",
    "LastCheckpoint",
    "PredictedTimes",
    "Progress",
    "RewardCurve",
    "Rollouts",
    "SampleTable",
    "SampledValidation",
    "SecondReward",
    "Trace",
    "ValidateFirst",
]

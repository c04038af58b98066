"""Lightning callbacks: sampled responses, the reward's curve, a demo's last line, the newest checkpoint."""

from rlhf_lightning.callbacks.demo_summary import DemoSummary
from rlhf_lightning.callbacks.last_checkpoint import LastCheckpoint
from rlhf_lightning.callbacks.reward_curve import RewardCurve
from rlhf_lightning.callbacks.sample_table import SampleTable

__all__ = ["DemoSummary", "LastCheckpoint", "RewardCurve", "SampleTable"]

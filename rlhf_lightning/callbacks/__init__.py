"""Lightning callbacks that show a run: sampled responses, the reward's curve, a demo's last line."""

from rlhf_lightning.callbacks.demo_summary import DemoSummary
from rlhf_lightning.callbacks.reward_curve import RewardCurve
from rlhf_lightning.callbacks.sample_table import SampleTable

__all__ = ["DemoSummary", "RewardCurve", "SampleTable"]

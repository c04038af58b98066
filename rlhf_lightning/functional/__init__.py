"""The mathematics of the algorithms as pure torch functions without state: advantages, losses, KL.

masked, aggregate, ratio, whiten, moments    sums and means under a mask; what losses are divided by
estimator, penalized_estimator, *_estimator  advantages, as objects that run where the data is
reading                                      what losses and estimators look up in vain
gae, returns, groups, kl, overlong           the formulas that estimators use
policy and its subclasses                    losses of policies: sequence_policy (GSPO), cispo, reinforce,
                                             geometric_policy (GMPO); off_policy, their correction
value                                        the loss of critics
sft, pairs, dpo, simpo, kto                  losses on given answers
distillation                                 the loss of a student whose teacher says what it would say
reward_model, cost_model, process_reward     losses of models that score
rollout, best_of                             metrics of responses
"""

from rlhf_lightning.functional.aggregate import Aggregation, Counts, Loss, aggregate, run_loss
from rlhf_lightning.functional.best_of import expected_best
from rlhf_lightning.functional.cispo import CISPOLoss
from rlhf_lightning.functional.cost_model import CostLoss, sign_loss
from rlhf_lightning.functional.distillation import DistillationLoss
from rlhf_lightning.functional.dpo import DPOLoss, PreferenceKind, preference_loss
from rlhf_lightning.functional.estimator import (
    Add,
    Estimator,
    alone,
    check_estimator,
    reads_reference,
    run_estimator,
)
from rlhf_lightning.functional.gae import Gap, bootstrap_truncated, explained_variance, gae
from rlhf_lightning.functional.gae_estimator import GAEEstimator
from rlhf_lightning.functional.geometric_policy import GeometricPolicyLoss
from rlhf_lightning.functional.greedy_estimator import GreedyEstimator
from rlhf_lightning.functional.group_estimator import Baseline, GroupEstimator
from rlhf_lightning.functional.groups import (
    Scale,
    Single,
    group_advantages,
    group_std,
    leave_one_out,
    optimal_baseline,
    spread,
    tied_share,
    varied_groups,
)
from rlhf_lightning.functional.kl import (
    KLKind,
    adapted_kl_coef,
    kl_columns,
    kl_estimate,
    penalized_rewards,
)
from rlhf_lightning.functional.kto import KTOLoss, kto_baseline, kto_loss, of_other_prompts
from rlhf_lightning.functional.lagrangian_estimator import LagrangianEstimator
from rlhf_lightning.functional.masked import (
    at_last_valid,
    last_valid,
    masked_mean,
    masked_sum,
    row_ends,
    token_mean,
    turn_ids,
    zero_masked,
)
from rlhf_lightning.functional.moments import mean_std, merged
from rlhf_lightning.functional.off_policy import OffPolicyCorrection
from rlhf_lightning.functional.overlong import Overlong, overlong_penalty
from rlhf_lightning.functional.pairs import PairLoss, in_whole_pairs, pair_mean, split_pairs, whole_pairs
from rlhf_lightning.functional.penalized_estimator import PenalizedEstimator
from rlhf_lightning.functional.policy import PolicyLoss, clipped_policy_loss
from rlhf_lightning.functional.process_reward import StepLoss
from rlhf_lightning.functional.ratio import log_ratio
from rlhf_lightning.functional.reinforce import ReinforceLoss
from rlhf_lightning.functional.return_estimator import ReturnEstimator
from rlhf_lightning.functional.returns import ReturnGap, discounted_returns, remax_advantages, remax_returns
from rlhf_lightning.functional.reward_model import PairwiseLoss, pairwise_loss
from rlhf_lightning.functional.rollout import part_metrics, rollout_metrics, row_totals
from rlhf_lightning.functional.sapo import SAPOLoss
from rlhf_lightning.functional.sequence_policy import SequencePolicyLoss
from rlhf_lightning.functional.sft import SFTLoss
from rlhf_lightning.functional.simpo import SimPOLoss
from rlhf_lightning.functional.value import ValueLoss, clipped_value_loss
from rlhf_lightning.functional.whiten import whiten

__all__ = [
    "Add",
    "Aggregation",
    "Baseline",
    "CISPOLoss",
    "CostLoss",
    "Counts",
    "DPOLoss",
    "DistillationLoss",
    "Estimator",
    "GAEEstimator",
    "Gap",
    "GeometricPolicyLoss",
    "GreedyEstimator",
    "GroupEstimator",
    "KLKind",
    "KTOLoss",
    "LagrangianEstimator",
    "Loss",
    "OffPolicyCorrection",
    "Overlong",
    "PairLoss",
    "PairwiseLoss",
    "PenalizedEstimator",
    "PolicyLoss",
    "PreferenceKind",
    "ReinforceLoss",
    "ReturnEstimator",
    "ReturnGap",
    "SAPOLoss",
    "SFTLoss",
    "Scale",
    "SequencePolicyLoss",
    "SimPOLoss",
    "Single",
    "StepLoss",
    "ValueLoss",
    "adapted_kl_coef",
    "aggregate",
    "alone",
    "at_last_valid",
    "bootstrap_truncated",
    "check_estimator",
    "clipped_policy_loss",
    "clipped_value_loss",
    "discounted_returns",
    "expected_best",
    "explained_variance",
    "gae",
    "group_advantages",
    "group_std",
    "in_whole_pairs",
    "kl_columns",
    "kl_estimate",
    "kto_baseline",
    "kto_loss",
    "last_valid",
    "leave_one_out",
    "log_ratio",
    "masked_mean",
    "masked_sum",
    "mean_std",
    "merged",
    "of_other_prompts",
    "optimal_baseline",
    "overlong_penalty",
    "pair_mean",
    "pairwise_loss",
    "part_metrics",
    "penalized_rewards",
    "preference_loss",
    "reads_reference",
    "remax_advantages",
    "remax_returns",
    "rollout_metrics",
    "row_ends",
    "row_totals",
    "run_estimator",
    "run_loss",
    "sign_loss",
    "split_pairs",
    "spread",
    "tied_share",
    "token_mean",
    "turn_ids",
    "varied_groups",
    "whiten",
    "whole_pairs",
    "zero_masked",
]

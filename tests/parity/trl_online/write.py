"""Writes references.json with TRL's GRPOTrainer and RLOOTrainer: what they make of scores, and their losses.

Runs in an environment that holds TRL, and imports nothing of this package:
    benchmarks/.venvs/trl-grpo/bin/python tests/parity/trl_online/write.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}

import torch
import trl  # type: ignore[import-not-found]
from datasets import disable_progress_bars
from torch import Tensor

from tests.parity import cases, references
from tests.parity.cases import Batch
from tests.parity.references import Formula, Found, shrunk
from tests.parity.trl.cases import POLICY
from tests.parity.trl.write import directory, language_model, settings, texts, tokenizer

Options = Mapping[str, Any]
LIMITS: Options = {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 1.5}
TOKEN = 5


@cache
def grpo() -> Any:  # noqa: ANN401
    return _trainer(trl.GRPOTrainer, trl.GRPOConfig)


@cache
def rloo() -> Any:  # noqa: ANN401
    return _trainer(trl.RLOOTrainer, trl.RLOOConfig)


def _trainer(kind: Any, options: Any) -> Any:  # noqa: ANN401
    """A trainer whose model is never asked: tests tell it log-probabilities and scores."""
    with directory() as output_dir:
        rows = len(cases.EVEN_SCORES)
        trainer = kind(
            model=language_model(POLICY),
            reward_funcs=[lambda completions, **columns: [0.0] * len(completions)],
            args=options(
                output_dir,
                **settings(),
                per_device_train_batch_size=rows,
                num_generations=cases.GROUP_SIZE,
                max_completion_length=cases.HORIZON,
                beta=0.0,  # else it looks for a reference on disk
            ),
            train_dataset=texts(),
            processing_class=tokenizer(),
        )
    trainer.model.train()
    trainer.ref_model = torch.nn.Identity()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def told(trainer: Any, batch: Batch, options: Options, scores: Tensor) -> dict[str, Tensor]:  # noqa: ANN401
    """What the trainer makes of generated rows; a score is missing for rows without tokens."""
    configure(trainer, options)
    outcomes = torch.where(batch.mask.any(dim=1), scores, torch.nan)
    by_model = {id(trainer.model): batch["old_log_probs"], id(trainer.ref_model): batch["ref_log_probs"]}
    trainer._get_per_token_logps_and_entropies = lambda model, *a, **k: (by_model[id(model)], None, None)
    trainer._calculate_rewards = lambda *a: outcomes[:, None]
    rows, width = batch.mask.shape
    prompts, answers = [[TOKEN]] * rows, [[TOKEN] * width] * rows
    if trainer is rloo():
        answers = [[TOKEN] * length for length in batch.mask.sum(dim=1).tolist()]
        generated: tuple[Any, ...] = (prompts, answers, [""] * rows)
    else:
        tool_mask, drawn = batch.mask.long().tolist(), batch["rollout_log_probs"].tolist()
        generated = (prompts, answers, tool_mask, [""] * rows, drawn, {}, None, None)
    trainer._generate = lambda prompts: generated
    found: dict[str, Tensor] = trainer._generate_and_score_completions([{"prompt": ""}] * rows)
    return found


def configure(trainer: Any, options: Options, arguments: Options | None = None) -> None:  # noqa: ANN401
    """Set what the constructor copies from its arguments, and the arguments that the loss reads itself."""
    for name, value in {"delta": None, "use_bias_correction_kl": False, **(arguments or {})}.items():
        setattr(trainer.args, name, value)
    plain = {
        "beta": 0.0,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "importance_sampling_level": "token",
        "use_vllm": False,
        "entropy_coef": 0.0,
        "_entropy_bonus_enabled": False,
    }
    for name, value in {**plain, **options}.items():
        setattr(trainer, name, value)


def scored(
    batch: Batch, *, options: Options, outcomes: tuple[float, ...] | None = None, of_rloo: bool = False
) -> Found:
    scores = batch["even_outcomes"] if outcomes is None else torch.tensor(outcomes)
    found = told(rloo() if of_rloo else grpo(), batch, options, scores)
    return {"advantages": found["advantages"][:, None].expand(batch.mask.shape)}


def loss(
    batch: Batch, *, options: Options, advantages: str = "advantages", arguments: Options | None = None
) -> Found:
    trainer = grpo()
    configure(trainer, options, arguments)
    return _differentiated(trainer, batch, {"advantages": batch[advantages]})


def corrected(batch: Batch, *, mode: str) -> Found:
    """The ratio to what an engine drew, limited, and the loss with it."""
    options = {"use_vllm": True, "loss_type": "dapo", "vllm_importance_sampling_mode": mode, **LIMITS}
    trainer = grpo()
    weights = told(trainer, batch, options, batch["even_outcomes"])["importance_sampling_ratio"]
    more = {"advantages": batch["advantages"], "importance_sampling_ratio": weights}
    return {"weights": weights.expand(batch.mask.shape), **_differentiated(trainer, batch, more)}


def on_policy(batch: Batch) -> Found:
    """RLOO's gradient while the policy is still the one that drew the rows."""
    trainer = rloo()
    old = {"old_logps": (batch["log_probs"] * batch.mask).sum(dim=1)}
    found = _differentiated(trainer, batch, {"advantages": batch["row_advantages"][:, 0], **old})
    return {"gradient": found["gradient"]}


def _differentiated(trainer: Any, batch: Batch, more: Mapping[str, Tensor]) -> Found:  # noqa: ANN401
    leaf, mask = batch["log_probs"].clone().requires_grad_(), batch.mask.long()
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (leaf, batch["entropy"], None)
    prompts = torch.full((len(mask), 1), TOKEN)
    value = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": torch.full_like(mask, TOKEN),
            "completion_mask": mask,
            "old_per_token_logps": batch["old_log_probs"],
            "ref_per_token_logps": batch["ref_log_probs"],
            "num_items_in_batch": mask.sum(),
            **more,
        },
    )
    return {"loss": value, "gradient": torch.autograd.grad(value, leaf)[0]}


WITH_TERMS: Options = {
    "loss_type": "dapo",
    "beta": 0.1,
    "entropy_coef": 0.01,
    "_entropy_bonus_enabled": True,
    "use_adaptive_entropy": False,
}
SEQUENCES: Options = {"importance_sampling_level": "sequence", "epsilon_low": 0.2, "epsilon_high": 0.3}
FORMULAS: Mapping[str, Formula] = {
    "grpo_advantages": partial(scored, options={}),
    "grpo_advantages_small": partial(shrunk, formula=partial(scored, options={})),
    "unscaled_advantages": partial(scored, options={"scale_rewards": "none"}),
    **{f"loss_{kind}": partial(loss, options={"loss_type": kind}) for kind in ("grpo", "bnpo", "dr_grpo")},
    "loss_dapo": partial(loss, options={"loss_type": "dapo", "epsilon_high": 0.28}),
    "loss_two_sided": partial(loss, options={"loss_type": "dapo"}, arguments={"delta": 1.5}),
    "loss_cispo": partial(loss, options={"loss_type": "cispo", "epsilon_high": 1.5}),
    "loss_sapo": partial(loss, options={"loss_type": "sapo"}),
    "loss_gspo": partial(loss, options=SEQUENCES, advantages="row_advantages"),
    "loss_luspo": partial(loss, options={**SEQUENCES, "loss_type": "luspo"}, advantages="row_advantages"),
    "loss_terms": partial(loss, options=WITH_TERMS),
    "loss_terms_corrected": partial(loss, options=WITH_TERMS, arguments={"use_bias_correction_kl": True}),
    **{
        f"corrected_{mode}": partial(corrected, mode=mode)
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
}
ON_RIGHT_PADDING: Mapping[str, Formula] = {
    "equal_scores": partial(scored, options={}, outcomes=cases.EQUAL_SCORES * 2),
    "rloo_advantages": partial(scored, options={}, of_rloo=True),
    "rloo_advantages_kl": partial(scored, options={"beta": 0.1}, of_rloo=True),
    "rloo_on_policy": on_policy,
}
"""RLOOTrainer takes lengths of answers where GRPOTrainer takes masks."""


def main() -> None:
    disable_progress_bars()
    values = references.calculated(FORMULAS)
    values |= references.calculated(ON_RIGHT_PADDING, only="right_padding")
    references.save("trl_online", trl.__version__, values)


if __name__ == "__main__":
    main()

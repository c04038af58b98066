"""Writes references.json with TRL's own trainers: collators, `compute_loss` and all, on a tiny Llama.

Runs in an environment that holds TRL (benchmarks/environments.py makes them) and imports
nothing of this package:
    benchmarks/.venvs/trl-grpo/bin/python tests/parity/trl/write.py
    benchmarks/.venvs/trl-ppo/bin/python tests/parity/trl/write.py process_reward
The first writes every section but the last, whose trainer TRL 1.16 no longer has and 1.12 has. Sections that
are not written stay as they are.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))
os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}

import torch  # noqa: E402
import trl  # type: ignore[import-not-found]  # noqa: E402
from datasets import Dataset, disable_progress_bars  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.parity.trl import cases  # noqa: E402

Case = dict[str, Any]
Options = Mapping[str, Any]

DPO: Mapping[str, Options] = {
    "sigmoid": {"loss_type": ["sigmoid"], "beta": 0.5},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.2},
    "ipo": {"loss_type": ["ipo"]},
    "hinge": {"loss_type": ["hinge"], "beta": 0.3},
    "sigmoid_normalised": {"loss_type": ["sigmoid_norm"], "beta": 2.0},
    "sigmoid_sft": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    "sigmoid_smoothed": {"loss_type": ["aot"], "label_smoothing": 0.1, "beta": 0.3},
}
"""`sigmoid` takes no label smoothing in TRL; `aot` does, and on one pair, which it has nothing to sort in, is
the same formula: that case runs pair by pair."""
KTO: Mapping[str, Options] = {
    "plain": {"loss_type": "kto", "beta": 0.3},
    "weighted": {"loss_type": "kto", "desirable_weight": 0.5, "undesirable_weight": 1.25},
    "clamped": {"loss_type": "kto"},
    "apo_zero": {"loss_type": "apo_zero_unpaired"},
}
"""`clamped` swaps policy and reference, so that the other sign of the baseline is met as well."""
SIMPO: Mapping[str, Options] = {
    "sigmoid": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    "smoothed": {
        "loss_type": "simpo",
        "beta": 2.5,
        "simpo_gamma": 0.5,
        "cpo_alpha": 0.0,
        "label_smoothing": 0.1,
    },
    "sft": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.5},
    "hinge_summed": {"loss_type": "hinge", "beta": 0.1, "cpo_alpha": 0.0},
    "cpo": {"loss_type": "sigmoid", "beta": 0.1, "cpo_alpha": 1.0},
}
REWARD: Mapping[str, Options] = {"plain": {}, "centred": {"center_rewards_coefficient": 0.05}, "margins": {}}
METRICS = {
    "dpo": {
        "accuracy": "rewards/accuracies",
        "margin": "rewards/margins",
        "chosen_reward": "rewards/chosen",
        "rejected_reward": "rewards/rejected",
        "chosen_log_prob": "logps/chosen",
    },
    "kto": {
        "kl": "kl",
        "margin": "rewards/margins",
        "desirable_reward": "rewards/chosen",
        "undesirable_reward": "rewards/rejected",
    },
    "reward_model": {"accuracy": "accuracy", "margin": "margin"},
    "process_reward": {},
}
"""Our names of a loss's metrics -> TRL's."""


def dpo() -> Iterator[tuple[str, Case]]:
    ids = [
        {"prompt_ids": pair.prompt, "chosen_ids": pair.chosen, "rejected_ids": pair.rejected}
        for pair in cases.pairs()
    ]
    for name, options in DPO.items():
        with directory() as output_dir:
            trainer = trl.DPOTrainer(
                model=language_model(cases.POLICY),
                ref_model=language_model(cases.REFERENCE),
                args=trl.DPOConfig(output_dir, **settings(), **options),
                train_dataset=texts("chosen", "rejected"),
                processing_class=tokenizer(),
            )
            split = [[row] for row in ids] if "aot" in options["loss_type"] else [ids]
            yield name, measured(trainer, [trainer.data_collator(rows) for rows in split], "dpo")


def kto() -> Iterator[tuple[str, Case]]:
    ids = [
        {
            "prompt_ids": row.prompt,
            "completion_ids": row.answer,
            "KL_completion_ids": row.other,
            "label": row.desirable,
        }
        for row in cases.answers()
    ]
    for name, options in KTO.items():
        weights = (cases.POLICY, cases.REFERENCE)
        trained, fixed = reversed(weights) if name == "clamped" else weights
        with directory() as output_dir:
            trainer = trl.KTOTrainer(
                model=language_model(trained),
                ref_model=language_model(fixed),
                args=trl.KTOConfig(output_dir, **settings(), **options, per_device_train_batch_size=2),
                train_dataset=texts("completion", label=True),
                processing_class=tokenizer(),
            )
            yield name, measured(trainer, [trainer.data_collator(ids)], "kto")


def simpo() -> Iterator[tuple[str, Case]]:
    from trl.experimental.cpo import CPOConfig, CPOTrainer  # type: ignore[import-not-found]

    for name, options in SIMPO.items():
        with directory() as output_dir:
            trainer = CPOTrainer(
                model=language_model(cases.POLICY),
                args=CPOConfig(output_dir, **settings(), **options, max_length=32),
                train_dataset=texts("chosen", "rejected"),
                processing_class=tokenizer(),
            )
            batch = trainer.data_collator([cpo_row(pair) for pair in cases.pairs()])
            case = measured(trainer, [batch], None)
            _, found = trainer.compute_loss(trainer.model, batch, return_outputs=True)
            case["metrics"] = {f"simpo/{key}": found[value] for key, value in METRICS["dpo"].items()}
            yield name, case


def cpo_row(pair: cases.Pair) -> dict[str, list[int]]:
    """What CPOTrainer.tokenize_row makes, without the tokens that it would put around."""
    row = {"prompt_input_ids": pair.prompt, "prompt_attention_mask": [1] * len(pair.prompt)}
    for key, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        row[f"{key}_input_ids"] = pair.prompt + answer
        row[f"{key}_attention_mask"] = [1] * len(pair.prompt + answer)
        row[f"{key}_labels"] = [-100] * len(pair.prompt) + answer
    return row


def reward_model() -> Iterator[tuple[str, Case]]:
    for name, options in REWARD.items():
        rows = [
            {"chosen_ids": pair.prompt + pair.chosen, "rejected_ids": pair.prompt + pair.rejected}
            | ({"margin": pair.margin} if name == "margins" else {})
            for pair in cases.pairs()
        ]
        with directory() as output_dir:
            trainer = trl.RewardTrainer(
                model=filled(LlamaForSequenceClassification(config(num_labels=1))),
                args=trl.RewardConfig(output_dir, **settings(), **options),
                train_dataset=texts("chosen", "rejected"),
                processing_class=tokenizer(),
            )
            yield name, measured(trainer, [trainer.data_collator(rows)], "reward_model")


def process_reward() -> Iterator[tuple[str, Case]]:
    from trl.experimental.prm import PRMConfig, PRMTrainer  # type: ignore[import-not-found]

    rows = []
    for row in cases.stepped():
        ids, labels = list(row.prompt), [-100] * len(row.prompt)
        for step, label in zip(row.steps, row.labels, strict=True):
            ids += step
            labels += [-100] * (len(step) - 1) + [int(label)]
        rows.append({"input_ids": ids, "labels": labels})
    with directory() as output_dir:
        trainer = PRMTrainer(
            model=filled(LlamaForTokenClassification(config(num_labels=2))),
            args=PRMConfig(output_dir, **settings(), disable_dropout=True),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
        )
        yield "plain", measured(trainer, [trainer.data_collator(rows)], "process_reward")


SECTIONS: Mapping[str, Callable[[], Iterator[tuple[str, Case]]]] = {
    "dpo": dpo,
    "kto": kto,
    "simpo": simpo,
    "reward_model": reward_model,
    "process_reward": process_reward,
}


def measured(trainer: Any, batches: Sequence[Any], group: str | None) -> Case:  # noqa: ANN401
    """Loss, gradient and metrics of one trainer; of several batches their means."""
    model = trainer.model.train()
    loss = torch.stack([trainer.compute_loss(model, dict(batch)) for batch in batches]).mean()
    torch.autograd.backward(loss)
    case: Case = {
        "weights": cases.checksum(model),
        "loss": loss.item(),
        "gradient": model.get_parameter(cases.GRADIENT_OF).grad.tolist(),
    }
    if group is not None:
        names = METRICS[group]
        found = trainer._metrics["train"] if names else {}
        case["metrics"] = {f"{group}/{key}": statistics.fmean(found[name]) for key, name in names.items()}
    return case


def settings() -> dict[str, Any]:
    """What every trainer is told."""
    return {
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }


@contextmanager
def directory() -> Iterator[str]:
    """A place for what a trainer may write."""
    with tempfile.TemporaryDirectory() as path:
        yield path


def config(**more: int) -> LlamaConfig:
    return LlamaConfig.from_dict(cases.MODEL | more)


def language_model(weights: tuple[int, float]) -> LlamaForCausalLM:
    model = LlamaForCausalLM(config())
    cases.fill(model, weights)
    return model


def filled(model: PreTrainedModel) -> PreTrainedModel:
    cases.fill(model, cases.POLICY)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """A word a token: trainers ask for one, though the batches come as ids."""
    pad, begin, end = "<pad>", "<s>", "</s>"
    words = [pad, begin, end, *(f"t{number}" for number in range(3, int(cases.MODEL["vocab_size"])))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=pad))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=pad, bos_token=begin, eos_token=end)


def texts(*answers: str, **more: bool) -> Dataset:
    """A data set for the constructor of a trainer, of which no row is read."""
    row = {"prompt": "t3 t4", **{name: f" t{5 + i}" for i, name in enumerate(answers)}, **more}
    return Dataset.from_list([row, row])


def main(names: Sequence[str]) -> None:
    disable_progress_bars()
    path = HERE / "references.json"
    references = json.loads(path.read_text()) if path.exists() else {}
    for name in names or [name for name in SECTIONS if name != "process_reward"]:
        references[name] = {"trl": trl.__version__, "cases": dict(SECTIONS[name]())}
    path.write_text(json.dumps(references, indent=1, sort_keys=True) + "\n")
    sys.stdout.write(json.dumps({"written": str(path), "trl": trl.__version__}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

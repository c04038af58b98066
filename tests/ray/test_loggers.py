"""A fit tells wandb, TensorBoard and CSV the same, shows its samples, and logs what docs/metrics.md lists."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import wandb

from tests.conftest import ROOT
from tests.logged import csv_file, tensorboard, wandb_config, wandb_rows, wandb_table
from tests.ray.commands import run

STEPS = 2
ROWS = 3
LOGGED = """
algo:
  class_path: ppo
  init_args:
    actor: {{path: {model}, optimizer: {{lr: 3.0e-4}}, sampling: {{max_new_tokens: 6}}}}
    critic: {{optimizer: {{lr: 1.0e-3, warmup_steps: 2}}}}
    reward: {{functions: {{exact_match: 1.0, length: 0.001}}}}
    policy_loss: {{kl_coef: 0.1}}
data: {{class_path: taskdata, init_args: {{num_rows: 32, num_val_rows: 8, batch_size: 8}}}}
trainer:
  max_steps: {steps}
  val_check_interval: 1
  default_root_dir: {root}
  enable_checkpointing: false
  logger:
  - {{class_path: WandbLogger, init_args: {{save_dir: {root}, offline: true, project: tests}}}}
  - {{class_path: TensorBoardLogger, init_args: {{save_dir: {root}/board}}}}
  - {{class_path: CSVLogger, init_args: {{save_dir: {root}/csv}}}}
  callbacks:
  - {{class_path: SampleTable, init_args: {{rows: {rows}, per_token: true}}}}
  - {{class_path: PredictedTimes}}
  - {{class_path: LearningRateMonitor, init_args: {{logging_interval: step}}}}
"""
TASK = "--data taskdata --data.num_rows 8 --data.num_val_rows 4"
ROWS_OF = "--data {data} --data.path rows.jsonl --data.val_rows 4"
PAIRS = ROWS_OF.format(data="preferencedata")
SECOND = "--trainer.callbacks+=SecondReward --trainer.callbacks.functions length"
SEVERAL = "--trainer.callbacks+=SampledValidation --trainer.callbacks.samples 2"
CORRECTED = "--algo.actor.recompute_log_probs true --algo.policy_loss.correction OffPolicyCorrection"
TURNS = "--algo.actor.environment.function examples.second_try.told"
OTHERS = {
    "grpo": f"--algo.group_size 2 {TASK} {SECOND} {SEVERAL} {CORRECTED} {TURNS}",
    "sft": f"{TASK} --data.completions true",
    "dapo": f"--algo.group_size 2 {TASK}",
    "saferlhf": "--algo.cost.functions length --algo.ptx_loss.coef 0.1 --data mixeddata"
    " --data.main rlhf_lightning.data.TaskData --data.main.num_rows 8 --data.main.num_val_rows 4"
    " --data.main.batch_size 4 --data.ptx rlhf_lightning.data.TextData --data.ptx.path rows.jsonl"
    " --data.ptx.text_field prompt --data.ptx.block_tokens 16 --data.ptx.batch_size 2",
    "onlinedpo": f"--algo.reward.functions length --strategy one-step-off --strategy.max_staleness 2 {TASK}",
    "distillation": f"--algo.teacher.path {{tiny}} {TASK}",
    "dpo": f"--algo.loss.sft_coef 0.1 {PAIRS}",
    "simpo": f"--algo.loss.sft_coef 0.1 {PAIRS}",
    "kto": ROWS_OF.format(data="unpaireddata") + " --data.response_field chosen",
    "rewardmodel": PAIRS,
    "costmodel": f"{PAIRS} --data.safe_fields [chosen_safe,rejected_safe]",
    "processrewardmodel": ROWS_OF.format(data="stepdata"),
}
"""Algorithms whose metrics PPO does not have, and their options."""
ROW = {
    "prompt": "What is it? ",
    "chosen": "this",
    "rejected": "that one",
    "chosen_safe": True,
    "rejected_safe": False,
    "steps": ["one", "two"],
    "labels": [1, 0],
}
OF_SERVICES = {"reward/retries", "cost/retries"}
"""Metrics of services, which tests/unit/rewards asks."""
OF_LIGHTNING = {"epoch", "step", "lr-RemoteOptimizer/actor", "lr-RemoteOptimizer/critic"}
"""Columns that Lightning and its LearningRateMonitor add."""


@pytest.fixture(scope="module")
def logged(tiny: Path, tmp_path_factory: pytest.TempPathFactory, module_leaves_nothing: None) -> Path:
    """The root directory of a fit with all loggers."""
    root = tmp_path_factory.mktemp("logged")
    (root / "run.yaml").write_text(LOGGED.format(model=tiny, root=root, steps=STEPS, rows=ROWS))
    run("rlhf fit -c run.yaml", cwd=root)
    wandb.finish()
    wandb.teardown()
    return root


def test_the_loggers_agree(logged: Path) -> None:
    board, table, rows = tensorboard(logged / "board"), csv_file(logged / "csv"), wandb_rows(logged)
    for name in ("reward/mean", "actor/kl", "critic/loss", "val/reward", "time/step_s"):
        assert len(table[name]) == STEPS
        assert board[name] == pytest.approx(table[name], rel=1e-6)
        assert [row[name] for row in rows if name in row] == pytest.approx(table[name], rel=1e-6)
    assert set(board) - {"hp_metric"} == set(table) - {"step"} | {"epoch"}
    assert [name for name, values in table.items() if not all(map(math.isfinite, values))] == []


def test_learning_rates_of_remote_optimizers(logged: Path) -> None:
    table = csv_file(logged / "csv")
    assert table["actor/lr"] == [pytest.approx(3e-4)] * STEPS
    assert table["critic/lr"] == [pytest.approx(1e-3 / 3), pytest.approx(2e-3 / 3)]
    # The monitor looks before a step, so that it shows the rate of the one before, at first of the first.
    assert table["lr-RemoteOptimizer/actor"] == [pytest.approx(3e-4)] * STEPS
    assert table["lr-RemoteOptimizer/critic"] == [pytest.approx(1e-3 / 3)] * STEPS


def test_wandb_holds_the_configuration(logged: Path) -> None:
    config = wandb_config(logged)
    penalty = config["kl"]
    assert isinstance(penalty, dict)
    assert penalty["coef"] == 0.05
    actor = config["actor"]
    assert isinstance(actor, dict)
    assert actor["optimizer"]["lr"] == 3e-4
    assert actor["sampling"]["max_new_tokens"] == 6


def test_wandb_holds_the_sample_table(logged: Path) -> None:
    columns, data = wandb_table(logged, "samples")
    assert columns == ["step", "prompt", "response", "score"]
    assert len(data) == ROWS
    for step, prompt, _, score in data:
        assert step == STEPS
        assert re.fullmatch(r"Sort \d{6}: ", str(prompt))
        assert float(str(score)) % 1 < 0.05  # a match, and a little for the length


def test_pages_show_numbers_of_every_token(logged: Path) -> None:
    pages = sorted((logged / "samples").glob("step-*.html"))
    assert [page.stem for page in pages] == ["step-000001", "step-000002"]
    text = pages[-1].read_text(encoding="utf-8")
    tokens = {}
    for name in ("kl", "values", "advantages"):
        cells = re.findall(rf"<div class='name'>{name}</div><pre>(.*?)</pre>", text, re.DOTALL)
        assert len(cells) == ROWS
        titles = [re.findall(r"<span [^>]*title='([^']+)'>", cell) for cell in cells]
        tokens[name] = [len(row) for row in titles]
        assert len({float(number) for row in titles for number in row}) > ROWS  # numbers, not one constant
    assert tokens["kl"] == tokens["values"] == tokens["advantages"]
    assert all(1 <= count <= 6 for count in tokens["kl"])


def documented() -> list[re.Pattern[str]]:
    """Names of docs/metrics.md; one without a group has that of the first in its line."""
    patterns = []
    for line in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines():
        names = re.findall(r"`([^`]+)`", line.split("|")[1]) if line.startswith("| `") else []
        for name in names:
            whole = name if "/" in name else f"{names[0].partition('/')[0]}/{name}"
            patterns.append(re.compile(re.sub(r"<\\?\w+>", r"\\w+", re.escape(whole))))
    return patterns


def test_the_document_lists_what_is_logged_and_nothing_else(logged: Path, tiny: Path) -> None:
    names = set(csv_file(logged / "csv"))
    others = {algorithm: options.format(tiny=tiny) for algorithm, options in OTHERS.items()}
    for algorithm, options in others.items():
        root = logged / algorithm
        root.mkdir()
        rows = [ROW | {"label": number % 2 == 0} for number in range(12)]
        (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        model = {"rewardmodel": "reward", "costmodel": "cost", "processrewardmodel": "reward"}.get(algorithm)
        actor = f"--algo.{model}.path {tiny}" if model else f"--algo.actor.path {tiny}"
        actor += "" if model else " --algo.actor.sampling.max_new_tokens 4"
        size = "" if algorithm == "saferlhf" else "--data.batch_size 4"
        run(
            f"rlhf fit --algo {algorithm} --strategy local {actor} {options} {size} --trainer.max_steps 1 "
            f"--trainer.val_check_interval 1 --trainer.enable_checkpointing false "
            f"--trainer.default_root_dir {root} --trainer.logger CSVLogger --trainer.logger.save_dir {root}",
            cwd=root,
        )
        names |= set(csv_file(root))
    patterns = documented()
    unknown = {name for name in names - OF_LIGHTNING if not any(p.fullmatch(name) for p in patterns)}
    assert unknown == set()
    assert [p.pattern for p in patterns if not any(map(p.fullmatch, names | OF_SERVICES))] == []

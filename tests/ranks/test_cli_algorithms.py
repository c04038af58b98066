"""Algorithms on the command line: a file of the user's own, and what each refuses before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.algos.small import write_judge
from tests.unit.rlhf import SHORT, Rlhf
from tests.unit.test_checks_judges import Twofold

pytestmark = pytest.mark.usefixtures("in_own_directory")
PAIR = {
    "prompt": "What? ",
    "chosen": "this",
    "rejected": "that",
    "label": True,
    "steps": ["a"],
    "labels": [1],
}
BFLOAT16 = ("--algo.actor.recompute_log_probs", "false", "--algo.actor.dtype", "bfloat16")
FIT = ("fit", "--strategy", "local", "--trainer.max_steps", "1", "--trainer.logger", "false")


def write(**changes: object) -> str:
    """Four whole rows, and a fifth that is changed; None takes a field away."""
    last = {name: value for name, value in {**PAIR, **changes}.items() if value is not None}
    rows = [PAIR] * 4 + [last]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "rows.jsonl"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--algo", "grpo", "--algo.group_size", "1"), ("group_size=1", "Try 8")),
        (("--algo", "saferlhf", "--algo.threshold", "0.1"), ("cost", "--algo.cost.functions")),
        (("--algo", "ppo", "--algo.ptx_loss.coef", "0.1"), ("ptx_loss.coef", "mixeddata")),
        (("--algo", "ppo", "--algo.reward.functions", "http://127.0.0.1:9/score"), ("127.0.0.1:9",)),
        (("--algo", "dpo"), ("DPO learns from pairs", "TaskData gives single rows", "preferencedata")),
        (("--algo", "kto"), ("KTO learns from the columns response_ids, labels", "unpaireddata")),
        (("--algo", "gspo", *BFLOAT16), ("actor.dtype=bfloat16", "--algo.actor.recompute_log_probs true")),
        (
            ("--algo", "grpo", "--algo.policy_loss.correction.high", "2"),
            ("correction", "recompute_log_probs"),
        ),
    ],
    ids=lambda value: " ".join(value[-2:]) if value and value[0] == "--algo" else "",
)
def test_options_that_cannot_be(rlhf: Rlhf, words: tuple[str, ...], said: tuple[str, ...]) -> None:
    message = rlhf.refused(*FIT, *SHORT, *words)
    assert [part for part in said if part not in message] == [], message


@pytest.mark.parametrize(
    ("algo", "data", "changes", "said"),
    [
        ("dpo", "preferencedata", {"rejected": None}, ("row 5", "rejected")),
        ("rewardmodel", "preferencedata", {"chosen": 3}, ("row 5", "chosen")),
        ("costmodel", "preferencedata", {}, ("PreferenceData gives no safe. Type --data.safe_fields",)),
        ("kto", "unpaireddata", {"label": "good"}, ("row 5", "good")),
        ("processrewardmodel", "stepdata", {"labels": [1, 0]}, ("row 5", "2")),
        ("processrewardmodel", "stepdata", {"labels": [7]}, ("row 5", "7")),
    ],
)
def test_rows_that_cannot_be(
    rlhf: Rlhf, algo: str, data: str, changes: dict[str, object], said: tuple[str, ...]
) -> None:
    options = ("--data.path", write(**changes), "--data.batch_size", "2")
    response = ("--data.response_field", "chosen") if data == "unpaireddata" else ()
    message = rlhf.refused(*FIT, "--algo", algo, "--data", data, *options, *response)
    assert [part for part in said if part not in message] == [], message


def test_a_file_dropped_into_a_folder_is_an_algorithm(rlhf: Rlhf) -> None:
    Path("mine.py").write_text(
        "from pathlib import Path\n\nfrom rlhf_lightning.algos import GRPO\n\n\n"
        "class Mine(GRPO):\n"
        "    def step(self, batch):\n"
        '        Path("seen").write_text(f"{self.group_size} answers to each of {len(batch)}")\n'
        "        return super().step(batch)\n"
    )
    small = ("--data.batch_size", "2", "--algo.group_size", "2", "--trainer.default_root_dir", "out")
    rlhf.succeeds(*FIT, "--algo", "mine.Mine", "--data", "taskdata", *small)
    assert Path("seen").read_text() == "2 answers to each of 2"
    assert Path("out/checkpoints/last.ckpt/actor").is_dir()


def test_a_loss_that_extends_the_algorithms_own_needs_no_algorithm(rlhf: Rlhf) -> None:
    Path("own_loss.py").write_text(
        "from dataclasses import dataclass\n"
        "from rlhf_lightning.functional import PolicyLoss\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Scaled(PolicyLoss):\n"
        "    extra: float = 1.0\n"
    )
    loss = ("--algo.policy_loss", "own_loss.Scaled", "--algo.policy_loss.extra", "2")
    out = rlhf.succeeds("fit", "--algo", "grpo", *loss, "--print_config")
    assert "class_path: own_loss.Scaled" in out
    assert "extra: 2.0" in out


def test_the_only_model_of_a_checkpoint_is_exported(rlhf: Rlhf) -> None:
    options = ("--data", "preferencedata", "--data.path", write(), "--data.batch_size", "2")
    rlhf.succeeds(*FIT, "--algo", "rewardmodel", *options, "--trainer.default_root_dir", "out")
    out = rlhf.succeeds("export", "out/checkpoints/last.ckpt", "model")
    assert out.endswith("exported reward of out/checkpoints/last.ckpt to model\n")
    assert json.loads(Path("model/config.json").read_text())["architectures"] == [
        "LlamaForSequenceClassification"
    ]


def test_what_is_advised_against_older_answers_can_be_typed(
    rlhf: Rlhf, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("fit", "--algo", "remax", "--strategy", "one-step-off", *SHORT, "--data.num_rows", "128")
    advice: list[str] = []
    for expected in (1, 0):
        caplog.clear()
        with pytest.raises(AssertionError, match="started Ray"):
            rlhf.run(*words, *advice)
        told = [record.getMessage() for record in caplog.records if "older weights" in record.getMessage()]
        assert len(told) == expected, told
        advice = told[0].rpartition("Type ")[2].rstrip(".").split() if told else []


def test_a_field_whose_default_scores_steps_takes_its_path_from_the_command_line(
    rlhf: Rlhf, tmp_path: Path
) -> None:
    algo = f"{Twofold.__module__}.{Twofold.__name__}"
    given = ("--algo.prm.path", write_judge(tmp_path / "prm"), "--algo.toxicity.functions", "too_lon")
    told = rlhf.refused("fit", "--strategy", "local", "--algo", algo, *given)
    assert told.startswith("toxicity function 'too_lon': "), "the path of the other is no longer missed"

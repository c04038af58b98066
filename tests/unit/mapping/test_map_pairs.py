"""`rlhf map` for algorithms of pairs, of given answers, of fewer models: it predicts what its file runs."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import pytest
from tensordict import TensorDict

from rlhf_lightning.algos import GRPO
from rlhf_lightning.commands import map as command
from rlhf_lightning.controller import DP, register
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.workers import Reward
from tests.unit.workers.test_tool import Finder

pytestmark = pytest.mark.unit

GIVEN, DRAWN = "--data.max_response_tokens", "--algo.actor.sampling.max_new_tokens"


@pytest.mark.parametrize(
    ("algo", "batch", "rows", "says"),
    [
        ("dpo", 64, 128, (GIVEN, "8 updates of 8 pairs")),
        ("simpo", 64, 128, (GIVEN, "8 updates of 8 pairs")),
        ("dpo", 3, 6, (GIVEN, "3 updates of 1 pairs")),
        ("rewardmodel", 64, 128, (GIVEN, "8 updates of 8 pairs")),
        ("costmodel", 9, 18, (GIVEN, "8 updates of 2 pairs")),
        ("tests.unit.test_data_checks.Writing", 3, 6, (GIVEN, "3 updates of 1 pairs")),
        ("sft", 64, 64, (GIVEN, "8 updates of 8 rows")),
        ("onlinedpo", 64, 128, (DRAWN, "8 updates of 8 pairs")),
        ("ppo", 64, 64, (DRAWN, "8 updates of 8 rows")),
    ],
)
def test_a_batch_is_counted_as_the_options_count_it(
    tmp_path: Path, algo: str, batch: int, rows: int, says: tuple[str, str]
) -> None:
    file, (limit, updates) = tmp_path / "run.yaml", says
    asked = ("--algo", algo, "--devices", "8", "--model", "llama-7b", "--batch", str(batch))
    with redirect_stdout(StringIO()) as output:
        command.run((*asked, "--json", "--yaml", str(file)))
    found = json.loads(output.getvalue())
    assert found["tokens_per_s"] * found["iteration_s"] == pytest.approx(rows * 2048)
    predicted, steps = file.read_text().splitlines()[2:4]
    assert predicted.endswith(f" --data.batch_size {batch} --data.max_prompt_tokens 1024 {limit} 1024")
    assert steps == f"# in {updates} (--algo.mini_batch_size)"


def test_a_model_that_follows_the_actor_has_masters() -> None:
    """2 N and 4 N bytes, of which Megatron's sharded optimizer divides the latter over the replicas."""
    asked = ("--algo", "tests.ranks.algos.test_opponents.SelfPlay", "--devices", "8", "--model", "llama-7b")
    algorithm, options = command._parse(asked)
    costs = command.search(algorithm, dict.fromkeys(("actor", "opponent"), "llama-7b"), options).costs
    held = [costs.resident("opponent", ParallelLayout(d=d)) for d in (1, 4)]
    assert held == [number * costs.shapes["opponent"].num_parameters for number in (2 + 4, 2 + 1)]


@pytest.mark.parametrize(("reward", "loaded"), [((), False), (("--reward", "llama-7b"), True)])
def test_a_reward_that_validates_alone_is_no_model_unasked(reward: tuple[str, ...], *, loaded: bool) -> None:
    """No step of a distillation calls it; by default it scores held-out answers by functions."""
    asked = ("--algo", "distillation", "--devices", "8", "--model", "llama-7b", *reward)
    with redirect_stdout(StringIO()) as output:
        command.run((*asked, "--top", "1"))
    assert ("reward, which no step calls, takes" in output.getvalue()) == loaded
    assert ("    reward: {path: " in output.getvalue()) == loaded


@dataclass(frozen=True, kw_only=True)
class Lengths(Reward):
    """Scores each token by a method of its own, which runs no model."""

    @register(transfer=DP, reads=("response_mask",), returns=("scores",))
    def compute_reward(self, rows: TensorDict) -> TensorDict:  # type: ignore[override]
        return TensorDict({"scores": rows["response_mask"].float()}, batch_size=len(rows))


class ByLengths(GRPO):
    """Has a reward, and a tool that it asks, without models."""

    reward: Lengths = field(default_factory=Lengths)
    finder: Finder = field(default_factory=Finder)


def test_roles_that_run_no_model_are_none_unasked() -> None:
    asked = ("--algo", f"{__name__}.ByLengths", "--devices", "8", "--model", "llama-7b", "--top", "1")
    with redirect_stdout(StringIO()) as output:
        command.run(asked)
    found = output.getvalue()
    assert "no step calls" not in found
    assert "reward: {" not in found
    assert "finder: {" not in found
    assert "reward, finder]" in found, "they stand with a model"


def test_a_reference_that_nothing_reads_is_placed_by_no_strategy() -> None:
    """DAPO has no KL: beside functions its actor is the only model, which `standalone` gives all devices."""
    asked = ("--algo", "dapo", "--devices", "8", "--model", "llama-7b", "--reward", "none")
    with redirect_stdout(StringIO()) as output:
        command.run((*asked, "--json"))
    found = json.loads(output.getvalue())
    assert [pool["roles"] for pool in found["mapping"]] == [["actor"]]
    assert found["baselines"]["standalone"] == found["baselines"]["colocated"] == found["tokens_per_s"]
    with pytest.raises(ValueError, match=r"^--reference llama-7b: unknown\. .* --model, dapo has --reward;"):
        command.run((*asked, "--reference", "llama-7b"))

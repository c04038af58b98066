"""What the documents have in Python: methods that run on the devices, and a loss with its test."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, cast

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from tensordict import TensorDict

from rlhf_lightning.algos import GRPO
from rlhf_lightning.commands import export
from rlhf_lightning.controller import Batch, Metrics, Worker
from rlhf_lightning.controller.register import methods_of
from rlhf_lightning.data import PromptData, TaskData, load_tokenizer
from rlhf_lightning.functional import PairLoss, PolicyLoss
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.reporting import answers
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reward, Settings, asking
from tests.conftest import ROOT
from tests.unit import spmd
from tests.unit.algos.short import trainer
from tests.unit.algos.small import write_other
from tests.unit.workers.test_judge import batch, on_devices, with_raw_rows


def run_documented(*parts: str, names: dict[str, object] | None = None) -> dict[str, object]:
    """What the blocks with these lines make, as a reader would copy them; `names` are there before."""
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
    blocks = [block for page in pages for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
    names = {} if names is None else names
    names["__name__"] = __name__
    for part in parts:
        (code,) = (block for block in blocks if part in block)
        exec(code, names)  # noqa: S102 - the package's own document
    return names


def documented() -> type[Actor]:
    """The role."""
    return cast(type[Actor], run_documented("Watched(Actor)")["Watched"])


def measured(group: dist.ProcessGroup, kind: type[Actor], rows: Batch) -> dict[str, float]:
    """What a rank returns of its share."""
    rank, layout = group.rank(), ParallelLayout(d=group.size())
    role = kind(path="embedded")
    role.binding.worker = Worker(
        rank=rank, layout=layout, device=torch.device("cpu"), dp_group=group, groups=None, settings=Settings()
    )
    mine = rows.split(group.size())[rank]
    share = TensorDict({"response_mask": mine["response_mask"]}, batch_size=len(mine))
    return cast(dict[str, float], methods_of(kind)["length"].function(role, share))


@pytest.mark.parametrize("lengths", [[1, 2, 6, 3], [1, 2, 6], [5]], ids=["even", "uneven", "a rank has none"])
def test_a_mean_over_all_rows(lengths: list[int]) -> None:
    rows = Batch.of({"response_mask": torch.arange(8) < torch.tensor(lengths)[:, None]})
    found = Metrics([spmd.run(2, measured, documented(), rows)]).fetch()
    assert found == {"mine/length": sum(lengths) / len(lengths)}


def test_a_loss_is_called_alone() -> None:
    value = run_documented("class Weighted(Loss)", "loss = Weighted()")["value"]
    assert isinstance(value, torch.Tensor)
    assert float(value.detach()) == 0.5


def test_a_loss_over_pairs_leaves_out_half_a_pair() -> None:
    """Of the scores 2 and 0.5, 0 and 1, and of an answer alone: the mean of 0 and 2."""
    scores = torch.tensor([2.0, 0.5, 0.0, 1.0, 3.0, math.nan], requires_grad=True)
    mask = torch.tensor([[True]] * 5 + [[False]])
    loss = cast(type[PairLoss], run_documented("class Hinge(PairLoss)")["Hinge"])()
    rows = {"response_mask": mask}
    whole = loss.count(rows)
    value, metrics = loss({"values": scores[:, None]}, rows, whole)
    assert float(value.detach()) == float(metrics["reward_model/loss"]) == 1.0
    (gradient,) = torch.autograd.grad(value, scores)
    assert gradient.tolist() == [0.0, 0.0, -0.5, 0.5, 0.0, 0.0]


def by_token() -> Reward:
    """The reward of the document."""
    kind = run_documented("class DigitReward(Reward)")["DigitReward"]
    return cast(type[Reward], kind)()


@pytest.mark.parametrize("ranks", [1, 3, 5], ids=["one", "uneven", "one has no rows"])
def test_a_score_for_each_token(ranks: int) -> None:
    """Of the answer `abc` each right character is a third; the last response has a gap at its fourth."""
    scores = on_devices(by_token(), ranks).compute_reward(with_raw_rows(batch(["abc", "xbcd", "", "abbc"])))
    third = torch.zeros(4, 8)
    third[0, :3], third[1, 1:3], third[3, :2] = 1 / 3, 1 / 3, 1 / 3
    torch.testing.assert_close(scores["scores"], third)


def test_held_out_answers_are_scored_by_token_too(tmp_path: Path) -> None:
    """Of held-out answers with as many tokens as digits the share of right ones is that of characters."""
    data = TaskData(batch_size=4, num_rows=4, num_val_rows=8)
    found = {}
    for name, reward in (("tokens", by_token()), ("characters", Reward(functions="partial_match"))):
        algorithm = GRPO(actor=Actor(sampling=Sampling(max_new_tokens=6)), reward=reward)
        run = trainer(Local(), tmp_path, limit_val_batches=None)
        found[name] = run.validate(algorithm, datamodule=data, verbose=False)[0]["val/reward"]
    assert 0 < found["tokens"] == pytest.approx(found["characters"], rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 3], ids=["one", "uneven"])
def test_a_score_that_adds_to_the_functions(ranks: int) -> None:
    """Of 8 tokens the last 4 cost a quarter each; the last of the answers ends at 8, and was cut off."""
    kind = run_documented("class OverlongReward(Reward)")["OverlongReward"]
    reward = cast(type[Reward], kind)(functions={"exact_match": 1.0, "length": 0.0}, truncated_penalty=0.5)
    said = batch(["abc", "abcdef", "", "abcdefgh"]) | {"row_truncated": torch.arange(4) == 3}
    found = on_devices(reward, ranks).compute_reward(with_raw_rows(said))
    assert found["scores"].sum(1).tolist() == [1.0, -0.75, 0.0, -1.5]
    assert found["score_parts"][:, 0].tolist() == [1.0, 0.0, 0.0, 0.0]


def peers(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """How many rows of the call have the same response."""
    return [float(responses.count(response)) for response in responses]


@pytest.mark.parametrize("ranks", [1, 3], ids=["one", "uneven"])
def test_a_score_that_compares_answers(ranks: int) -> None:
    kind = run_documented("class ComparingReward(Reward)")["ComparingReward"]
    reward = cast(type[Reward], kind)(functions=peers)
    said = with_raw_rows(batch(["a", "a", "b", "a"]))
    assert on_devices(reward, ranks).compute_reward(said)["scores"].sum(1).tolist() == [3.0, 3.0, 1.0, 3.0]


def worth(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """What each row says."""
    return [cast(float, row["worth"]) for row in rows]


def test_held_out_scores_of_each_data_source(tmp_path: Path) -> None:
    """Means over rows, of sources that come in batches of other numbers, one of them not in each."""
    rows = [{"prompt": "p", "data_source": "a" if n != 3 else "b", "worth": float(n)} for n in range(5)]
    data = PromptData.from_rows(rows, held_out=rows, tokenizer="embedded", batch_size=2)
    kind = cast(type[GRPO], run_documented("class BySource(GRPO)")["BySource"])
    algorithm = kind(actor=Actor(sampling=Sampling(max_new_tokens=2)), reward=Reward(functions=worth))
    run = trainer(Local(), tmp_path, limit_val_batches=None)
    (found,) = run.validate(algorithm, datamodule=data, verbose=False)
    assert (found["val/a"], found["val/b"], found["val/reward"]) == (1.75, 3.0, 2.0)


def test_a_model_is_written_as_a_checkpoint_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kind = cast(type[Callback], run_documented("class Exports(pl.Callback)", names={"pl": pl})["Exports"])
    algorithm = GRPO(actor=Actor(sampling=Sampling(max_new_tokens=2)), reward=Reward(functions=peers))
    callbacks = [kind(), ModelCheckpoint(".", filename="saved")]
    run = trainer(Local(), tmp_path, callbacks=callbacks, enable_checkpointing=True)
    run.fit(algorithm, datamodule=TaskData(batch_size=2))
    export.run(["saved.ckpt", "exported"])
    written, exported = (Path(name, "model.safetensors") for name in ("runs/models/step-1", "exported"))
    assert written.read_bytes() == exported.read_bytes()


@dataclass(frozen=True, kw_only=True)
class Defender(Actor):
    """Has another tokenizer than the field `actor`."""

    own_tokens: ClassVar[bool] = True


class RedTeam(GRPO):
    """The actor's answers are what the defender is asked."""

    defender: Defender = field(default_factory=Defender)
    texts: tuple[object, ...] = ()

    def step(self, batch: Batch) -> Metrics:
        """Ask, learn from the replies, and keep what both have said."""
        mine = batch | self.actor.generate_sequences(batch)
        tokenizer = load_tokenizer(self.defender.path)
        asked = asking(mine, said := [f"> {text}" for text in answers(mine, self.tokenizer)], tokenizer)
        asked |= self.defender.generate_sequences(asked)
        prompts = zip(asked["prompt_ids"], asked["prompt_mask"], strict=True)
        read = [tokenizer.decode(ids[mask]) for ids, mask in prompts]
        self.texts = (*said, *read, *answers(asked, tokenizer))
        asked |= {"advantages": asked["response_mask"].float()}
        return self.defender.update_actor(asked, loss=PolicyLoss()).moved("actor", to="defender")


def test_two_actors_with_tokenizers_of_their_own(tmp_path: Path) -> None:
    """The second one's numbers are the bytes backwards; it is the same model otherwise."""
    limit = Sampling(max_new_tokens=4)
    defender = Defender(path=write_other(tmp_path / "other", 2), sampling=limit)
    algorithm = RedTeam(actor=Actor(sampling=limit), defender=defender)
    run = trainer(Local(), tmp_path)
    run.fit(algorithm, datamodule=TaskData(batch_size=2, num_rows=4))
    said, read, replies = (algorithm.texts[first : first + 2] for first in (0, 2, 4))
    assert read == said
    assert all(replies)
    assert float(run.logged_metrics["defender/grad_norm"]) > 0

"""RLHFAlgorithm: a LightningModule whose `step` composes calls on remote models.

    class Mine(PPO):                     fields are options, on the command line too
        beta: float = 0.1
        def step(self, batch): ...       runs on the controller, once an iteration

A field that holds a role (actor: Actor = field(default_factory=Actor)) is a model that the strategy places;
inside `fit` its methods run on the devices.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self, cast, dataclass_transform, get_type_hints

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.controller import Batch, CallReport, Metrics
from rlhf_lightning.data import RowData, load_tokenizer
from rlhf_lightning.engines import check_model, max_positions
from rlhf_lightning.optimizer import RemoteOptimizer
from rlhf_lightning.rewards import preflight
from rlhf_lightning.spec import run_seed
from rlhf_lightning.workers import Actor, Reward, Role

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from rlhf_lightning.strategy import Strategy

Columns = Mapping[str, Tensor | Sequence[object]]
"""What a data module yields: one mini-batch of prompts by column."""


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
class RLHFAlgorithm(LightningModule):
    """Base of all algorithms; a subclass states its roles and options as fields and writes `step`.

    Every subclass is made a keyword-only dataclass, so that its options need no constructor.
    """

    explain_samples = False
    """Whether `validation_step` adds per-token numbers; the SampleTable callback sets it."""

    def __init_subclass__(cls) -> None:
        """Make the subclass a dataclass, unless it writes its own constructor."""
        super().__init_subclass__()
        dataclasses.dataclass(kw_only=True, eq=False, repr=False)(cls)
        # The command line reads types, and a subclass elsewhere could not resolve the names of its base.
        hints = get_type_hints(cls.__init__)
        cls.__init__.__annotations__ = hints
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            field.type = hints.get(field.name, field.type)

    def __new__(cls, *_args: object, **_options: object) -> Self:
        """Prepare the module before the generated constructor sets fields on it."""
        self = super().__new__(cls)
        LightningModule.__init__(self)
        return self

    @property  # type: ignore[misc]  # nobody may set it
    def automatic_optimization(self) -> bool:
        """Never: the optimizers are with the models."""
        return False

    # ---- what a subclass writes ----------------------------------------------------------------------------

    def step(self, batch: Batch) -> Metrics:
        """One iteration: compose remote calls on the roles and return what they report."""
        raise NotImplementedError(f"{type(self).__name__} writes no step(self, batch).")

    def explain(self, batch: Batch) -> Batch:
        """Add per-token columns [B, R] (`kl`, `values`, `advantages`) to a validation batch, for tables."""
        return batch

    # ---- roles ---------------------------------------------------------------------------------------------

    def roles(self) -> dict[str, Role]:
        """The models of the dataflow, by field name."""
        fields = dataclasses.fields(cast("DataclassInstance", self))
        found = {f.name: self.__dict__.get(f.name) for f in fields}
        return {name: role for name, role in found.items() if isinstance(role, Role)}

    def bind(self, handles: Mapping[str, Role]) -> None:
        """Replace roles by handles on the workers that have them."""
        for name, handle in handles.items():
            setattr(self, name, handle)

    @property
    def main_actor(self) -> Actor:
        """The actor.

        Raises:
            ValueError: the algorithm has none.
        """
        actor = self.roles().get("actor")
        if not isinstance(actor, Actor):
            raise ValueError(
                f"{type(self).__name__} has no field `actor: Actor`, which prompts and samples need."
            )
        return actor

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The actor's tokenizer."""
        return load_tokenizer(self.main_actor.path)

    # ---- Lightning hooks -----------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Complete the roles and refuse what cannot work, before any worker starts.

        Raises:
            ValueError: a model directory is missing or damaged, the rows are too long for it, or a reward
                function does not work.
        """
        actor, seed = self.main_actor, run_seed()
        self.bind({n: r.following(actor).located().seeded(seed) for n, r in self.roles().items()})
        for role in self.roles().values():
            if role.path:
                check_model(role)
                self._check_lengths(role)
        for reward in (role for role in self.roles().values() if isinstance(role, Reward)):
            self._try_out(reward)
        self.save_hyperparameters(_plain(self))

    def configure_optimizers(self) -> RemoteOptimizer | None:
        """A stand-in that counts iterations and shows the learning rates of the trained roles."""
        rates = {name: role.optimizer.lr for name, role in self.roles().items() if role.trains}
        return RemoteOptimizer(rates) if rates else None

    def training_step(self, batch: Columns, batch_idx: int) -> None:
        """Run one iteration, log what it reports, and count it."""
        started = time.perf_counter()
        rows = Batch.of(batch)
        numbers = self.step(rows).fetch()
        numbers |= timings(self.strategy.drain())
        seconds = time.perf_counter() - started
        numbers["time/step_s"] = seconds
        if "response/tokens" in numbers:
            prompts = batch["prompt_mask"]
            assert isinstance(prompts, Tensor)
            samples = numbers.get("response/samples_per_prompt", 1.0)
            tokens = numbers["response/tokens"] + float(prompts.sum()) * samples
            numbers["throughput/tokens_per_s"] = tokens / seconds
        for name in ("reward/mean", "sft/loss"):
            if name in numbers:
                self.log(name, numbers.pop(name), prog_bar=True, batch_size=len(rows))
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        optimizer.show({k.removesuffix("/lr"): v for k, v in numbers.items() if k.endswith("/lr")})
        self.log_dict(numbers, batch_size=len(rows))
        optimizer.step()

    def validation_step(self, batch: Columns, batch_idx: int) -> dict[str, list[object]] | None:
        """Answer held-out prompts greedily and score them; the samples go to the SampleTable callback."""
        rows = self.evaluate(Batch.of(batch))
        scores = rows["scores"].sum(dim=1)
        mask = rows["response_mask"]
        self.log("val/reward", scores.mean(), batch_size=len(rows), prog_bar=True)
        self.log("val/response_length", mask.sum(dim=1).float().mean(), batch_size=len(rows))
        samples = self._texts(rows) | {"scores": [float(s) for s in scores]}
        if self.explain_samples:
            samples |= self._per_token(self.explain(rows))
        self.strategy.drain()
        return samples

    def predict_step(self, batch: Columns, batch_idx: int) -> dict[str, list[object]]:
        """Answer prompts greedily."""
        return self._texts(Batch.of(batch) | self.main_actor.generate_sequences(Batch.of(batch), greedy=True))

    def evaluate(self, batch: Batch) -> Batch:
        """Answer prompts greedily and score the answers with the role `reward`."""
        batch |= self.main_actor.generate_sequences(batch, greedy=True)
        reward = self.roles().get("reward")
        assert isinstance(reward, Reward)
        return batch | reward.compute_reward(batch)

    # ---- for `step` ----------------------------------------------------------------------------------------

    def mini_batches(self, batch: Batch, *, size: int, epochs: int = 1) -> Iterator[Batch]:
        """The rows in a new order each epoch, `size` at a time; 0 is all rows, in order.

        The order depends on the iteration and the epoch only, not on the devices.
        """
        for epoch in range(epochs):
            if size <= 0 or size >= len(batch):
                yield batch
                continue
            generator = torch.Generator().manual_seed(self.global_step * 1009 + epoch)
            order = torch.randperm(len(batch), generator=generator).numpy()
            for start in range(0, len(batch), size):
                yield batch.take(order[start : start + size])

    @property
    def strategy(self) -> Strategy:
        """The strategy that has placed the roles."""
        return cast("Strategy", self.trainer.strategy)

    # ---- details -------------------------------------------------------------------------------------------

    def _check_lengths(self, role: Role) -> None:
        data, positions = self.trainer.datamodule, max_positions(role)  # type: ignore[attr-defined]
        if isinstance(data, RowData) and positions is not None:
            data.check_lengths(positions=positions, new_tokens=self.main_actor.sampling.max_new_tokens)

    def _try_out(self, reward: Reward) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, RowData):
            preflight(reward.spec, data.train_rows)

    def _texts(self, rows: Batch) -> dict[str, list[object]]:
        tokenizer = self.tokenizer

        def read(ids: Tensor, mask: Tensor) -> list[object]:
            return list(tokenizer.batch_decode([i[m].tolist() for i, m in zip(ids, mask, strict=True)]))

        return {
            "prompts": read(rows["prompt_ids"], rows["prompt_mask"]),
            "responses": read(rows["response_ids"], rows["response_mask"]),
        }

    def _per_token(self, rows: Batch) -> dict[str, list[object]]:
        mask = rows["response_mask"]
        ids = rows["response_ids"]
        columns: dict[str, list[object]] = {
            "tokens": [
                [self.tokenizer.decode([t]) for t in i[m].tolist()] for i, m in zip(ids, mask, strict=True)
            ]
        }
        for name in ("kl", "values", "advantages"):
            if name in rows:
                columns[name] = [v[m].tolist() for v, m in zip(rows[name], mask, strict=True)]
        return columns


def timings(reports: Sequence[CallReport]) -> dict[str, float]:
    """Seconds of each method (the slowest device's), and the peak memory of the fullest device.

    Args:
        reports: of the calls of one iteration.
    """
    spent: defaultdict[tuple[str, str, int], float] = defaultdict(float)
    for report in reports:
        spent[report.role, report.method, report.rank] += report.seconds
    numbers: dict[str, float] = {}
    for (role, method, _), seconds in spent.items():
        name = f"time/{role}.{method}_s"
        numbers[name] = max(numbers.get(name, 0.0), seconds)
    if reports:
        numbers["memory/device_gb"] = max(report.memory_bytes for report in reports) / 1e9
    return numbers


def _plain(value: object) -> object:
    """A configuration as nested dictionaries, for loggers."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)

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
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Self, cast, dataclass_transform, final

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning import checks
from rlhf_lightning.balance import balanced, tokens_of
from rlhf_lightning.controller import GROUPS, Batch, Metrics, check_neighbours
from rlhf_lightning.data import RowData, load_tokenizer, row_data
from rlhf_lightning.data.sampler import permutation
from rlhf_lightning.functional import Estimator
from rlhf_lightning.optimizer import RemoteOptimizer
from rlhf_lightning.options import options
from rlhf_lightning.reporting import (
    answers,
    described,
    forget_iteration,
    pace,
    per_token,
    plain,
    retries,
    run_step,
    texts,
    timings,
    warn_of_skips,
)
from rlhf_lightning.spec import run_seed
from rlhf_lightning.workers import Actor, Reference, Reward, Role, seed_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from rlhf_lightning.strategy import Strategy

Columns = Mapping[str, Tensor | Sequence[object]]
"""What a data module yields: one mini-batch of prompts by column."""
_NO_TEXT = (
    "ptx_loss.coef is above 0, and the data has no second batch of text for it. "
    "Try --data mixeddata, with `main` and `ptx`."
)
PTX = "ptx"
"""Key of a second batch beside the columns: pre-training text."""


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
class RLHFAlgorithm(LightningModule):
    """Base of all algorithms; a subclass states its roles and options as fields and writes `step`.

    Every subclass is made a keyword-only dataclass, so that its options need no constructor.
    """

    explain_samples = False
    """Whether `validation_step` adds per-token numbers; the SampleTable callback sets it."""
    keeps_rollouts = False
    """Whether `rollout_metrics` keeps the rows as `rollouts`; the Rollouts callback sets it."""
    rollouts: Batch | None = None
    advantages_on: Literal["controller", "workers"] = "controller"
    """Where `estimate` computes; the strategy sets it."""
    rows_stay = False
    """Whether an update of the whole batch leaves rows where they were evaluated; the strategy sets it."""
    pretraining: Batch | None = None
    """The second batch of this iteration, where the data module gives one under `ptx`."""
    iterations_here = 0
    """Iterations that it has learned from in this process, but for those that try a run out."""
    needs: tuple[str, ...] = ()
    """Columns that the data has to give, beside prompts."""
    needs_pairs = False
    """Whether rows have to be pairs, chosen, rejected, chosen, rejected, ..."""
    validates: tuple[str, ...] = ()
    """Roles that `validation_step` calls, beside those that answer and score."""
    progress: tuple[str, ...] = ("reward/mean",)
    """Metrics that the progress bar shows."""

    def __init_subclass__(cls) -> None:
        """Make the fields of the subclass options."""
        super().__init_subclass__()
        options(cls)

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

    @abstractmethod
    def step(self, batch: Batch) -> Metrics:
        """One iteration: compose remote calls on the roles and return what they report."""

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
    def main_model(self) -> Role:
        """The model whose tokenizer the data is read with: the actor, else the first that is trained.

        Raises:
            ValueError: no role is trained.
        """
        roles = self.roles()
        trained = [role for role in roles.values() if role.trains]
        if "actor" not in roles and not trained:
            raise ValueError(
                f"{type(self).__name__} has no field with a model to train, such as `actor`. "
                "A constructor of its own calls super().__init__(...)."
            )
        return roles["actor"] if "actor" in roles else trained[0]

    @property
    def main_actor(self) -> Actor:
        """The actor.

        Raises:
            ValueError: the algorithm has none.
        """
        actor = self.roles().get("actor")
        if not isinstance(actor, Actor):
            raise ValueError(f"{type(self).__name__} has no field `actor: Actor`, which answers prompts.")
        return actor

    @property
    def main_reward(self) -> Reward:
        """What scores held-out answers.

        Raises:
            ValueError: there is no field `reward`.
        """
        reward = self.roles().get("reward")
        if not isinstance(reward, Reward):
            raise ValueError(
                f"{type(self).__name__} has no field `reward: Reward`, which scores held-out answers. Give "
                "it one, or a validation_step of its own, or try --trainer.limit_val_batches 0."
            )
        return reward

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The main model's tokenizer."""
        return load_tokenizer(self.main_model.path)

    # ---- Lightning hooks -----------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Complete the roles and refuse what cannot work, before any worker starts.

        Raises:
            ValueError: a model directory is missing or damaged, the rows are too long for it, or a reward
                function does not work.
        """
        checks.check_lightning(self)
        checks.check_fields(self)
        if stage != "predict":
            checks.check_columns(self)
        if "response_ids" in self.needs:
            self._read_at_temperature_1()
        main, seed = self.main_model, run_seed()
        seeds = {n: seed if r is main else seed_of(n, r, seed) for n, r in self.roles().items()}
        self.bind({n: r.following(main).located().seeded(seeds[n]) for n, r in self.roles().items()})
        checks.check_roles(self, generates=stage == "predict" or "response_ids" not in self.needs)
        if stage != "predict":
            checks.check_judges(self)
            self._check_held_out()
        self.save_hyperparameters(plain(self))

    @final
    def configure_optimizers(self) -> RemoteOptimizer | None:
        """A stand-in that counts iterations and shows the learning rates of the trained roles."""
        trained = {name: role.optimizer for name, role in self.roles().items() if role.trains}
        return RemoteOptimizer(trained) if trained else None

    @final
    def training_step(self, batch: Columns, batch_idx: int) -> None:
        """Run one iteration, log what it reports, and count it."""
        started = time.perf_counter()
        forget_iteration(self.trainer)
        rows, self.pretraining = _both(batch)
        metrics = run_step(type(self).__name__, self.step, rows)
        self._lead_references()
        self.strategy.learned()
        numbers = metrics.fetch() | retries(self.roles())
        numbers |= timings(self.strategy.drain()) | self.strategy.numbers()
        warn_of_skips(numbers)
        numbers |= pace(numbers, rows, seconds=time.perf_counter() - started)
        for name in self.progress:
            if name in numbers:
                self.log(name, numbers.pop(name), prog_bar=True, batch_size=len(rows))
        optimizer = cast(RemoteOptimizer, self.optimizers())
        optimizer.show({k.removesuffix("/lr"): v for k, v in numbers.items() if k.endswith("/lr")})
        self.log_dict(numbers, batch_size=len(rows))
        optimizer.step()
        self.iterations_here += not self.trainer.fast_dev_run  # type: ignore[attr-defined]

    def validation_step(self, batch: Columns, batch_idx: int) -> dict[str, list[object]] | None:
        """Answer held-out prompts greedily and score them; the samples go to callbacks.

        Those are SampleTable and SecondReward, which reads the raw rows and, as reward functions do, answers
        without special tokens.
        """
        rows = self.evaluate(Batch.of(batch))
        scores = rows["scores"].sum(dim=1)
        mask = rows["response_mask"]
        self.log("val/reward", scores.mean(), batch_size=len(rows), prog_bar=True)
        self.log("val/response_length", mask.sum(dim=1).float().mean(), batch_size=len(rows))
        samples = texts(rows, self.tokenizer) | {"scores": [float(s) for s in scores]}
        samples |= {"answers": answers(rows, self.tokenizer), "rows": list(batch["rows"])}
        if self.explain_samples:
            samples |= per_token(self.explain(rows), self.tokenizer)
        self.strategy.drain()
        return samples

    def predict_step(self, batch: Columns, batch_idx: int) -> dict[str, list[object]]:
        """Answer prompts greedily."""
        rows = Batch.of(batch)
        return texts(rows | self.main_actor.generate_sequences(rows, greedy=True), self.tokenizer)

    def evaluate(self, batch: Batch) -> Batch:
        """Answer prompts greedily and score the answers with the role `reward`."""
        batch |= self.main_actor.generate_sequences(batch, greedy=True)
        return batch | self.main_reward.compute_reward(batch)

    def refuse_greedy(self, what: str) -> None:
        """Refuse an actor whose answers to a prompt are all the same.

        Args:
            what: needs answers that differ, for the message.

        Raises:
            ValueError: as said.
        """
        if self.main_actor.sampling.temperature == 0:
            raise ValueError(
                f"{what}, with actor.sampling.temperature=0: greedy generation gives the same answer every "
                "time. Try temperature 1.0."
            )

    # ---- for `step` ----------------------------------------------------------------------------------------

    def mini_batches(self, batch: Batch, *, size: int, epochs: int = 1, together: int = 1) -> Iterator[Batch]:
        """The rows in a new order each epoch, some at a time.

        The order depends on the run's seed, the iteration, the epoch and the lengths of the rows, not on the
        devices. Devices that take equal numbers of a mini-batch's rows have about as many tokens, unless
        `rows_stay`.

        Args:
            batch: all rows.
            size: groups of rows at a time; 0 is all.
            epochs: passes.
            together: neighbouring rows that form a group and stay side by side.
        """
        groups = len(batch) // together
        if not groups:
            return
        tokens = tokens_of(batch)
        if size <= 0 or size >= groups:
            yield from [batch if self.rows_stay else balanced(batch, tokens, together=together)] * epochs
            return
        for epoch in range(epochs):
            order = permutation(groups, run_seed(), self.global_step, epoch)
            rows = (order[:, None] * together + torch.arange(together)).flatten().numpy()
            for start in range(0, len(batch), size * together):
                part = rows[start : start + size * together]
                spent = None if tokens is None else tokens[part]
                yield balanced(batch.take(part), spent, together=together)

    def answers_to(self, batch: Batch, times: int) -> Batch:
        """Each prompt `times` times, side by side, each copy with a row id of its own to be answered by.

        Args:
            batch: prompts, with `row_ids` [B] int64.
            times: copies of each.
        """
        copies = torch.arange(times).repeat(len(batch))
        repeated = batch.repeat(times)
        row_ids = repeated["row_ids"] * times + copies
        return repeated | {"row_ids": row_ids, GROUPS: repeated["row_ids"]}

    @property
    def second_batch(self) -> Batch:
        """The pre-training rows of this iteration.

        Raises:
            ValueError: the data module gives none.
        """
        if self.pretraining is None:
            raise ValueError(_NO_TEXT)
        return self.pretraining

    def require_second_batch(self) -> None:
        """Refuse a data module that is known to give none; in `setup`, before any worker starts.

        Raises:
            ValueError: as said.
        """
        if isinstance(row_data(self.trainer), RowData):
            raise ValueError(_NO_TEXT)

    def estimate(self, batch: Batch, estimator: Estimator) -> Batch:
        """Add the columns that an estimator makes, on the controller or where the rows lie."""
        if self.advantages_on == "workers":
            return batch | self.main_actor.compute_advantage(batch, estimator=estimator)
        check_neighbours(type(estimator).__name__, batch, estimator.rows_together)
        return batch | estimator({name: batch[name] for name in estimator.columns})

    def rollout_metrics(self, batch: Batch) -> dict[str, float]:
        """What an estimated batch looks like: rewards, lengths, the divergence and values, where known."""
        self.rollouts = batch if self.keeps_rollouts else None
        reward = self.roles().get("reward")
        parts = reward.parts if isinstance(reward, Reward) else ()
        return described(batch, actor=self.main_actor, parts=parts)

    def log_held_out(self, metrics: Metrics, rows: Batch, *, counted: str = "", **over: int) -> None:
        """Log a loss's metrics on held-out rows as `val/<name>` instead of `<group>/<name>`.

        Args:
            metrics: means over the rows, or over what is counted.
            rows: of one batch.
            counted: a mask [B, R], whose True the means are over; empty where they are over rows.
            **over: how much a metric is a mean over, for one that has its own; it is left out where 0.
        """
        usual = int(rows[counted].sum()) if counted else len(rows)
        for name, value in metrics.fetch().items():
            short = name.rpartition("/")[2]
            if size := over.get(short, usual):
                self.log(f"val/{short}", value, prog_bar=short == "loss", batch_size=size)
        self.strategy.drain()

    @property
    def strategy(self) -> Strategy:
        """The strategy that has placed the roles."""
        return cast("Strategy", self.trainer.strategy)

    # ---- details -------------------------------------------------------------------------------------------

    def _read_at_temperature_1(self) -> None:
        """Take given answers as they are likely at temperature 1, whatever `actor.sampling` says."""
        actor = self.roles().get("actor")
        if isinstance(actor, Actor):
            unscaled = dataclasses.replace(actor.sampling, temperature=1.0)
            self.bind({"actor": dataclasses.replace(actor, sampling=unscaled)})

    def _lead_references(self) -> None:
        """Let the references that follow the actor do so."""
        followers = [r for r in self.roles().values() if isinstance(r, Reference) and r.kept]
        if followers:
            weights = self.main_actor.give_weights(Batch({}, num_rows=1))
            for reference in followers:
                reference.follow(weights)

    def _check_held_out(self) -> None:
        """Refuse held-out answers without a reward, unless the subclass validates in its own way."""
        data, mine = row_data(self.trainer), (type(self).validation_step, type(self).evaluate)
        scored = mine == (RLHFAlgorithm.validation_step, RLHFAlgorithm.evaluate)
        if scored and data and data.held_out_rows and self.trainer.limit_val_batches:
            _ = self.main_reward


def _both(batch: Columns) -> tuple[Batch, Batch | None]:
    """The rows of an iteration, and the second batch that may lie beside their columns."""
    columns = {name: column for name, column in batch.items() if name != PTX}
    second: object = batch.get(PTX)
    return Batch.of(columns), Batch.of(second) if isinstance(second, Mapping) else None

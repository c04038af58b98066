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
from typing import TYPE_CHECKING, Literal, NoReturn, Self, cast, dataclass_transform, final

from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning import checks, data_checks, reporting, resume, stepping, trainer_habits
from rlhf_lightning.balance import balanced
from rlhf_lightning.controller import Batch, Metrics, check_neighbours, copies_of
from rlhf_lightning.data import load_tokenizer
from rlhf_lightning.data.sampler import permutation
from rlhf_lightning.field_types import check_types
from rlhf_lightning.functional import Estimator, Loss, check_estimator, masked_sum, run_estimator
from rlhf_lightning.functional.groups import rows_of_groups
from rlhf_lightning.optimizer import RemoteOptimizer
from rlhf_lightning.options import check_free, options
from rlhf_lightning.spec import run_seed
from rlhf_lightning.trainer_checks import check_lightning
from rlhf_lightning.workers import Actor, Follower, Opponent, Reward, Role, drawing_apart

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from rlhf_lightning.strategy import Strategy

Columns = Mapping[str, Tensor | Sequence[object]]
"""One batch as a data module yields it: values [B, ...] by column name."""
_DECLARED = {"needs", "draws", "in_pairs", "needs_pairs", "validates", "progress"}  # may be options, too


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
class RLHFAlgorithm(LightningModule):
    """Base of all algorithms; a subclass states its roles and options as fields and writes `step`.

    Every subclass is made a keyword-only dataclass, so that its options need no constructor.
    """

    # Declared by a subclass.
    needs: tuple[str, ...] = ()
    """Columns that the data must have in addition to prompts."""
    draws = False
    """Whether the actor draws answers of its own, too, where `needs` has `response_ids`."""
    validates: tuple[str, ...] = ()
    """Roles that `validation_step`, or a `test_step`, calls in addition to those that answer and score."""
    progress: tuple[str, ...] = ("reward/mean",)
    """Metrics that the progress bar shows."""

    # Set by the strategy.
    advantages_on: Literal["controller", "workers"] = "controller"
    """Where `estimate` runs the estimator."""
    rows_stay = False
    """Whether a whole batch keeps its row order, because devices kept the activations of their rows."""

    # Set by callbacks.
    explain_samples = False
    """Whether `validation_step` adds per-token numbers; for SampleTable."""
    keeps_rollouts = False
    """Whether `rollout_metrics` stores the rows in `kept_rollouts`; for Rollouts."""
    kept_rollouts: Batch | None = None

    # State of the run.
    ptx_batch: Batch | None = None
    """Pre-training rows of this iteration, where the data module gives some under the key `ptx`."""
    iterations_here = 0
    """Iterations trained in this process, without those of a `fast_dev_run`."""
    told_of_doubles = False
    """Whether it was said that rows of a batch have the same answers."""
    _first: dict[str, Tensor] | None = None
    """The algorithm's own tensors before its first run, as its options make them."""

    def __init_subclass__(cls) -> None:
        """Make the fields of the subclass options.

        Raises:
            ValueError: a field has the name of something else.
        """
        super().__init_subclass__()
        options(cls)
        check_free(cls, {*dir(RLHFAlgorithm), *vars(LightningModule())} - _DECLARED)

    def __new__(cls, *_args: object, **_options: object) -> Self:
        """Prepare the module before the generated constructor sets fields on it."""
        self = super().__new__(cls)
        LightningModule.__init__(self)
        return self

    @classmethod
    def load_from_checkpoint(cls, *_: object, **__: object) -> NoReturn:
        """Refuse: the models of a checkpoint are loaded onto devices, which a run has."""
        raise TypeError(
            f"{cls.__name__}.load_from_checkpoint: the models are loaded onto devices, within a run. Type "
            f"trainer.fit({cls.__name__}(...), ckpt_path=PATH), or validate or predict in place of fit."
        )

    @property  # type: ignore[misc]  # nobody may set it
    def automatic_optimization(self) -> bool:
        """Always False: the optimizers live with the models, on the devices."""
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

    def uncalled(self) -> tuple[str, ...]:
        """Roles that no step calls with these options, so that they are neither placed nor loaded: none."""
        return ()

    def placed(self) -> dict[str, Role]:
        """The roles that devices hold: all but the uncalled ones that do not change and validate nothing."""
        idle = {*self.uncalled()} - {*self.validates}
        return {name: role for name, role in self.roles().items() if role.weights_change or name not in idle}

    def bind(self, roles: Mapping[str, Role]) -> None:
        """Replace roles: by completed ones, or by handles, whose methods run on the workers."""
        for name, role in roles.items():
            setattr(self, name, role)

    @property
    def main_model(self) -> Role:
        """The model whose tokenizer the data is read with: the actor, else the first that is trained.

        Raises:
            ValueError: no role is trained.
        """
        roles = self.roles()
        if "actor" in roles:
            return roles["actor"]
        if trained := [role for role in roles.values() if role.trains]:
            return trained[0]
        raise ValueError(
            f"{type(self).__name__} has no field with a model to train, such as `actor`. "
            "A constructor of its own calls super().__init__(...)."
        )

    @property
    def main_actor(self) -> Actor:
        """The field `actor`.

        Raises:
            ValueError: the algorithm has none, or something else there, such as a path.
        """
        actor = self.roles().get("actor")
        if not isinstance(actor, Actor):
            check_types(self)
            raise ValueError(f"{type(self).__name__} has no field `actor: Actor`, which answers prompts.")
        return actor

    @property
    def main_reward(self) -> Reward:
        """The field `reward`, which scores held-out answers.

        Raises:
            ValueError: the algorithm has none.
        """
        reward = self.roles().get("reward")
        if not isinstance(reward, Reward):
            raise ValueError(
                f"{type(self).__name__} has no field `reward: Reward`, which scores held-out answers. Give "
                "it one, or a validation_step of its own, or try --trainer.limit_val_batches 0."
            )
        return reward

    @property
    def reads_only(self) -> bool:
        """Whether it learns from given answers, and draws none."""
        return "response_ids" in self.needs and not self.draws

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The main model's tokenizer."""
        return load_tokenizer(self.main_model.located().path)

    # ---- losses --------------------------------------------------------------------------------------------
    def loss_fields(self) -> dict[str, Loss]:
        """The losses in its fields, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Loss)}

    @property
    def in_pairs(self) -> bool:
        """Whether it learns from pairs of rows, which `mini_batch_size` counts; as its losses say."""
        return any(loss.rows_together == 2 for loss in self.loss_fields().values())

    @property
    def needs_pairs(self) -> bool:
        """Whether the data must give the pairs, chosen, rejected, ..., since it draws no answers itself."""
        return self.in_pairs and self.reads_only

    # ---- Lightning hooks -----------------------------------------------------------------------------------
    def setup(self, stage: str) -> None:
        """Complete the roles and refuse what cannot work, before any worker starts.

        Raises:
            ValueError: a model directory is missing or damaged, the rows are too long for it, or a reward
                function does not work.
        """
        check_lightning(self)
        self._first = resume.begun(self, self._first)
        checks.check_fields(self)  # again: a subclass may have set some up since
        if stage != "predict":
            data_checks.check_columns(self)
        if self.reads_only and isinstance(actor := self.roles().get("actor"), Actor):
            opponents = {n: r.following(actor) for n, r in self.roles().items() if isinstance(r, Opponent)}
            self.bind({name: role.reading() for name, role in {**opponents, "actor": actor}.items()})
        main, seed, kind = self.main_model, run_seed(), type(self)
        found = {n: r if r is main else drawing_apart(n, r, seed=seed) for n, r in self.roles().items()}
        self.bind({n: r.following(main).located().seeded(seed) for n, r in found.items()})
        checks.check_roles(self, generates=stage == "predict" or not self.reads_only)
        if stage != "predict":
            checks.check_judges(self)
            validation = (kind.validation_step, kind.evaluate)
            if validation == (RLHFAlgorithm.validation_step, RLHFAlgorithm.evaluate):
                checks.check_validation(self)
        reporting.keep_options(self)

    @final
    def configure_optimizers(self) -> RemoteOptimizer:
        """A stand-in that counts iterations and shows the learning rates of the trained roles."""
        trained = {name: role.optimizer for name, role in self.roles().items() if role.trains}
        return RemoteOptimizer(trained)

    @final
    def training_step(self, batch: Columns, batch_idx: int) -> None:
        """Run one iteration, log what it reports, and count it."""
        started = time.perf_counter()
        trainer_habits.reset_step_metrics(self.trainer)
        rows, self.ptx_batch = stepping.with_ptx(self, batch)
        stepping.warn_of_doubles(self, rows)
        metrics = stepping.run_step(type(self).__name__, self.step, rows)
        self._update_followers()
        self.strategy.after_step()
        returned = metrics.fetch()
        measured = reporting.service_retries(self.placed())
        measured |= reporting.timings(stepping.finished(self.strategy.drain())) | self.strategy.metrics()
        measured |= reporting.throughput(returned, rows, seconds=time.perf_counter() - started)
        trainer_habits.check_logged(self.trainer, returned, measured)
        numbers = returned | measured
        reporting.warn_of_skipped_steps(numbers)
        for name in self.progress:
            if name in numbers:
                self.log(name, numbers.pop(name), prog_bar=True, batch_size=len(rows))
        optimizer = cast(RemoteOptimizer, self.optimizers())
        optimizer.show({k.removesuffix("/lr"): v for k, v in numbers.items() if k.endswith("/lr")})
        self.log_dict(numbers, batch_size=len(rows))
        optimizer.step()
        self.iterations_here += not self.trainer.fast_dev_run  # type: ignore[attr-defined]

    def validation_step(self, batch: Columns, batch_idx: int) -> dict[str, list[object]] | None:
        """Answer held-out prompts greedily and score them.

        Returns:
            Lists of B for callbacks: `prompts`, `responses`, `scores`, the raw `rows`, and `answers`, which
            are the responses without special tokens.
        """
        rows = self.evaluate(stepping.rows_of(self, batch))
        scores = masked_sum(rows["scores"], rows["response_mask"], dim=1)
        self.log("val/reward", scores.mean(), batch_size=len(rows), prog_bar=True)
        self.log("val/response_length", rows["response_mask"].sum(dim=1).float().mean(), batch_size=len(rows))
        samples = reporting.texts(rows, self.tokenizer) | {"scores": [float(s) for s in scores]}
        samples |= {"answers": reporting.answers(rows, self.tokenizer), "rows": list(batch["rows"])}
        if self.explain_samples:
            samples |= reporting.per_token(self.explain(rows), self.tokenizer)
        return samples

    def predict_step(self, batch: Columns, batch_idx: int) -> dict[str, list[object]]:
        """Answer prompts greedily; see `reporting.predicted`."""
        rows, actor = stepping.rows_of(self, batch), self.main_actor
        return reporting.predicted(rows | actor.generate_sequences(rows, greedy=True), self.tokenizer)

    def evaluate(self, batch: Batch) -> Batch:
        """Answer prompts greedily and score the answers with the role `reward`."""
        batch |= self.main_actor.generate_sequences(batch, greedy=True)
        return batch | self.main_reward.compute_reward(batch)

    def refuse_greedy(self, what: str) -> None:
        """Refuse an actor that answers greedily, and so gives the same answer to a prompt every time.

        Args:
            what: begins the message; what needs answers that differ.

        Raises:
            ValueError: the actor's temperature is 0, or its sampling keeps the likeliest token alone.
        """
        for name, greedy, drawn in (("temperature", 0, 1.0), ("top_k", 1, 0), ("min_p", 1, 0.0)):
            if (given := getattr(self.main_actor.sampling, name)) == greedy:
                raise ValueError(
                    f"{what}, with actor.sampling.{name}={given}: greedy generation gives the same answer "
                    f"every time. Try {name} {drawn}."
                )

    # ---- for `step` ----------------------------------------------------------------------------------------
    def mini_batches(self, batch: Batch, *, size: int, epochs: int = 1, together: int = 1) -> Iterator[Batch]:
        """Yield the batch in mini-batches, shuffled anew in each epoch.

        The shuffle depends on the run's seed, the iteration and the epoch, not on the devices. Within a
        mini-batch rows are ordered so that devices get about equally many tokens. A mini-batch that is the
        whole batch is not shuffled, and with `rows_stay` not reordered either.

        Args:
            batch: all rows.
            size: groups per mini-batch; 0 takes the whole batch.
            epochs: passes over the batch.
            together: rows per group: neighbours that must stay side by side.

        Raises:
            ValueError: the rows are no whole groups of that size.
        """
        if not (groups := batch.num_groups(together)):
            return
        if size <= 0 or size >= groups:
            yield from [batch if self.rows_stay else balanced(batch, together=together)] * epochs
            return
        for epoch in range(epochs):
            order = permutation(groups, run_seed(), self.global_step, epoch)
            for part in rows_of_groups(order, size=together).split(size * together):
                yield balanced(batch.take(part.numpy()), together=together)

    def answers_to(self, batch: Batch, times: int) -> Batch:
        """Repeat each prompt, so that `generate_sequences` gives several answers to it.

        Args:
            batch: B prompts, with `row_ids` [B] int64.
            times: copies of each prompt, at least 1, side by side: each has a row id of its own, so that it
                is answered differently, and all have one number in `group_ids`, the prompt's row id.
        """
        return copies_of(batch, times)

    def estimate(self, batch: Batch, estimator: Estimator) -> Batch:
        """Add the estimator's columns to the batch, computed on the controller or by the actor's workers."""
        check_estimator(estimator)
        if self.advantages_on == "workers":
            return batch | self.main_actor.compute_advantage(batch, estimator=estimator)
        check_neighbours(type(estimator).__name__, batch, estimator.rows_together)
        return batch | run_estimator(estimator, {n: batch[n] for n in estimator.columns})

    def rollout_metrics(self, batch: Batch) -> dict[str, float]:
        """Metrics of a batch after `estimate`: rewards, lengths and, where known, KL and value statistics."""
        self.kept_rollouts = batch if self.keeps_rollouts else None
        return reporting.response_metrics(
            batch, actor=self.main_actor, parts=reporting.part_names(self.roles())
        )

    def log_held_out(self, metrics: Metrics, rows: Batch, *, counted: str = "", **over: int) -> None:
        """Log a loss's metrics on held-out rows as `val/<name>` instead of `<group>/<name>`.

        Args:
            metrics: means over the rows, or over the tokens of `counted`.
            rows: the held-out batch.
            counted: name of the mask column [B, R] whose True entries the means are over; empty for rows.
            **over: for a metric (its short name) with another count, that; with 0 it is not logged.
        """
        default = int(rows[counted].sum()) if counted else len(rows)
        for name, value in metrics.fetch().items():
            short = name.rpartition("/")[2]
            if size := over.get(short, default):
                self.log(f"val/{short}", value, prog_bar=short == "loss", batch_size=size)

    @property
    def strategy(self) -> Strategy:
        """The strategy that has placed the roles."""
        return cast("Strategy", self.trainer.strategy)

    def _update_followers(self) -> None:
        """Move the references and opponents that follow the actor towards its new weights."""
        followers = [role for role in self.roles().values() if isinstance(role, Follower)]
        if due := [role for role in followers if role.follows_after(self.global_step + 1)]:
            weights = self.main_actor.give_weights(Batch({}, num_rows=1))
            for follower in due:
                follower.follow(weights)

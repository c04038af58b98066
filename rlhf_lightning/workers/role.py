"""What all roles share: one class is the description, the controller's handle and the worker of a role.

PPO(actor=Actor(path=...))   a description, pickled to the devices
algo.actor                   after the strategy's set-up a handle: `bound`, its methods run on the workers
Device.roles["actor"]        on each device the worker: `build` has made this rank's part of the model
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self, cast

import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.controller import ONE_TO_ALL, Caller, Gathered, Remote, Worker, register
from rlhf_lightning.engines import (
    PARTS,
    Asked,
    Head,
    TrainEngine,
    be_deterministic,
    check_adapters,
    check_checkpoint,
    located,
    require_shared,
    train_engine,
)
from rlhf_lightning.functional import Counts, Loss, run_loss
from rlhf_lightning.parallel import ParallelLayout, need_all_ranks, need_all_rows
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.workers.binding import Binding
from rlhf_lightning.workers.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Role(ModelSpec, Remote):
    """A model with a task in the dataflow; an engine holds it on the workers."""

    head: ClassVar[Head] = "lm"
    """What the model outputs for each response token."""
    needed_to_validate: ClassVar[bool] = False
    """Whether `validate` and `predict` place it too, not only `fit`."""
    trains: ClassVar[bool] = False
    """Whether it has an optimizer."""
    divided: ClassVar[bool] = True
    """Whether one copy of the model may be divided over several devices."""
    own_tokens: ClassVar[bool] = False
    """Whether it reads ids of its own tokenizer, which may differ from the actor's: texts come between."""

    @property
    def weights_change(self) -> bool:
        """See `ModelSpec.weights_change`: here, whether the role is trained."""
        return self.trains

    @cached_property
    def binding(self) -> Binding:
        """Set by `bound` and `build`. A cached property, not a field, because fields are options."""
        return Binding()

    def caller(self) -> Caller | None:
        """Where calls go; None on a worker.

        Raises:
            RuntimeError: the role is not placed yet.
        """
        if self.binding.caller is None and self.binding.worker is None:
            raise RuntimeError(
                f"{type(self).__name__} is not placed yet: its methods work inside trainer.fit, validate and "
                "predict, once the strategy has put it on devices. Without training that is the models that "
                'answer and score, and those that the algorithm names: `validates = ("reference",)`. None is '
                "that its `uncalled()` names, since no step calls it: override that where one does."
            )
        return self.binding.caller

    def bound(self, caller: Caller) -> Self:
        """A copy that is a handle: its registered methods are sent through `caller`."""
        handle = replace(self)
        handle.binding.caller = caller
        return handle

    def following(self, actor: Role) -> Self:
        """A copy whose unset options come from the actor: its path and, with the same path, its dtype."""
        if self.path and located(self.path) != located(actor.path):
            return self
        return replace(self, path=actor.path, dtype=self.dtype or actor.dtype)

    def located(self) -> Self:
        """A copy with absolute paths, since devices have another working directory."""
        lora = self.lora and replace(self.lora, path=located(self.lora.path))
        return replace(self, path=located(self.path), lora=lora)

    def seeded(self, seed: int) -> Self:
        """A copy with this seed for fresh weights, unless it has one of its own."""
        return self if self.init_seed is not None else replace(self, init_seed=seed)

    @property
    def worker(self) -> Worker:
        """This rank's place; on a worker only.

        Raises:
            ValueError: this is a handle.
        """
        if self.binding.worker is None:
            raise ValueError(
                f"{type(self).__name__}: its engine and its place among the ranks are on the devices alone. "
                "Put @register(transfer=...) above the method that asks for them: it then runs there."
            )
        return self.binding.worker

    @property
    def settings(self) -> Settings:
        """How the job's models compute; on a worker only."""
        assert isinstance(self.worker.settings, Settings)
        return self.worker.settings

    @property
    def engine(self) -> TrainEngine:
        """This rank's engine; on a worker only, and of a role with a model."""
        if self.binding.engine is None:
            _ = self.worker  # refuses a handle
            raise ValueError(f"{type(self).__name__}: it holds no model, so there is no engine to ask.")
        return self.binding.engine

    def build(self, worker: Worker) -> None:
        """Load the model, where there is one."""
        self.binding.worker = worker
        settings = self.settings
        be_deterministic(settings.deterministic, seed=self.init_seed or 0)
        if self.path:
            config = settings.training
            self.binding.engine = train_engine(self, head=self.head, seat=worker, config=config)

    def update(self, rows: TensorDict, *, loss: Loss, temperature: float) -> Mapping[str, float]:
        """One optimizer step on this rank's share of a mini-batch, and on what `accumulate` has left.

        Returns:
            Those of `accumulate`, and `grad_norm`, `lr`, `skipped_steps`, such as `actor/lr`.
        """
        metrics = self.accumulate(rows, loss=loss, temperature=temperature)
        if not self.engine.accumulated:  # without a gradient, Adam's moments would still move the weights
            return metrics
        name, report = self.worker.role, self.engine.optimizer_step()
        return metrics | {f"{name}/{key}": value for key, value in report.items()}

    def accumulate(self, rows: TensorDict, *, loss: Loss, temperature: float) -> dict[str, float]:
        """Add the gradient of this rank's share of a mini-batch to what the next optimizer step takes.

        Returns:
            This rank's part of the loss's metrics, times d: DP_METRIC averages over the d replicas, and the
            mean of these values is the metric of the whole mini-batch.
        """
        counts = self.count(rows, loss)
        if counts == Counts(0, 0, 0):
            return {}
        parts = self.engine.accumulate(rows, loss, counts, temperature=temperature)
        return {key: float(value) * self.worker.layout.d for key, value in parts.items()}

    def evaluate(self, rows: TensorDict, *, loss: Loss, temperature: float) -> dict[str, float]:
        """The metrics of a loss without a gradient; like those of `accumulate`, times d."""
        counts = self.count(rows, loss)
        if counts == Counts(0, 0, 0):
            return {}
        outputs = self.engine.infer(rows, temperature=temperature, asked=Asked.by(loss))
        said, given = (cast(dict[str, Tensor], dict(table.items())) for table in (outputs, rows))
        _, metrics = run_loss(loss, said, given, counts)
        return {key: float(value) * self.worker.layout.d for key, value in metrics.items()}

    def count(self, rows: TensorDict, loss: Loss) -> Counts:
        """The tokens, sequences and groups that a loss divides by, counted over all data-parallel ranks.

        Raises:
            TypeError: `loss` is not a Loss.
        """
        if not isinstance(loss, Loss):
            raise TypeError(
                f"loss={getattr(loss, '__name__', loss)}: is a {type(loss).__name__}. Derive a frozen "
                "dataclass from rlhf_lightning.functional.Loss, whose __call__ is what you have."
            )
        mine = loss.count(cast(Mapping[str, Tensor], rows))
        if self.worker.dp_group is None:
            return mine
        every: list[Counts] = [mine] * self.worker.layout.d
        dist.all_gather_object(every, mine, group=self.worker.dp_group)
        return sum(every, Counts(0, 0, 0))

    def add_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of a tensor on the host over the data-parallel ranks of this role; see `need_all_rows`."""
        need_all_rows(f"{type(self).__name__}.add_over_ranks")
        if self.worker.dp_group is None:
            return x
        need_all_ranks(f"{type(self).__name__}.add_over_ranks")
        total = x.to(self.worker.device, copy=True)
        dist.all_reduce(total, group=self.worker.dp_group)
        return total.cpu()

    @register(transfer=ONE_TO_ALL)
    def save(self, *, directory: Path) -> None:
        """Write weights and optimizer state; collective.

        Raises:
            ValueError: this node does not see the controller's directory.
        """
        require_shared(directory.parent)
        self.engine.save(directory)

    @register(transfer=ONE_TO_ALL)
    def load(self, *, directory: Path, trained: bool = True) -> None:
        """Load what `save` wrote, on any number of ranks; collective.

        Args:
            directory: what `save` was given.
            trained: load the optimizer state too; False loads the weights alone, to evaluate them.

        Raises:
            ValueError: the checkpoint is incomplete or of another model, or this node does not see it.
        """
        require_shared(directory)
        self.engine.load(directory, trained=trained)

    def export(self, *, directory: Path) -> Gathered[None]:
        """Write a Hugging Face directory, which is made on the controller's disk if it is not there."""
        self.caller()  # refuses a role without devices, for which nothing is made
        directory = Path(directory).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        return self.export_model(directory=directory)

    @register(transfer=ONE_TO_ALL)
    def export_model(self, *, directory: Path) -> None:
        """`export` on the devices.

        Raises:
            ValueError: this node does not see the controller's directory.
        """
        require_shared(directory)
        self.engine.export(directory)

    @register(transfer=ONE_TO_ALL, computes=False)
    def free_kept(self) -> None:
        """Free what the model keeps for updates of the rows that it saw last, as none follows."""
        self.engine.free_kept()

    def offload(self) -> None:
        """Free the device of parameters, gradients and optimizer state, if any; called between phases."""
        if self.binding.engine is not None:
            self.binding.engine.offload(PARTS)

    def reload(self) -> None:
        """Bring them back."""
        if self.binding.engine is not None:
            self.binding.engine.reload(PARTS)

    def reload_bytes(self) -> int:
        """See `Remote.reload_bytes`."""
        engine = self.binding.engine
        return 0 if engine is None else engine.reload_bytes()

    def holds_gradient(self) -> bool:
        """See `Remote.holds_gradient`."""
        return self.binding.engine is not None and self.binding.engine.accumulated

    def lies_in(self, other: Remote) -> bool:
        """See `Remote.lies_in`."""
        engine, its = self.binding.engine, other.binding.engine if isinstance(other, Role) else None
        return engine is not None and engine.memory_owner is its

    def check_layout(self, layout: ParallelLayout, settings: Settings) -> None:
        """Refuse a layout in which the model cannot be divided, reading its config.json only."""
        settings.training.check(self, self.head, layout)
        self._check_lora(settings)

    def _check_lora(self, settings: Settings) -> None:
        if self.lora is None:
            return
        if not settings.training.trains_adapters:
            raise ValueError(
                f"lora with strategy.settings.engine={settings.engine}: only the FSDP engine trains "
                "adapters. Try --strategy.settings.engine fsdp under a strategy that takes it, or leave lora "
                "out."
            )
        if not self.trains:
            raise ValueError("lora: this model is not trained. Leave it out.")
        check_adapters(self, self.head)

    def check_checkpoint(self, directory: Path) -> None:
        """Refuse a checkpoint of another model without loading either."""
        check_checkpoint(self, self.head, directory)

    @register(transfer=ONE_TO_ALL, computes=False)
    def memory(self) -> Mapping[str, int]:
        """Bytes of parameters, gradients, optimizer state and offloaded parts on each rank."""
        return self.engine.memory()

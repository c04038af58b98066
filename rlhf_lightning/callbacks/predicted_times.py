"""Predicted and measured seconds of every model's work side by side: each run checks the simulators."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller.cluster import num_gpus
from rlhf_lightning.cores import usable_cores
from rlhf_lightning.mapping import hardware as clusters
from rlhf_lightning.mapping import measured
from rlhf_lightning.mapping.machine import of_a_run
from rlhf_lightning.mapping.observe import Lengths, count_calls, phases, shape_of
from rlhf_lightning.mapping.phases import Iteration
from rlhf_lightning.output import check_output, keep, leaves_files, output_path
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.trainer_habits import unreported


class PredictedTimes(Callback):
    """Log each iteration's seconds as `rlhf map` predicts them, and write both for `rlhf calibrate --from`.

    It logs `predicted/<role>.<method>_s` beside `time/<role>.<method>_s`, and `predicted/step_s`. What is
    predicted is the real work of the iteration: the rows and calls that there were, their lengths, each
    model's layout and pool. When training ends it prints the medians of both, without the first iteration,
    which warms up.

    Raises:
        ValueError: the hardware is unknown.
    """

    def __init__(self, hardware: str = "", *, path: str | None = None) -> None:
        """Say what the simulators should assume.

        Args:
            hardware: a known name, or a file that `rlhf calibrate` wrote; by default what this machine looks
                like: the GPU's data sheet, or on a CPU a rough description.
            path: of the measurements; None is `measurements.jsonl` under the trainer's `default_root_dir`.
        """
        super().__init__()
        self.hardware = hardware
        self.path = path
        self._iterations: list[Iteration] = []
        if hardware:
            clusters.load(hardware)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a GPU of an unknown kind, a directory that takes no files, a run without metrics."""
        if stage == "fit":
            if trainer.barebones:
                raise ValueError(
                    "PredictedTimes: with trainer.barebones=true no metrics are logged, and it reads the "
                    "lengths of answers in them. Leave one of the two out."
                )
            asked = trainer.strategy.devices if isinstance(trainer.strategy, Strategy) else None
            devices = asked or num_gpus() or usable_cores()
            self._cluster = of_a_run(self.hardware, devices, option="PredictedTimes(hardware=...)")
            check_output(trainer, self._file(trainer).parent, name="PredictedTimes")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the file, keeping that of an earlier run, and read the sizes of the models."""
        assert isinstance(pl_module, RLHFAlgorithm)
        roles = pl_module.strategy.models()
        self._models = {name: shape_of(role) for name, role in roles.items() if role.path}
        self._iterations = []
        if leaves_files(trainer):
            if trainer.global_step == 0:
                keep(self._file(trainer))
            measured.begin(self._file(trainer), self._cluster)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Mapping[str, Tensor],
        batch_idx: int,
    ) -> None:
        """Predict the iteration that has ended, and log it."""
        assert isinstance(pl_module, RLHFAlgorithm)
        absent = unreported(trainer)
        metrics = {name: value for name, value in trainer.callback_metrics.items() if name not in absent}
        lengths = _lengths(batch, metrics)
        if lengths is None:
            return
        strategy = pl_module.strategy
        found = phases(
            strategy.reports,
            strategy.models(),
            strategy.workers,
            models=self._models,
            settings={name: strategy.settings_of(name) for name in strategy.workers},
            lengths=lengths,
        )
        iteration = Iteration(
            step=trainer.global_step,
            seconds=float(metrics["time/step_s"]),
            calls=count_calls(strategy.reports),
            phases=found,
        )
        numbers = {f"predicted/{phase.name}_s": phase.predict(self._cluster) for phase in found}
        numbers["predicted/step_s"] = iteration.predict(self._cluster)
        pl_module.log_dict(numbers, batch_size=1)
        self._iterations.append(iteration)
        if leaves_files(trainer):
            measured.append(self._file(trainer), iteration)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the medians."""
        kept: Sequence[Iteration] = self._iterations[1:] or self._iterations
        if kept and trainer.is_global_zero:
            sys.stdout.write(measured.table(kept, self._cluster))

    def _file(self, trainer: Trainer) -> Path:
        return output_path(trainer, self.path, measured.FILE)


def _lengths(batch: Mapping[str, Tensor], metrics: Mapping[str, Tensor]) -> Lengths | None:
    """Lengths of an iteration's rows; None where neither columns nor metrics tell of responses."""
    if "prompt_mask" not in batch:
        return None
    prompts = batch["prompt_mask"].sum(dim=1).tolist()
    if "response_mask" in batch:
        counts = batch["response_mask"].sum(dim=1).float()
        mean, longest, truncated = float(counts.mean()), float(counts.max()), 0.0
    elif "response/length_mean" in metrics:
        names = ("response/length_mean", "response/length_max", "response/truncated")
        mean, longest, truncated = (float(metrics[name]) for name in names)
    else:
        return None
    return Lengths.of(prompts, rows=len(prompts), mean=mean, longest=longest, truncated=truncated)

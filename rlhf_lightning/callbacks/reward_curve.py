"""A picture of metrics over the training steps."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.output import check_output, leaves_files, output_path
from rlhf_lightning.trainer_habits import begins_anew, unreported

Curve = list[tuple[int, float]]
"""Points (step, value), by ascending step."""
_FILE = "reward.png"
_WINDOW = 5
"""Points in the running mean that is drawn over the single values."""


class RewardCurve(Callback):
    """Draw metrics over the steps into a PNG, when training ends and, if asked for, in between.

    Metrics whose name begins with `val/` get a point at each validation, the others at each training step
    that reports them.
    The points travel in checkpoints, so the picture of a resumed run is whole.

    Raises:
        ValueError: no metric is named.
    """

    def __init__(
        self,
        metrics: Sequence[str] = ("reward/mean", "val/reward"),
        *,
        every_n_steps: int = 0,
        path: str | None = None,
    ) -> None:
        """Say what to draw.

        Args:
            metrics: names of logged metrics; those that nobody logs are left out.
            every_n_steps: training steps between pictures; 0 draws at the end only.
            path: of the picture; None is `reward.png` under the trainer's `default_root_dir`.
        """
        super().__init__()
        if not metrics or isinstance(metrics, str):
            raise ValueError(f"RewardCurve(metrics={metrics!r}): name a list, as ['reward/mean'].")
        self.metrics = tuple(metrics)
        self.every_n_steps = every_n_steps
        self.path = path
        self._curves: dict[str, Curve] = {name: [] for name in self.metrics}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin anew, unless the trainer goes on, and refuse a directory that cannot be written.

        Raises:
            ValueError: nothing can be written there.
        """
        if begins_anew(trainer, stage):
            self._curves = {name: [] for name in self.metrics}
        if stage == "fit":
            check_output(trainer, output_path(trainer, self.path, _FILE).parent, name="RewardCurve")

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Note the metrics of a step."""
        self._note(trainer, validation=False)
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self._draw(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the metrics of a validation."""
        if not trainer.sanity_checking:
            self._note(trainer, validation=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw everything."""
        if not any(self._curves.values()):
            warnings.warn(
                f"RewardCurve(metrics={list(self.metrics)}): none was logged, so there is no picture. "
                f"Logged were {sorted(trainer.callback_metrics)}.",
                stacklevel=2,
            )
        self._draw(trainer)

    def state_dict(self) -> dict[str, Curve]:
        """Hand the points to a checkpoint."""
        return dict(self._curves)

    def load_state_dict(self, state_dict: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Continue from the points of a checkpoint."""
        for name, points in state_dict.items():
            if name in self._curves:
                self._curves[name] = [(int(step), float(value)) for step, value in points]

    def _note(self, trainer: Trainer, *, validation: bool) -> None:
        found = trainer.callback_metrics.keys() - unreported(trainer)
        for name in self.metrics:
            if name in found and name.startswith("val/") == validation:
                value = float(trainer.callback_metrics[name])
                self._curves[name] = with_point(self._curves[name], trainer.global_step, value)

    def _draw(self, trainer: Trainer) -> None:
        curves = {name: curve for name, curve in self._curves.items() if curve}
        if curves and leaves_files(trainer):
            draw_curves(curves, output_path(trainer, self.path, _FILE))


def with_point(curve: Curve, step: int, value: float) -> Curve:
    """The curve with one more point, instead of points at its step and later: steps repeat after a resume."""
    return [*(point for point in curve if point[0] < step), (step, value)]


def draw_curves(curves: Mapping[str, Curve], path: Path) -> None:
    """Draw one line a metric, its running mean, with the single values faint behind it.

    Metrics of `val/`, of which there are few values, are drawn as they are, with marks.

    Args:
        curves: by metric, none of them empty.
        path: of the PNG; its directory is created.
    """
    # Imported only to draw; without pyplot there is no global state and no display.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for i, (name, curve) in enumerate(curves.items()):
        steps, values = [step for step, _ in curve], [value for _, value in curve]
        marker = "o" if name.startswith("val/") else ""
        smooth = values if marker else running_mean(values, _WINDOW)
        axes.plot(steps, values, color=f"C{i}", alpha=0.25, linewidth=1)
        axes.plot(steps, smooth, color=f"C{i}", marker=marker, label=name)
    axes.set_xlabel("step")
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """For each value the mean of it and up to `window` - 1 values before it."""
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]

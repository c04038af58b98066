"""A run whose iterations are predicted: what is logged, kept in a file, printed, and used again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import GRPO, PPO, SFT
from rlhf_lightning.callbacks import PredictedTimes
from rlhf_lightning.controller import Batch, Metrics, cluster
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import Native
from rlhf_lightning.mapping import hardware, measured
from rlhf_lightning.mapping.hardware import CPU
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Settings
from tests.logged import csv_file
from tests.unit.algos.short import trainer
from tests.unit.algos.small import write_model

METHODS = (
    "actor.generate_sequences",
    "critic.compute_values",
    "reference.compute_ref_log_prob",
    "critic.update_critic",
    "actor.update_actor",
)


class Bounded(Local):
    """Bounds the rows of the actor's generation, as `Auto` does by its search."""

    strategy_name = "bounded"

    def settings_of(self, name: str) -> Settings:
        return replace(super().settings_of(name), generate=Native(slots=3 if name == "actor" else 0))


def fit(
    root: Path,
    algorithm: RLHFAlgorithm,
    callback: PredictedTimes,
    *,
    steps: int = 3,
    checkpoint: str = "",
    strategy: type[Local] = Local,
) -> None:
    saving = ModelCheckpoint(root, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    logs: dict[str, object] = {"logger": CSVLogger(root, name="", version=""), "log_every_n_steps": 1}
    saves: dict[str, object] = {"callbacks": [callback, saving], "enable_checkpointing": True}
    run = trainer(strategy(), root, steps=steps, limit_val_batches=None, **logs, **saves)
    data = TaskData(batch_size=8, num_rows=32, num_val_rows=4, completions=isinstance(algorithm, SFT))
    run.fit(algorithm, datamodule=data, ckpt_path=checkpoint or None)


def actor(root: Path) -> Actor:
    return Actor(path=write_model(root / "model"), sampling=Sampling(max_new_tokens=6))


def test_every_phase_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, PPO(actor=actor(tmp_path), mini_batch_size=4, epochs=2), PredictedTimes("cpu"))
    logged = csv_file(tmp_path)
    named = {name for name in logged if name.startswith("predicted/")}
    assert named == {f"predicted/{method}_s" for method in METHODS} | {"predicted/step_s"}
    cluster, kept = measured.read(tmp_path)
    assert (cluster, [one.step for one in kept]) == (CPU, [2, 3])
    for one in kept:
        assert one.calls == 3 + 1 + 2 * 4
        calls = {phase.name: (phase.calls, phase.workload.batch) for phase in one.phases}
        assert calls == dict(zip(METHODS, [(1, 8)] * 3 + [(4, 4)] * 2, strict=True))
        for phase in one.phases:
            assert logged[f"time/{phase.name}_s"][one.step - 1] == pytest.approx(phase.seconds)
            assert logged[f"predicted/{phase.name}_s"][one.step - 1] == pytest.approx(phase.predict(CPU))
            mean = sum(phase.workload.lengths) / len(phase.workload.lengths)
            assert mean == pytest.approx(logged["response/length_mean"][one.step - 1], abs=0.07)
        assert logged["predicted/step_s"][one.step - 1] == pytest.approx(one.predict(CPU))
        assert logged["time/step_s"][one.step - 1] == pytest.approx(one.seconds)
    assert measured.table(kept, CPU) in capsys.readouterr().out


def test_a_resumed_run_goes_on_in_the_file(tmp_path: Path) -> None:
    machine = tmp_path / "machine.yaml"
    hardware.save(CPU, machine)
    fit(tmp_path, GRPO(actor=actor(tmp_path), group_size=2), PredictedTimes(), steps=2)
    resumed = PredictedTimes(str(machine))
    fit(
        tmp_path, GRPO(actor=actor(tmp_path), group_size=2), resumed, checkpoint=str(tmp_path / "step=2.ckpt")
    )
    cluster, kept = measured.read(tmp_path)
    assert (cluster, [one.step for one in kept]) == (CPU, [2])
    assert {phase.workload.batch for phase in kept[0].phases} == {16}


def test_measurements_of_an_earlier_run_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for steps in (2, 1):
        fit(tmp_path, GRPO(actor=actor(tmp_path), group_size=2), PredictedTimes(), steps=steps)
    assert f"{tmp_path / measured.FILE} is of an earlier run; it is measurements-v1.jsonl now." in caplog.text
    files = ("", "measurements-v1.jsonl")
    assert [[one.step for one in measured.read(tmp_path / file)[1]] for file in files] == [[1], [2]]


class Sometimes(GRPO):
    """Answers in every other iteration, the first one included."""

    def step(self, batch: Batch) -> Metrics:
        return Metrics() if self.global_step % 2 else super().step(batch)


def test_an_iteration_without_answers_has_no_lengths_of_the_one_before(tmp_path: Path) -> None:
    fit(tmp_path, Sometimes(actor=actor(tmp_path), group_size=2), PredictedTimes("cpu"), steps=4)
    assert [one.step for one in measured.read(tmp_path)[1]] == [3], "without the first, which warms up"


def test_each_model_is_predicted_as_it_was_told_to_compute(tmp_path: Path) -> None:
    algorithm = PPO(actor=actor(tmp_path))
    fit(tmp_path, algorithm, PredictedTimes("cpu"), steps=1, strategy=Bounded)
    (one,) = measured.read(tmp_path)[1]
    bounds = {phase.name: phase.workload.max_resident for phase in one.phases}
    assert (bounds["actor.generate_sequences"], bounds["critic.compute_values"]) == (3, 0)


def test_lengths_of_given_answers(tmp_path: Path) -> None:
    file = tmp_path / "elsewhere.jsonl"
    fit(tmp_path, SFT(actor=actor(tmp_path)), PredictedTimes(path=str(file)), steps=1)
    (one,) = measured.read(file)[1]
    assert [phase.name for phase in one.phases] == ["actor.update_actor"]
    assert one.phases[0].workload.response > 1
    assert not (tmp_path / measured.FILE).exists()


def test_gpus_of_other_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They would be predicted as CPUs."""
    monkeypatch.setattr(cluster, "num_gpus", lambda: 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = r"^PredictedTimes\(hardware=...\): the cluster has 16 GPUs, and this process sees none.* a100-80gb"
    with pytest.raises(ValueError, match=said):
        fit(tmp_path, SFT(actor=actor(tmp_path)), PredictedTimes(), steps=1)


def test_a_run_without_metrics_is_refused(tmp_path: Path) -> None:
    run = trainer(Local(), tmp_path, barebones=True, callbacks=[PredictedTimes("cpu")])
    data = TaskData(batch_size=2, num_rows=2, num_val_rows=0, completions=True)
    with pytest.raises(
        ValueError, match=r"^PredictedTimes: with trainer\.barebones=true no metrics are logged"
    ):
        run.fit(SFT(actor=actor(tmp_path)), datamodule=data)


def test_unknown_hardware() -> None:
    with pytest.raises(ValueError, match="hardware='tpu': neither a file nor one of a100-80gb"):
        PredictedTimes("tpu")

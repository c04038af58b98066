"""Trace: every call of a run is in it, once."""

from __future__ import annotations

import json
import time
from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Literal

import pytest
from lightning.pytorch import Callback, Trainer

from rlhf_lightning.algorithm import Columns
from rlhf_lightning.algos import GRPO
from rlhf_lightning.callbacks import SampledValidation, Trace
from rlhf_lightning.controller import Batch
from rlhf_lightning.data import TaskData
from rlhf_lightning.strategies import Local
from tests.unit.algos.short import grpo, trainer


class Waiting(GRPO):
    """Leaves it to others to wait for the calls of its validation, or of its test."""

    def validation_step(self, batch: Columns, batch_idx: int) -> None:
        self.actor.generate_sequences(Batch.of(batch), greedy=True)

    test_step = validation_step


def methods(
    root: Path, kind: type[GRPO], *callbacks: Callback, fn: Literal["fit", "validate"]
) -> Counter[str]:
    """How often each method was called in two iterations with two validations of two batches, or in one."""
    run = trainer(
        Local(),
        root,
        steps=2,
        limit_val_batches=2,
        val_check_interval=1,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
    )
    data = TaskData(batch_size=2, num_rows=4, num_val_rows=4)
    (run.fit if fn == "fit" else run.validate)(grpo(kind), datamodule=data)
    events = json.loads((root / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["tid"]]
    assert len({(span["name"], span["ts"]) for span in spans}) == len(spans), "each call once"
    return Counter(span["name"] for span in spans)


@pytest.mark.parametrize("order", permutations(range(2)))
def test_answers_that_a_callback_draws_stand_beside_those_of_the_validation(
    order: tuple[int, int], tmp_path: Path
) -> None:
    callbacks = [Trace(str(tmp_path / "trace.json")), SampledValidation(2)]
    found = methods(tmp_path, GRPO, *(callbacks[n] for n in order), fn="fit")
    assert found["actor.generate_sequences"] == 2 + 2 * 2 * 2
    assert found["actor.update_actor"] == 2


def test_a_validation_that_waits_for_nothing_is_in_it(tmp_path: Path) -> None:
    trace = Trace(str(tmp_path / "trace.json"))
    found = methods(tmp_path, Waiting, trace, fn="fit")
    assert found["actor.generate_sequences"] == 2 + 2 * 2
    assert found["actor.update_actor"] == 2
    found = methods(tmp_path, Waiting, Trace(str(tmp_path / "trace.json")), fn="validate")
    assert found == {"actor.generate_sequences": 2}


def test_a_test_of_ones_own_has_its_trace(tmp_path: Path) -> None:
    trace, data = Trace(str(tmp_path / "trace.json")), TaskData(batch_size=2, num_rows=2, num_val_rows=2)
    algorithm = grpo(Waiting)
    data.tokenizer = algorithm.main_model.path
    data.setup("validate")
    trainer(Local(), tmp_path, callbacks=[trace]).test(algorithm, data.val_dataloader())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["actor.generate_sequences"]


def test_two_traces_are_alike(tmp_path: Path) -> None:
    first, second = (Trace(str(tmp_path / name)) for name in ("trace.json", "second.json"))
    found = methods(tmp_path, GRPO, first, second, fn="fit")
    assert found["actor.generate_sequences"] == 2 + 2 * 2
    assert [call.started_s for call in first.calls] == [call.started_s for call in second.calls]
    assert (tmp_path / "second.json").exists()


def test_a_second_run_has_a_trace_of_its_own(tmp_path: Path) -> None:
    trace = Trace(str(tmp_path / "trace.json"))
    for _ in range(2):
        assert methods(tmp_path, GRPO, trace, fn="fit")["actor.update_actor"] == 2
    assert len(trace.iterations) == 2


def test_a_later_run_of_the_strategy_is_not_told_of_an_earlier_one(tmp_path: Path) -> None:
    strategy, data = Local(), TaskData(batch_size=2, num_rows=2, num_val_rows=0)
    traces = [Trace(str(tmp_path / name)) for name in ("first.json", "second.json")]
    for trace in traces:
        run = Trainer(
            strategy=strategy, max_steps=1, logger=False, enable_checkpointing=False, callbacks=[trace]
        )
        run.fit(grpo(), datamodule=data)
    for trace in traces:
        assert [call.method for call in trace.calls].count("update_actor") == 1


def test_a_run_that_logs_nothing_has_its_trace(tmp_path: Path) -> None:
    trace = Trace(str(tmp_path / "trace.json"))
    run = trainer(Local(), tmp_path, barebones=True, callbacks=[trace])
    run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=2, num_val_rows=0))
    ((_, seconds),) = trace.iterations
    assert 0 < sum(call.seconds for call in trace.calls) < seconds


def test_trying_a_run_out_leaves_no_trace(tmp_path: Path) -> None:
    trace = Trace(str(tmp_path / "trace.json"))
    run = trainer(Local(), tmp_path, fast_dev_run=True, callbacks=[trace])
    run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=2, num_val_rows=0))
    assert trace.calls
    assert not trace.path.exists()


def test_a_clock_that_is_set_back_makes_no_iteration_shorter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, run, algorithm = Trace(), trainer(Local(), tmp_path), grpo()
    trace.on_train_batch_start(run, algorithm)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    trace.on_train_batch_end(run, algorithm)
    ((_, seconds),) = trace.iterations
    assert seconds > 0


def test_a_strategy_of_lightning_has_nothing_to_trace(tmp_path: Path) -> None:
    trace = Trace(str(tmp_path / "trace.json"))
    run = Trainer(accelerator="cpu", max_steps=1, logger=False, default_root_dir=tmp_path, callbacks=[trace])
    with pytest.raises(ValueError, match=r"^GRPO: .* SingleDeviceStrategy\. Type Trainer\(strategy="):
        run.fit(grpo(), datamodule=TaskData())
    assert not trace.path.exists()


class Fuller(Callback):
    """Ends the run, and leaves no place for the trace."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        (Path(trainer.default_root_dir) / "trace.json").mkdir()
        raise KeyError("ended on purpose")


def test_the_error_that_ended_a_run_is_told_where_the_trace_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError, match="ended on purpose"):
        methods(tmp_path, GRPO, Trace(str(tmp_path / "trace.json")), Fuller(), fn="fit")
    assert f"{tmp_path / 'trace.json'}: could not be written (Is a directory)." in caplog.messages

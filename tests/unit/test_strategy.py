"""What a strategy decides before anything is started, and what it asks of its devices' nodes."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.tuner.tuning import Tuner

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import PPO, SFT
from rlhf_lightning.controller.register import methods_of
from rlhf_lightning.data import MixedData, RowData, TaskData
from rlhf_lightning.engines import FSDP, VLLM, Megatron, Native, ZeRO
from rlhf_lightning.strategies import (
    Colocated,
    DeepSpeedChat,
    HybridEngine3D,
    Local,
    OneStepOff,
    OpenRLHF,
    Standalone,
)
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, Settings
from tests.unit.algos.short import grpo, trainer


def test_the_process_of_the_trainer_needs_no_gpu(tmp_path: Path) -> None:
    run = trainer(Local(), tmp_path)
    run.strategy.accelerator = CUDAAccelerator()  # what Lightning chooses on a machine with GPUs
    run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=2, num_val_rows=0))
    assert run.global_step == 1


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            HybridEngine3D(settings=Settings(train=FSDP(max_tokens_per_micro_batch=9))),
            r"train\.max_tokens_per_micro_batch=9: nothing reads it, since megatron .*"
            r"Type --strategy\.settings\.megatron\.max_tokens_per_micro_batch\.",
        ),
        (Local(settings=Settings(zero=ZeRO(stage=3))), r"zero\.stage=3: .*\.engine zero under a strategy"),
        (
            OpenRLHF(settings=Settings(megatron=Megatron(chunks=2))),
            r"megatron\.chunks=2: .* or add --strategy\.settings\.engine megatron under a strategy that ",
        ),
        (Local(settings=Settings(vllm=VLLM(max_num_seqs=4))), r"vllm\.max_num_seqs=4: .*\.generator vllm\."),
    ],
)
def test_options_that_nothing_reads_are_refused(strategy: Strategy, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(strategy, tmp_path).fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=2, num_val_rows=0))


def test_a_wait_has_an_end() -> None:
    with pytest.raises(ValueError, match=r"strategy\.timeout_s=0: must be above 0"):
        Colocated(timeout_s=0)
    with pytest.raises(ValueError, match=r"strategy\.timeout_s=nan: is not a finite number"):
        Colocated(timeout_s=float("nan"))


def test_fewer_threads_than_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^strategy\.num_threads=-1: is negative\. Use 0 "):
        Local(num_threads=-1)


def test_values_of_wrong_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^strategy\.devices='2': has to be of type int or None\.$"):
        Colocated(devices="2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^strategy\.settings='zero': has to be of type Settings"):
        Colocated(settings="zero")  # type: ignore[arg-type]


def test_options_of_all_that_computes_are_read() -> None:
    generating = FSDP(max_tokens_per_micro_batch=9)
    Settings(engine="megatron", train=generating, megatron=Megatron(chunks=2)).check_read(apart=True)
    Settings(train=generating, generate=Native(slots=2)).check_read(apart=False)
    with pytest.raises(ValueError, match="engine=megatron: deepspeed-chat trains with zero"):
        DeepSpeedChat(settings=Settings(engine="megatron"))


@pytest.mark.parametrize(("name", "rank"), [("RANK", "1"), ("SLURM_PROCID", "7"), ("SLURM_PROCID", "0")])
def test_one_process_of_a_launcher_is_the_controller(
    name: str, rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, rank)
    run, data = trainer(Local(), tmp_path), TaskData(batch_size=2, num_rows=2, num_val_rows=0)
    if rank == "0":
        run.fit(grpo(), datamodule=data)
        return
    with pytest.raises(ValueError, match=rf"{name}={rank}: this is one of several processes"):
        run.fit(grpo(), datamodule=data)


@pytest.mark.parametrize(
    ("strategy", "algorithm", "expected"),
    [
        (Standalone(devices=2), grpo(), [(("actor", "reward"), 1)]),
        (OpenRLHF(devices=8), PPO(), [(("actor", "reward"), 2), (("generator",), 2)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_evaluates_stands_where_it_does_in_training(
    strategy: Strategy, algorithm: RLHFAlgorithm, expected: list[tuple[tuple[str, ...], int]]
) -> None:
    strategy.connect(algorithm)
    evaluating = {name: role for name, role in strategy.models().items() if role.needed_to_validate}
    pools = strategy._pools(evaluating)
    assert [(pool.roles, pool.num_devices) for pool in pools] == expected


def test_no_more_devices_are_advised_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"8 devices cannot be divided over 5 models.*Try devices=5"):
        Standalone().place(("a", "b", "c", "d", "e"), 8)


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_a_smaller_last_batch_is_refused_before_anything_starts(max_staleness: int, tmp_path: Path) -> None:
    strategy = OneStepOff(max_staleness=max_staleness)
    data = TaskData(batch_size=3, num_rows=7, num_val_rows=0)
    with pytest.raises(ValueError, match=r"7 rows ends with a batch of 1.*Try --data.drop_last true"):
        trainer(strategy, tmp_path, steps=3).fit(grpo(), datamodule=data)


def test_what_is_advised_for_it_is_an_option_of_the_data(tmp_path: Path) -> None:
    given = TaskData(batch_size=1, num_rows=1, num_val_rows=0, completions=True)
    data = MixedData(main=TaskData(batch_size=3, num_rows=7, num_val_rows=0), ptx=given)
    with pytest.raises(ValueError, match=r"^data\.main\.batch_size=3: .*Try --data\.main\.drop_last true\."):
        trainer(OneStepOff(), tmp_path, steps=3).fit(grpo(), datamodule=data)
    with pytest.raises(ValueError, match=r"^validate: TaskData .* Try data\.main\.val_rows, data\.main\."):
        trainer(Local(), tmp_path).validate(grpo(), datamodule=data)


@pytest.mark.parametrize(
    ("algorithm", "data", "steps"),
    [
        (grpo(), TaskData(batch_size=3, num_rows=7, drop_last=True), 3),
        (grpo(), TaskData(batch_size=3, num_rows=7), 2),
        (SFT(), TaskData(batch_size=3, num_rows=7, completions=True), 3),
    ],
    ids=["it is left out", "it is not reached", "nothing is generated"],
)
def test_otherwise_it_is_not(
    algorithm: RLHFAlgorithm, data: RowData, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> None:
        raise KeyError("it would start")

    monkeypatch.setattr(OneStepOff, "_launch", start)
    with pytest.raises(KeyError, match="it would start"):
        trainer(OneStepOff(), tmp_path, steps=steps).fit(algorithm, datamodule=data)


class Started(Colocated):
    """Fails once it is to start."""

    def join(self) -> None:
        raise KeyError("it would start")


def told(strategy: Strategy, root: Path, **options: object) -> str:
    """With what a run ends whose trainer has these options."""
    run = pl.Trainer(strategy=strategy, logger=False, default_root_dir=root, **options)  # type: ignore[arg-type]
    with pytest.raises((ValueError, KeyError)) as error:
        run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=2, num_val_rows=0))
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"devices": 2}, "Type Trainer(strategy=Started(devices=2))"),
        ({"num_nodes": 2}, 'Leave num_nodes out, and type Trainer(strategy=Colocated(address="HOST:PORT"))'),
        ({"precision": "bf16-mixed"}, "Trainer(precision='bf16-mixed'): each model has a type"),
        ({"precision": "bf16-true"}, 'Type Actor(dtype="bfloat16")'),
        ({"gradient_clip_val": 0.5}, "in Python Actor(optimizer=OptimizerSpec(grad_clip=0.5))"),
        ({"accumulate_grad_batches": 2}, "in Python Settings(train=FSDP(max_tokens_per_micro_batch=TOKENS))"),
        ({"sync_batchnorm": True}, "Trainer(sync_batchnorm=True): the strategy divides the models"),
        ({"detect_anomaly": True}, "Type --strategy local, in Python Trainer(strategy=Local())"),
    ],
    ids=str,
)
def test_a_trainer_that_was_told_what_others_decide(
    options: dict[str, object], said: str, tmp_path: Path
) -> None:
    assert said in told(Started(), tmp_path, accelerator="cpu", **options)


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        ({"val_check_interval": 3}, False),
        ({"val_check_interval": 2, "limit_train_batches": 1}, False),
        ({"val_check_interval": 2}, True),
        ({"val_check_interval": 0.5}, True),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, True),
        ({"val_check_interval": 3, "limit_val_batches": 0.0}, True),
        ({"val_check_interval": 3, "fast_dev_run": True}, True),
    ],
    ids=["rows", "limit", "fits", "share", "of-the-run", "unvalidated", "trial"],
)
def test_an_interval_beyond_the_epoch_is_refused_before_anything_starts(
    options: dict[str, object], *, starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(strategy: Strategy, roles: object) -> None:
        raise KeyError("it would start")

    monkeypatch.setattr(Local, "_launch", start)
    run = trainer(Local(), tmp_path, steps=1, **{"limit_val_batches": 1, **options})
    with pytest.raises((ValueError, KeyError)) as error:
        run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=2))
    said = str(error.value)
    assert said.startswith("'it would start" if starts else "Trainer(val_check_interval=")
    assert starts or f"an epoch has {options.get('limit_train_batches', 2)} iterations" in said
    assert starts or "--trainer.check_val_every_n_epoch null" in said


@pytest.mark.parametrize(
    ("called", "option", "batches"),
    [
        ("fit", "limit_train_batches", 2),
        ("fit", "limit_val_batches", 1),
        ("fit", "overfit_batches", 2),
        ("validate", "limit_val_batches", 1),
        ("validate", "overfit_batches", 1),
        ("predict", "limit_predict_batches", 1),
    ],
)
def test_a_share_of_less_than_a_batch_is_refused_before_anything_starts(
    called: str, option: str, batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Local, "_launch", lambda *_: pytest.fail("it would start"))
    unread = {"overfit_batches": 1} if called == "predict" else {}
    run = trainer(Local(), tmp_path, steps=1, **{option: 0.4, **unread})
    data = TaskData(batch_size=2, num_rows=4, num_val_rows=2)
    with pytest.raises(ValueError, match=rf"\({option}=0.4.* of {batches} is less") as error:
        getattr(run, called)(grpo(), datamodule=data)
    assert f"--trainer.{option} 1 " in str(error.value)


def test_a_run_of_no_batches_may_have_any_interval(tmp_path: Path) -> None:
    options = {"limit_train_batches": 0, "limit_val_batches": 1, "val_check_interval": 3}
    run = trainer(Local(), tmp_path, steps=1, **options)
    run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=2))
    assert run.global_step == 0


@pytest.mark.parametrize(
    ("callback", "instead"),
    [
        (EMAWeightAveraging(), "it averages the controller's module. Try --algo.reference.decay"),
        (StochasticWeightAveraging(0.1), "Try --algo.reference.decay"),
        (ModelPruning("l1_unstructured"), "Prune the model that `rlhf export` writes"),
        (BackboneFinetuning(), "Try --algo.actor.lora.rank"),
        (GradientAccumulationScheduler({1: 2}), "Try --algo.mini_batch_size"),
        (SpikeDetection(), "Watch actor/grad_norm and <role>/skipped_steps"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_callbacks_on_a_module_without_weights_are_refused(
    callback: Callback, instead: str, tmp_path: Path
) -> None:
    said = told(Started(), tmp_path, accelerator="cpu", callbacks=callback)
    assert said.startswith(f"{type(callback).__name__}: weights and gradients are on the devices; ")
    assert instead in said


def test_a_way_to_write_checkpoints_that_nobody_would_take(tmp_path: Path) -> None:
    said = told(Started(), tmp_path, accelerator="cpu", plugins=AsyncCheckpointIO())
    assert said.startswith("Trainer(plugins=AsyncCheckpointIO()): it would write nothing")


def test_what_an_error_leaves_is_not_saved(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, save_on_exception=True)
    said = told(Started(), tmp_path, accelerator="cpu", callbacks=saving)
    assert said.startswith("ModelCheckpoint(save_on_exception=True): an error comes in the middle")
    assert "+=LastCheckpoint --trainer.callbacks.directory DIRECTORY --trainer.callbacks.every_n" in said
    said = told(Started(), tmp_path, accelerator="cpu", callbacks=OnExceptionCheckpoint(tmp_path))
    assert said.startswith("OnExceptionCheckpoint: an error comes")


def test_what_lightning_would_do_to_a_module_that_steps_itself_is_refused(tmp_path: Path) -> None:
    by_the_clock = ModelCheckpoint(tmp_path, train_time_interval=timedelta(minutes=1))
    said = told(Started(), tmp_path, accelerator="cpu", callbacks=by_the_clock)
    assert said.startswith("ModelCheckpoint(train_time_interval=...): Lightning would never save")
    for finder in (BatchSizeFinder(), LearningRateFinder()):
        said = told(Started(), tmp_path, accelerator="cpu", callbacks=finder)
        assert said.startswith(f"{type(finder).__name__}: its trials train the models")
    run = pl.Trainer(strategy=Started(), logger=False, default_root_dir=tmp_path, accelerator="cpu")
    data = TaskData(batch_size=2, num_rows=2, num_val_rows=0)
    with pytest.raises(ValueError, match="its trials train"):
        Tuner(run).scale_batch_size(grpo(), datamodule=data)
    with pytest.raises(KeyError, match="it would start"):
        run.fit(grpo(), datamodule=data)


@pytest.mark.parametrize(
    "options",
    [{}, {"devices": "auto"}, {"devices": 1}, {"devices": 2}, {"accelerator": "auto", "precision": 32}],
    ids=str,
)
def test_what_says_nothing_else_is_taken(options: dict[str, object], tmp_path: Path) -> None:
    assert "it would start" in told(Started(devices=2), tmp_path, **{"accelerator": "cpu", **options})


def test_what_lightning_says_of_other_modules_is_left_out(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    run = trainer(Local(), tmp_path, enable_checkpointing=True, callbacks=[saves])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=2, num_val_rows=0))
    assert Path(saves.best_model_path).is_dir()
    assert [str(w.message) for w in warned if "manual optimization" in str(w.message)] == []
    assert not any(isinstance(c, ModelSummary) for c in run.callbacks)  # type: ignore[attr-defined]


def test_a_summary_that_was_asked_for_stays(tmp_path: Path) -> None:
    asked = ModelSummary(max_depth=2)
    run, algorithm = pl.Trainer(strategy=Local(), accelerator="cpu", logger=False, callbacks=[asked]), grpo()
    algorithm.trainer = run
    run.strategy.connect(algorithm)
    assert asked in run.callbacks  # type: ignore[attr-defined]


def test_a_strategy_of_one_device_names_another(tmp_path: Path) -> None:
    assert "Type Trainer(strategy=Colocated(devices=2))" in told(Local(), tmp_path, devices=2)


@pytest.mark.parametrize("name", ["save", "load", "export_model"])
def test_a_node_that_does_not_see_the_controllers_disk(name: str, tmp_path: Path) -> None:
    method = methods_of(Actor)[name].function
    with pytest.raises(
        ValueError, match=r"not there on this node\. Checkpoints need a disk that all nodes share"
    ):
        method(Actor(), directory=tmp_path / "elsewhere.ckpt" / "actor")


def test_devices_are_given_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept(Actor):
        def save(self, *, directory: Path) -> Kept:  # type: ignore[override]
            seen.append(directory)
            return self

        def fetch(self) -> None:
            """It is done."""

    seen: list[Path] = []
    monkeypatch.chdir(tmp_path)
    strategy = Local()
    strategy._handles = {"actor": Kept()}
    strategy.save_checkpoint({"epoch": 1}, "runs/mine.ckpt")
    assert [path.parent.parent for path in seen] == [tmp_path / "runs"]


def test_a_strategy_of_lightning_is_refused(tmp_path: Path) -> None:
    run = pl.Trainer(accelerator="cpu", max_steps=1, logger=False, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=r"^GRPO: .* SingleDeviceStrategy\. Type Trainer\(strategy="):
        run.fit(grpo(), datamodule=TaskData())

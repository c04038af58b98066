"""Where commands look for a checkpoint, and what they say where there is none or nothing can be written."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_lightning import checkpoint, directories
from rlhf_lightning.algos import PPO
from rlhf_lightning.callbacks import LastCheckpoint
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import Head, export_checkpoint
from rlhf_lightning.spec import CHECKPOINT, ModelSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor
from tests.logged import csv_file
from tests.unit.rlhf import FIT, SHORT, Rlhf

pytestmark = pytest.mark.usefixtures("in_own_directory")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run."""
    root = tmp_path_factory.mktemp("saved")
    sampling = Sampling(max_new_tokens=2)
    run = Trainer(
        strategy=Local(), max_steps=1, logger=False, limit_val_batches=0, callbacks=[LastCheckpoint(root)]
    )
    run.fit(PPO(actor=Actor(sampling=sampling)), datamodule=TaskData(batch_size=2, num_rows=8))
    return root / "last.ckpt"


@pytest.fixture
def trained(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "copy" / "last.ckpt"))


def cut(file: Path) -> None:
    """Leave the first half."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_a_run_with_a_checkpoint_callback_of_the_users_own_goes_on(rlhf: Rlhf) -> None:
    mine = ("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=50")
    local = ("--strategy", "local", "--trainer.logger", "false", "--data.batch_size", "2")
    words = (*FIT, *SHORT, *local, *mine, "--algo.actor.sampling.max_new_tokens", "2", "--ckpt_path", "last")
    code, _, err = rlhf.run(*words, "--trainer.max_steps", "1")
    assert code == 0, err
    place = Path("runs/checkpoints").absolute()
    assert f"rlhf: --ckpt_path last: {place} is not there. The run begins anew.\n" in err
    assert "save_last" not in err
    code, _, err = rlhf.run(*words, "--trainer.max_steps", "2")
    assert code == 0, err
    assert "begins anew" not in err
    assert checkpoint.read_state(place / "last.ckpt")["global_step"] == 2


def test_the_rates_that_are_shown_go_on(rlhf: Rlhf) -> None:
    monitor = ("--trainer.callbacks+=LearningRateMonitor", "--trainer.callbacks.logging_interval", "step")
    logger = ("--trainer.logger", "CSVLogger", "--trainer.log_every_n_steps", "1")
    short = ("--data.batch_size", "2", "--algo.actor.sampling.max_new_tokens", "2")
    rates = ("--algo.critic.optimizer.warmup_steps", "3", "--trainer.limit_val_batches", "0")
    words = (*FIT, *SHORT, *short, *rates, *monitor, *logger, "--strategy", "local")
    shown = []
    for root, runs in (("whole", ("4",)), ("cut", ("2", "4"))):
        there = ("--trainer.default_root_dir", root, "--trainer.logger.save_dir", root, "--ckpt_path", "last")
        for steps in runs:
            rlhf.succeeds(*words, *there, "--trainer.max_steps", steps)
        tables = [csv_file(path.parent) for path in sorted(Path(root).rglob("metrics.csv"))]
        shown.append([rate for table in tables for rate in table["lr-RemoteOptimizer/critic"]])
        taken = [rate for table in tables for rate in table["critic/lr"]]
        assert shown[-1] == pytest.approx([taken[0], *taken[:-1]])
    assert shown[0] == shown[1]


def test_a_file_is_no_checkpoint(rlhf: Rlhf, trained: Path) -> None:
    words = ("validate", "--algo", "ppo", *SHORT, "--strategy", "local", "--ckpt_path")
    Path("weights.pt").write_bytes(b"not zipped")
    said = rlhf.refused(*words, "weights.pt")
    assert said == "--ckpt_path weights.pt: is a file, and a checkpoint a directory."
    inside = trained / CHECKPOINT
    assert rlhf.refused(*words, str(inside)).endswith(f"a checkpoint a directory. Type {trained}.")


def test_the_directory_of_a_run_and_the_parts_of_a_checkpoint_are_none(rlhf: Rlhf, trained: Path) -> None:
    shutil.copytree(trained, "runs/checkpoints/last.ckpt")
    for words in (("export", "runs", "out"), ("predict", *FIT[1:], *SHORT, "--ckpt_path", "runs")):
        said = rlhf.refused(*words)
        assert said == "'runs' is not a checkpoint, and holds some. Type one: runs/checkpoints/last.ckpt."
    for part in ("actor", "trainer.json"):
        said = rlhf.refused("export", str(trained / part), "out")
        assert said == f"{str(trained / part)!r} lies in a checkpoint. Type {trained}."


def test_evaluating_elsewhere_warns_of_nothing(
    rlhf: Rlhf, trained: Path, recwarn: pytest.WarningsRecorder
) -> None:
    words = ("--algo", "ppo", *SHORT, "--strategy", "local", "--trainer.logger", "false")
    few = ("--algo.actor.sampling.max_new_tokens", "2", "--ckpt_path", str(trained))
    out = rlhf.succeeds("predict", *words, *few)
    assert out.endswith("predictions: runs/predictions.jsonl\n")
    assert [str(each.message) for each in recwarn if "dirpath" in str(each.message)] == []


def test_the_configuration_of_a_fit_outlives_an_evaluation(rlhf: Rlhf) -> None:
    few = ("--data.num_rows", "8", "--data.batch_size", "2", "--algo.actor.sampling.max_new_tokens", "2")
    words = ("--algo", "ppo", *SHORT, *few, "--strategy", "local", "--trainer.logger", "false")
    assert rlhf.run("fit", *words, "--trainer.max_steps", "1", "--algo.gamma", "0.5")[0] == 0
    before = Path("runs/config.yaml").read_text()
    assert rlhf.run("predict", *words, "--ckpt_path", "last")[0] == 0
    assert Path("runs/config.yaml").read_text() == before
    assert "gamma: 1.0" in Path("runs/predict.yaml").read_text()


def test_a_checkpoint_is_no_model(rlhf: Rlhf, trained: Path) -> None:
    for role in ("actor", "reward"):
        said = rlhf.refused(*FIT, *SHORT, f"--algo.{role}.path", str(trained))
        assert said.endswith(f" It is a checkpoint: type OUT after `rlhf export {trained} OUT`."), said
        said = rlhf.refused(*FIT, *SHORT, f"--algo.{role}.path", str(trained / "critic"))
        inside = f"It lies in a checkpoint: type OUT after `rlhf export {trained} OUT critic`."
        assert said.endswith(f" {inside}"), said


def test_an_export_builds_no_engine(rlhf: Rlhf, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_lightning.commands.export.FSDPEngine", lambda *_, **__: pytest.fail("it does"))
    for role in ("actor", "critic"):
        assert rlhf.run("export", str(trained), role, role)[0] == 0
    assert AutoModelForCausalLM.from_pretrained("actor").config.vocab_size
    assert AutoModelForSequenceClassification.from_pretrained("critic").score.weight.shape[0] == 1


def test_an_export_keeps_no_tokenizer_of_another_model(rlhf: Rlhf, trained: Path) -> None:
    """Transformers would read what is left: a template takes the place of one in tokenizer_config.json."""
    others = ("chat_template.jinja", "added_tokens.json", "special_tokens_map.json", "generation_config.json")
    assert rlhf.run("export", str(trained), "fresh", "critic")[0] == 0
    expected = {file.name for file in Path("fresh").iterdir()}
    assert not expected & {*others}
    make(Path("out/tokenizer"))
    for name in (*others, "config.json", "README.md"):
        Path("out", name).write_text("another model's")
    assert rlhf.run("export", str(trained), "out", "critic")[0] == 0
    assert {file.name for file in Path("out").iterdir()} == expected | {"README.md", "tokenizer"}


def test_an_export_of_a_checkpoint_that_is_replaced_meanwhile(
    rlhf: Rlhf, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(held: Path, out: Path, *, spec: ModelSpec, head: Head) -> bool:
        with directories.replacing(trained) as fresh:
            shutil.copytree(trained, fresh, dirs_exist_ok=True)
        return export_checkpoint(held, out, spec=spec, head=head)

    monkeypatch.setattr("rlhf_lightning.commands.export.export_checkpoint", overtaken)
    said = rlhf.refused("export", str(trained), "out")
    assert said.startswith(f"checkpoint {trained}: its run replaced it while it was read")
    assert not Path("out").exists()


def test_an_option_that_export_does_not_have(rlhf: Rlhf, trained: Path) -> None:
    assert "are required: OUT. Try --help." in rlhf.refused("export", str(trained), "--out")
    assert "unrecognized arguments: --out. Try --help." in rlhf.refused("export", str(trained), "--out", "x")
    assert not Path("--out").exists()
    assert not Path("x").exists()


def test_a_checkpoint_of_another_program_is_not_exported(rlhf: Rlhf) -> None:
    checkpoint.write_state(make(Path("other.ckpt")), {"global_step": 1})
    assert "does not say which models it holds" in rlhf.refused("export", "other.ckpt", "out")


def test_no_last_checkpoint_to_evaluate(rlhf: Rlhf) -> None:
    words = ("--algo", "ppo", *SHORT, "--strategy", "local", "--ckpt_path", "last")
    place = Path("runs/checkpoints").absolute()
    assert f"--ckpt_path last: {place} is not there. Type the path of one" in rlhf.refused("validate", *words)
    for command in ("validate", "predict"):
        assert "checkpoint 'other.ckpt' is not there" in rlhf.refused(command, *words[:-1], "other.ckpt")
    checkpoint.write_state(make(place / "step=3.ckpt"), {})
    assert f"{place} holds no last.ckpt, but step=3.ckpt. Type" in rlhf.refused("predict", *words)
    off = ("--trainer.enable_checkpointing", "false")
    assert "nothing is kept with enable_checkpointing false" in rlhf.refused("predict", *words, *off)


@pytest.mark.parametrize("command", ["fit", "validate", "predict"])
def test_a_job_of_slurm_does_not_go_on_from_anothers_warning(
    command: str, rlhf: Rlhf, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = Path(shutil.copytree(trained, "runs/hpc_ckpt_1.ckpt"))
    job = {"SLURM_JOB_ID": "78", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "rlhf"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    few = ("--data.num_rows", "8", "--data.batch_size", "2", "--algo.actor.sampling.max_new_tokens", "2")
    words = (command, "--algo", "ppo", *SHORT, *few, "--strategy", "local", "--trainer.logger", "false")
    assert rlhf.refused(*words).startswith(f"{left}: an earlier job of Slurm was warned and has left this")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    rlhf.succeeds(*words, *(("--trainer.max_steps", "2") if command == "fit" else ()))
    if command == "fit":
        last = checkpoint.read_state(Path("runs/checkpoints/last.ckpt"))
        batches = last["loops"]["fit_loop"]["epoch_loop.batch_progress"]  # type: ignore[index]
        assert (last["global_step"], batches["total"]["ready"]) == (2, 2)


@pytest.mark.parametrize(
    ("command", "logger", "says"),
    [
        ("fit", "true", "file/runs/checkpoints cannot be written (Not a directory). Type another path"),
        ("predict", "false", "file/runs: Not a directory."),
    ],
)
def test_a_directory_that_cannot_be_made(rlhf: Rlhf, command: str, logger: str, says: str) -> None:
    Path("file").touch()
    words = ("--strategy", "local", "--trainer.default_root_dir", "file/runs", "--trainer.logger", logger)
    message = rlhf.refused(command, "--algo", "ppo", *SHORT, *words)
    assert says in message


def test_an_export_to_where_nothing_can_be_written(
    rlhf: Rlhf, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").touch()
    assert rlhf.refused("export", str(trained), "file/out") == "file/out: Not a directory."
    made = os.mkdir

    def refuse(path: str | os.PathLike[str], mode: int = 0o777) -> None:
        if ".saving-" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        made(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        assert rlhf.refused("export", str(trained), "out") == "out: Permission denied."
    assert rlhf.run("export", str(trained), "out")[0] == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in Path("out").iterdir()
    }


def test_the_package_is_the_command_and_libraries_warn_of_nothing_that_nobody_can_change(
    trained: Path,
) -> None:
    """In a process of its own, where cuDNN's attention is left on: the process may be a user's."""
    program = (
        "import atexit, runpy, sys; from operator import attrgetter;"
        "seen = attrgetter('backends.cuda.cudnn_sdp_enabled');"
        "atexit.register(lambda: print(seen(sys.modules['torch'])()));"
        "runpy.run_module('rlhf_lightning', run_name='__main__', alter_sys=True)"
    )
    data = ("--data.batch_size", "2", "--data.num_rows", "8", "--data.num_val_rows", "0")
    words = (*FIT, *data, "--strategy", "local", "--ckpt_path", str(trained), "--trainer.max_steps", "2")
    root = ("--trainer.default_root_dir", str(trained.parents[1]), "--trainer.logger", "false")
    command = [sys.executable, "-c", program, *words, *root]
    (trained.parents[1] / "checkpoints").mkdir()
    (trained.parents[1] / "checkpoints" / "mine.txt").touch()
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-1] == "True"
    assert "max_steps=2` reached" in run.stderr
    last = trained.parents[1] / "checkpoints" / "last.ckpt"
    said = f"rlhf: wrote {last}; `rlhf export {last} OUT` exports its model."
    assert run.stderr.splitlines()[-1] == said
    assert [line for line in run.stderr.splitlines() if re.search("deprecat|not empty|is zero", line)] == []


def test_a_run_that_had_nothing_left_to_do_wrote_nothing(rlhf: Rlhf, trained: Path) -> None:
    data = ("--data.batch_size", "2", "--data.num_rows", "8", "--data.num_val_rows", "0")
    words = (*FIT, *data, "--strategy", "local", "--trainer.logger", "false", "--ckpt_path", str(trained))
    code, _, err = rlhf.run(*words, "--trainer.max_steps", "1")
    said = "rlhf: nothing was trained or written: no iteration was left after 1, that of the checkpoint."
    assert (code, err.splitlines()[-1]) == (0, said)


def test_what_stopped_a_run_early_is_said(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the algorithm brings callbacks, which replace others of their class."""
    monkeypatch.setattr(PPO, "configure_callbacks", lambda _: LambdaCallback())
    stop = ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=reward/mean")
    limits = ("--trainer.callbacks.patience=0", "--trainer.callbacks.min_delta=9", "--trainer.max_steps=9")
    data = ("--data.batch_size", "2", "--data.num_rows", "4", "--data.num_val_rows", "0")
    words = (*FIT, *data, "--strategy", "local", "--trainer.logger", "false", "--trainer.max_epochs", "9")
    code, _, err = rlhf.run(*words, *stop, *limits)
    assert code == 0
    said = "rlhf: EarlyStopping ended the run after 4 of 9 iterations: Monitored metric reward/mean did not "
    assert [line for line in err.splitlines() if line.startswith(said)], err
    assert err.splitlines()[-1].startswith("rlhf: wrote ")
    code, _, err = rlhf.run(*words, "--trainer.max_steps=3", "--trainer.default_root_dir", "whole")
    assert (code, "EarlyStopping" in err) == (0, False)


def test_an_export_into_the_checkpoint_or_over_its_beginning(rlhf: Rlhf, trained: Path) -> None:
    for out in (trained, trained / "hf"):
        assert rlhf.refused("export", str(trained), str(out)).startswith(f"{out}: lies in the checkpoint")
    assert rlhf.refused("export", str(trained), "gs://a/b").startswith("OUT=gs://a/b: is in a store")
    assert rlhf.run("export", str(trained), "base")[0] == 0
    words = (*FIT, *SHORT, "--strategy", "local", "--trainer.max_steps", "1", "--algo.actor.path", "base")
    assert rlhf.run(*words, "--trainer.default_root_dir", "again")[0] == 0
    before = Path("base/model.safetensors").read_bytes()
    said = rlhf.refused("export", "again/checkpoints/last.ckpt", "base")
    assert said.startswith("base: is the model that actor began with")
    assert Path("base/model.safetensors").read_bytes() == before
    held = Path("again/checkpoints/last.ckpt")
    assert rlhf.refused("export", "again/checkpoints", "out").endswith(f"Type one: {held}.")


def test_another_model_than_the_one_it_began_with(
    rlhf: Rlhf, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert rlhf.run("export", str(trained), "base")[0] == 0
    data = ("--data.batch_size", "2", "--data.num_rows", "8", "--data.num_val_rows", "0")
    words = (*FIT, *data, "--strategy", "local", "--ckpt_path", str(trained), "--trainer.max_steps", "3")
    other = ("--algo.reference.path", "base", "--trainer.default_root_dir", "runs")
    rlhf.succeeds(*words, *other)
    assert f"its reference began with embedded, and this run's with {Path('base').absolute()}." in caplog.text
    assert "its actor began" not in caplog.text
    caplog.clear()
    rlhf.succeeds(*words, "--trainer.default_root_dir", "same")
    assert "began with" not in caplog.text


def test_an_export_of_a_model_whose_beginning_is_gone(rlhf: Rlhf, trained: Path) -> None:
    gone = str(Path("gone").absolute())
    state = trained / "trainer.json"
    state.write_text(state.read_text().replace('"path": "embedded"', f'"path": "{gone}"'))
    said = rlhf.refused("export", str(trained), "out")
    assert "config and tokenizer are those of the model that actor began with" in said
    assert f"path={gone}: no such directory" in said
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("actor/shard-*.safetensors", cut, r"shard-00001-\S+: is truncated or corrupt \(.*not fully covered"),
        (
            "actor/shard-*.safetensors",
            Path.unlink,
            r"last\.ckpt/actor: lacks \S+, or a part .* of \d+ tensors",
        ),
        ("critic/engine.json", cut, r"critic/engine\.json: is damaged"),
        ("critic/engine.json", Path.unlink, r"critic: holds no checkpoint, engine\.json is missing"),
        ("trainer.json", cut, r"last\.ckpt: trainer\.json or tensors\.safetensors is damaged"),
        ("tensors.safetensors", cut, r"last\.ckpt: trainer\.json or tensors\.safetensors is damaged"),
        ("tensors.safetensors", Path.unlink, r"last\.ckpt: tensors\.safetensors lacks 'state\.state_dict"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_anything_starts(
    rlhf: Rlhf, trained: Path, file: str, damage: Callable[[Path], None], message: str
) -> None:
    for damaged in trained.glob(file):
        damage(damaged)
    words = ("--algo", "ppo", "--strategy", "colocated", *SHORT, "--ckpt_path", str(trained))
    assert re.search(message, rlhf.refused("fit", *words, "--trainer.default_root_dir", "other"))


def make(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


@pytest.mark.parametrize(
    ("root", "said"),
    [
        ("/proc", "predictions.jsonl: /proc cannot be written (No such file or directory)"),
        (
            "here",
            "here/predictions.jsonl is a directory. Move it, or type another --trainer.default_root_dir.",
        ),
    ],
)
def test_nothing_is_predicted_where_the_answers_cannot_be_kept(root: str, said: str, rlhf: Rlhf) -> None:
    Path("here/predictions.jsonl").mkdir(parents=True)
    options = ("--strategy", "local", "--trainer.default_root_dir", root)
    assert said in rlhf.refused("predict", "--algo", "ppo", *options, *SHORT)

"""A checkpoint is there whole or not at all, whenever the process that writes it dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from rlhf_lightning import checkpoint as files
from rlhf_lightning import directories
from rlhf_lightning.callbacks import LastCheckpoint
from rlhf_lightning.controller import Batch
from rlhf_lightning.controller.in_process import InProcessTransport
from rlhf_lightning.data import TaskData
from rlhf_lightning.spec import CHECKPOINT
from rlhf_lightning.strategies import Local
from tests.unit.algos.short import grpo
from tests.unit.algos.short import trainer as short

DEAD = 9


def write(target: Path, step: int) -> None:
    with directories.replacing(target) as directory:
        files.write_state(directory, {"global_step": step})


def test_tensors_whose_places_read_alike_stay_apart(tmp_path: Path) -> None:
    one, two, three, four, five = (torch.tensor(float(number)) for number in range(5))
    state = {"a.b": one, "a": {"b": two, "b'": three}, 1: {"c": four}, "1": {"c": five}}
    files.write_state(tmp_path, {"callbacks": state})
    assert files.read_state(tmp_path)["callbacks"] == state


def test_keys_that_look_like_marks_are_keys(tmp_path: Path) -> None:
    state = {"kept": {"$tensor": "a"}, "more": {"$tuple": [1]}, "last": {"$items": [[1, 2]]}}
    files.write_state(tmp_path, state)
    assert files.read_state(tmp_path) == state


def test_a_checkpoint_is_on_the_disk_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []

    def flush(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        assert (tmp_path / "last.ckpt").exists() == (flushed[-1] == tmp_path.name)

    monkeypatch.setattr(os, "fsync", flush)
    write(tmp_path / "last.ckpt", 1)
    assert flushed[0] == CHECKPOINT
    assert flushed[-1] == tmp_path.name


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (Batch.of({"scores": torch.ones(2)}), r"kept\[0\], a .*\.Batch: .* Put in its fetch\(\), which"),
        (np.ones(2), r"kept\[0\], a numpy\.ndarray: .* Put in torch\.from_numpy\(\.\.\.\) of it\.$"),
        (deque([1.0]), r"kept\[0\], a collections\.deque: .* Put in list\(\.\.\.\) of it\.$"),
        (Path, r"kept\[0\], a builtins\.type: .* Turn it into such in state_dict\(\) or on_save_"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_told_what_to_put_in(
    kept: object, told: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=rf"^a checkpoint cannot hold state\.{told}"):
        files.write_state(tmp_path, {"kept": [kept]})


def step_of(target: Path) -> object:
    return files.read_state(files.find(target))["global_step"]


def found_as_last(directory: Path) -> Path:
    """What `ckpt_path="last"` takes."""
    callback = ModelCheckpoint(dirpath=directory, filename="last")
    trainer = Trainer(callbacks=[callback], logger=False, accelerator="cpu", default_root_dir=directory)
    return Path(max(callback._find_last_checkpoints(trainer), key=os.path.getmtime))


def dies(*, before: str, call: int, run: Callable[[], None]) -> None:
    """Run it in a process that ends at once before the n-th call of an operation on files."""
    child = os.fork()
    if child == 0:
        owner, name = (Path, before) if hasattr(Path, before) else (shutil, before)
        calls, original = [0], getattr(owner, name)

        def counted(*arguments: object, **options: object) -> object:
            calls[0] += 1
            if calls[0] == call:
                os._exit(DEAD)
            return original(*arguments, **options)

        setattr(owner, name, counted)
        run()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == DEAD


@pytest.mark.parametrize(
    ("before", "call", "expected"),
    [
        pytest.param("write_text", 1, 1, id="state-unwritten"),
        pytest.param("rename", 1, 1, id="old-in-place"),
        pytest.param("rename", 2, 1, id="old-aside-new-not-in-place"),
        pytest.param("rename", 3, 2, id="both"),
        pytest.param("rmtree", 1, 2, id="old-not-deleted"),
    ],
)
def test_the_writer_dies(before: str, call: int, expected: int, tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    write(target, 1)
    dies(before=before, call=call, run=lambda: write(target, 2))
    assert step_of(target) == expected
    assert step_of(found_as_last(tmp_path)) == expected
    write(target, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert step_of(target) == 3


def test_a_checkpoint_is_removed_at_once(tmp_path: Path) -> None:
    target = tmp_path / "epoch=0-step=1.ckpt"
    write(target, 1)
    dies(before="rmtree", call=1, run=lambda: directories.remove(target))
    with pytest.raises(ValueError, match="is not there; beside it: no checkpoint"):
        files.find(target)
    directories.remove(target)


def test_of_a_link_to_a_checkpoint_the_link_is_removed_or_replaced(tmp_path: Path) -> None:
    """As ModelCheckpoint(save_last="link") leaves one."""
    whole, link = tmp_path / "step=1.ckpt", tmp_path / "last.ckpt"
    write(whole, 1)
    link.symlink_to(whole)
    write(link, 2)
    link.rename(other := tmp_path / "step=2.ckpt")
    link.symlink_to(other)
    directories.remove(link)
    assert sorted(tmp_path.iterdir()) == [whole, other]
    assert [files.read_state(path)["global_step"] for path in (whole, other)] == [1, 2]


def test_what_can_be_typed_instead_of_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    write(tmp_path / "last.ckpt", 3)
    (tmp_path / "unfinished.ckpt").mkdir()
    with pytest.raises(ValueError, match=r"is not there; beside it: \['last\.ckpt'\]\."):
        files.find(tmp_path / "lost.ckpt")
    write(tmp_path / "last-v1.ckpt", 2)
    (tmp_path / "last.ckpt" / CHECKPOINT).write_text('{"format": 1, "st')
    instead = r"Copy it again, or type another checkpoint; beside it: \['last-v1\.ckpt'\]\."
    with pytest.raises(ValueError, match=rf"last\.ckpt: .* is damaged \(.*\)\. {instead}"):
        files.read_state(tmp_path / "last.ckpt")
    for other in ('{"format": 1, "state": [1]}', "[]"):
        (tmp_path / "last.ckpt" / CHECKPOINT).write_text(other)
        with pytest.raises(ValueError, match=rf"last\.ckpt: .* is not the state of a checkpoint\. {instead}"):
            files.read_state(tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt" / CHECKPOINT).write_text('{"format": 2, "state": {}}')
    with pytest.raises(ValueError, match=r"last\.ckpt: is of format 2, this version reads 1\.$"):
        files.read_state(tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt" / CHECKPOINT).unlink()
    with pytest.raises(
        ValueError, match=r"last\.ckpt' holds no trainer\.json; beside it: \['last-v1\.ckpt'\]\."
    ):
        files.find(tmp_path / "last.ckpt")


@pytest.mark.parametrize("closed", [CHECKPOINT, files.TENSORS])
def test_what_another_user_keeps_closed_is_not_called_damaged(
    closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs this test may be root, who may read everything."""
    target = tmp_path / "last.ckpt"
    with directories.replacing(target) as directory:
        files.write_state(directory, {"buffer": torch.ones(2)})
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != closed and mode == os.R_OK)
    said = r"may not be read by this user\. Ask its owner to type `chmod -R a\+rX"
    with pytest.raises(ValueError, match=rf"^{target / closed}: {said} {target}`"):
        files.read_state(target)


def test_the_current_directory_is_a_checkpoint_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for nameless in (".", "/"):
        with pytest.raises(
            ValueError, match=rf"^checkpoint '{nameless}' holds no trainer\.json; beside it: "
        ):
            files.find(nameless)
    (tmp_path / CHECKPOINT).touch()
    assert files.find(".").samefile(tmp_path)


def test_a_model_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=rf"is a model, no checkpoint\. .* type --algo\.actor\.path {tmp_path} in"
    ):
        files.find(tmp_path)


def text(path: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in path.iterdir()}


def test_files_are_added_to_a_directory_all_or_none(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def add(said: str, error: Exception | None = None) -> None:
        with directories.adding(target, last="config.json", replaces=["model*"]) as fresh:
            for name in ("config.json", "model.safetensors"):
                (fresh / name).write_text(said)
            if error is not None:
                raise error

    full = RuntimeError("Error while serializing: No space left on device (os error 28)")
    with pytest.raises(OSError, match="No space left on device; nothing was written there") as caught:
        add("first", full)
    assert caught.value.filename == str(target)
    assert not target.exists()
    target.mkdir()
    with pytest.raises(OSError, match="No space left on device"):
        add("first", full)
    assert target.is_dir(), "it was there before"
    for name in ("README.md", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (target / name).write_text("mine")
    add("second")
    with pytest.raises(KeyError):
        add("third", KeyError("else"))
    assert text(target) == {"README.md": "mine", "config.json": "second", "model.safetensors": "second"}


def test_files_are_added_beside_others_in_a_folder_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "README.md").write_text("mine")
    (tmp_path / "templates" / "old.jinja").write_text("old")
    with directories.adding(
        tmp_path, last="config.json", replaces=["templates*", "templates/*.jinja"]
    ) as fresh:
        (fresh / "templates").mkdir()
        for name in ("config.json", "templates/config.json", "templates/new.jinja"):
            (fresh / name).write_text("new")
    assert text(tmp_path / "templates") == {"README.md": "mine", "config.json": "new", "new.jinja": "new"}
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["config.json"]


def test_a_model_that_is_added_in_part_has_no_configuration(tmp_path: Path) -> None:
    def add() -> None:
        with directories.adding(tmp_path, last="config.json", replaces=["model*"]) as fresh:
            for name in ("config.json", "model.safetensors", "tokenizer.json"):
                (fresh / name).write_text("new")

    (tmp_path / "config.json").write_text("old")
    dies(before="replace", call=2, run=add)
    assert not (tmp_path / "config.json").exists()
    add()
    assert text(tmp_path) == dict.fromkeys(("config.json", "model.safetensors", "tokenizer.json"), "new")


def test_an_interrupt_leaves_whole_checkpoints_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a device that is ended goes on writing for a while."""
    write, ends, begun = files.write_state, InProcessTransport.close, list[Path]()

    def interrupted(directory: Path, state: dict[str, object]) -> None:
        begun.append(directory)
        write(directory, state)
        if len(begun) == 2:
            raise KeyboardInterrupt

    def ends_late(transport: InProcessTransport) -> None:
        (begun[-1] / "actor").mkdir(parents=True)
        ends(transport)

    monkeypatch.setattr(files, "write_state", interrupted)
    monkeypatch.setattr(InProcessTransport, "close", ends_late)
    own = LastCheckpoint(tmp_path / "checkpoints", every_n_steps=1)
    run = short(Local(), tmp_path, steps=3, callbacks=[own], enable_checkpointing=True)
    heeded = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=6, num_val_rows=0))
    signal.signal(signal.SIGINT, heeded)  # Lightning has it ignored
    assert [path.name for path in own.path.parent.iterdir()] == ["last.ckpt"]
    assert step_of(own.path) == 1


def test_what_another_run_writes_in_the_directory_stays(tmp_path: Path) -> None:
    with directories.replacing(tmp_path / "last.ckpt") as unfinished:
        child = os.fork()
        if child == 0:
            write(tmp_path / "best.ckpt", 5)
            write(tmp_path / "last.ckpt", 6)
            os._exit(0 if unfinished.is_dir() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        files.write_state(unfinished, {"global_step": 7})
    assert [step_of(tmp_path / name) for name in ("best.ckpt", "last.ckpt")] == [5, 7]
    assert len(list(tmp_path.iterdir())) == 2


def test_who_still_writes_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as writer:
        with monkeypatch.context() as there:
            there.setattr(os, "getpid", lambda: writer.pid)
            unfinished = directories._unfinished(tmp_path / "last.ckpt")
        unfinished.mkdir()
        write(tmp_path / "last.ckpt", 1)
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(timeout=0.1)
        writer.kill()
    assert unfinished.is_dir()

    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)  # as where it is another user's
    write(tmp_path / "last.ckpt", 2)
    assert unfinished.is_dir()


def test_what_another_machine_left_of_the_same_checkpoint_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as there:
        there.setattr(directories, "gethostname", lambda: "node-7")
        same, other = (directories._unfinished(tmp_path / name) for name in ("last.ckpt", "best.ckpt"))
    for path in (same, other):
        path.mkdir()
    write(tmp_path / "last.ckpt", 1)
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", other.name}


def test_containers_come_back_as_they_were(tmp_path: Path) -> None:
    state: dict[str, object] = {"list": [1, 2], "tuple": (0.9, 0.95), "set": {1, (2, 3)}}
    state |= {"nested": {"a": [(1, None)]}, "numbers": {3: "x"}}
    state |= {"hashed": {frozenset({1, frozenset({2})}): 3}}
    files.write_state(tmp_path, {"callbacks": state})
    assert files.read_state(tmp_path)["callbacks"] == state


def test_tensors_that_share_memory_come_back_each_by_itself(tmp_path: Path) -> None:
    whole = torch.arange(6.0).view(2, 3)
    held = {"whole": whole, "turned": whole.T, "row": whole[1]}
    files.write_state(tmp_path, {"callbacks": held})
    found = files.read_state(tmp_path)["callbacks"]
    assert isinstance(found, dict)
    assert all(torch.equal(found[name], tensor) for name, tensor in held.items())


def test_numbers_of_numpy_and_paths_come_back_as_plain_ones(tmp_path: Path) -> None:
    held = {"ints": [np.int64(3), np.uint8(4)], "half": np.float32(0.5), "at": Path("runs/1"), np.int64(7): 1}
    plain = {"ints": [3, 4], "half": 0.5, "at": "runs/1", 7: 1}
    files.write_state(tmp_path, {"callbacks": held})
    assert repr(files.read_state(tmp_path)["callbacks"]) == repr(plain)

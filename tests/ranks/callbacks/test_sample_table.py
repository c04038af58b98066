from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from rlhf_lightning.callbacks import SampleTable, ValidateFirst
from tests.logged import wandb_rows, wandb_table
from tests.unit.callbacks.module import PROMPTS, RESPONSES, SAMPLES, Tiny, data, fit, trainer_in

TOKENS = {
    "tokens": [["1", "</b>"], ["x", "y"]],
    "kl": [[0.5, -1.0], [0.0, 0.25]],
    "values": [[1.0, 2.0], [3.0, 4.0]],
}


class Page(HTMLParser):
    """What a browser would show: tags seen, and the text of each `pre`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.links: list[str | None] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "pre":
            self.texts.append("")
        if tag == "a":
            self.links.append(dict(attrs)["href"])

    def handle_data(self, data: str) -> None:
        if self.texts and "pre" in self.tags[-2:]:
            self.texts[-1] += data


def test_pages_and_index(tmp_path: Path) -> None:
    fit(trainer_in(tmp_path, [SampleTable(rows=3)]), Tiny())
    folder = tmp_path / "samples"
    assert sorted(path.name for path in folder.iterdir()) == [
        "index.html",
        "step-000002.html",
        "step-000004.html",
    ]
    assert Page(folder / "index.html").links == ["step-000004.html", "step-000002.html"]
    page = Page(folder / "step-000002.html")
    assert page.tags.count("tr") == 1 + 3  # two batches of two, three asked for
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert page.texts[0].startswith(PROMPTS[0])
    assert page.texts[1].startswith(RESPONSES[0])
    text = (folder / "step-000002.html").read_text(encoding="utf-8")
    assert "mean score 0.75" in text  # (1 + 0.25 + 1) / 3
    assert "background: rgba" not in text


def test_a_single_validation_and_a_directory_of_its_own(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, [SampleTable(directory=str(tmp_path / "elsewhere"))])
    trainer.validate(Tiny(), data(), verbose=False)
    assert Page(tmp_path / "elsewhere" / "validate.html").tags.count("tr") == 1 + 4


def test_validations_of_checkpoints_stand_beside_the_pages_of_the_fit(tmp_path: Path) -> None:
    """Each has the number of steps 0, as the page before the first step has."""
    saver = ModelCheckpoint(tmp_path, filename="{step} #1", every_n_train_steps=2, save_top_k=-1)
    fit(trainer_in(tmp_path, [SampleTable(), ValidateFirst(), saver], steps=4, checkpoints=True), Tiny())
    folder = tmp_path / "samples"
    untrained = (folder / "step-000000.html").read_text(encoding="utf-8")
    for step in (2, 4):
        trainer = trainer_in(tmp_path, [SampleTable()])
        trainer.validate(Tiny(), data(), ckpt_path=str(tmp_path / f"step={step} #1.ckpt"), verbose=False)
    assert (folder / "step-000000.html").read_text(encoding="utf-8") == untrained
    names = ["step-000004", "step-000002", "step-000000", "validate-step=2 #1", "validate-step=4 #1"]
    links = [unquote(str(link)) for link in Page(folder / "index.html").links]
    assert links == [f"{name}.html" for name in names]
    assert all((folder / link).is_file() for link in links)
    for link, step in zip(links[3:], (2, 4), strict=True):
        title = f"<h1>Validation of {tmp_path}/step={step} #1.ckpt</h1>"
        assert title in (folder / link).read_text(encoding="utf-8")


def test_two_checkpoints_of_one_name_have_a_page_each(tmp_path: Path) -> None:
    """Such as the last ones of two runs."""
    paths = [tmp_path / run / "last.ckpt" for run in ("a", "b")]
    for path in paths:
        saver = ModelCheckpoint(path.parent, filename=path.stem, every_n_train_steps=2)
        fit(trainer_in(tmp_path, [saver], steps=2, checkpoints=True), Tiny())
        trainer_in(tmp_path, [SampleTable()]).validate(Tiny(), data(), ckpt_path=str(path), verbose=False)
    folder = tmp_path / "samples"
    links = [str(link) for link in Page(folder / "index.html").links]
    assert links == ["validate-last.html", "validate-last-v1.html"]
    for link, path in zip(links, paths, strict=True):
        assert f"<h1>Validation of {path}</h1>" in (folder / link).read_text(encoding="utf-8")


def test_the_pages_of_another_run_are_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    fit(trainer_in(tmp_path, [SampleTable(), saver], steps=4, checkpoints=True), Tiny())
    resumed = trainer_in(tmp_path, [SampleTable()], steps=6)
    fit(resumed, Tiny(), str(tmp_path / "step=2.ckpt"))
    folder, pages = tmp_path / "samples", ["step-000006.html", "step-000004.html", "step-000002.html"]
    assert Page(folder / "index.html").links == pages
    assert "another run" not in caplog.text
    fit(trainer_in(tmp_path, [SampleTable()], steps=2), Tiny())
    assert Page(folder / "index.html").links == pages[2:]
    assert Page(tmp_path / "samples-v1" / "index.html").links == pages
    assert f"{folder} holds answers of another run; they are in samples-v1 now." in caplog.text


@pytest.mark.parametrize("per_token", [True, False])
def test_tokens_are_coloured_on_demand(tmp_path: Path, per_token: bool) -> None:
    fit(trainer_in(tmp_path, [SampleTable(per_token=per_token)], steps=2), Tiny(SAMPLES | TOKENS))
    text = (tmp_path / "samples" / "step-000002.html").read_text(encoding="utf-8")
    assert text.count("<span ") == (2 * 2 * 2 * 2 if per_token else 0)  # batches, rows, tokens, quantities
    assert ("<div class='name'>values</div>" in text) == per_token
    assert "</b></span>" not in text


def test_nothing_to_show_leaves_nothing(tmp_path: Path) -> None:
    fit(trainer_in(tmp_path, [SampleTable()]), Tiny(None))
    fit(trainer_in(tmp_path, [SampleTable()], fast_dev_run=True), Tiny())
    assert not (tmp_path / "samples").exists()


def test_wrong_outputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Tiny\.validation_step returned a Tensor: return a dictionary"):
        fit(trainer_in(tmp_path, [SampleTable()]), Tiny(torch.ones(1)))
    with pytest.raises(ValueError, match=r"rows=0\): must be at least 1"):
        SampleTable(rows=0)


def test_csv_and_tensorboard(tmp_path: Path) -> None:
    board = TensorBoardLogger(tmp_path / "board", name="")
    fit(trainer_in(tmp_path, [SampleTable(rows=1)], loggers=[CSVLogger(tmp_path / "csv"), board]), Tiny())
    events = EventAccumulator(board.log_dir).Reload()
    shown = events.Tensors("samples/text_summary")
    assert [event.step for event in shown] == [2, 4]
    markdown = shown[0].tensor_proto.string_val[0].decode()
    assert "**score 1**" in markdown
    assert f"    {RESPONSES[0]}" in markdown  # indented: a code block, in which tags are text
    board.experiment.close()


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb  # here, since it takes as long as many tests, and of several sessions one runs this

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    fit(
        trainer_in(tmp_path, [SampleTable(rows=2)], steps=2, loggers=[WandbLogger(save_dir=tmp_path)]), Tiny()
    )
    wandb.finish()
    wandb.teardown()
    (entry,) = [row for row in wandb_rows(tmp_path) if "samples._type" in row]
    assert entry["samples._type"] == "table-file"
    assert entry["trainer/global_step"] == 2
    columns, rows = wandb_table(tmp_path, "samples")
    assert columns == ["step", "prompt", "response", "score"]
    assert rows[0] == [2, PROMPTS[0], RESPONSES[0], 1.0]
    assert rows[1] == [2, PROMPTS[1], "\u2400\u241b[31m? \u00fc", 0.25]

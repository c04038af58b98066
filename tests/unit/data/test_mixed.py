"""MixedData: a second batch beside the first."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from rlhf_lightning.data import CompletionData, MixedData, PromptData, RowData, TextData
from rlhf_lightning.data.loader import RowLoader
from rlhf_lightning.data.mixed import MixedLoader
from tests.unit.data.conftest import Writer, assert_resumes, batches


@pytest.fixture
def file(write_rows: Writer) -> Path:
    """Five rows with a prompt, a response and a text."""
    return write_rows(*({"prompt": f"p{n}", "response": f"r{n}", "text": f"t{n}"} for n in range(5)))


def prompts(file: Path, **options: object) -> PromptData:
    return PromptData(**{"path": str(file), "tokenizer": "embedded", "batch_size": 2} | options)  # type: ignore[arg-type]


def mixed(file: Path, ptx: RowData | None = None, **options: object) -> MixedData:
    second = CompletionData(path=str(file), tokenizer="embedded", batch_size=3, limit=4)
    return MixedData(main=prompts(file, **options), ptx=second if ptx is None else ptx)


def test_both_have_to_be_there(file: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.ptx=None: has to be of type RowData\."):
        MixedData(main=prompts(file), ptx=None)  # type: ignore[arg-type]


def test_every_batch_has_a_second_one(file: Path) -> None:
    data = mixed(file)
    loader = data.main
    found = batches(data)
    assert len(data.train_dataloader()) == 3
    assert [len(batch["row_ids"]) for batch in found] == [2, 2, 1]
    assert [len(batch["ptx"]["row_ids"]) for batch in found] == [3, 1, 3], "it begins again"
    assert [batch["ptx"]["response_ids"].shape[1] for batch in found] == [3] * 3
    assert "response_ids" not in found[0]
    assert [batch["row_ids"].tolist() for batch in found] == [
        batch["row_ids"].tolist() for batch in batches(loader)
    ]


def test_the_second_goes_on_over_the_firsts_epochs(file: Path) -> None:
    data = mixed(file)
    data.setup("fit")
    loader = data.train_dataloader()
    ids = [key for _ in range(4) for batch in loader for key in batch["ptx"]["row_ids"].tolist()]
    assert [key >> 32 for key in ids] == [epoch for epoch in range(6) for _ in range(4)], "12 of 3 and 1"
    assert len(set(ids)) == 24


@pytest.mark.parametrize("workers", [0, 1])
def test_going_on_in_mid_epoch(file: Path, workers: int) -> None:
    stops = range(7) if workers == 0 else range(2, 5, 2)
    assert_resumes(lambda: mixed(file, num_workers=workers), stops=stops)


def test_going_on_where_an_epoch_of_the_second_had_no_rest(file: Path) -> None:
    second = CompletionData(path=str(file), tokenizer="embedded", batch_size=2, limit=4)
    assert_resumes(lambda: mixed(file, second), stops=range(5))


def test_going_back_in_a_loader_under_way(file: Path) -> None:
    data = mixed(file, TextData(path=str(file), tokenizer="embedded", block_tokens=2, batch_size=1))
    data.setup("fit")
    loader = data.train_dataloader()
    running = iter(loader)
    next(running)
    state = loader.state_dict()
    following = next(running)
    loader.load_state_dict(state)
    again = next(iter(loader))
    assert again["row_ids"].tolist() == following["row_ids"].tolist()
    assert again["ptx"]["row_ids"].tolist() == following["ptx"]["row_ids"].tolist()


def test_the_second_may_be_longer(file: Path) -> None:
    texts = TextData(path=str(file), tokenizer="embedded", block_tokens=2, batch_size=1)
    assert [batch["ptx"]["prompt_ids"].shape for batch in batches(mixed(file, texts))] == [(1, 1)] * 3
    assert_resumes(lambda: mixed(file, texts), stops=range(5))


def test_all_else_is_the_firsts(file: Path) -> None:
    data = mixed(file, val_rows=2)
    data.setup("fit")
    (validated,) = data.val_dataloader()[0]
    (predicted,) = data.predict_dataloader()
    assert [row["prompt"] for row in validated["rows"]] == ["p3", "p4"]
    assert validated["rows"] == predicted["rows"]
    assert "ptx" not in validated


def test_an_error_says_whose_option_it_is(file: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^data\.main\.batch_size=9: .*has only 5 rows.*--data\.main\.batch_size 5"
    ):
        mixed(file, batch_size=9).setup("fit")
    short = CompletionData(path=str(file), tokenizer="embedded", batch_size=9)
    with pytest.raises(ValueError, match=r"^data\.ptx\.batch_size=9: .*--data\.ptx\.batch_size 5"):
        mixed(file, short).setup("fit")
    with pytest.raises(ValueError, match=r"data\.ptx=PromptData: its rows have no responses .*TextData"):
        mixed(file, prompts(file)).setup("fit")


def test_what_the_model_cannot_take_says_whose_options_it_is(file: Path) -> None:
    data = mixed(file)
    data.setup("fit")
    with pytest.raises(
        ValueError, match=r"^sampling\.max_new_tokens=4.*\(data\.main\.max_prompt_tokens drops"
    ):
        data.main.check_lengths(positions=5, new_tokens=4, generates=True)
    lower = r"lower data\.ptx\.max_prompt_tokens or data\.ptx\.max_response_tokens\."
    with pytest.raises(ValueError, match=rf"the longest prompt and response have 5 tokens.*{lower}"):
        data.ptx.check_lengths(positions=4, new_tokens=1, generates=False)
    texts = TextData(path=str(file), tokenizer="embedded", block_tokens=4, batch_size=1)
    mixed(file, texts).setup("fit")
    with pytest.raises(ValueError, match=r"^data\.ptx\.block_tokens=4.*Try --data\.ptx\.block_tokens 3\."):
        texts.check_lengths(positions=3, new_tokens=1, generates=False)


def test_states_of_other_runs_are_refused(file: Path) -> None:
    two, one, working = mixed(file), prompts(file), prompts(file, num_workers=1)
    for data in (two, one, working):
        data.setup("fit")
    loaders: list[MixedLoader | RowLoader] = [data.train_dataloader() for data in (two, one, working)]
    with pytest.raises(
        ValueError, match=r"data\.ptx: the checkpoint was taken .* without a second data module"
    ):
        loaders[0].load_state_dict(loaders[1].state_dict())
    with pytest.raises(ValueError, match=r"with a second data module, data\.ptx\. Resume with the same"):
        loaders[1].load_state_dict(loaders[0].state_dict())
    with pytest.raises(
        ValueError, match=r"data\.num_workers=1: .*with 0\. Resume with --data\.num_workers 0"
    ):
        loaders[2].load_state_dict(loaders[1].state_dict())


@pytest.mark.parametrize("whose", ["main", "ptx"])
def test_a_state_that_is_refused_says_whose_option_it_is(file: Path, whose: str) -> None:
    def begun(size: int, rows: int = 5) -> MixedLoader:
        own, plain = {"batch_size": size, "limit": rows}, {"batch_size": 2}
        options = own if whose == "ptx" else plain
        second = CompletionData(path=str(file), tokenizer="embedded", **options)  # type: ignore[arg-type]
        data = mixed(file, second, **(own if whose == "main" else plain))
        data.setup("fit")
        return data.train_dataloader()

    loader = begun(2)
    next(iter(loader))
    state = loader.state_dict()
    named = rf"data\.{whose}\.batch_size"
    with pytest.raises(ValueError, match=rf"^{named}=1: .*--{named} 2\."):
        begun(1).load_state_dict(state)
    with pytest.raises(ValueError, match=rf"^data\.{whose}: .*5 rows"):
        begun(2, rows=4).load_state_dict(state)


def test_reloading_would_read_the_seconds_first_rows_again(file: Path) -> None:
    data = mixed(file)
    data.trainer = Trainer(reload_dataloaders_every_n_epochs=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"^trainer\.reload_dataloaders_every_n_epochs=1: .* Leave it out"):
        data.setup("fit")


def test_workers_end_with_the_run(file: Path) -> None:
    second = CompletionData(path=str(file), tokenizer="embedded", batch_size=3, num_workers=1)
    data = mixed(file, second, num_workers=1)
    data.setup("fit")
    loader = data.train_dataloader()  # a Trainer keeps it
    running = iter(loader)
    next(running)
    running.close()  # type: ignore[attr-defined]  # it is a generator
    workers = [w for part in (loader._main, loader._ptx) for w in vars(part)["_iterator"]._workers]
    assert len(workers) == 2
    assert all(worker.is_alive() for worker in workers)
    data.teardown("fit")
    assert not any(worker.is_alive() for worker in workers)

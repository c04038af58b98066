"""Options of the data modules under the command line's parser."""

from __future__ import annotations

import pytest
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import LightningDataModule

from rlhf_lightning.data import MixedData, PreferenceData, PromptData, StepData, TextData, UnpairedData


def parse(*arguments: str) -> LightningDataModule:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data", required=True)
    module = parser.instantiate(parser.parse_args(list(arguments))).data
    assert isinstance(module, LightningDataModule)
    return module


def test_options_from_the_command_line() -> None:
    data = parse("--data", "PromptData", "--data.path", "rows.jsonl", "--data.batch_size=2", "--data.limit=2")
    assert isinstance(data, PromptData)
    assert (data.batch_size, data.limit, data.shuffle) == (2, 2, True)
    gym = parse("--data=rlhf_lightning.data.ReasoningGymData", '--data.options={"max_word_len": 4}')
    assert vars(gym)["options"] == {"max_word_len": 4}
    with pytest.raises(ArgumentError, match="colour"):
        parse("--data", "TaskData", "--data.colour", "red")
    with pytest.raises(ArgumentError, match="path"):
        parse("--data", "PromptData")


def test_two_modules_from_the_command_line() -> None:
    main = (
        "--data.main=rlhf_lightning.data.PromptData",
        "--data.main.path=rows.jsonl",
        "--data.main.batch_size=2",
    )
    ptx = (
        "--data.ptx=rlhf_lightning.data.TextData",
        "--data.ptx.path=rows.jsonl",
        "--data.ptx.block_tokens=7",
    )
    data = parse("--data=MixedData", *main, *ptx)
    assert isinstance(data, MixedData)
    assert isinstance(data.main, PromptData)
    assert isinstance(data.ptx, TextData)
    assert (data.main.batch_size, data.ptx.block_tokens) == (2, 7)


def test_options_of_the_other_modules_from_the_command_line() -> None:
    pairs = parse(
        "--data=PreferenceData", "--data.path=x", "--data.safe_fields=[a, b]", "--data.margin_field=m"
    )
    assert isinstance(pairs, PreferenceData)
    assert (pairs.safe_fields, pairs.margin_field, pairs.batch_size) == (("a", "b"), "m", 32)
    single = parse("--data=UnpairedData", "--data.path=x", "--data.from_pairs=true")
    assert isinstance(single, UnpairedData)
    assert single.from_pairs
    steps = parse("--data=StepData", "--data.path=x", "--data.separator=;", "--data.num_workers=2")
    assert isinstance(steps, StepData)
    assert (steps.separator, steps.num_workers) == (";", 2)

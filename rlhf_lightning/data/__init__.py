"""Data modules: rows of prompts, completions, preferences and texts, encoded, in resumable loaders.

    files, rows         reading: raw rows for training, and those that are held out
    record, drafts      what a row says, in text: a prompt, and the answers to it
    format, encoding    prompt and answers as token ids; rows that are too long are dropped
    batch               encoded rows, and padded batches of them
    sampler, loader     the order of the rows, and loaders that resume within an epoch
A data module (`RowData` in `module`) runs all of it; its subclasses say where rows come from and how one is
read, a file each.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_lightning.data.batch import RowBatch
    from rlhf_lightning.data.completions import CompletionData
    from rlhf_lightning.data.encoding import prompt_columns
    from rlhf_lightning.data.files import RowSplit
    from rlhf_lightning.data.format import Format
    from rlhf_lightning.data.mixed import MixedData, row_data, second_data
    from rlhf_lightning.data.module import RowData
    from rlhf_lightning.data.preferences import PreferenceData
    from rlhf_lightning.data.prompts import PromptData
    from rlhf_lightning.data.steps import StepData
    from rlhf_lightning.data.tasks import ReasoningGymData, TaskData
    from rlhf_lightning.data.texts import TextData
    from rlhf_lightning.data.tokenizer import load_tokenizer
    from rlhf_lightning.data.unpaired import UnpairedData

__all__ = [
    "CompletionData",
    "Format",
    "MixedData",
    "PreferenceData",
    "PromptData",
    "ReasoningGymData",
    "RowBatch",
    "RowData",
    "RowSplit",
    "StepData",
    "TaskData",
    "TextData",
    "UnpairedData",
    "load_tokenizer",
    "prompt_columns",
    "row_data",
    "second_data",
]
_FILES = {
    "CompletionData": "completions",
    "Format": "format",
    "MixedData": "mixed",
    "PreferenceData": "preferences",
    "PromptData": "prompts",
    "ReasoningGymData": "tasks",
    "RowBatch": "batch",
    "RowData": "module",
    "RowSplit": "files",
    "StepData": "steps",
    "TaskData": "tasks",
    "TextData": "texts",
    "UnpairedData": "unpaired",
    "load_tokenizer": "tokenizer",
    "prompt_columns": "encoding",
    "row_data": "mixed",
    "second_data": "mixed",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used: devices need only the tokenizer, and Lightning takes seconds."""
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"{__name__}.{_FILES[name]}"))[name]


def __dir__() -> list[str]:
    """What a prompt completes, also what is not imported yet."""
    return sorted({*globals(), *__all__})

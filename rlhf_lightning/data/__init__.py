"""Rows of prompts and completions: reading, encoding, and resumable loaders."""

from rlhf_lightning.data.batch import RowBatch
from rlhf_lightning.data.completions import CompletionData
from rlhf_lightning.data.module import RowData
from rlhf_lightning.data.prompts import PromptData
from rlhf_lightning.data.tasks import ReasoningGymData, TaskData
from rlhf_lightning.data.tokenizer import load_tokenizer

__all__ = [
    "CompletionData",
    "PromptData",
    "ReasoningGymData",
    "RowBatch",
    "RowData",
    "TaskData",
    "load_tokenizer",
]

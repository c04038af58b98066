"""What TRL's two trainers share here: a bare Trainer (no logging, saving, checkpointing) and a stopwatch."""

import os
from itertools import chain

import torch.distributed as dist
from iterations import Run, Stopwatch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase, TrainerCallback
from workload import LEARNING_RATE, SEQUENCES


class Laps(TrainerCallback):
    """Notes the end of every iteration: one step is one generation and one update."""

    def __init__(self, watch: Stopwatch) -> None:
        """Note the ends on `watch`."""
        self.watch = watch

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        """An iteration ended."""
        self.watch.lap()


def bare_arguments(run: Run) -> dict[str, object]:
    """Trainer arguments: one update an iteration, nothing beside the training itself."""
    shared = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False} if run.processes > 1 else {}
    return {
        **shared,
        "output_dir": str(run.workload.model.parent / "trl"),
        "use_cpu": True,
        "per_device_train_batch_size": SEQUENCES // run.processes // run.micro_batches,
        "gradient_accumulation_steps": run.micro_batches,
        "gradient_checkpointing": False,
        "bf16": False,
        "learning_rate": LEARNING_RATE,
        "temperature": 1.0,
        "seed": run.seed,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def policy(run: Run) -> LlamaForCausalLM:
    """The model of the workload."""
    return LlamaForCausalLM.from_pretrained(run.workload.model, dtype=run.dtype)


def tokenizer(run: Run) -> PreTrainedTokenizerBase:
    """The tokenizer of the workload; TRL's trainers pad on the left."""
    return AutoTokenizer.from_pretrained(run.workload.model, padding_side="left")


def report(watch: Stopwatch, run: Run) -> None:
    """Print the result, once, with the sequences of all processes.

    Raises:
        RuntimeError: the iterations are not those of the workload.
    """
    own = (watch.prompt_tokens, watch.response_tokens)
    every = [own] * run.processes
    if run.processes > 1:
        dist.all_gather_object(every, own)
    watch.prompt_tokens = [sum(each) for each in zip(*(prompts for prompts, _ in every), strict=True)]
    watch.response_tokens = [[*chain(*each)] for each in zip(*(lengths for _, lengths in every), strict=True)]
    if os.environ.get("RANK", "0") == "0":
        found = watch.measured(run)
        found.check(run)
        print(found.as_json())

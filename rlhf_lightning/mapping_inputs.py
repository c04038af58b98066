"""Reads what the automatic mapping needs from an algorithm and its trainer: dataflow, workload, model shapes.

The dataflow itself is a `mapping.dataflow.Dataflow`; `mapping.trace` records it from a `step`.
"""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.data import RowData, row_data
from rlhf_lightning.mapping.dataflow import Dataflow
from rlhf_lightning.mapping.observe import recipe, shape_of
from rlhf_lightning.mapping.shapes import ModelShape
from rlhf_lightning.mapping.trace import trace, traced_batch
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.stepping import is_own
from rlhf_lightning.workers import Actor, Settings
from rlhf_lightning.workers.naming import naming_role

_LATE = 10**9
"""Iterations that the traced step has behind it: enough for any warm-up of an algorithm to be over."""
_ROWS = 32
"""Rows of a batch where there is no data module of this project."""
_SAMPLE = 64
"""Most lengths of given responses that are looked at, the longest among them."""
_TOKENS = 512
"""Tokens of a prompt, and of a response, where neither the data nor an actor's options tell."""


def read_dataflow(algorithm: RLHFAlgorithm, rows: int) -> Dataflow:
    """The dataflow of an algorithm, traced from one `step` of a copy of it, as late in training.

    The step sees `rows` made-up prompts, with raw rows of the training data if the trainer has any. A `setup`
    of the user's own runs before it, where there are data.

    Raises:
        ValueError: the step, or that `setup`, fails on them.
    """
    data = _data(algorithm)
    twin = copy.deepcopy(algorithm)
    if data is not None and is_own(type(algorithm).setup):
        twin.trainer = algorithm.trainer
        twin.setup(algorithm.trainer.state.fn or "fit")
    twin.ptx_batch = traced_batch(rows)
    vars(twin).update(log=_logs_nothing, log_dict=_logs_nothing)  # Lightning's ask for a loop that runs
    twin.trainer = trainer = _trainer()
    trainer.strategy.connect(twin)
    return trace(twin, traced_batch(rows, data.train_rows if data else ()))


def _logs_nothing(*_args: object, **_options: object) -> None:
    """What `self.log` is in a step that is only read."""


def _data(algorithm: RLHFAlgorithm) -> RowData | None:
    """The trainer's data module, set up here: models are placed before Lightning sets it up."""
    trainer = algorithm._trainer
    data = None if trainer is None else row_data(trainer)
    if trainer is not None and data is not None:
        trainer.datamodule.setup(trainer.state.fn or "fit")  # type: ignore[attr-defined]
    return data


def _trainer() -> Trainer:
    """A trainer that is in the middle of `fit`, as far as a step can see."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    finally:
        log.setLevel(level)
    loop = trainer.fit_loop.epoch_loop
    loop.manual_optimization.optim_step_progress.total.completed = _LATE
    trainer.state.stage = RunningStage.TRAINING
    return trainer


def read_workload(algorithm: RLHFAlgorithm, settings: Settings, *, offload: bool) -> Workload:
    """Batch size and lengths of an iteration, from the data module; assumed for one of another project.

    Rows of each call and the number of updates are in the dataflow.
    """
    main = algorithm.main_model
    data = _data(algorithm)
    lengths = data.prompt_lengths if data else []
    given = sorted(data.response_lengths, reverse=True) if data and algorithm.reads_only else []
    response = max(given or lengths, default=_TOKENS)
    if isinstance(main, Actor) and not algorithm.reads_only:
        response = main.sampling.max_new_tokens
    longest = data.longest_prompt if data else response
    rows = data.batch_rows if data else _ROWS
    return replace(
        recipe(main, settings),
        prompt=longest,
        response=response,
        lengths=tuple(given[:: math.ceil(len(given) / _SAMPLE) or 1]),
        batch=rows,
        mini_batches=1,
        real_prompt=sum(lengths) / len(lengths) if lengths else 0.0,
        offload=offload,
    )


def read_recipes(
    algorithm: RLHFAlgorithm, settings: Settings, workload: Workload, flow: Dataflow
) -> dict[str, Workload]:
    """The workload as the model of each role computes it: in its type, with the lengths that it draws."""
    main = algorithm.main_model
    fields = ("prompt", "response", "lengths", "batch", "mini_batches", "real_prompt", "offload")
    rows = {name: getattr(workload, name) for name in fields}
    found: dict[str, Workload] = {}
    for name, role in algorithm.placed().items():
        model = role.following(main)
        found[name] = replace(recipe(model, settings), **rows)
        if isinstance(model, Actor) and "generate" in flow.kinds(name):
            found[name] = replace(found[name], response=model.sampling.max_new_tokens, lengths=())
    return found


def read_shapes(algorithm: RLHFAlgorithm) -> dict[str, ModelShape]:
    """Sizes of the models by role; roles without a model are left out.

    Raises:
        ValueError: a model's config.json cannot be read.
    """
    main = algorithm.main_model
    found: dict[str, ModelShape] = {}
    for name, role in algorithm.placed().items():
        model = role.following(main)
        if model.path:
            with naming_role(name):
                found[name] = shape_of(model)
    return found

"""Runs micro-batches through the stages of a pipeline, in the order of Megatron's schedules.

1F1B, p = 2          stage 0   F0 F1 B0 F2 B1 B2
                     stage 1      F0 B0 F1 B1 F2 B2
Stages exchange the shape of each tensor before it, since micro-batches have different numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlhf_lightning.engines.packed.packing import PackedRows

Rows = Mapping[str, Tensor]
Evaluate = Callable[[Tensor, PackedRows, Rows], tuple[Tensor | None, object]]
"""(output of the last stage, packed rows, rows) -> (loss, or None in inference; a result)."""


class Pipeline:
    """The pipeline of which this rank is one stage."""

    def __init__(
        self, runs: Sequence[nn.Module], config: TransformerConfig, collection: ProcessGroupCollection
    ) -> None:
        self._runs, self._collection = list(runs), collection
        stages, chunks = collection.pp.size(), config.virtual_pipeline_model_parallel_size
        self._interleaved = chunks is not None
        self._schedule = get_forward_backward_func(stages, chunks)
        self._exchange = P2PCommunicator(collection.pp, config)
        self.multiple: int = stages if self._interleaved else 1
        """The number of micro-batches is a multiple of this."""

    def run(
        self,
        batches: Sequence[list[int]],
        make: Callable[[list[int]], tuple[Rows, PackedRows]],
        evaluate: Evaluate,
        *,
        backward: bool,
    ) -> list[object]:
        """Compute all micro-batches; every rank of the replica calls it with the same arguments.

        Args:
            batches: row numbers of each micro-batch.
            make: returns a micro-batch's rows and their packed form.
            evaluate: called on the last stage, by every tensor rank.
            backward: whether to run backward passes, which accumulate the gradients of the losses.

        Returns:
            The results of `evaluate`, in order; empty on stages before the last.
        """

        def forward(
            iterator: Iterator[list[int]], run: nn.Module
        ) -> tuple[Tensor, Callable[..., tuple[Tensor | None, Tensor, object] | object]]:
            rows, packed = make(next(iterator))
            output = run(packed)

            def finish(output: Tensor, *, non_loss_data: bool = False) -> object:
                loss, result = evaluate(output, packed, rows)
                # The second is a number of tokens to divide by, which is unused: the loss is divided already.
                return result if non_loss_data else (loss, torch.zeros((), dtype=torch.int), result)

            return output, finish

        if not batches:
            return []
        iterators = [iter(batches) for _ in self._runs]
        results: list[object] = self._schedule(
            forward_step_func=forward,
            data_iterator=iterators if self._interleaved else iterators[0],
            model=self._runs if self._interleaved else self._runs[0],
            num_microbatches=len(batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=not backward,
            collect_non_loss_data=not backward,
            p2p_communicator=self._exchange,
            pg_collection=self._collection,
        )
        return results

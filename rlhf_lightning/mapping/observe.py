"""From reports of a run's calls to the phases that the simulators predict: work, layout and recipe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf_lightning.controller import CallReport, WorkerGroup
from rlhf_lightning.controller.cluster import num_gpus
from rlhf_lightning.controller.register import methods_of
from rlhf_lightning.engines.huggingface.source import config_source
from rlhf_lightning.mapping import shapes
from rlhf_lightning.mapping.dataflow import Kind, kind_of
from rlhf_lightning.mapping.phases import Phase
from rlhf_lightning.mapping.shapes import ModelShape
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.workers import Actor, Generator, Role, Settings

_OTHERS = ("accumulate", "start", "hold", "carry")
"""How methods begin whose work is not that on the iteration's rows alone."""
_SAMPLE = 64
"""Most lengths of responses that are kept of an iteration."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of an iteration's rows."""

    prompt: float
    """Mean, without padding."""
    longest_prompt: int
    """Longest, without padding."""
    responses: tuple[int, ...]
    """A sample of the lengths of responses."""

    @classmethod
    def of(
        cls, prompts: Sequence[int], *, rows: int, mean: float, longest: float, truncated: float = 0.0
    ) -> Lengths:
        """Lengths with a known mean, maximum and share at the maximum; the other responses are alike.

        Args:
            prompts: tokens of each prompt.
            rows: how many responses there are.
            mean: tokens of a response.
            longest: tokens of the longest.
            truncated: share of the responses that end at the limit; at least one is the longest.
        """
        size, limit = min(max(rows, 1), _SAMPLE), max(1, round(longest))
        cut = min(size, max(1, round(truncated * size)))
        rest = size - cut
        left = max(rest, min(rest * limit, round(mean * size) - cut * limit))
        ordinary = [left * (i + 1) // rest - left * i // rest for i in range(rest)]
        return cls(sum(prompts) / len(prompts), max(prompts), (*ordinary, *[limit] * cut))


def recipe(role: Role, settings: Settings) -> Workload:
    """How a model's engine computes, with the rows and tokens of an iteration left open."""
    on_cpu, training, vllm = not num_gpus(), settings.training, settings.generator == "vllm"
    copies = not (on_cpu and settings.vllm.zero_copy and training.lends)
    limit = settings.vllm.kv_cache_bytes(on_cpu=on_cpu) or 0 if vllm else 0
    return Workload(
        packed=True,
        max_resident=settings.vllm.rows_at_once if vllm else settings.generate.slots,
        micro_batch_tokens=training.micro_batch_tokens(on_cpu=on_cpu),
        kept_tokens=training.kept_tokens if role.trains else 0,
        recompute=role.gradient_checkpointing,
        sequence_parallel=training.sequence_parallel,
        chunks=training.chunks,
        sharding="none" if isinstance(role, Generator) else training.sharding,
        shared_by=training.shared_by,
        held_once=training.held_once and not (vllm and copies),
        kv_limit=limit,
        generation_share=settings.vllm.gpu_memory_utilization if vllm and not limit else 1.0,
        reserves=vllm and not on_cpu,
        one_stage=vllm,
        reshards=training.reshards(on_cpu=on_cpu),
        defers=training.defers(on_cpu=on_cpu),
        keeps_gradients=training.keeps_gradients,
        lora_rank=role.lora.rank if role.lora else 0,
        states_on_host=training.offload_optimizer,
        parameters_on_host=training.offload_parameters,
        element=2 if role.computes_in == "bfloat16" else 4,
        masters=role.computes_in == "bfloat16" or training.masters_beside,
        masters_beside=training.masters_beside,
        follows=role.weights_change and not role.trains,
    )


def shape_of(role: Role) -> ModelShape:
    """The sizes of a role's model.

    Raises:
        ValueError: its config.json cannot be read.
    """
    return shapes.load(str(config_source(role)), head=role.head)


def phases(
    reports: Sequence[CallReport],
    roles: Mapping[str, Role],
    workers: Mapping[str, WorkerGroup],
    *,
    models: Mapping[str, ModelShape],
    settings: Mapping[str, Settings],
    lengths: Lengths,
) -> tuple[Phase, ...]:
    """The phases of an iteration: the methods that ran a model over the iteration's rows.

    Args:
        reports: of the iteration's calls, from all ranks.
        roles: by name.
        workers: each role's worker group.
        models: sizes of the models; roles without one are left out.
        settings: by role, how its model computes.
        lengths: of the iteration's rows.
    """
    found = []
    for (name, method), ranks in _by_rank(reports).items():
        role = roles.get(name)
        kind = _kind(role, method) if role is not None and name in models else None
        rows = max(sum(report.num_rows for report in mine) for mine in ranks.values())
        if role is None or kind is None or not rows:
            continue
        group = workers[name]
        calls = max(sum(report.num_rows > 0 for report in mine) for mine in ranks.values())
        # The rows are those of all calls on the fullest device.
        replicas = group.layout.generating.num_replicas if kind == "generate" else group.layout.d
        total = max(1, round(rows / calls)) * replicas
        found.append(
            Phase(
                role=name,
                method=method,
                kind=kind,
                calls=calls,
                seconds=max(sum(report.seconds for report in mine) for mine in ranks.values()),
                devices=group.devices,
                shape=models[name],
                layout=group.layout,
                workload=_workload(role, settings[name], lengths, rows=total),
                rescored=kind == "generate" and isinstance(role, Actor) and role.recompute_log_probs,
            )
        )
    return tuple(found)


def count_calls(reports: Sequence[CallReport]) -> int:
    """Number of remote calls over rows, so without checkpoints; one to all ranks of a model counts once."""
    every = _by_rank([report for report in reports if report.num_rows]).values()
    return sum(max(len(mine) for mine in ranks.values()) for ranks in every)


def _by_rank(
    reports: Sequence[CallReport],
) -> dict[tuple[str, str], dict[int, list[CallReport]]]:
    found: dict[tuple[str, str], dict[int, list[CallReport]]] = defaultdict(lambda: defaultdict(list))
    for report in reports:
        found[report.role, report.method][report.rank].append(report)
    return found


def _kind(role: Role, method: str) -> Kind | None:
    """The kind of a method's work; None where it does not run the model over the iteration's rows.

    `accumulate_actor` reads other text, with other lengths. `start_sequences` and `hold_sequences` only begin
    generations, which `next_sequences` and `carry_sequences` continue, the latter with other rows too.
    """
    known = methods_of(type(role)).get(method)
    if known is None or not known.takes_rows or method.startswith(_OTHERS):
        return None
    return kind_of(method) if known.reads is None or "prompt_ids" in known.reads else None


def _workload(role: Role, settings: Settings, lengths: Lengths, *, rows: int) -> Workload:
    return replace(
        recipe(role, settings),
        prompt=lengths.longest_prompt,
        real_prompt=lengths.prompt,
        response=max(lengths.responses),
        lengths=lengths.responses,
        batch=rows,
        mini_batches=1,
    )

"""The generator: a second copy of the actor on devices of its own, which only generates.

actor.generate_sequences(batch)              the algorithm does not know that there is a generator
  -> actor.send_weights | generator.receive_weights     side by side, where the actor's weights have changed
  -> generator.generate_sequences      answers the whole batch, or
     start_sequences, next_sequences   hands over the answers part by part, as they end, or
     carry_sequences                   continues with unfinished rows of earlier calls
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Self, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.controller import (
    MICRO_DP,
    ONE_TO_ALL,
    Batch,
    Caller,
    PartOf,
    Parts,
    Worker,
    register,
)
from rlhf_lightning.controller.register import Method, methods_of
from rlhf_lightning.engines import WeightSource, be_deterministic, train_engine
from rlhf_lightning.parallel import Link, ParallelLayout
from rlhf_lightning.rewards import Environment
from rlhf_lightning.spec import ModelSpec, Sampling
from rlhf_lightning.workers.actor import ANSWERS, PROMPTS, Actor
from rlhf_lightning.workers.in_hand import COUNTS, NUMBERS, VERSIONS, Carry, InHand
from rlhf_lightning.workers.naming import naming_role
from rlhf_lightning.workers.role import Role
from rlhf_lightning.workers.settings import Settings
from rlhf_lightning.workers.underway import Underway

_KEEPING = methods_of(Actor).keys() - {"update_actor", "load"}
"""Methods of Actor that leave its weights as they are; a user's own methods are assumed to change them."""


@dataclass
class LinkedSource(WeightSource):
    """Weights that arrive over a link, for an engine that keeps a copy of its own, such as vLLM."""

    link: Link
    """Where the weights come from."""
    version: int = 0
    """How often `receive_weights` announced new weights."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource.weights`."""
        return self.link.receive()


@dataclass(frozen=True, kw_only=True)
class Generator(Role):
    """Answers with a copy of the actor's weights; every rank has all of them."""

    actor: Actor = field(default_factory=Actor)
    """The actor that it copies, with its sampling and environment."""
    needed_to_validate: ClassVar[bool] = True
    divided: ClassVar[bool] = False

    @classmethod
    def of(cls, actor: Actor) -> Self:
        """The generator of an actor."""
        model = {f.name: getattr(actor, f.name) for f in dataclasses.fields(ModelSpec)} | {"lora": None}
        return cls(**model, actor=dataclasses.replace(actor, recompute_log_probs=False))

    def located(self) -> Self:
        """See `Role.located`."""
        return dataclasses.replace(super().located(), actor=self.actor.located())

    def build(self, worker: Worker) -> None:
        """Build what holds the received weights: vLLM, or a model for the native engine."""
        self.actor.find_environment()
        settings = worker.settings
        assert isinstance(settings, Settings)
        be_deterministic(settings.deterministic, seed=self.init_seed or 0)
        bindings = (self.binding, self.actor.binding)
        for binding in bindings:
            binding.worker = worker
        if settings.generator == "vllm":
            assert worker.link is not None
            # No other model needs these devices, and weights that vLLM puts to sleep must be sent again.
            config = dataclasses.replace(settings.vllm, sleep=False)
            self.actor.binding.generator = self.actor.generator_over(LinkedSource(worker.link), config)
            return
        alone = dataclasses.replace(worker, dp_group=None, groups=None)
        train = dataclasses.replace(settings.train, kept_tokens=0)  # no update follows here
        engine = train_engine(self, head=self.head, seat=alone, config=train)
        for binding in bindings:
            binding.engine = engine

    def check_layout(self, layout: ParallelLayout, settings: Settings) -> None:
        """See `Actor.check_generation`; the copy is neither divided nor trained, and its path the actor's."""
        with naming_role("actor"):
            self.actor.check_generation(layout, settings)

    @cached_property
    def underway(self) -> Underway:
        """The generation begun by `start_sequences`; on a worker only."""
        return Underway()

    @register(transfer=ONE_TO_ALL)
    def receive_weights(self) -> None:
        """Take the actor's weights, while its workers run `send_weights`."""
        assert self.worker.link is not None
        source = self.actor.generator.source
        if isinstance(source, LinkedSource):
            source.version += 1
            self.actor.generator.refresh()
        else:
            self.engine.take_weights(self.worker.link.receive())

    @register(transfer=MICRO_DP, reads=(*PROMPTS, "row_ids"), returns=ANSWERS)
    def generate_sequences(
        self,
        rows: TensorDict,
        *,
        greedy: bool = False,
        environment: Environment | None = None,
        sampling: Sampling | None = None,
    ) -> TensorDict:
        """See `Actor.generate_sequences`."""
        return self.actor.drawing_by(sampling).answer(rows, greedy=greedy, environment=environment)

    @register(transfer=MICRO_DP, reads=(*PROMPTS, "row_ids", NUMBERS), returns=())
    def start_sequences(
        self, rows: TensorDict, *, parts: int, greedy: bool = False, sampling: Sampling | None = None
    ) -> TensorDict:
        """Begin to answer every prompt; `next_sequences` returns the answers, in `parts` calls.

        Rows are as for `generate_sequences`, and have row_numbers [B] int64.
        """
        actor = self.actor.drawing_by(sampling)
        self.underway.begin(self._finished(actor, rows, greedy=greedy, parts=parts), parts=parts)
        return TensorDict({}, batch_size=rows.batch_size)

    def _finished(self, actor: Actor, rows: TensorDict, *, greedy: bool, parts: int) -> Iterator[TensorDict]:
        sampling, seed = actor.sampling_for(greedy=greedy), actor.seed or 0
        for which, drawn in actor.generator.finished(rows, sampling=sampling, seed=seed, parts=parts):
            answers = actor.completed(drawn)
            answers[NUMBERS] = rows[NUMBERS][which]
            yield answers

    @register(transfer=MICRO_DP, reads=(), returns=(*ANSWERS, NUMBERS))
    def next_sequences(self, rows: TensorDict) -> TensorDict:
        """The answers that finish next, as many as there are rows, and their prompts' row_numbers [n]."""
        return self.underway.more()

    @cached_property
    def in_hand(self) -> InHand:
        """Unfinished rows of `hold_sequences` and `carry_sequences`; on a worker only."""
        return InHand()

    @register(transfer=MICRO_DP, reads=(*PROMPTS, "row_ids", NUMBERS), returns=())
    def hold_sequences(self, rows: TensorDict, *, carry: Carry) -> TensorDict:
        """Add rows for later calls of `carry_sequences`; `carry` only keeps each group on one rank."""
        self.in_hand.add(rows, width=self.actor.sampling.max_new_tokens)
        return TensorDict({}, batch_size=rows.batch_size)

    @register(
        transfer=MICRO_DP,
        reads=(*PROMPTS, "row_ids", NUMBERS),
        returns=(*ANSWERS, NUMBERS, *VERSIONS, *COUNTS),
    )
    def carry_sequences(self, rows: TensorDict, *, carry: Carry) -> TensorDict:
        """Add rows, and return as many with their answers: those that finish first, added now or earlier.

        Args:
            rows: as for `generate_sequences`, and row_numbers [B] int64, consecutive within a group.
            carry: version of the weights, and how stale a row may become.

        Returns:
            The columns of `generate_sequences`, and row_numbers, weights_version, last_version, older_tokens
            and num_tokens [B] int64, as from `InHand.answer`.
        """
        self.hold_sequences(rows, carry=carry)
        sampling, seed = self.actor.sampling_for(greedy=False), self.actor.seed or 0
        engine = self.actor.generator
        found = self.in_hand.answer(engine, size=len(rows), carry=carry, sampling=sampling, seed=seed)
        return self.actor.completed(found)


@dataclass
class SeparateGeneration:
    """What the actor's handle calls where a generator exists: answers come from there, all else as usual.

    Before it answers, the generator is sent the actor's weights if they have changed.
    """

    actor: Caller
    """The actor's workers."""
    generator: Caller
    """The generator's workers."""
    recompute_log_probs: bool
    """Let the actor's workers recompute `log_probs` of the answers; see `Actor.recompute_log_probs`."""
    stale: bool = True
    """Whether the generator's weights differ from the actor's."""
    version: int = 0
    """How many times weights have been sent."""

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        """See `Caller.call`; answers also have the column `weights_version` [B] int64."""
        self.stale = self.stale or method.name not in _KEEPING
        if method.name != "generate_sequences":
            return self.actor.call(method, batch, arguments)
        assert batch is not None
        answers = self.answered(batch, arguments)
        if arguments.get("greedy"):
            return answers
        return self.with_log_probs(answers, cast("Sampling | None", arguments.get("sampling")))

    def answered(self, batch: Batch, arguments: Mapping[str, object]) -> Batch:
        """The batch with answers by the actor's current weights."""
        self.synchronize()
        version = Batch.of({"weights_version": torch.full((len(batch),), self.version)})
        return batch | self.ask_generator(batch, arguments) | version

    def synchronize(self) -> None:
        """Send the actor's weights to the generator, if they differ."""
        if self.stale:
            self.actor.call(methods_of(Actor)["send_weights"], None, {})
            self.generator.call(methods_of(Generator)["receive_weights"], None, {})
            self.stale, self.version = False, self.version + 1

    def ask_generator(self, batch: Batch, arguments: Mapping[str, object]) -> Batch:
        """The generator's answers, by the weights that it has."""
        method = methods_of(Generator)["generate_sequences"]
        return cast(Batch, self.generator.call(method, batch, arguments))

    def with_log_probs(self, answers: Batch, sampling: Sampling | None = None) -> Batch:
        """The answers with `log_probs` recomputed by the actor, if it is to, as they were drawn."""
        if not self.recompute_log_probs:
            return answers
        how = {"keep": True} | ({} if sampling is None else {"temperature": sampling.temperature})
        recomputed = self.actor.call(methods_of(Actor)["read_log_prob"], answers, how)
        return answers | cast(Batch, recomputed)


def refuse_turns(arguments: Mapping[str, object]) -> None:
    """Refuse an environment, whose turns need all answers together, where answers come one by one."""
    if arguments.get("environment") is not None:
        raise ValueError(
            "generate_sequences(environment=...): this strategy hands answers on as they end, and an "
            "environment asks for several turns of all together. Try --strategy openrlhf, or one-step-off "
            "with --strategy.max_staleness 1."
        )


@dataclass
class GenerationInParts(SeparateGeneration):
    """Separate generation whose finished answers are passed on while the generator continues with the others.

    All calls are sent at once: per part one to the generator, and one to each role that reads the answers.
    Only the devices know which rows a part has, until something needs the order of the rows.
    """

    parts: int = 8
    """Parts of a batch, at most one per row; 1 passes on all answers together."""

    def ask_generator(self, batch: Batch, arguments: Mapping[str, object]) -> Batch:
        """See `SeparateGeneration.ask_generator`; returns a batch in parts."""
        parts = min(self.parts, len(batch))
        if parts < 2:
            return super().ask_generator(batch, arguments)
        refuse_turns(arguments)
        methods = methods_of(Generator)
        numbered = batch | {NUMBERS: torch.arange(len(batch))}
        how = {name: value for name, value in arguments.items() if name != "environment"}  # it is None
        self.generator.call(methods["start_sequences"], numbered, {**how, "parts": parts})
        found = []
        for index in range(parts):
            part = PartOf(index=index, parts=parts)
            method = dataclasses.replace(methods["next_sequences"], transfer=part)
            found.append(cast(Batch, self.generator.call(method, numbered, {})))
        numbers = Parts(tuple(part.column(NUMBERS) for part in found))
        return Batch.in_parts(numbers, [part.select(ANSWERS) for part in found])

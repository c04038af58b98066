"""The generator: a second copy of the actor on devices of its own, which only answers.

actor.generate_sequences(batch)              the algorithm knows of no generator
  -> actor.send_weights | generator.receive_weights     side by side, where the actor has changed
  -> generator.generate_sequences      or start_sequences, and next_sequences for each part of the answers,
                                       or carry_sequences, which goes on with what is left of earlier calls
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
from rlhf_lightning.workers.role import Role, Settings
from rlhf_lightning.workers.underway import Underway

_KEEPING = methods_of(Actor).keys() - {"update_actor", "load"}
"""Methods of an actor that leave its weights as they are; of one of the user's own nobody knows."""


@dataclass
class Arriving(WeightSource):
    """Weights that another device sends, for an engine that reads them into memory of its own."""

    link: Link
    """Where they come from."""
    announced: int = 0
    """How often they have come."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource.weights`."""
        return self.link.receive()

    @property
    def version(self) -> int:
        """See `WeightSource.version`."""
        return self.announced


@dataclass(frozen=True, kw_only=True)
class Generator(Role):
    """Answers with a copy of the actor's weights; every rank has all of them."""

    actor: Actor = field(default_factory=Actor)
    """What it is a copy of, and how that answers."""
    evaluates: ClassVar[bool] = True
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
        """Make room for the weights: vLLM's own, or a model that the native engine computes with."""
        settings = worker.settings
        assert isinstance(settings, Settings)
        be_deterministic(settings.deterministic, seed=self.init_seed or 0)
        places = (self.place, self.actor.place)
        for place in places:
            place.worker = worker
        if settings.generator == "vllm":
            assert worker.link is not None
            # Nobody else wants these devices, and weights that sleep would have to be sent again.
            config = dataclasses.replace(settings.vllm, sleep=False)
            self.actor.place.generator = self.actor.generator_over(Arriving(worker.link), config)
            return
        alone = dataclasses.replace(worker, dp_group=None, groups=None)
        train = dataclasses.replace(settings.train, kept_tokens=0)  # no update follows here
        engine = train_engine(self, head=self.head, seat=alone, config=train)
        for place in places:
            place.engine = engine

    def check_layout(self, layout: ParallelLayout, settings: Settings) -> None:
        """See `Actor.check_generation`; the copy is never divided, and nothing trains it."""
        self.actor.check_generation(layout, settings)

    def offload(self) -> None:
        """See `Role.offload`; vLLM keeps what it has."""
        if self.place.engine is not None:
            super().offload()

    def reload(self) -> None:
        """See `Role.reload`."""
        if self.place.engine is not None:
            super().reload()

    @cached_property
    def underway(self) -> Underway:
        """The generation that `start_sequences` began, made on first use; on a worker only."""
        return Underway()

    @register(transfer=ONE_TO_ALL)
    def receive_weights(self) -> None:
        """Become the actor, which sends its weights meanwhile."""
        assert self.worker.link is not None
        source = self.actor.generator.source
        if isinstance(source, Arriving):
            source.announced += 1
            self.actor.generator.refresh()
        else:
            self.engine.take_weights(self.worker.link.receive())

    @register(transfer=MICRO_DP, reads=(*PROMPTS, "row_ids"), returns=ANSWERS)
    def generate_sequences(
        self, rows: TensorDict, *, greedy: bool = False, environment: Environment | None = None
    ) -> TensorDict:
        """See `Actor.generate_sequences`."""
        return self.actor.answer(rows, greedy=greedy, environment=environment)

    @register(transfer=MICRO_DP, reads=(*PROMPTS, "row_ids", NUMBERS), returns=())
    def start_sequences(self, rows: TensorDict, *, parts: int, greedy: bool = False) -> TensorDict:
        """Begin to answer every prompt as `generate_sequences` does.

        Args:
            rows: as for `generate_sequences`, and row_numbers [B] int64.
            parts: calls of `next_sequences` that will ask for the answers.
            greedy: as for `generate_sequences`.
        """
        self.underway.begin(self._finished(rows, self.actor.drawn(greedy=greedy), parts), parts=parts)
        return TensorDict({}, batch_size=rows.batch_size)

    def _finished(self, rows: TensorDict, sampling: Sampling, parts: int) -> Iterator[TensorDict]:
        engine, seed = self.actor.generator, self.actor.seed or 0
        for which, drawn in engine.finished(rows, sampling=sampling, seed=seed, parts=parts):
            answers = self.actor.completed(drawn)
            answers[NUMBERS] = rows[NUMBERS][which]
            yield answers

    @register(transfer=MICRO_DP, reads=(), returns=(*ANSWERS, NUMBERS))
    def next_sequences(self, rows: TensorDict) -> TensorDict:
        """The answers that end next, as many as there are rows, and row_numbers [n] of their prompts."""
        return self.underway.more()

    @cached_property
    def in_hand(self) -> InHand:
        """Rows of `hold_sequences` and `carry_sequences` without an answer; on a worker only."""
        return InHand()

    @register(transfer=MICRO_DP, reads=(*PROMPTS, "row_ids", NUMBERS), returns=())
    def hold_sequences(self, rows: TensorDict, *, carry: Carry) -> TensorDict:
        """Take rows in hand for `carry_sequences`, columns as there; `carry` keeps a group on one rank."""
        self.in_hand.add(rows, width=self.actor.sampling.max_new_tokens)
        return TensorDict({}, batch_size=rows.batch_size)

    @register(
        transfer=MICRO_DP,
        reads=(*PROMPTS, "row_ids", NUMBERS),
        returns=(*ANSWERS, NUMBERS, *VERSIONS, *COUNTS),
    )
    def carry_sequences(self, rows: TensorDict, *, carry: Carry) -> TensorDict:
        """Take rows in hand, and hand over as many with their answers, those that end first.

        Args:
            rows: as for `generate_sequences`, and row_numbers [B] int64, by which groups are neighbours.
            carry: version of the weights, and when a row may wait no longer.

        Returns:
            What `generate_sequences` returns, and row_numbers, weights_version, last_version, older_tokens
            and num_tokens [B] int64, as `InHand.answer` does.
        """
        self.hold_sequences(rows, carry=carry)
        sampling, seed = self.actor.drawn(greedy=False), self.actor.seed or 0
        engine = self.actor.generator
        found = self.in_hand.answer(engine, size=len(rows), carry=carry, sampling=sampling, seed=seed)
        return self.actor.completed(found)


@dataclass
class SeparateGeneration:
    """Calls of an actor's handle: answers come from the generator, which first becomes what the actor is."""

    actor: Caller
    """Workers of the actor."""
    generator: Caller
    """Workers of its copy."""
    recompute_log_probs: bool
    """As the actor has it: its workers compute the log-probabilities of the answers once more."""
    stale: bool = True
    """Whether the copy has other weights than the actor."""
    version: int = 0
    """How often weights have been sent."""

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        """See `Caller.call`; answers have `weights_version` [B] int64 too."""
        self.stale = self.stale or method.name not in _KEEPING
        if method.name != "generate_sequences":
            return self.actor.call(method, batch, arguments)
        assert batch is not None
        answers = self.answers(batch, arguments)
        return answers if arguments.get("greedy") else self.scored(answers)

    def answers(self, batch: Batch, arguments: Mapping[str, object]) -> Batch:
        """The batch with the generator's answers."""
        self.synchronize()
        version = Batch.of({"weights_version": torch.full((len(batch),), self.version)})
        return batch | self.asked(batch, arguments) | version

    def synchronize(self) -> None:
        """Give the generator the actor's weights, where it has others."""
        if self.stale:
            self.actor.call(methods_of(Actor)["send_weights"], None, {})
            self.generator.call(methods_of(Generator)["receive_weights"], None, {})
            self.stale, self.version = False, self.version + 1

    def asked(self, batch: Batch, arguments: Mapping[str, object]) -> Batch:
        """What the generator, which is up to date, answers."""
        method = methods_of(Generator)["generate_sequences"]
        return cast(Batch, self.generator.call(method, batch, arguments))

    def scored(self, answers: Batch) -> Batch:
        """The answers with log-probabilities as the actor wants them."""
        if not self.recompute_log_probs:
            return answers
        again = self.actor.call(methods_of(Actor)["compute_log_prob"], answers, {})
        return answers | cast(Batch, again).select(["log_probs"])


def refuse_turns(arguments: Mapping[str, object]) -> None:
    """Refuse turns of an environment where answers do not come all together.

    Raises:
        ValueError: as said.
    """
    if arguments.get("environment") is not None:
        raise ValueError(
            "generate_sequences(environment=...): this strategy hands answers on as they end, and an "
            "environment asks for several turns of all together. Try --strategy openrlhf, or one-step-off "
            "with --strategy.max_staleness 1."
        )


@dataclass
class GenerationInParts(SeparateGeneration):
    """The same, but answers are handed on as they end, while the generator goes on with the others.

    All calls are sent at once: one a part to the generator, and one a part to whoever reads the answers.
    Which rows a part has is known to the devices only, until something needs the order of the rows.
    """

    parts: int = 8
    """Of each batch, no more than it has rows; 1 hands on all answers together."""

    def asked(self, batch: Batch, arguments: Mapping[str, object]) -> Batch:
        """See `SeparateGeneration.asked`; a batch in parts."""
        parts = min(self.parts, len(batch))
        if parts < 2:
            return super().asked(batch, arguments)
        refuse_turns(arguments)
        methods = methods_of(Generator)
        numbered = batch | {NUMBERS: torch.arange(len(batch))}
        self.generator.call(methods["start_sequences"], numbered, {**arguments, "parts": parts})
        found = []
        for index in range(parts):
            part = PartOf(index=index, parts=parts)
            method = dataclasses.replace(methods["next_sequences"], transfer=part)
            found.append(cast(Batch, self.generator.call(method, numbered, {})))
        numbers = Parts(tuple(part.column(NUMBERS) for part in found))
        return Batch.in_parts(numbers, [part.select(ANSWERS) for part in found])

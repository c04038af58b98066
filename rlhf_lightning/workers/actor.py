"""The actor: the model that answers, and that is trained to answer better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, cast
from zlib import crc32

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.controller import BROADCAST, DP, DP_METRIC, MICRO_DP, ONE_TO_ALL, Worker, register
from rlhf_lightning.controller.cluster import num_gpus
from rlhf_lightning.data.tokenizer import end_tokens, load_tokenizer
from rlhf_lightning.engines import (
    VLLM,
    Asked,
    Ends,
    GenerationEngine,
    Native,
    Transition,
    WeightSource,
    check_vllm,
    generation_engine,
    read_config,
)
from rlhf_lightning.functional import Estimator, Loss, run_estimator
from rlhf_lightning.parallel import Moved, ParallelLayout
from rlhf_lightning.rewards import Environment
from rlhf_lightning.spec import Sampling
from rlhf_lightning.workers.conversation import Conversation
from rlhf_lightning.workers.naming import found_before
from rlhf_lightning.workers.role import Role
from rlhf_lightning.workers.settings import Settings

PROMPTS = ("prompt_ids", "prompt_mask")
ANSWERS = (
    *("response_ids", "response_mask", "truncated_mask"),
    *("row_truncated", "row_turns", "log_probs", "rollout_log_probs"),
)
SEQUENCES = (*PROMPTS, "response_ids", "response_mask")


def drawing_apart(name: str, role: Role, *, seed: int) -> Role:
    """A role besides the main one: an actor whose draws have no seed of their own gets one for its name."""
    if not isinstance(role, Actor) or role.seed is not None:
        return role
    return replace(role, seed=(seed + crc32(name.encode())) % 2**31)


@dataclass(frozen=True, kw_only=True)
class Actor(Role):
    """Generates responses, scores them, and learns."""

    sampling: Sampling = field(default_factory=Sampling)
    """How responses are drawn."""
    seed: int | None = None
    """Seed of the draws, that of the run where None: (seed, row id, position) decides a token, not the device
    or batch it is drawn in."""
    environment: Environment | None = None
    """What speaks between the actor's turns; each response is one turn where None."""
    recompute_log_probs: bool = False
    """Let log_probs be the training engine's; those that answers were drawn with are rollout_log_probs."""
    needed_to_validate: ClassVar[bool] = True
    trains: ClassVar[bool] = True

    def seeded(self, seed: int) -> Self:
        """The same actor with the run's seed for fresh weights and draws, where it has none of its own."""
        return replace(super().seeded(seed), seed=seed if self.seed is None else self.seed)

    def reading(self) -> Self:
        """The same actor for given answers, which are read at temperature 1, whatever `sampling` says."""
        return replace(self, sampling=replace(self.sampling, temperature=1.0))

    def build(self, worker: Worker) -> None:
        """Load the model, once its environment is found."""
        self.find_environment()
        super().build(worker)

    def find_environment(self) -> None:
        """Find the environment's function on this node, of which else the first answers would tell."""
        if self.environment is not None:
            with found_before():
                self.environment.find()

    def arguments(self, method: str) -> Mapping[str, object]:
        """See `Remote.arguments`: `generate_sequences` gets the actor's environment."""
        spoken = self.environment is not None and method == "generate_sequences"
        return {"environment": self.environment} if spoken else {}

    @register(
        transfer=MICRO_DP,
        reads=(*PROMPTS, "row_ids"),
        returns=ANSWERS,
    )
    def generate_sequences(
        self,
        rows: TensorDict,
        *,
        greedy: bool = False,
        environment: Environment | None = None,
        sampling: Sampling | None = None,
    ) -> TensorDict:
        """Answer every prompt.

        Args:
            rows: prompt_ids [B, P] int64, prompt_mask [B, P] bool, row_ids [B] int64.
            greedy: take the likeliest token instead of a draw.
            environment: replies to the actor, which then continues; it also reads the column `rows`, the raw
                rows. By default the actor's own.
            sampling: how to draw; by default the actor's own. Calls that read the answers take its
                temperature.

        Returns:
            response_ids [B, R] int64, response_mask [B, R] bool, log_probs and rollout_log_probs [B, R]
            float32 of the drawn tokens; row_truncated [B] bool, whether the response was cut off, and
            truncated_mask [B, R] bool, the tokens of such responses; row_turns [B] int64, the actor's turns.
            R = sampling.max_new_tokens. The masks are False at tokens of the environment.
        """
        return self.drawing_by(sampling).answer(rows, greedy=greedy, environment=environment)

    def drawing_by(self, sampling: Sampling | None) -> Self:
        """The same actor on the same worker with another `sampling`, of answers that are no longer.

        Raises:
            ValueError: they are longer.
        """
        if sampling is None:
            return self
        if sampling.max_new_tokens > (most := self.sampling.max_new_tokens):
            raise ValueError(
                f"generate_sequences(sampling): max_new_tokens={sampling.max_new_tokens}, and the actor has "
                f"room for answers of {most} tokens. Give actor.sampling.max_new_tokens the larger number."
            )
        found = replace(self, sampling=sampling)
        vars(found)["binding"] = self.binding
        return found

    def answer(self, rows: TensorDict, *, greedy: bool, environment: Environment | None = None) -> TensorDict:
        """`generate_sequences` on a worker, not registered: `Generator` calls it on its own workers."""
        engine, sampling = self.generator, self.sampling_for(greedy=greedy)
        if environment is None:
            drawn = engine.generate(rows, sampling=sampling, seed=self.seed or 0)
        else:
            talk = Conversation(
                engine=engine,
                environment=environment,
                tokenizer=load_tokenizer(self.path),
                ends=self.ends,
                groups=self.worker.groups,
            )
            drawn = talk.answer(rows, sampling=sampling, seed=self.seed or 0)
        answers = self.completed(drawn)
        if self.recompute_log_probs and not greedy:
            whole = TensorDict({**rows.select(*PROMPTS), **answers}, batch_size=rows.batch_size)
            answers["log_probs"] = self._recomputed(whole)
        return answers

    def completed(self, answers: TensorDict) -> TensorDict:
        """A generator's answers with the columns of `ANSWERS` that can be derived from them."""
        ids, mask, cut = answers["response_ids"], answers["response_mask"], answers.get("row_truncated")
        if cut is None:
            cut = self.ends.cut_off(ids, mask, sampling=self.sampling)
        answers["truncated_mask"], answers["row_truncated"] = mask & cut[:, None], cut
        if "row_turns" not in answers:
            answers["row_turns"] = torch.ones(len(mask), dtype=torch.int64, device=mask.device)
        answers["rollout_log_probs"] = answers["log_probs"]
        return answers

    @property
    def ends(self) -> Ends:
        """What ends a response, or a turn of one."""
        tokenizer, found = load_tokenizer(self.path), end_tokens(self.path)
        pad = tokenizer.pad_token_id
        return Ends(pad_token_id=found[0] if pad is None else pad, eos_token_ids=found, tokenizer=tokenizer)

    def sampling_for(self, *, greedy: bool) -> Sampling:
        """`sampling`, at temperature 0 where greedy."""
        return replace(self.sampling, temperature=0.0) if greedy else self.sampling

    @property
    def generator(self) -> GenerationEngine:
        """This rank's generation engine, made on first use; on a worker only."""
        if self.binding.generator is None:
            settings = self.settings
            config = settings.vllm if settings.generator == "vllm" else settings.generate
            self.binding.generator = self.generator_over(self.engine, config)
        return self.binding.generator

    def generator_over(self, source: WeightSource, config: Native | VLLM) -> GenerationEngine:
        """A generation engine that reads its weights from `source`."""
        return generation_engine(self, source, seat=self.worker, ends=self.ends, config=config)

    def offload(self) -> None:
        """Free the device of the model, and of what generates with it."""
        if self.binding.generator is not None:
            self.binding.generator.offload()
        super().offload()

    def takes_all(self, method: str) -> bool:
        """See `Remote.takes_all`: torch counts vLLM asleep too, and so does not show what it takes."""
        return method == "generate_sequences" and self.settings.generator == "vllm"

    def check_layout(self, layout: ParallelLayout, settings: Settings) -> None:
        """Refuse a layout in which the model cannot be trained, or cannot generate."""
        super().check_layout(layout, settings)
        self.check_generation(layout, settings)

    def check_generation(self, layout: ParallelLayout, settings: Settings) -> None:
        """Refuse a layout in which the model cannot generate, and a vLLM that does not take it."""
        if settings.generator == "vllm":
            check_vllm(read_config(self), layout, settings=settings.vllm, on_cpu=not num_gpus())

    def _recomputed(self, rows: TensorDict) -> Tensor:
        """The training engine's log-probabilities [B, R] float32.

        The copies that generate within a training replica have different rows, and training wants the same
        rows on all ranks of the replica: so they gather all rows, and each takes back its own.
        """
        layout, groups = self.worker.layout, self.worker.groups
        if groups is None or layout.p * layout.t == 1:
            return self._log_probs(rows)
        every: list[TensorDict] = [rows] * layout.generating.num_micro
        dist.all_gather_object(every, rows, group=groups.micro)
        found = self._log_probs(cast(TensorDict, torch.cat(cast(list[Tensor], every)))).to(self.worker.device)
        dist.broadcast(found, group=groups.replica, group_src=(layout.p - 1) * layout.t)
        parts: tuple[Tensor, ...] = found.cpu().split([len(part) for part in every])
        return parts[dist.get_rank(groups.micro)]

    def _log_probs(self, rows: TensorDict) -> Tensor:
        found = self.engine.infer(rows, temperature=self.sampling.temperature, keep=True)
        return cast(Tensor, found["log_probs"])

    @register(transfer=ONE_TO_ALL, computes=False)
    def transition(self) -> Transition:
        """Seconds and bytes of the last transition from training to generation, on each rank."""
        return self.engine.transition()

    def reads_at(self, temperature: float | None) -> float:
        """The temperature at which responses are read: what a call was told, that of `sampling` where None.

        Raises:
            ValueError: it is negative.
        """
        if temperature is None:
            return self.sampling.temperature
        return replace(self.sampling, temperature=temperature).temperature

    @register(transfer=DP, reads=SEQUENCES, returns=("log_probs", "entropy"))
    def compute_log_prob(self, rows: TensorDict, *, temperature: float | None = None) -> TensorDict:
        """Log-probabilities and entropy of the responses under the current weights, [B, R] float32."""
        heat = self.reads_at(temperature)
        return self.engine.infer(rows, temperature=heat, asked=Asked(entropy=True), keep=True)

    @register(transfer=DP, reads=SEQUENCES, returns=("log_probs",))
    def read_log_prob(
        self, rows: TensorDict, *, keep: bool = False, temperature: float | None = None
    ) -> TensorDict:
        """The log-probabilities of `compute_log_prob` alone; `keep` where an update of these rows follows."""
        return self.engine.infer(rows, temperature=self.reads_at(temperature), keep=keep)

    @register(transfer=DP_METRIC, reads=SEQUENCES)
    def update_actor(
        self, rows: TensorDict, *, loss: Loss, temperature: float | None = None
    ) -> Mapping[str, float]:
        """One optimizer step on a mini-batch; reads the `columns` of the loss too."""
        return self.update(rows, loss=loss, temperature=self.reads_at(temperature))

    @register(transfer=DP_METRIC, reads=SEQUENCES)
    def accumulate_actor(
        self, rows: TensorDict, *, loss: Loss, temperature: float | None = None
    ) -> Mapping[str, float]:
        """Add the gradient of a loss to that of the next `update_actor`; reads the loss's `columns` too."""
        return self.accumulate(rows, loss=loss, temperature=self.reads_at(temperature))

    @register(transfer=ONE_TO_ALL)
    def send_weights(self) -> Moved:
        """Send all weights to the generator's devices, which run `receive_weights` at the same time."""
        weights = self.engine.weights()
        if self.worker.link is not None:
            return self.worker.link.send(weights)
        for _ in weights:  # gathering is collective, so every rank takes part; only the linked one sends
            pass
        return Moved()

    @register(transfer=BROADCAST, reads=(), returns=("weights",))
    def give_weights(self, rows: TensorDict) -> TensorDict:
        """All weights, for `Follower.follow`: a batch of one row, `weights` [1, N] float32."""
        first = self.worker.layout.output_ranks[0]
        weights = self.engine.give_weights(wanted=self.worker.rank == first)
        return TensorDict({"weights": weights[None]}, batch_size=1)

    @register(transfer=DP, reads=(), returns=())
    def compute_advantage(self, rows: TensorDict, *, estimator: Estimator) -> TensorDict:
        """Run an estimator on this rank's rows; it names the columns that it reads and returns."""
        given = {name: rows[name] for name in estimator.columns}
        found = run_estimator(estimator, given, self.add_over_ranks)
        return TensorDict(found, batch_size=rows.batch_size)

    @register(transfer=DP_METRIC, reads=SEQUENCES)
    def compute_loss(
        self, rows: TensorDict, *, loss: Loss, temperature: float | None = None
    ) -> Mapping[str, float]:
        """The metrics of a loss, without learning from it."""
        return self.evaluate(rows, loss=loss, temperature=self.reads_at(temperature))

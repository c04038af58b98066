"""vLLM as a generation engine in the device's own process: one vLLM per rank, in the layout's tensor groups.

training engine ── weights(), one at a time, if they have changed ──> vLLM's parameters, in place
rows ── prompts without padding ──> schedule, forward, draw: equal on all tensor ranks ──> responses
     <── afterwards vLLM sleeps: memory of keys and values, on a GPU of weights too, is freed ──┘

B is the number of rows, R the width of the responses.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property

import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.exchange import UnfitError, fitting
from rlhf_lightning.engines.generation import GenerationEngine
from rlhf_lightning.engines.huggingface.sizes import max_positions
from rlhf_lightning.engines.huggingface.source import config_source
from rlhf_lightning.engines.prompts import begun, read_prompts
from rlhf_lightning.engines.training import WeightSource
from rlhf_lightning.engines.vllm.config import VLLM
from rlhf_lightning.engines.vllm.failure import failing, larger_cache
from rlhf_lightning.engines.vllm.memory import release_pages
from rlhf_lightning.engines.vllm.process import process_restored
from rlhf_lightning.engines.vllm.weights import as_trained, needed, weight_shapes
from rlhf_lightning.parallel import Seat
from rlhf_lightning.parallel.shares import shares
from rlhf_lightning.spec import ModelSpec, Sampling

with process_restored():
    from vllm import CompletionOutput, EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from rlhf_lightning.engines.vllm.executor import InPlaceExecutor
    from rlhf_lightning.engines.vllm.groups import Groups, drop_groups, keeping_world
    from rlhf_lightning.engines.vllm.plain import plain_experts, plain_weights
    from rlhf_lightning.engines.vllm.requests import Requests, RunningRequests
    from rlhf_lightning.engines.vllm.responses import add, begun_responses, responses
    from rlhf_lightning.engines.vllm.zero_copy import ZeroCopyWeights

logger = logging.getLogger(__name__)

_Outputs = dict[int, CompletionOutput]
"""Finished outputs by row."""


class VLLMEngine(GenerationEngine):
    """See the head of the module.

    Args:
        model: the model that the source trains; of its directory only config.json is read.
        source: where the weights come from.
        seat: this rank's place.
        ends: what ends a response.
        config: options of the engine.

    Attributes:
        update_s: seconds that the last update of the weights took, by copying or lending.

    Raises:
        ValueError: vLLM cannot generate with the model.
    """

    version: int | None = None
    """Of the source's weights that gave the last answers; None before the first."""

    def __init__(
        self, model: ModelSpec, source: WeightSource, *, seat: Seat, ends: Ends, config: VLLM
    ) -> None:
        self.source, self._ends, self._config, self._spec = source, ends, config, model
        self._on_cpu = seat.device.type == "cpu"
        self._sleeps = config.sleep and not self._on_cpu
        with process_restored():
            self._groups = Groups(seat.groups.generation_tensor if seat.groups else None, device=seat.device)
        self._engine = self._started()
        worker = self._engine.model_executor.driver_worker.worker
        self._runner, self._model = worker.model_runner, worker.get_model()
        drop_groups(self._model)
        self._logits = self._model.compute_logits = _Logits(self._model.compute_logits)
        self._engine.engine_core._finalizer.detach()  # it would destroy the job's process groups
        self._closing = weakref.finalize(self, _close, self._engine, self._groups)
        self._check_model()
        self._lacking = self._lacking_cache()
        if self._lacking and seat.rank == 0:
            logger.warning("vLLM answers rows of at most %d tokens. %s", self._positions, self._lacking)
        self._fresh, self._asleep, self._held, self.update_s = False, False, False, 0.0
        borrows = config.zero_copy and self._on_cpu and source.lending() is not None
        self._zero_copy = ZeroCopyWeights(self._model) if borrows else None
        if config.sleep:
            self.offload()

    def finished(
        self, rows: TensorDict, *, sampling: Sampling, seed: int, parts: int
    ) -> Iterator[tuple[Tensor, TensorDict]]:
        """See `GenerationEngine.finished`."""
        width = sampling.max_new_tokens
        prompts = rows.select("prompt_ids", "prompt_mask", "row_ids")
        requests = self._requests(begun(prompts, width=width), sampling, seed)
        answered = self._answered(requests, shares(len(rows), parts))
        while True:
            with self._computing():
                part = next(answered, None)
            if part is None:
                break
            answers = responses(list(part.values()), width=width, pad=self._ends.pad_token_id)
            yield torch.tensor([*part], dtype=torch.int64), answers.to(rows["prompt_ids"].device)
        if self._config.sleep:
            self.offload()

    def resume(
        self,
        rows: TensorDict,
        *,
        sampling: Sampling,
        seed: int,
        pause: Callable[[Tensor], bool],
        at_once: int = 0,
    ) -> TensorDict:
        """See `GenerationEngine.resume`."""
        rows = begun(rows, width=sampling.max_new_tokens)
        requests = self._requests(rows, sampling, seed)
        found = begun_responses(rows, pad=self._ends.pad_token_id)
        left = (~found["ended"]).nonzero()[:, 0].tolist()
        with self._computing(), self._running(requests, rows=left, at_once=at_once or len(rows)) as running:
            while not pause(found["ended"]) and not bool(found["ended"].all()):
                ended = running.step()
                add(found, ended, requests.begun)
                found["ended"][[*ended]] = True
            add(found, running.pause(), requests.begun)
        if self._config.sleep:
            self.offload()
        return found.to(rows["prompt_ids"].device)

    @contextmanager
    def weights_held(self) -> Iterator[None]:
        """See `GenerationEngine.weights_held`."""
        with ExitStack() as weights:
            with self._computing():
                self._wake()
                weights.enter_context(self._weights())
            self._held = True
            try:
                yield
            finally:
                self._held = False
                with self._computing():
                    weights.close()
                if self._config.sleep:
                    self.offload()

    def refresh(self) -> None:
        """See `GenerationEngine.refresh`."""
        with self._computing():
            self._wake()
            with self._weights():
                pass

    def offload(self) -> None:
        """Free memory: on a GPU of weights, keys and values, on a CPU of keys and values.

        Does nothing while weights are held. Before the next answers on a GPU, the weights are copied again.
        """
        if self._asleep or self._held:
            return
        self._asleep = True
        with self._groups.entered():
            if self._sleeps:
                self._engine.sleep(level=2)
                self._fresh = False
            elif self._on_cpu:
                self._engine.reset_prefix_cache()
                release_pages(self._runner.kv_caches)

    def close(self) -> None:
        """End vLLM in this process; happens by itself when the engine is garbage-collected."""
        self._closing()

    def _started(self) -> LLMEngine:
        """Start vLLM with these groups; if that fails, close them."""
        entered, start = self._groups.entered, failing("to start", self._config)
        try:
            with start, process_restored(), entered(), self._uncompiled(), plain_weights():
                return LLMEngine.from_engine_args(self._arguments())
        except BaseException:
            self._groups.close()
            raise

    def _check_model(self) -> None:
        """Refuse a model that vLLM has not itself: through transformers it fails at the first generation."""
        if type(self._model).__name__.startswith("Transformers"):
            self.close()
            kind = self._engine.vllm_config.model_config.hf_config.model_type
            raise ValueError(
                f"strategy.settings.generator=vllm: vLLM has no {kind} of its own, and to compute it with "
                f"that of transformers ({self._spec.path}) fails. Take generator=native, or another model."
            )

    @property
    def _positions(self) -> int:
        """Most tokens of a prompt and its response."""
        return int(self._engine.model_config.max_model_len)

    def _lacking_cache(self) -> str:
        """What to change where the cache holds no row as long as the model's; empty where it does."""
        positions = max_positions(self._spec) or 0  # vLLM's are more where the config scales them
        if self._config.max_model_len or self._positions >= positions:
            return ""
        larger = larger_cache(self._config)
        return f"The model has {positions} positions, and vLLM's cache holds no longer row: try {larger}."

    def _arguments(self) -> EngineArgs:
        config = self._config
        return EngineArgs(
            model=str(config_source(self._spec)),
            hf_overrides=as_trained(self._spec),
            dtype=self._spec.computes_in,
            skip_tokenizer_init=True,
            load_format="dummy",
            tensor_parallel_size=len(self._groups.ranks),
            distributed_executor_backend=InPlaceExecutor,
            # These two map memory of other GPUs, which this process does not see.
            disable_custom_all_reduce=True,
            compilation_config={"pass_config": {"fuse_allreduce_rms": False}},
            # The others of a GPU lay out weights anew as they start, and would be given plain ones later.
            moe_backend="auto" if self._on_cpu else "triton",
            enable_flashinfer_autotune=False,  # it waits for all ranks of the job, also those without vLLM
            gpu_memory_utilization=config.share(on_cpu=self._on_cpu),
            kv_cache_memory_bytes=config.kv_cache_bytes(on_cpu=self._on_cpu),
            max_num_seqs=config.rows_at_once,  # vLLM refuses more than the tokens of a pass
            max_num_batched_tokens=config.max_num_batched_tokens or None,
            max_model_len=config.max_model_len or -1,
            enable_prefix_caching=config.enable_prefix_caching,
            # A chunk of a prompt draws a token that is dropped; on a CPU its random state is not restored.
            enable_chunked_prefill=False if self._on_cpu else None,
            enforce_eager=config.eager(on_cpu=self._on_cpu),
            async_scheduling=False,  # scheduling a step ahead, it would draw before `seed`
            enable_sleep_mode=self._sleeps,
            logprobs_mode="raw_logprobs",
            disable_log_stats=True,
        )

    def _uncompiled(self) -> AbstractContextManager[object]:
        """In eager mode, keep torch from compiling the small functions that vLLM compiles even then."""
        eager = self._config.eager(on_cpu=self._on_cpu)
        return torch.compiler.set_stance("force_eager") if eager else nullcontext()

    def _wake(self) -> None:
        """Take the memory back that was freed; others may have taken it since.

        Raises:
            VLLMError: there is too little.
        """
        if self._asleep and self._sleeps:
            with failing("as it woke up", self._config):
                self._engine.wake_up()
        self._asleep = False

    @contextmanager
    def _weights(self) -> Iterator[None]:
        """Within this context vLLM has the source's present weights; changed ones clear the prefix cache."""
        version, started = self.source.version, time.perf_counter()
        changed = not self._fresh or version != self.version
        lending = self.source.lending() if self._zero_copy is not None else None
        if changed:
            self._engine.reset_prefix_cache()
            self._engine.set_weight_version(str(version))
        if lending is None or self._zero_copy is None:
            if changed:
                with self._taking():
                    self._copy()
            self._arrived(version, started)
            yield
            return
        with lending as shard:
            try:
                with self._taking():
                    self._zero_copy.attach(shard)
                self._arrived(version, started)
                yield
            finally:
                self._zero_copy.detach()

    def _taking(self) -> AbstractContextManager[None]:
        return failing("as it took weights", self._config)

    def _copy(self) -> None:
        """Copy the source's weights into vLLM's, one after the other.

        Raises:
            UnfitError: they are those of another model.
        """
        owner = f"vLLM of {self._spec.path}"
        weights = fitting(self.source.weights(), self._shapes, owner=owner)
        with plain_experts(self._model):
            loaded = self._model.load_weights(weights)
        if missing := needed(self._model) - loaded:
            raise UnfitError(
                f"{owner}: its {type(self._model).__name__} needs {min(missing)}, which the trained model "
                "does not have as a parameter. Take strategy.settings.generator=native."
            )

    @cached_property
    def _shapes(self) -> dict[str, torch.Size]:
        return weight_shapes(self._spec)

    def _arrived(self, version: int, started: float) -> None:
        """Note the version of the weights that vLLM has now, and how long they took."""
        self.version, self._fresh, self.update_s = version, True, time.perf_counter() - started
        logger.debug("vLLM has weights %s after %.3f s", version, self.update_s)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with torch.no_grad(), self._groups.entered(), self._uncompiled(), torch.random.fork_rng([]):
            yield

    def _requests(self, rows: TensorDict, sampling: Sampling, seed: int) -> Requests:
        """Make requests of rows as `begun` returns them, and set the temperature of the logits.

        Raises:
            ValueError: a prompt is empty, or too long for the model.
        """
        longest, more = sampling.max_new_tokens, self._lacking
        prompts = read_prompts(rows, positions=self._positions, new_tokens=longest, owner="vLLM", advice=more)
        self._logits.temperature = sampling.temperature or 1.0
        return Requests.of(rows, prompts, sampling=sampling, ends=self._ends, seed=seed)

    @contextmanager
    def _running(self, requests: Requests, *, rows: Sequence[int], at_once: int) -> Iterator[RunningRequests]:
        """Run requests with the present weights; on exit, unfinished ones are aborted."""
        self._wake()
        running = RunningRequests(self._engine, self._runner, requests, rows=rows, at_once=at_once)
        weights = nullcontext() if self._held else self._weights()
        with weights, failing(f"as it answered {len(requests)} rows", self._config):
            self._logits.before = running.seed
            try:
                yield running
            finally:
                self._logits.before = None
                running.abort()

    def _answered(self, requests: Requests, sizes: list[int]) -> Iterator[_Outputs]:
        """Answer every request; yield finished outputs by row, `sizes` at a time."""
        found: _Outputs = {}
        with self._running(requests, rows=range(len(requests)), at_once=len(requests)) as running:
            for size in sizes:
                while len(found) < size:
                    found |= running.step()
                yield {row: found.pop(row) for row in sorted([*found][:size])}


class _Logits:
    """Divides a model's logits by the temperature, so vLLM's "raw" log-probabilities only lack truncation."""

    def __init__(self, compute: Callable[[Tensor], Tensor | None]) -> None:
        self._compute, self.temperature = compute, 1.0
        self.before: Callable[[], None] | None = None
        """Called before the logits of each step are computed, and so before its draws."""

    def __call__(self, hidden: Tensor) -> Tensor | None:
        if self.before is not None:
            self.before()
        logits = self._compute(hidden)
        return logits if logits is None or self.temperature == 1 else logits.float() / self.temperature


def _close(engine: LLMEngine, groups: Groups) -> None:
    with process_restored(), keeping_world():
        _awaken(engine)
        engine.engine_core.engine_core.shutdown()
    groups.close()


def _awaken(engine: LLMEngine) -> None:
    """Let what sleeps be freed: vLLM's allocator fails on memory that it has given back, and ever after."""
    if not engine.is_sleeping():
        return
    try:
        engine.wake_up()
    except RuntimeError as err:
        logger.warning(
            "vLLM ends asleep, as it could not wake up, for want of room say (%s). Another in this process "
            "may not start, whatever is free by then: start a new process.",
            err,
        )

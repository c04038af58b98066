"""The process of one device: it hosts every role placed there and runs their calls in order."""

from __future__ import annotations

import gc
import resource
import socket
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import FrozenInstanceError, dataclass

import torch
import torch.distributed as dist
from tensordict import NonTensorStack, TensorDict

from rlhf_lightning.controller.block import Block, decode, encode, is_number
from rlhf_lightning.controller.call import Call, CallReport
from rlhf_lightning.controller.errors import WorkerError
from rlhf_lightning.controller.futures import as_numbers
from rlhf_lightning.controller.register import Remote, Worker, methods_of
from rlhf_lightning.controller.residents import GPUGauge, Residents
from rlhf_lightning.controller.transfer import MetricTransfer
from rlhf_lightning.parallel import ParallelLayout, World, WorldSpec, serving

_UNREACHED = (
    " Where the nodes do not reach one another by these addresses, name the interface by which they do in "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, where `ray start` runs (docs/cluster.md)."
)
_STATE = (
    "its fields are options, which do not change. Keep what does in an object that it holds: "
    "`@cached_property def kept(self): return {}` above the methods that write into self.kept."
)
_LESS = (
    "Try --algo.actor.dtype bfloat16 and --algo.actor.gradient_checkpointing true (each role has them), "
    "fewer tokens at once (max_tokens_per_micro_batch of --strategy.settings.train, .megatron or .zero), "
    "fewer answers at once (.generate.slots, .vllm.max_num_seqs), --strategy.offload true, or more devices; "
    "docs/running.md says what each option saves."
)


@dataclass(frozen=True)
class Placement:
    """Where a role goes: the devices of its pool, and its layout on them."""

    role: Remote
    layout: ParallelLayout
    devices: tuple[int, ...]
    """Global rank of the device behind each rank of the layout."""
    settings: object
    """The strategy's settings of how models compute; the role knows their type."""
    link: tuple[int, ...] = ()
    """Global ranks of the link that the role is an end of: the sending device, then the receiving ones."""


def assemble(call: Call, blocks: Sequence[Block]) -> TensorDict:
    """A call's rows as one TensorDict on the host: numbers as tensors, Python objects as non-tensor data.

    The objects are copies, one for each row, which the method may change: answers to one prompt share a row,
    as far as they are on one device.
    """
    feed: Iterator[Block] = iter(blocks)
    columns: dict[str, object] = {}
    for column in call.columns:
        found = [next(feed).take(rows) for rows in column.picks]
        value = decode(found, by=[next(feed).take(rows) for rows in column.by], name=column.name)
        if not isinstance(value, torch.Tensor):
            value = NonTensorStack(*map(deepcopy, value))
        columns[column.name] = value
    return TensorDict(columns, batch_size=[call.num_rows])


def allow_files(most: int = 65536) -> None:
    """Let this process have as many open files as the node allows: gloo keeps one for each pair of devices.

    Args:
        most: no more than this.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


@contextmanager
def unwritten(rows: TensorDict) -> Iterator[None]:
    """Refuse a method that writes into its input columns, whose memory other calls read."""
    tensors = {k: v for k, v in rows.items() if isinstance(v, torch.Tensor)}
    # Tensors made in inference mode (only in this process, by a trainer that validates) have no version.
    given = {k: (v, v._version) for k, v in tensors.items() if not v.is_inference()}
    yield
    written = [name for name, (tensor, version) in given.items() if tensor._version != version]
    if written:
        raise ValueError(
            f"wrote in place into its input columns {written}, whose memory other calls read: "
            f"start with rows[{written[0]!r}].clone()."
        )


@contextmanager
def as_torch_begins() -> Iterator[None]:
    """Within this context gradients are on, and numbers float32 where nobody says otherwise.

    A reward function, or a module that it imports, may have changed that for all roles of this process; where
    it is the controller's, a trainer that validates, or a script that fits in inference mode.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(mode=False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(before)


class Device:
    """One device: its roles share the process, the device context and the memory budget."""

    def __init__(self, rank: int, *, gpu: bool | None = None) -> None:
        """Be a device of the job.

        Args:
            rank: among all devices.
            gpu: compute on a GPU; None: where the process sees one.
        """
        self.rank, self.gpu = rank, torch.cuda.is_available() if gpu is None else gpu
        self.node = socket.gethostname()
        self.world: World | None = None
        self.roles: dict[str, Remote] = {}
        self.made: dict[str, int] = {}
        """Bytes of the columns that the last call of each `role.method` made."""
        self.offload = False
        self.gauge = GPUGauge() if self.gpu else None
        self.residents = Residents(self.roles, self.gauge)

    def join(self, spec: WorldSpec, num_threads: int, *, offload: bool = False) -> None:
        """Set the number of threads, and join the job's torch.distributed world.

        Args:
            spec: the world.
            num_threads: threads of computation.
            offload: offload roles to make room for the one that computes.

        Raises:
            WorkerError: it is to compute on a GPU that torch cannot use, or the others are not reached.
        """
        if self.gpu and not torch.cuda.is_available():
            raise WorkerError(
                f"device {self.rank} on node {self.node}: Ray counts a GPU there, and PyTorch "
                f"{torch.__version__} cannot use it. Install one that is built for it there, or start that "
                "node's Ray with --num-gpus 0 to compute on CPUs."
            )
        torch.set_num_threads(num_threads)
        allow_files()
        self.offload = offload
        try:
            self.world = World.join(self.rank, spec, gpu=self.gpu)
        except RuntimeError as err:
            raise WorkerError(
                f"device {self.rank} on node {self.node}: cannot join the world of {spec.size} devices: {err}"
                f"{_UNREACHED * spec.spans_nodes}"
            ) from err

    def host(self, name: str, placement: Placement) -> None:
        """Build a role's part on this device.

        Raises:
            WorkerError: the role could not be built.
        """
        assert self.world is not None
        seat = self.world.seat(placement.layout, placement.devices)
        try:
            link = self.world.link(placement.link)
            with as_torch_begins():
                placement.role.build(Worker(**vars(seat), settings=placement.settings, link=link, role=name))
        except Exception as err:  # noqa: BLE001 - re-raised under the name of the call
            raise self._failure(name, seat.rank, "build", err, role=placement.role) from None
        self.roles[name] = placement.role
        if self.offload:
            placement.role.offload()

    def call(self, call: Call, *blocks: Block) -> tuple[CallReport | Block, ...]:
        """Run one call.

        Returns:
            the report, then one block for each column of `call.returns`.

        Raises:
            WorkerError: the method raised; named after role, rank, node and method.
        """
        started, clock = time.time(), time.perf_counter()
        try:
            with as_torch_begins(), serving(call.scope):
                value, columns = self._run(call, blocks)
        except Exception as err:  # noqa: BLE001 - re-raised under the name of the call
            role = self.roles.get(call.role)
            raise self._failure(call.role, call.rank, call.method, err, role=role) from None
        seconds = time.perf_counter() - clock
        self.made[f"{call.role}.{call.method}"] = sum(column.size_bytes for column in columns)
        peak = memory_bytes() if self.gauge is None else self.gauge.highest_bytes()
        by, left = (call.role, call.method, self.rank), self.roles[call.role].holds_gradient()
        report = CallReport(*by, started, seconds, peak, value, num_rows=call.num_rows, left=left)
        return (report, *columns)

    def _failure(
        self, name: str, rank: int, method: str, err: Exception, *, role: Remote | None
    ) -> WorkerError:
        trace = "".join(traceback.format_exception(err))
        said = f"{type(err).__name__}: {err}" if isinstance(err, LookupError) else str(err)
        called = None if role is None else methods_of(type(role)).get(method)
        if isinstance(err, KeyError) and called is not None and called.reads is not None:
            said += f" (it is given the columns that its reads={called.reads} names)"
        if role is not None and _writes_into(role, err):
            said += f" of {name}: {_STATE}"
        if _is_out_of_memory(err):
            said = f"{said.rstrip()} {_LESS}"
        return WorkerError(f"{name}[rank {rank}, node {self.node}].{method}: {said}\n{trace}")

    def _run(self, call: Call, blocks: Sequence[Block]) -> tuple[object, list[Block]]:
        role = self.roles[call.role]
        method = methods_of(type(role))[call.method]
        arguments = dict(call.arguments)
        with self.residents.computing(call) if self.offload and method.computes else nullcontext():
            if not method.takes_rows:
                value = method.function(role, **arguments)
            else:
                rows = assemble(call, blocks)
                with unwritten(rows):
                    value = method.function(role, rows=rows, **arguments)
        if isinstance(method.transfer, MetricTransfer):
            value = as_numbers(value)
        return (None, _columns(value, call)) if call.returns else (value, [])

    def close(self) -> None:
        """Let every role go and leave the world."""
        self.roles.clear()
        gc.collect()  # roles and engines form cycles, and vLLM leaves its groups when it is freed
        if self.world is not None:
            self.world.leave()


def _columns(value: object, call: Call) -> list[Block]:
    if not isinstance(value, TensorDict | Mapping):
        raise TypeError(f"returned {type(value).__name__}, not the columns {call.returns} that it declares.")
    missing = [name for name in call.returns if name not in value]
    if missing:
        there = sorted(value.keys())
        raise ValueError(f"declares the columns {call.returns} but returned no {missing}; it has {there}.")
    if single := [name for name in call.returns if is_number(value[name])]:
        raise ValueError(f"returned one number as column {single[0]!r}: give one for each row.")
    blocks = [encode(value[name]) for name in call.returns]
    wrong = {n: len(b) for n, b in zip(call.returns, blocks, strict=True) if len(b) != call.num_rows}
    if wrong:
        raise ValueError(f"was given {call.num_rows} rows and returned columns of other lengths: {wrong}.")
    return blocks


def _writes_into(role: Remote, err: Exception) -> bool:
    """Whether a method wrote into a field of its role, which is frozen."""
    frames = [frame for frame, _ in traceback.walk_tb(err.__traceback__)]
    return isinstance(err, FrozenInstanceError) and frames[-1].f_locals.get("self") is role


def _is_out_of_memory(err: Exception) -> bool:
    """Whether a GPU has no memory left: for torch, or for NCCL, which asks for its own."""
    if isinstance(err, dist.DistBackendError):
        return "out of memory" in str(err)
    return isinstance(err, torch.OutOfMemoryError)


def memory_bytes() -> int:
    """Peak memory of the process so far, in the host's memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

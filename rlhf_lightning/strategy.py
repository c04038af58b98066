"""Strategy: which models share which devices. A Lightning strategy whose devices are remote.

Trainer.fit -> data and algorithm checked -> Strategy.setup: place -> pools -> devices -> world -> roles built
            -> algo.actor, algo.critic, ... become handles -> the fit loop, which calls algo.step
success or failure   -> Strategy.teardown: devices released, Ray stopped where this job started it

    class Mine(Strategy):                fields are options, on the command line too
        reward_devices: int = 1
        def place(self, roles, devices): ...
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self, cast, dataclass_transform

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

from rlhf_lightning import checkpoint as files
from rlhf_lightning import checks, directories, resume, stepping
from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.checkpoint_source import CheckpointSource
from rlhf_lightning.controller import Caller, CallReport, ResourcePool, WorkerGroup
from rlhf_lightning.controller.cluster import RayCluster, check_alone, num_devices, num_gpus
from rlhf_lightning.controller.device import Placement
from rlhf_lightning.controller.ray_transport import RayTransport
from rlhf_lightning.controller.transport import Transport
from rlhf_lightning.garbage import collect_rarely
from rlhf_lightning.loader_checks import check_loaders
from rlhf_lightning.options import complete, options, unless_given
from rlhf_lightning.output import checkpoint_directories, keep_tables
from rlhf_lightning.parallel import ParallelLayout, subgroups
from rlhf_lightning.reporting import plain_options
from rlhf_lightning.requeue import Requeue, check_whole
from rlhf_lightning.strategy_checks import check_layouts, check_options, check_pools, check_start, release
from rlhf_lightning.trainer_checks import check_callbacks, check_trainer
from rlhf_lightning.trainer_habits import monitor_each_validation, silence_lightning
from rlhf_lightning.workers import Critic, Generator, Role, Settings
from rlhf_lightning.workers.placement_summary import log_placements


@dataclass_transform(
    kw_only_default=True, eq_default=False, field_specifiers=(dataclasses.field, unless_given)
)
@options
class Strategy(SingleDeviceStrategy):
    """Owns placement, devices and checkpoints; a subclass says only which roles share devices."""

    strategy_name = "rlhf"
    engine: ClassVar[Literal["fsdp", "megatron", "zero"] | None] = None
    """The training engine, where the strategy leaves no choice."""
    makes_room: ClassVar[bool] = True
    """Whether roles share devices; false: `offload`, which would do nothing, is refused."""
    in_process: ClassVar[bool] = False
    """Whether models compute in the controller's own process."""

    devices: int | None = None
    """Devices of the job; by default all GPUs, or on a CPU as few as the placement needs."""
    address: str | None = None
    """host:port of a head, `auto` (one that runs here), `local` (a new one); else RAY_ADDRESS or local."""
    settings: Settings = unless_given(factory=Settings)
    """How the models compute."""
    offload: bool = False
    """Where a device lacks room for all of its roles, keep those in host memory that compute last of all."""
    timeout_s: float = 1800.0
    """Longest wait for any remote call, seconds."""

    def __init_subclass__(cls) -> None:
        """Make the fields of the subclass options."""
        super().__init_subclass__()
        options(cls)

    def __new__(cls, *_args: object, **_options: object) -> Self:
        """Prepare the Lightning strategy before the generated constructor sets fields on it."""
        self = super().__new__(cls)
        SingleDeviceStrategy.__init__(self, device="cpu")
        return self

    def __post_init__(self) -> None:
        """Refuse impossible options, complete `settings`, and begin with nothing placed."""
        complete(self)
        check_options(self)
        engine = self.engine or self.settings.engine or "fsdp"
        self.settings = dataclasses.replace(self.settings, engine=engine)
        self.transport: Transport | None = None
        self.reports: list[CallReport] = []
        """Reports of the calls that the last `drain` waited for."""
        self.history: list[CallReport] | None = None
        """Reports of all calls of a run, once a callback such as Trace has given a list for them."""
        self.workers: dict[str, WorkerGroup] = {}
        """The worker group of each placed role, during a run."""
        self._restore_gc: Callable[[], None] = lambda: None
        self._resume: CheckpointSource | None = None
        self._saved: Path | None = None
        self._cluster: RayCluster | None = None
        self._handles: dict[str, Role] = {}

    @abstractmethod
    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """Say which roles share which devices.

        Args:
            roles: names of the roles in `models`; each stands in one pool, and no other does.
            devices: number of devices; None lets the strategy take as few as it can.

        Raises:
            ValueError: the devices cannot be divided so.
        """

    def models(self) -> dict[str, Role]:
        """The roles to place, paths filled in: those of the algorithm, and any that the strategy adds."""
        return {n: role.following(self.algorithm.main_model) for n, role in self.algorithm.placed().items()}

    def callers(self, workers: Mapping[str, Caller]) -> Mapping[str, Caller]:
        """What receives the calls on each role's handle: its own workers, unless overridden."""
        return workers

    def after_step(self) -> None:
        """Hook after `algorithm.step`: its calls are sent, maybe not finished. Must not wait for them."""

    def metrics(self) -> dict[str, float]:
        """Metrics of an iteration that only the strategy knows; none by default."""
        return {}

    def links(self, devices: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The links over which weights go to other devices; none by default.

        Args:
            devices: global ranks of each role.

        Returns:
            For each role at one end of a link, the global rank of the sender and then those of the receivers.
        """
        return {}

    def layout(self, role: Role, name: str, devices: int) -> ParallelLayout:
        """The layout of a role on the devices of its pool: as its engine divides a model, else replicas only.

        Raises:
            ValueError: the role cannot be divided so.
        """
        if role.path and role.divided:
            return self.settings_of(name).training.layout(devices, name=name)
        return ParallelLayout(d=devices)

    def settings_of(self, name: str) -> Settings:
        """How a role's model computes: by default all as `settings` says."""
        return self.settings.completed()

    @property
    def algorithm(self) -> RLHFAlgorithm:
        """The algorithm that the trainer runs.

        Raises:
            TypeError: the trainer was given another kind of LightningModule.
        """
        found = self.lightning_module
        if not isinstance(found, RLHFAlgorithm):
            raise TypeError(f"{type(self).__name__} places an RLHFAlgorithm, not {type(found)}.")
        return found

    def connect(self, model: LightningModule) -> None:
        """Take the algorithm, and check the trainer's options before Lightning does.

        Raises:
            ValueError: the trainer was told what this strategy or the models decide.
        """
        super().connect(model)
        if model._trainer is not None:
            check_trainer(model._trainer, self)
            silence_lightning(model._trainer, model)
            Requeue.add(model._trainer)

    def setup_environment(self) -> None:
        """Refuse callbacks, placements and clusters that cannot work, before data are read or processes run.

        Raises:
            ValueError: too few devices, a wrong division, no cluster, several controllers, such a callback.
        """
        self.accelerator = CPUAccelerator()  # the controller has no model; Lightning would take a GPU for it
        if (trainer := self.algorithm._trainer) is not None:  # which has the algorithm's callbacks by now
            check_callbacks(trainer)
            monitor_each_validation(trainer)
            keep_tables(trainer)
        check_alone()
        super().setup_environment()
        checks.check_fields(self.algorithm)  # which say what is placed
        release(self)
        self.join()
        roles = self.models()
        self.settings.check_read(apart=any(isinstance(role, Generator) for role in roles.values()))
        pools = self._pools(roles)
        check_layouts(self, roles, pools)
        if self._cluster is not None:
            called = set(self._called())
            self._cluster.check(num_devices([pool for pool in pools if called & {*pool.roles}]))

    def join(self) -> None:
        """Connect to a cluster that is already running, so that its GPUs are counted and not this machine's.

        Raises:
            ValueError: no cluster answers at the address.
        """
        self._cluster = RayCluster(self.address, timeout_s=self.timeout_s)
        if self._cluster.is_elsewhere:
            self._cluster.connect(1)

    def setup(self, trainer: Trainer) -> None:
        """Start the devices, build the roles on them, and hand the algorithm its handles."""
        check_start(self.algorithm)
        check_loaders(trainer)
        resume.end_if_done(trainer)
        self._launch(self._called())
        if self._resume is not None:
            resume.load(self._resume, self._handles, trained=trainer.state.fn == "fit")
            self._resume = None
        super().setup(trainer)

    def _called(self) -> dict[str, Role]:
        """The roles that a run calls: all in a fit."""
        trainer, roles = self.algorithm._trainer, self.models()
        task = trainer.state.fn if trainer else "fit"
        also = () if task == "predict" else self.algorithm.validates
        return {n: r for n, r in roles.items() if task == "fit" or r.needed_to_validate or n in also}

    def _pools(self, roles: Mapping[str, Role]) -> list[ResourcePool]:
        """The pools, reduced to the given roles: each has the devices on which it would train."""
        names = tuple(self.models())
        pools = check_pools(self, names, self.place(names, self.devices or num_gpus() or None))
        kept = [(pool, tuple(role for role in pool.roles if role in roles)) for pool in pools]
        return [dataclasses.replace(pool, roles=names) for pool, names in kept if names]

    def _launch(self, roles: Mapping[str, Role]) -> None:
        placements, transport = self.start(roles), cast(Transport, self.transport)
        self.workers = {n: WorkerGroup(n, transport, p.layout, p.devices) for n, p in placements.items()}
        callers = stepping.refusing_draws(self.algorithm, self.callers(self.workers))
        self._handles = {name: roles[name].bound(caller) for name, caller in callers.items()}
        self.algorithm.bind({n: handle for n, handle in self._handles.items() if n in self.algorithm.roles()})
        self.algorithm.advantages_on = self.settings.advantages
        reads = self.algorithm.reads_only  # then actors score no answers before they learn from them
        self.algorithm.rows_stay = any(not reads or isinstance(roles[n], Critic) for n in self._keeping())

    def _keeping(self) -> list[str]:
        return [name for name in self._handles if self.settings_of(name).training.kept_tokens]

    def start(self, roles: Mapping[str, Role]) -> dict[str, Placement]:
        """Start the devices, set `transport`, build the roles, and return where each one is."""
        cluster = cast(RayCluster, self._cluster)
        self.transport = RayTransport(cluster, timeout_s=self.timeout_s)
        pools = self._pools(roles)
        placements, groups = self.placements(roles, pools)
        cluster.start(pools)
        log_placements(placements, cluster.hosts)
        saved_in = checkpoint_directories(self.algorithm._trainer)
        cluster.prepare(placements, groups, offload=self.offload, saved_in=saved_in)
        self._restore_gc = collect_rarely()
        return placements

    def placements(
        self, roles: Mapping[str, Role], pools: Sequence[ResourcePool]
    ) -> tuple[dict[str, Placement], list[tuple[int, ...]]]:
        """The placement of each role, and the global ranks of every process group that the job needs."""
        placements: dict[str, Placement] = {}
        groups, first = list[tuple[int, ...]](), 0
        for pool in pools:
            members = tuple(range(first, first + pool.num_devices))
            for name in pool.roles:
                role, settings = dataclasses.replace(roles[name]), self.settings_of(name)
                layout = self.layout(roles[name], name, pool.num_devices)
                grouped = settings.training.groups if role.path and role.divided else subgroups
                groups += grouped(layout, members)
                placements[name] = Placement(role, layout, members, settings)
            first += pool.num_devices
        links = self.links({name: placement.devices for name, placement in placements.items()})
        for name, link in links.items():
            placements[name] = dataclasses.replace(placements[name], link=link)
        return placements, [*groups, *links.values()]

    def drain(self) -> list[CallReport]:
        """Wait for all pending remote calls, and return the reports since the last drain.

        Raises:
            WorkerError: a call failed.
        """
        self.reports = cast(Transport, self.transport).drain()
        if self.history is not None:
            self.history += self.reports
        return self.reports

    def on_validation_end(self) -> None:
        """Wait for the calls of a validation, and free what models kept of its rows: no update follows."""
        if self._keeping() and self.algorithm.trainer.state.fn == "fit":
            for role in resume.kept(self._handles).values():
                role.free_kept()
        self.drain()

    def on_predict_end(self) -> None:
        """Wait for the calls of a prediction, or of a test: one may have failed."""
        self.drain()

    on_test_end = on_predict_end
    on_train_start = on_predict_end  # calls of the algorithm's `on_train_start` are no part of an iteration

    def on_exception(self, exception: BaseException) -> None:
        """Release the devices: Lightning would not, where a logger fails as it ends, as on a full disk."""
        self.teardown()

    def teardown(self) -> None:
        """Release the devices, also after a failure; the roles become plain descriptions again."""
        if self.transport is not None:
            self.transport.close()
            self.transport = self.history = None
            self._restore_gc()
        elif self._cluster is not None:
            self._cluster.close()
        if self._saved is not None:
            directories.sweep(self._saved)  # what a device wrote until its end, where a save was interrupted
        if self._handles:
            self.algorithm.bind({n: dataclasses.replace(r) for n, r in self.algorithm.roles().items()})
        self._handles, self.workers, self._resume, self._saved, self._cluster = {}, {}, None, None, None
        super().teardown()

    def model_to_device(self) -> None:
        """Do nothing: the models are on their devices."""

    def save_checkpoint(
        self, checkpoint: dict[str, object], filepath: str | Path, storage_options: object = None
    ) -> None:
        """Write a checkpoint directory, which appears whole or not at all.

        Raises:
            RuntimeError: the run is over and its models are gone, or an iteration is under way.
            ValueError: `on_save_checkpoint` has put something under a key that is taken.
        """
        check_whole(filepath, checkpoint)
        kept = resume.kept(self._handles)
        roles = self.algorithm.roles() if self.lightning_module else {}
        files.check_models(filepath, kept, resume.kept(roles))
        models = {n: {"path": r.path, "head": r.head, "dtype": r.computes_in} for n, r in kept.items()}
        own = {files.MODELS: models, files.PATHS: resume.start_paths(roles), **self.in_flight()}
        state = files.with_own(filepath, plain_options(checkpoint), own)
        self._saved = Path(filepath).absolute()
        with directories.replacing(self._saved) as directory:
            saved = [role.save(directory=directory / name) for name, role in kept.items()]
            files.write_state(directory, state)
            for ranks in saved:
                ranks.fetch()

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, object]:
        """Read the trainer's state; the roles load theirs once they are built.

        Raises:
            ValueError: the checkpoint is incomplete, or belongs to other roles, models or rows.
        """
        trainer, roles = self.algorithm.trainer, self.algorithm.roles()
        source, wanted = CheckpointSource(files.find(checkpoint_path).absolute()), resume.kept(roles)
        resuming = trainer.state.fn == "fit"
        state = files.read_state(source.directory, resuming=resuming)
        resume.check_held(checkpoint_path, source.directory, wanted)
        resume.recount_epochs(state)
        if resuming:
            resume.check_rows(state, trainer)
            resume.warn_of_others(checkpoint_path, state.get(files.MODELS), wanted)
            self.restore_in_flight(cast(dict[str, files.Column], state.pop(files.IN_FLIGHT, {})))
        resume.warn_of_paths(checkpoint_path, state.pop(files.PATHS, {}), roles, resuming=resuming)
        self._resume = source
        return state

    def in_flight(self) -> dict[str, object]:
        """What a checkpoint keeps of prompts that are being answered; nothing by default."""
        return {}

    def restore_in_flight(self, columns: dict[str, files.Column]) -> None:
        """Take prompts that were being answered when the checkpoint was written; by default they are lost."""
        resume.warn_of_rows(columns)

    def load_model_state_dict(self, checkpoint: Mapping[str, object], strict: bool = True) -> None:
        """Restore the algorithm's own tensors; `validate` and `predict` take only those that fit.

        Raises:
            ValueError: the checkpoint is of another algorithm.
        """
        algorithm = self.algorithm
        held, own = cast(Mapping[str, torch.Tensor], checkpoint["state_dict"]), algorithm.state_dict()
        if strict and algorithm.trainer.state.fn == "fit":
            resume.check_tensors(held, own, source=self._resume, name=type(algorithm).__name__)
        super().load_model_state_dict({"state_dict": resume.fitting(held, own)}, strict=strict)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint directory."""
        self._saved = Path(filepath).absolute()
        directories.remove(self._saved)

"""Fields of strategies and algorithms are options: of the shipped ones, and of ones in files of a user."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import GRPO, PPO
from rlhf_lightning.controller import Batch, Metrics, ResourcePool
from rlhf_lightning.engines import VLLM
from rlhf_lightning.strategies import (
    Auto,
    Colocated,
    DeepSpeedChat,
    HybridEngine3D,
    Local,
    NeMoAligner,
    OneStepOff,
    OpenRLHF,
    Pipelined,
    Split,
    Standalone,
)
from rlhf_lightning.strategies.auto import MappingOption
from rlhf_lightning.strategies.hybrid3d import Parallel3D, Sizes
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Reference, Role, Settings
from tests.conftest import ROOT
from tests.unit.rlhf import Rlhf

COMMON = ["devices", "address", "settings", "offload", "timeout_s"]
SMALL = (
    "--data.num_rows",
    "2",
    "--data.num_val_rows",
    "0",
    "--data.batch_size",
    "2",
    "--algo.group_size",
    "2",
)
FIT = ("fit", "--algo", "grpo", "--trainer.max_steps", "1", "--trainer.logger", "false", *SMALL)

MINE = '''
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_lightning.algos import GRPO
from rlhf_lightning.controller.device import Placement
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Reward, Role


@dataclass(frozen=True, kw_only=True)
class Note:
    text: str = "nothing"


class Mine(Local):
    note: Note = field(default_factory=Note)
    """What is written down."""

    def start(self, roles: Mapping[str, Role]) -> dict[str, Placement]:
        Path("seen").write_text(f"{self.note.text} {self.timeout_s} {vars(self).get('times')}")
        return super().start(roles)


@dataclass(frozen=True, kw_only=True)
class Bonus(Reward):
    bonus: float = 0.0
    """Added to each score."""


class Rewarded(GRPO):
    reward: Bonus | None = field(default_factory=Bonus)

    def on_fit_start(self) -> None:
        Path("seen").write_text(f"{self.reward.bonus} {self.reward.http.retries}")


class ByHand(Mine):
    def __init__(self, *, note: Note | None = None, minutes: int = 1) -> None:
        super().__init__(note=note or Note(), num_threads=1)
        self.timeout_s = 60.0 * minutes
'''
ELSEWHERE = '''
from __future__ import annotations

from ones_own import ByHand, Mine


class Later(Mine):
    times: int = 3
    """How often."""


class Inheriting(ByHand):
    times = 5
'''


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two modules of a user in the present directory, one of which knows nothing of the other's types."""
    monkeypatch.chdir(tmp_path)
    Path("ones_own.py").write_text(MINE)
    Path("elsewhere.py").write_text(ELSEWHERE)
    yield
    for name in ("ones_own", "elsewhere"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("strategy", "words", "seen"),
    [
        ("ones_own.Mine", ("note.text", "hello"), "hello 1800.0 None"),
        ("elsewhere.Later", ("note.text", "hello", "times", "4"), "hello 1800.0 4"),
        ("ones_own.ByHand", ("note.text", "hello", "minutes", "2"), "hello 120.0 None"),
        ("elsewhere.Inheriting", ("note.text", "hello", "minutes", "3"), "hello 180.0 None"),
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_strategies_in_files_of_ones_own(
    rlhf: Rlhf, strategy: str, words: tuple[str, ...], seen: str
) -> None:
    options = [f"--strategy.{word}" if i % 2 == 0 else word for i, word in enumerate(words)]
    rlhf.succeeds(*FIT, "--strategy", strategy, *options, "--trainer.default_root_dir", "out")
    assert Path("seen").read_text() == seen


@pytest.mark.usefixtures("elsewhere")
def test_a_role_of_ones_own_has_options_of_its_own(rlhf: Rlhf) -> None:
    words = ("--strategy", "local", "--trainer.default_root_dir", "out")
    mine = ("--algo", "ones_own.Rewarded", "--algo.reward.bonus", "2", "--algo.reward.http.retries", "7")
    rlhf.succeeds(*FIT, *words, *mine)
    assert Path("seen").read_text() == "2.0 7"


@pytest.mark.usefixtures("elsewhere")
def test_help_has_what_stands_below_the_fields_of_all_bases(rlhf: Rlhf) -> None:
    code, out, _ = rlhf.run("fit", "--strategy.help", "elsewhere.Later")
    said = " ".join(out.split())
    assert code == 0
    for text in ("How the models compute. (type: Settings | null", "How often. (type: int, default: 3)"):
        assert text in said
    assert "--strategy.note NOTE What is written down." in said
    assert "--strategy.devices" not in said


@pytest.mark.usefixtures("elsewhere")
def test_a_constructor_by_hand_takes_its_own_options_alone(rlhf: Rlhf) -> None:
    message = rlhf.refused(*FIT, "--strategy", "elsewhere.Inheriting", "--strategy.times", "4")
    assert "'times' is not accepted" in message
    assert "note, minutes" in message


def test_a_constructor_by_hand_goes_for_algorithms_too() -> None:
    class ByHand(GRPO):
        def __init__(self, *, answers: int) -> None:
            super().__init__(group_size=answers)

    class Inheriting(ByHand):
        """Adds nothing."""

    assert Inheriting(answers=3).group_size == 3  # type: ignore[call-arg]


@pytest.mark.parametrize(("base", "whose"), [(PPO, PPO), (GRPO, GRPO), (Split, Strategy)])
def test_a_post_init_begins_with_that_of_its_base(base: type, whose: type) -> None:
    def alone(self: object) -> None:
        vars(self)["mine"] = 1

    def begun(self: object) -> None:
        base.__post_init__(self)  # type: ignore[attr-defined]

    said = rf"^Mine\.__post_init__ leaves out that of {whose.__name__}, .* super\(\)\.__post_init__\(\)"
    with pytest.raises(ValueError, match=said):
        type("Mine", (base,), {"__post_init__": alone})
    type("Later", (type("Mine", (base,), {"__post_init__": begun}),), {})()


def test_a_post_init_alone_has_none_to_begin_with() -> None:
    class Mine(RLHFAlgorithm):
        def __post_init__(self) -> None:
            self.made = True

        def step(self, batch: Batch) -> Metrics:
            raise NotImplementedError

    assert Mine().made


@pytest.mark.usefixtures("elsewhere")
def test_a_command_says_what_a_post_init_leaves_out(rlhf: Rlhf) -> None:
    Path("elsewhere.py").write_text(
        "from rlhf_lightning.algos import PPO\nclass Mine(PPO):\n  def __post_init__(self):\n    self.n = 1\n"
    )
    assert "Mine.__post_init__ leaves out that of PPO" in rlhf.refused("fit", "--algo", "elsewhere.Mine")


def test_the_placement_in_the_documents(rlhf: Rlhf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "patterns.md").read_text(), re.DOTALL)
    Path("documented.py").write_text(code)
    words = ("--strategy", "documented.Mine", "--strategy.devices", "2", "--strategy.reward_devices")
    assert "strategy.reward_devices=0: a role needs a device" in rlhf.refused(*FIT, *words, "0")
    assert "Mine(devices=2): none is left. Try devices=3" in rlhf.refused(*FIT, *words, "2")
    with pytest.raises(AssertionError, match="started Ray"):
        rlhf.run(*FIT, *words, "1")
    sys.modules.pop("documented")


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (Colocated, []),
        (DeepSpeedChat, []),
        (Auto, ["mapping"]),
        (HybridEngine3D, ["parallel"]),
        (NeMoAligner, ["parallel"]),
        (OpenRLHF, ["generator_devices"]),
        (OneStepOff, ["generator_devices", "max_staleness"]),
        (Pipelined, ["generator_devices", "parts"]),
        (Split, ["actor_devices"]),
    ],
)
def test_what_is_no_option_is_no_field(kind: type[Strategy], own: list[str]) -> None:
    assert [field.name for field in dataclasses.fields(kind)] == COMMON + own


def test_every_strategy_is_itself_alone() -> None:
    first, second = Colocated(devices=2), Colocated(devices=2)
    assert first != second
    assert len({first, second, first}) == 2
    with pytest.raises(TypeError, match="positional"):
        OpenRLHF(2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="devices"):
        Local(devices=2)  # type: ignore[call-arg]


def test_what_a_configuration_leaves_null_is_made(rlhf: Rlhf, tmp_path: Path) -> None:
    assert Colocated().settings == Settings(engine="fsdp")
    assert Auto(mapping=None).mapping == MappingOption()  # type: ignore[arg-type]
    assert HybridEngine3D().parallel == Parallel3D()
    assert HybridEngine3D().settings.engine == "megatron"
    given = Settings(advantages="workers")
    assert HybridEngine3D(settings=given).settings == Settings(engine="megatron", advantages="workers")
    assert HybridEngine3D(settings=Settings(engine="megatron")).settings.engine == "megatron"
    out = rlhf.succeeds("fit", "--algo", "sft", "--strategy", "hybrid3d", "--print_config")
    assert "    settings: null\n" in out
    (tmp_path / "mine.yaml").write_text(
        "algo: sft\ndata: {class_path: taskdata, init_args: {completions: true}}\n"
        "strategy: {class_path: hybrid3d, init_args: {settings: null, parallel: null, devices: 0}}\n"
    )
    assert "strategy.devices=0" in rlhf.refused("fit", "-c", str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize("kind", [DeepSpeedChat, HybridEngine3D, NeMoAligner])
def test_a_strategy_with_an_engine_of_its_own_takes_no_other(rlhf: Rlhf, kind: type[Strategy]) -> None:
    """Errors advise `engine fsdp`: one that is taken and not used would lead to the same error again."""
    words = ("--strategy", kind.strategy_name, "--strategy.settings.engine", "fsdp")
    message = rlhf.refused("fit", "--algo", "ppo", *words)
    assert f"strategy.settings.engine=fsdp: {kind.strategy_name} trains with {kind.engine}. Leave" in message


@pytest.mark.parametrize("kind", [OneStepOff, OpenRLHF, Pipelined, Standalone])
def test_models_with_devices_of_their_own_are_not_offloaded(rlhf: Rlhf, kind: type[Strategy]) -> None:
    """It would do nothing, and look as if it saved memory."""
    words = ("--strategy", kind.strategy_name, "--strategy.offload", "true")
    message = rlhf.refused("fit", "--algo", "ppo", *words)
    assert f"{kind.__name__}(offload=True): every model has devices of its own" in message
    assert "try --strategy colocated --strategy.offload true" in message
    assert Colocated(offload=True).offload


class Mine(Split):
    """One's own."""


class Judged(NeMoAligner):
    """Adds a role."""

    def models(self) -> dict[str, Role]:
        return super().models() | {"second": Reference(path="embedded")}


class JudgedToo(HybridEngine3D):
    """Adds a role."""

    def models(self) -> dict[str, Role]:
        return super().models() | {"second": Reference(path="embedded")}


def placed(strategy: Strategy, devices: int | None) -> Sequence[ResourcePool]:
    strategy.connect(PPO())
    pools = strategy.place(tuple(strategy.models()), devices)
    for pool in pools:
        for name in pool.roles:
            strategy.layout(strategy.models()[name], name, pool.num_devices)
    return pools


@pytest.mark.parametrize("strategy", [Judged(parallel=Sizes(t=2)), JudgedToo(parallel=Parallel3D(t=2))])
def test_a_role_that_a_strategy_adds_is_placed(strategy: Strategy) -> None:
    assert "second" in [role for pool in placed(strategy, 4) for role in pool.roles]


@pytest.mark.parametrize(
    ("strategy", "devices", "says"),
    [
        (Mine(), 3, r"^Mine\(devices=3\): 3 devices are not two equal halves"),
        (Judged(), 3, r"^Judged\(devices=3\): p=1 x t=1 = 1 ranks .* Try devices=2"),
        (
            Judged(parallel=Sizes(t=2)),
            6,
            r"^Judged\(devices=6\): p=1 x t=2 = 2 .* multiple of 4 devices.* Try devices=4",
        ),
        (JudgedToo(parallel=Parallel3D(t=2)), 3, r"^JudgedToo\(devices=3\): .* Try devices=2\.$"),
        (
            JudgedToo(parallel=Parallel3D(roles={"critik": Sizes()})),
            2,
            r"^JudgedToo\(parallel\.roles=\['critik'\]\): .* It has actor, critic, reference, reward, second",
        ),
    ],
)
def test_errors_name_the_strategy_that_was_chosen(strategy: Strategy, devices: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        placed(strategy, devices)


def test_threads_below_0() -> None:
    with pytest.raises(ValueError, match=r"^strategy\.num_threads=-1: is negative. Use 0 for the"):
        Local(num_threads=-1)


def test_vllm_that_keeps_its_memory_makes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_lightning.workers.settings.require_vllm", lambda: None)
    awake = Settings(generator="vllm", vllm=VLLM(sleep=False))
    assert not Colocated(settings=awake).settings.vllm.sleep
    with pytest.raises(ValueError, match=r"vllm\.sleep=false with strategy\.offload=true: .* Leave one"):
        Colocated(settings=awake, offload=True)


@pytest.mark.parametrize(
    ("option", "kinds"), [("engine", "fsdp, megatron, zero"), ("generator", "native, vllm")]
)
def test_an_engine_that_there_is_not(option: str, kinds: str) -> None:
    with pytest.raises(ValueError, match=rf"^strategy\.settings\.{option}=deepspeed: .*Try {kinds}\.$"):
        Settings(**{option: "deepspeed"})  # type: ignore[arg-type]


def test_errors_name_the_sizes_that_were_written() -> None:
    with pytest.raises(ValueError, match=r"^Sizes\(p=0, t=1\): every size is at least 1"):
        NeMoAligner(parallel=Sizes(p=0))

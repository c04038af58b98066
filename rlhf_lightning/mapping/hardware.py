"""Clusters as data: peaks of a device and of the links between devices, and the shares that programs reach.

Everything is in SI base units: bytes, seconds, FLOP; bandwidths are of one direction. docs/simulators.md says
where the numbers come from.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from rlhf_lightning.yaml_files import read_yaml


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the peaks that programs reach, each in (0, 1], by kind of work and with the peak it is of."""

    matmul: float = 0.685
    """Large matrix products, of `peak_flops`."""
    attention: float = 0.216
    """Attention kernels over whole sequences, of `peak_flops`."""
    prefill_matmul: float = 0.865
    """Matrix products over whole prompts in a generation engine, of `peak_flops`."""
    decode_matmul: float = 0.69
    """Matrix products with as many rows as sequences are decoded, of `peak_flops`."""
    memory: float = 0.9
    """Element-wise kernels, of `memory_bandwidth`."""
    weights: float = 0.943
    """Reading weights in decoding, of `memory_bandwidth`."""
    kv: float = 0.658
    """Reading keys and values in decoding, of `memory_bandwidth`."""
    intra: float = 0.85
    """Collectives inside a node, of `intra_bandwidth`."""
    inter: float = 0.9
    """Collectives that leave a node, of `inter_bandwidth`."""


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Seconds that do not shrink when the work is spread over more devices."""

    rows: float = 0.0
    """Tokens added to those of every matrix product: filling and draining the device."""
    layer: float = 0.0
    """Each layer's forward pass of a micro-batch, beside its arithmetic: launches that nothing hides."""
    decode_step: float = 0.0
    """Each decoding step: scheduling, preparing inputs, sampling."""
    decode_layer: float = 0.0
    """Each layer of a decoding step: launches."""
    decode_sequence: float = 0.0
    """Each sequence of a decoding step: what the engine does for it on the host."""
    transition: float = 0.0
    """Each transition from training to generation and back, beside the bytes moved: allocation, first
    launches."""
    call: float = 0.0
    """Each call on a model: sending the request, collecting the answer."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A cluster of equal nodes.

    Raises:
        ValueError: a number is not positive.
    """

    name: str
    """What the reports call it."""
    gpus_per_node: int
    """Devices in a node."""
    memory_bytes: float
    """Memory of a device."""
    memory_bandwidth: float
    """Bandwidth of a device's memory."""
    peak_flops: float
    """FLOP/s of dense matrix products in bfloat16; on a CPU in float32."""
    intra_bandwidth: float
    """Bandwidth from a device to the others of its node."""
    inter_bandwidth: float
    """Bandwidth from a node to the others, shared by its devices."""
    intra_latency: float = 4e-6
    """One hop of a collective inside a node."""
    inter_latency: float = 1.5e-5
    """One hop of a collective between nodes."""
    usable_memory: float = 0.92
    """Share of the memory that tensors can take; the rest is contexts, buffers of libraries, fragments."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    """Shares of the peaks."""
    overhead: Overhead = field(default_factory=Overhead)
    """Times that do not shrink."""

    def __post_init__(self) -> None:
        _check(self.name, self, at_least_zero=("intra_latency", "inter_latency"))
        _check(self.name, self.efficiency)
        _check(self.name, self.overhead, at_least_zero=tuple(f.name for f in dataclasses.fields(Overhead)))
        shares = {**dataclasses.asdict(self.efficiency), "usable_memory": self.usable_memory}
        for key, value in shares.items():
            if value > 1:
                raise ValueError(
                    f"{self.name}: {key}={value}: is a share of a peak, so at most 1. Write one such as 0.7."
                )

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device that tensors can take."""
        return self.memory_bytes * self.usable_memory


def _check(name: str, values: object, *, at_least_zero: tuple[str, ...] = ()) -> None:
    for entry in dataclasses.fields(values):  # type: ignore[arg-type]
        value = getattr(values, entry.name)
        if isinstance(value, int | float) and (value < 0 or (value == 0 and entry.name not in at_least_zero)):
            wanted = "not be negative" if entry.name in at_least_zero else "be positive"
            raise ValueError(f"{name}: {entry.name}={value}: must {wanted}.")


_GPU = Overhead(
    rows=102, decode_step=1e-3, decode_layer=1.42e-4, decode_sequence=3.8e-5, transition=0.5, call=0.01
)

A100 = Hardware(
    name="a100-80gb",
    gpus_per_node=8,
    memory_bytes=80e9,
    memory_bandwidth=2.039e12,
    peak_flops=312e12,
    intra_bandwidth=300e9,
    inter_bandwidth=25e9,
    overhead=_GPU,
)
H100 = dataclasses.replace(
    A100,
    name="h100-80gb",
    memory_bandwidth=3.35e12,
    peak_flops=989e12,
    intra_bandwidth=450e9,
    inter_bandwidth=400e9,
)
H200 = dataclasses.replace(H100, name="h200-141gb", memory_bytes=141e9, memory_bandwidth=4.8e12)
CPU = Hardware(
    name="cpu",
    gpus_per_node=2,
    memory_bytes=8e9,
    memory_bandwidth=1e10,
    peak_flops=5e10,
    intra_bandwidth=1e9,
    inter_bandwidth=1e9,
    intra_latency=2e-4,
    inter_latency=2e-4,
    overhead=Overhead(layer=1e-3, decode_step=1e-3, decode_layer=1e-3, transition=0.01, call=3e-3),
)

_UNITS = {
    "memory_bytes": "bytes, such as 80e9",
    "memory_bandwidth": "bytes a second, such as 2e12",
    "peak_flops": "FLOP a second, such as 312e12",
    "intra_bandwidth": "bytes a second, such as 300e9",
    "inter_bandwidth": "bytes a second, such as 25e9",
}
"""Of what is easily written in GB or TFLOP/s."""
_FEW = 1e5
"""What no device has so few of."""
KNOWN = {hardware.name: hardware for hardware in (A100, H100, H200, CPU)}
"""Hardware by name."""


def load(source: str) -> Hardware:
    """The hardware of a known name, or of a YAML file as `save` writes it.

    Raises:
        ValueError: neither a known name nor a file, or the file has other keys.
    """
    if source in KNOWN:
        return KNOWN[source]
    if not Path(source).is_file():
        raise ValueError(
            f"hardware={source!r}: neither a file nor one of {', '.join(KNOWN)}. "
            "Try one of these, or write your own with `rlhf calibrate`."
        )
    values = read_yaml(source, shown=source)
    if not isinstance(values, dict):
        raise ValueError(f"{source}: holds no keys. Begin with `name: ...`, as `rlhf calibrate` writes it.")
    return build(source, values)


def build(source: str, values: dict[str, Any]) -> Hardware:
    """The hardware of nested keys, as `dataclasses.asdict` makes them; a GPU's shares and overheads if none.

    Args:
        source: where they come from, for messages.
        values: by field.

    Raises:
        ValueError: a key is unknown or missing, or holds something else than it should.
    """
    parts: dict[str, Efficiency | Overhead] = {"efficiency": Efficiency(), "overhead": _GPU}
    for key, usual in parts.items():
        given = values.get(key) or {}
        if not isinstance(given, dict):
            raise ValueError(f"{source}: {key} is {given!r}, and has to hold keys of its own.")
        parts[key] = _build(source, type(usual), {**dataclasses.asdict(usual), **given})
    hardware: Hardware = _build(source, Hardware, {**values, **parts})
    return hardware


def save(hardware: Hardware, path: Path) -> None:
    """Write the file that `load` reads."""
    path.write_text(yaml.safe_dump(dataclasses.asdict(hardware), sort_keys=False))


def _build(source: str, kind: type[Any], values: dict[str, Any]) -> Any:  # noqa: ANN401
    fields = {entry.name: entry for entry in dataclasses.fields(kind)}
    if unknown := sorted(values.keys() - fields.keys()):
        raise ValueError(f"{source}: {unknown[0]!r} is unknown. {kind.__name__} has {', '.join(fields)}.")
    missing = [
        name for name, entry in fields.items()
        if name not in values and entry.default is entry.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        raise ValueError(f"{source}: lacks {', '.join(missing)}. Add them, in bytes, seconds and FLOP.")
    return kind(**{name: _value(source, fields[name].type, name, value) for name, value in values.items()})


def _value(source: str, kind: object, name: str, value: object) -> object:
    """A value of a file, of its field's type: a text, a part built before, or a finite number."""
    if kind == "str":
        return str(value)
    if kind not in ("int", "float"):
        return value
    try:
        number = float(value)  # type: ignore[arg-type]  # YAML 1.1 reads 1e9, without a point and a sign, as text
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or (kind == "int" and number % 1):
        wanted = "a whole number" if kind == "int" else "a number"
        raise ValueError(f"{source}: {name} is {value!r}, and has to be {wanted}.")
    if name in _UNITS and 0 < number < _FEW:
        raise ValueError(f"{source}: {name} is {value!r}, and has to be in {_UNITS[name]}.")
    if kind == "int":
        return int(number)
    return number if isinstance(value, str) else value

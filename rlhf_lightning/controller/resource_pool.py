"""What a placement is made of: sets of devices, and the roles on each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ResourcePool:
    """Devices that the roles placed on them share (HybridFlow section 4.1); pools never share a device."""

    name: str
    num_devices: int
    roles: tuple[str, ...]

"""The machines: kinds of devices, and the links between them by level."""

from __future__ import annotations

from typing import Literal

from partita.ir.frozen import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One kind of device.

    Attributes:
        name: Catalogue name, e.g. ``"H100-80GB"`` or ``"cpu"``.
        platform: Which torch backend drives it.
        memory_bytes: Memory that a process may use.
        peak_flops: Dense peak by dtype name, FLOP/s (a multiply-add is 2).
        memory_bandwidth: Bytes per second of the main memory.
        launch_s: Seconds that the smallest operator takes.
        efficiency: Reached fraction of the peak or bandwidth by cost class (`OpKind`).
        source: Where the figures come from, with a date.
        units: Multiprocessors that share the tiles of a product; 0 if tiles do not matter or it is not known.
    """

    name: str
    platform: Literal["cpu", "cuda"]
    memory_bytes: int
    peak_flops: tuple[tuple[str, float], ...]
    memory_bandwidth: float
    launch_s: float
    efficiency: tuple[tuple[str, float], ...] = ()
    source: str = ""
    units: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a message of ``n`` bytes costs: ``latency_s + n / bandwidth``.

    Attributes:
        latency_s: Seconds before the first byte (alpha).
        bandwidth: Bytes per second (1 / beta).
        source: Where the figures come from.
    """

    latency_s: float
    bandwidth: float
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the topology.

    Attributes:
        name: ``host``, ``rack`` or ``site``.
        link: The link between two devices of one group that no inner level connects.
        group_size: Consecutive ranks per group; the outermost level's group holds all.
        group_links: The link of each group in order, where groups differ; empty if ``link`` holds for all. ``link`` is
            then the slowest of them.
        in_network: Whether the level's switches add up what devices send (SHARP, NVLink's multicast).
    """

    name: str
    link: Link
    group_size: int
    group_links: tuple[Link, ...] = ()
    in_network: bool = False

    def link_of(self, group: int) -> Link:
        """Return the link inside the group number ``group``."""
        return self.group_links[group] if group < len(self.group_links) else self.link


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices, by rank, and the levels that connect them.

    Attributes:
        name: The text it was described by, e.g. ``"2x8xH100-80GB"``.
        kinds: The distinct kinds of devices.
        device_kinds: For each rank the index of its kind.
        levels: Innermost first; each level's groups are whole groups of the one before.
    """

    name: str
    kinds: tuple[DeviceSpec, ...]
    device_kinds: tuple[int, ...]
    levels: tuple[Level, ...] = ()

    @property
    def num_devices(self) -> int:
        """Number of ranks."""
        return len(self.device_kinds)

    def device(self, rank: int) -> DeviceSpec:
        """Return the device of ``rank``."""
        return self.kinds[self.device_kinds[rank]]

    def link(self, first: int, second: int) -> Link:
        """Return the link between two ranks: that of the innermost level whose group holds both.

        Raises:
            ValueError: If no level connects them.
        """
        for level in self.levels:
            if first // level.group_size == second // level.group_size:
                return level.link_of(first // level.group_size)
        raise ValueError(f"no level of cluster {self.name!r} connects ranks {first} and {second}")

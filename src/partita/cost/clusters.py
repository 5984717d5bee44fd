"""Read a description of a cluster: ``"4xcpu"``, ``"2x8xH100-80GB"``, ``"8xA100-40GB+8xV100-16GB"`` or a file.

Grammar of the text (blanks around ``+`` are allowed)::

    cluster := pool ("+" pool)*
    pool    := [ [ HOSTS "x" ] DEVICES "x" ] KIND

A kind's devices of one host are connected by the host link of the catalogue, hosts by its network link, and hosts of
unlike pools by the slower of their networks. A file says everything itself, see `partita.cost.cluster_file`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from pathlib import Path
from typing import Literal

from partita.cost.catalogue import DEVICES, HOST_LINKS, NETWORK_LINKS, chip_of
from partita.cost.cluster_file import FILE_SUFFIXES, read_cluster_file
from partita.cost.lookup import MAX_DEVICES, cpu_device, find_link, known_name
from partita.errors import CostError
from partita.ir.cluster import Cluster, Level, Link

__all__ = ["cpu_device", "default_cluster", "match_device", "parse_cluster"]


@dataclass(frozen=True, slots=True)
class _Pool:
    """``hosts`` hosts with ``devices`` devices of one kind each."""

    hosts: int
    devices: int
    kind: str


def parse_cluster(description: str | Path) -> Cluster:
    """Read a cluster's description.

    Args:
        description: Text in the grammar above, or the path of a file (it ends in ``.toml``, ``.yaml`` or ``.yml``).

    Returns:
        The cluster; ranks are numbered in the order of the text, hosts outermost.

    Raises:
        CostError: The text cannot be read; says which part, and the names that are known.

    Example:
        >>> cluster = parse_cluster("2x8xH100-80GB")
        >>> cluster.num_devices, cluster.link(0, 7) == cluster.link(8, 15), cluster.link(0, 8).bandwidth
        (16, True, 37000000000.0)
    """
    text = str(description).strip()
    if isinstance(description, Path) or text.lower().endswith(FILE_SUFFIXES):
        return read_cluster_file(Path(text))
    pools = tuple(_parse_pool(part.strip(), text) for part in text.split("+"))
    return _build(pools)


def default_cluster(
    *,
    platform: Literal["cpu", "cuda"] = "cpu",
    device_name: str = "",
    memory_bytes: int | None = None,
) -> Cluster:
    """Describe the running job, or this machine if no launcher has set ``WORLD_SIZE``.

    Args:
        platform: What the processes run on; the caller, which may import torch, decides.
        device_name: The CUDA device's name as torch tells it, e.g. ``"NVIDIA H100 80GB HBM3"``.
        memory_bytes: The CUDA device's memory.

    Returns:
        ``WORLD_SIZE`` devices, ``LOCAL_WORLD_SIZE`` per host if that divides them.

    Raises:
        CostError: The environment is malformed, or the CUDA device is not in the catalogue.
    """
    world = _environment_count("WORLD_SIZE", 1)
    local = _environment_count("LOCAL_WORLD_SIZE", world)
    kind = "cpu" if platform == "cpu" else match_device(device_name, memory_bytes)
    hosts, devices = (world // local, local) if world % local == 0 else (1, world)
    return _build((_Pool(hosts, devices, kind),))


def match_device(device_name: str, memory_bytes: int | None = None) -> str:
    """Return the catalogue's name for a CUDA device: the same chip, and the memory size nearest to ``memory_bytes``.

    Raises:
        CostError: No such chip.
    """
    words = device_name.replace("-", " ").upper().split()
    words += [first + second for first, second in pairwise(words)]  # torch says "RTX 4090"
    chips = {name: chip_of(name).upper().split("-") for name in DEVICES}
    found = [name for name, chip in chips.items() if all(word in words for word in chip)]
    if not found:
        raise CostError(
            f"the device {device_name!r} is not in the catalogue; known: {', '.join(DEVICES)}",
            hint="describe it in a cluster file (a [[kinds]] table) and pass the file as cluster",
        )
    most = max(len(chips[name]) for name in found)  # "H100 PCIe" rather than "H100"
    exact = [DEVICES[name] for name in found if len(chips[name]) == most]
    if memory_bytes is None:
        return exact[0].name
    return min(exact, key=lambda device: abs(device.memory_bytes - memory_bytes)).name


_USAGE = (
    "write e.g. '4xcpu', '8xH100-80GB', '2x8xH100-80GB' (hosts x devices), 'A+B' for two pools, "
    "or the path of a .toml or .yaml file"
)


def _parse_pool(part: str, text: str) -> _Pool:
    if not part:
        raise CostError(f"the cluster {text!r} has an empty part", hint=_USAGE)
    words = part.split("x")
    numbers: list[str] = []
    while len(words) > 1 and words[0].strip().isdecimal():
        numbers.append(words.pop(0).strip())
    kind = "x".join(words).strip()
    if len(numbers) > 2:
        raise CostError(
            f"{part!r} in the cluster {text!r} has {len(numbers)} counts; at most hosts x devices", hint=_USAGE
        )
    counts = [int(number) for number in numbers]
    if any(not 0 < count <= MAX_DEVICES for count in counts):
        raise CostError(f"a count in {part!r} of the cluster {text!r} is not between 1 and {MAX_DEVICES}", hint=_USAGE)
    hosts, devices = (1, 1, *counts)[-2:]
    return _Pool(hosts, devices, known_name(kind, DEVICES, "device", text, _USAGE))


def _build(pools: tuple[_Pool, ...]) -> Cluster:
    kinds = tuple(dict.fromkeys(pool.kind for pool in pools))
    host_sizes = [pool.devices for pool in pools for _ in range(pool.hosts)]
    total = sum(host_sizes)
    if total > MAX_DEVICES:
        raise CostError(f"a cluster of {total} devices is more than {MAX_DEVICES}")
    levels: list[Level] = []
    # Ranks are grouped in equal runs: a shorter last host is a shorter last run, otherwise hosts are cut alike.
    equal = len(set(host_sizes[:-1])) <= 1 and host_sizes[-1] <= host_sizes[0]
    group = host_sizes[0] if equal else gcd(*host_sizes)
    ranks = [pool.kind for pool in pools for _ in range(pool.hosts * pool.devices)]
    if group > 1:
        levels.append(_host_level(ranks, group))
    if total > group:
        levels.append(Level(name="site", link=_slowest(NETWORK_LINKS[kind] for kind in kinds), group_size=total))
    return Cluster(
        name="+".join(_pool_name(pool) for pool in pools),
        kinds=tuple(cpu_device() if kind == "cpu" else DEVICES[kind] for kind in kinds),
        device_kinds=tuple(kinds.index(kind) for kind in ranks),
        levels=tuple(levels),
    )


def _host_level(ranks: Sequence[str], group: int) -> Level:
    """Connect each group of ranks by the link of its kind; a group is a host or a part of one, so it has one kind."""
    names = [HOST_LINKS[ranks[first]] for first in range(0, len(ranks), group)]
    links = tuple(find_link(name) for name in names) if len(set(names)) > 1 else ()
    return Level(name="host", link=_slowest(names), group_size=group, group_links=links)


def _pool_name(pool: _Pool) -> str:
    return f"{pool.hosts}x{pool.devices}x{pool.kind}" if pool.hosts > 1 else f"{pool.devices}x{pool.kind}"


def _slowest(names: Iterable[str]) -> Link:
    return min((find_link(name) for name in names), key=lambda link: link.bandwidth)


def _environment_count(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not 0 < int(text) <= MAX_DEVICES:
        raise CostError(f"the environment variable {name} is {text!r}, not a number of processes")
    return int(text)

"""Read a cluster file, which says everything itself.

The format is TOML, or the same tables as YAML where PyYAML is installed (``.yaml``, ``.yml``)::

name = "lab"
[[devices]]            # in the order of the ranks
kind = "A100-40GB"     # a name of the catalogue or of [[kinds]]
count = 8
[[kinds]]              # optional: devices that the catalogue lacks
name = "L4-24GB"
platform = "cuda"
memory = "24GB"
memory_bandwidth = "300GB/s"
launch = "5us"
peak_tflops = { float32 = 30.3, bfloat16 = 121.0 }
[[levels]]             # innermost first: hosts, racks, sites
name = "host"
group_size = 4         # ranks; the outermost level may leave it out
link = "PCIe4"         # or: latency = "10us", bandwidth = "24GB/s"; or links = ["PCIe4", "NVLink3"], one per group
in_network = false     # whether the switches add up what devices send
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from math import ceil
from pathlib import Path

from partita.cost.catalogue import CPU, DEVICES, LINKS
from partita.cost.lookup import MAX_DEVICES, cpu_device, find_link, known_name
from partita.errors import CostError
from partita.ir.cluster import Cluster, DeviceSpec, Level, Link
from partita.units import parse_bytes, parse_seconds

FILE_SUFFIXES = (".toml", ".yaml", ".yml")
"""How the name of a cluster file ends."""
_KIND_ENTRIES = "name platform memory memory_bandwidth launch peak_tflops efficiency source units"
_LEVEL_ENTRIES = "name group_size link latency bandwidth links in_network"


def read_cluster_file(path: Path) -> Cluster:
    """Read a cluster file.

    Raises:
        CostError: The file cannot be read, an entry is unknown, missing or of a wrong type, or no level connects all
            devices.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CostError(f"the cluster file {str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CostError(f"the cluster file {str(path)!r} is not UTF-8 text: {error.reason}") from error
    data = _yaml(text, path) if path.suffix.lower() in {".yaml", ".yml"} else _toml(text, path)
    root = _Table(data, f"the cluster file {path.name!r}", "name devices kinds levels")
    own = [_kind(table) for table in root.tables("kinds", _KIND_ENTRIES)]
    known = {**DEVICES, **{kind.name: kind for kind in own}}
    ranks: list[str] = []
    for table in root.tables("devices", "kind count"):
        ranks += [known_name(table.text("kind"), known, "device", path.name)] * table.count("count", 1)
    if not ranks:
        raise CostError(f"{root.place} describes no device", hint="add a [[devices]] table with kind and count")
    kinds = tuple(dict.fromkeys(ranks))
    own_names = {kind.name for kind in own}
    return Cluster(
        name=root.text("name", path.stem),
        kinds=tuple(cpu_device() if name == "cpu" and name not in own_names else known[name] for name in kinds),
        device_kinds=tuple(kinds.index(name) for name in ranks),
        levels=_levels(root, len(ranks)),
    )


def _toml(text: str, path: Path) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CostError(f"the cluster file {str(path)!r} is not TOML: {error}") from error


def _yaml(text: str, path: Path) -> object:
    try:
        yaml = import_module("yaml")
    except ImportError as error:
        raise CostError(
            f"the cluster file {str(path)!r} is YAML, which needs PyYAML, and PyYAML is not installed",
            hint="pip install pyyaml, or write the same tables as TOML",
        ) from error
    try:
        data: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CostError(f"the cluster file {str(path)!r} is not YAML: {error}") from error
    return {} if data is None else data


def _kind(table: _Table) -> DeviceSpec:
    platform = table.text("platform", "cuda")
    if platform not in {"cpu", "cuda"}:
        raise CostError(f"platform in {table.place} is {platform!r}; known: cpu, cuda")
    base = CPU if platform == "cpu" else DEVICES["A100-40GB"]
    return DeviceSpec(
        name=table.text("name"),
        platform="cpu" if platform == "cpu" else "cuda",
        memory_bytes=table.size("memory"),
        peak_flops=table.rates("peak_tflops", 1e12, needed=True),
        memory_bandwidth=float(table.size("memory_bandwidth")),
        launch_s=table.seconds("launch", "5us"),
        efficiency=tuple({**dict(base.efficiency), **dict(table.rates("efficiency", 1.0, needed=False))}.items()),
        source=table.text("source", f"given in {table.place}"),
        units=table.count("units", 1) if "units" in table.data else 0,
    )


def _levels(root: _Table, num_devices: int) -> tuple[Level, ...]:
    levels: list[Level] = []
    for table in root.tables("levels", _LEVEL_ENTRIES):
        size = table.count("group_size", num_devices)
        inner = levels[-1].group_size if levels else 1
        if size % inner and size < num_devices:
            raise CostError(f"group_size {size} of {table.place} is not a multiple of the level's before, {inner}")
        if levels and size <= inner:
            raise CostError(f"group_size {size} of {table.place} is not above the level's before, {inner}")
        own = [_known_link(name, root) for name in table.texts("links")]
        groups = ceil(num_devices / size)
        if own and len(own) != groups:
            raise CostError(f"{table.place} has {len(own)} links for {groups} groups of {size} ranks")
        levels.append(
            Level(
                name=table.text("name"),
                link=min(own, key=lambda link: link.bandwidth) if own else _own_link(table, root),
                group_size=size,
                group_links=tuple(own),
                in_network=table.flag("in_network"),
            )
        )
    if num_devices > 1 and (not levels or levels[-1].group_size < num_devices):
        raise CostError(
            f"{root.place} has {num_devices} devices and no level that connects all of them",
            hint=f"add a [[levels]] table with group_size = {num_devices}",
        )
    return tuple(levels)


def _known_link(name: str, root: _Table) -> Link:
    return find_link(known_name(name, LINKS, "link", root.place))


def _own_link(table: _Table, root: _Table) -> Link:
    """Read ``link``, or ``latency`` and ``bandwidth``."""
    if "link" not in table.data:
        source = f"given in {table.place}"
        return Link(latency_s=table.seconds("latency"), bandwidth=float(table.size("bandwidth")), source=source)
    both = sorted({"latency", "bandwidth"} & set(table.data))
    if both:
        raise CostError(f"{table.place} has a link and {both[0]!r}", hint="give one or the other")
    return _known_link(table.text("link"), root)


class _Table:
    """A table of a cluster file, with entries read by type and errors that name the place."""

    def __init__(self, data: object, place: str, allowed: str) -> None:
        if not isinstance(data, Mapping):
            raise CostError(f"{place} is not a table")
        self.data = data
        self.place = place
        unknown = [str(name) for name in data if name not in allowed.split()]
        if unknown:
            near = get_close_matches(unknown[0], allowed.split(), n=1)
            hint = f"did you mean {near[0]!r}?" if near else ""
            raise CostError(f"unknown entry {unknown[0]!r} in {place}; known: {', '.join(allowed.split())}", hint=hint)

    def text(self, name: str, default: str | None = None) -> str:
        value = self.data.get(name, default)
        if not isinstance(value, str) or not value:
            raise CostError(f"{self.place} needs {name!r} as text, it has {value!r}")
        return value

    def texts(self, name: str) -> list[str]:
        value = self.data.get(name, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise CostError(f"{self.place} needs {name!r} as a list of text, it has {value!r}")
        return value

    def flag(self, name: str) -> bool:
        value = self.data.get(name, False)
        if not isinstance(value, bool):
            raise CostError(f"{self.place} needs {name!r} as true or false, it has {value!r}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_DEVICES:
            raise CostError(f"{self.place} needs {name!r} as a whole number from 1 to {MAX_DEVICES}, it has {value!r}")
        return value

    def size(self, name: str) -> int:
        """Read bytes, or bytes per second."""
        try:
            size = parse_bytes(self.text(name).removesuffix("/s"))
        except ValueError as error:
            raise CostError(f"{name!r} in {self.place}: {error}") from error
        if size <= 0:
            raise CostError(f"{name!r} in {self.place} must be above 0")
        return size

    def seconds(self, name: str, default: str | None = None) -> float:
        try:
            return parse_seconds(self.text(name, default))
        except ValueError as error:
            raise CostError(f"{name!r} in {self.place}: {error}") from error

    def rates(self, name: str, unit: float, *, needed: bool) -> tuple[tuple[str, float], ...]:
        """Read a table of positive numbers."""
        value = self.data.get(name, {})
        if not isinstance(value, Mapping) or (needed and not value):
            raise CostError(f"{self.place} needs {name!r} as a table of numbers")
        for entry, rate in value.items():
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < float("inf"):
                raise CostError(f"{name}.{entry} in {self.place} is {rate!r}, not a positive number")
        return tuple(sorted((str(entry), float(rate) * unit) for entry, rate in value.items()))

    def tables(self, name: str, allowed: str) -> list[_Table]:
        value = self.data.get(name, [])
        if not isinstance(value, list):
            raise CostError(f"{name!r} in {self.place} must be a list of tables, [[{name}]]")
        return [
            _Table(entry, f"[[{name}]] {number + 1} of {self.place}", allowed) for number, entry in enumerate(value)
        ]

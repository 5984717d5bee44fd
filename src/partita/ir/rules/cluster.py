"""Rules of clusters."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

from partita.ir.cluster import Cluster
from partita.ir.rules import Findings, Rule


def _has_devices(cluster: Cluster) -> Findings:
    if not cluster.device_kinds:
        yield "device_kinds", "there is no device"


def _kinds_exist(cluster: Cluster) -> Findings:
    for rank, kind in enumerate(cluster.device_kinds):
        if not 0 <= kind < len(cluster.kinds):
            yield f"device_kinds[{rank}]", f"kind {kind} of {len(cluster.kinds)}"


def _kind_names_differ(cluster: Cluster) -> Findings:
    seen: dict[str, int] = {}
    for index, device in enumerate(cluster.kinds):
        if seen.setdefault(device.name, index) != index:
            yield f"kinds[{index}].name", f"{device.name!r} is also the name of kind {seen[device.name]}"


def _figures_positive(cluster: Cluster) -> Findings:
    for index, device in enumerate(cluster.kinds):
        figures = [("memory_bytes", device.memory_bytes), ("memory_bandwidth", device.memory_bandwidth)]
        figures += [(f"peak_flops.{dtype}", peak) for dtype, peak in device.peak_flops]
        for name, figure in figures:
            if not figure > 0:
                yield f"kinds[{index}].{name}", f"{figure} is not positive"
        if not device.launch_s >= 0:
            yield f"kinds[{index}].launch_s", f"{device.launch_s} s is negative"


def _efficiencies_are_fractions(cluster: Cluster) -> Findings:
    for index, device in enumerate(cluster.kinds):
        for name, fraction in device.efficiency:
            if not 0 < fraction <= 1:
                yield f"kinds[{index}].efficiency.{name}", f"{fraction} is not in (0, 1]"


def _links_cost_time(cluster: Cluster) -> Findings:
    for index, level in enumerate(cluster.levels):
        own = [(f"group_links[{group}]", link) for group, link in enumerate(level.group_links)]
        for name, link in [("link", level.link), *own]:
            if not link.latency_s >= 0:
                yield f"levels[{index}].{name}.latency_s", f"{link.latency_s} s is negative"
            if not link.bandwidth > 0:
                yield f"levels[{index}].{name}.bandwidth", f"{link.bandwidth} B/s is not positive"


def _every_group_has_its_link(cluster: Cluster) -> Findings:
    for index, level in enumerate(cluster.levels):
        groups = ceil(cluster.num_devices / level.group_size) if level.group_size > 0 else 0
        if level.group_links and len(level.group_links) != groups:
            yield f"levels[{index}].group_links", f"{len(level.group_links)} links for {groups} groups"


def _levels_nest(cluster: Cluster) -> Findings:
    for index, level in enumerate(cluster.levels):
        if level.group_size < 1:
            yield f"levels[{index}].group_size", f"{level.group_size} is not positive"
    for index, (inner, outer) in enumerate(pairwise(cluster.levels)):
        if inner.group_size > 0 and (outer.group_size % inner.group_size or outer.group_size <= inner.group_size):
            text = f"{outer.group_size} ranks are not two or more whole groups of {inner.group_size} of {inner.name!r}"
            yield f"levels[{index + 1}].group_size", text


def _outermost_level_holds_all(cluster: Cluster) -> Findings:
    reach = cluster.levels[-1].group_size if cluster.levels else 1
    if reach < cluster.num_devices:
        yield "levels", f"the outermost group has {reach} of {cluster.num_devices} ranks"


STRUCTURE = (
    Rule("C001", "a cluster has devices", _has_devices),
    Rule("C002", "every device is of a known kind", _kinds_exist),
)
MEANING = (
    Rule("C003", "kinds of devices have different names", _kind_names_differ),
    Rule("C004", "memory, bandwidth and peaks are positive, and launching takes no negative time", _figures_positive),
    Rule("C005", "an efficiency is a fraction in (0, 1]", _efficiencies_are_fractions),
    Rule("C006", "a link has a positive bandwidth and no negative latency", _links_cost_time),
    Rule("C007", "each level's groups are whole groups of the level below", _levels_nest),
    Rule("C008", "the outermost level connects all ranks", _outermost_level_holds_all),
    Rule("C009", "where groups of a level differ, each has its link", _every_group_has_its_link),
)

"""What was measured on one kind of device, and the file it is kept in.

A table holds, for one device and one set of software versions (`ProfileTable.environment`):

* `Timing` of sets of items (blocks, operators), by the digest of their structure and the rows of the microbatch;
* a `Curve` (seconds by bytes) per link level, per layout of an all-reduce, and per optimiser.

Between two measured sizes a curve is the straight line through them, so each range of sizes has its own latency and
bandwidth (alpha and beta): one line cannot follow a library that changes its algorithm with the size.  The file is JSON
and can be shared; in the cache directory there is one per environment.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import Any

from partita.cost.measure_file import cache_folder, write_at_once
from partita.errors import CostError

SCHEMA, VERSION = "partita.profile", 1
"""Name and version of the file's format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Repeated measurements of one thing, seconds.

    Attributes:
        value: Lower quartile: what it takes when nothing interferes, without trusting a single lucky sample.
        low: The fastest.
        high: Upper quartile.
        repeats: Number of samples.
        outliers: Samples beyond the upper quartile by more than 1.5 times the distance of the quartiles.
    """

    value: float
    low: float
    high: float
    repeats: int
    outliers: int = 0

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Return the spread of at least one sample."""
        ordered = sorted(samples)
        lower, upper = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
        limit = upper + 1.5 * (upper - lower)
        outliers = sum(sample > limit for sample in ordered)
        return cls(value=lower, low=ordered[0], high=upper, repeats=len(ordered), outliers=outliers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One set of items at one number of rows.

    Attributes:
        label: For people.
        forward: The forward, with gradients recorded as in training.
        backward: The backward, gradients of parameters accumulated; zeros where nothing is trainable.
        input_backward: Only the gradients of what the items received (``I``); None if not asked for.
        weight_backward: The rest of the backward (``W``); None if not asked for.
    """

    label: str
    forward: Spread
    backward: Spread
    input_backward: Spread | None = None
    weight_backward: Spread | None = None


@dataclass(frozen=True, slots=True)
class Range:
    """A range of sizes in which ``seconds = latency_s + bytes * seconds_per_byte``.

    Attributes:
        from_bytes: Smallest size.
        latency_s: Alpha.
        seconds_per_byte: Beta.
    """

    from_bytes: int
    latency_s: float
    seconds_per_byte: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by bytes.

    Attributes:
        points: (bytes, seconds) as measured, by ascending bytes.
    """

    points: tuple[tuple[int, float], ...]

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of a size: linear between measured ones, never falling with the size.

        Above the largest size the last range goes on; below the smallest one takes as long as the smallest.
        """
        sizes = [size for size, _ in self.points]
        times = list(accumulate((time for _, time in self.points), max))
        at = bisect_left(sizes, num_bytes)
        if at == 0 or len(sizes) == 1:
            return times[0] if num_bytes <= sizes[0] else times[0] * num_bytes / max(sizes[0], 1)
        at = min(at, len(sizes) - 1)
        slope = (times[at] - times[at - 1]) / (sizes[at] - sizes[at - 1])
        return times[at] + slope * (num_bytes - sizes[at])

    def ranges(self) -> tuple[Range, ...]:
        """Return alpha and beta by range of sizes."""
        times = list(accumulate((time for _, time in self.points), max))
        found = []
        for (size, _), (after, _), time, later in zip(self.points, self.points[1:], times, times[1:], strict=False):
            slope = (later - time) / (after - size)
            found.append(Range(from_bytes=size, latency_s=time - slope * size, seconds_per_byte=slope))
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTable:
    """Measurements of one environment.

    Attributes:
        device: Catalogue name of the device, e.g. ``"H100-80GB"`` or ``"cpu"``.
        environment: Device, versions and settings that the figures hold for, as text.
        date: ISO date of the last measurement.
        cores: Cores that the measuring process could use (CPU), which the ranks of a host share.
        timings: By digest of the structure and rows.
        skipped: What was not measured, and why, by digest.
        links: By name of the level (``host``, ``site``).
        reductions: All-reduces by layout: the parts per level, e.g. ``"4"`` or ``"2x8"``.
        updates: Optimiser updates by name; bytes are those of the updated parameters.
        complete: Keys of requests for which everything is here, so that the model need not be captured to know it.
    """

    device: str
    environment: str
    date: str = ""
    cores: int = 1
    timings: Mapping[tuple[str, int], Timing] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, Curve] = field(default_factory=dict)
    reductions: Mapping[str, Curve] = field(default_factory=dict)
    updates: Mapping[str, Curve] = field(default_factory=dict)
    complete: tuple[str, ...] = ()

    def rows(self, digest: str) -> tuple[int, ...]:
        """Return the rows at which something was measured, ascending."""
        return tuple(sorted(rows for found, rows in self.timings if found == digest))

    def joined(self, other: ProfileTable) -> ProfileTable:
        """Return both tables' figures; of two for one thing the other's.

        Raises:
            CostError: If they are of different environments.
        """
        if other.environment != self.environment:
            raise CostError(
                f"a profile of {other.environment!r} cannot join one of {self.environment!r}",
                hint="profile on the device and with the versions that the plan is for",
            )
        return replace(
            other,
            timings={**self.timings, **other.timings},
            skipped={**self.skipped, **other.skipped},
            links={**self.links, **other.links},
            reductions={**self.reductions, **other.reductions},
            updates={**self.updates, **other.updates},
            complete=tuple(sorted({*self.complete, *other.complete})),
        )

    def only(self, keys: Iterable[tuple[str, int]]) -> ProfileTable:
        """Return the table with these timings only."""
        wanted = set(keys)
        return replace(self, timings={key: timing for key, timing in self.timings.items() if key in wanted})

    def save(self, path: str | Path | None = None) -> Path:
        """Write the table as JSON: the same table gives the same bytes.

        Args:
            path: The file, or None for the cache (`cached_path`).

        Returns:
            The file.
        """
        target = cached_path(self.environment) if path is None else Path(path)
        data = asdict(self) | {"schema": SCHEMA, "version": VERSION}
        data["timings"] = {f"{digest}@{rows}": asdict(timing) for (digest, rows), timing in self.timings.items()}
        write_at_once(target, json.dumps(data, indent=1, sort_keys=True) + "\n")
        return target

    @classmethod
    def load(cls, path: str | Path) -> ProfileTable:
        """Read a table.

        Raises:
            CostError: If the file is no table of this version.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise CostError(f"the profile {path} cannot be read: {error.strerror}", hint=_AGAIN) from error
        except ValueError as error:
            raise CostError(f"the profile {path} is not JSON: {error}", hint=_AGAIN) from error
        if not isinstance(data, Mapping) or (data.get("schema"), data.get("version")) != (SCHEMA, VERSION):
            raise CostError(f"{path} is not a profile of version {VERSION}", hint=_AGAIN)
        try:
            return _read(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"{type(error).__name__}: {error}"
            raise CostError(f"the profile {path} has an entry of the wrong form: {text}", hint=_AGAIN) from error

    @classmethod
    def cached(cls, device: str, environment: str) -> ProfileTable:
        """Return what the cache has for an environment; an empty table if there is nothing, or nothing readable."""
        path = cached_path(environment)
        try:
            found = cls.load(path) if path.exists() else None
        except CostError:
            found = None  # a damaged cache is measured again
        if found is None or found.environment != environment:
            return cls(device=device, environment=environment)
        return found


_AGAIN = "run `partita profile` again"


def cached_path(environment: str) -> Path:
    """Return the cache's file for an environment."""
    return cache_folder() / "profiles" / f"{sha256(environment.encode()).hexdigest()[:16]}.json"


def _read(data: Mapping[str, Any]) -> ProfileTable:
    timings = {}
    for key, entry in data["timings"].items():
        digest, _, rows = key.partition("@")
        timings[digest, int(rows)] = Timing(
            label=str(entry["label"]),
            forward=_spread(entry["forward"]),
            backward=_spread(entry["backward"]),
            **{
                name: None if entry.get(name) is None else _spread(entry[name])
                for name in ("input_backward", "weight_backward")
            },
        )
    curves = {name: {key: _curve(value) for key, value in data[name].items()} for name in _CURVES}
    return ProfileTable(
        device=str(data["device"]),
        environment=str(data["environment"]),
        date=str(data["date"]),
        cores=int(data["cores"]),
        timings=timings,
        complete=tuple(map(str, data["complete"])),
        skipped={str(key): str(value) for key, value in data["skipped"].items()},
        **curves,
    )


_CURVES = ("links", "reductions", "updates")


def _spread(entry: Mapping[str, Any]) -> Spread:
    times = {name: float(entry[name]) for name in ("value", "low", "high")}
    if not all(isfinite(time) and time >= 0 for time in times.values()):
        raise ValueError(f"a time is not a number of seconds: {dict(entry)}")
    return Spread(**times, repeats=int(entry["repeats"]), outliers=int(entry["outliers"]))


def _curve(entry: Mapping[str, Any]) -> Curve:
    points = tuple((int(size), float(time)) for size, time in entry["points"])
    sizes = [size for size, _ in points]
    if not points or sizes != sorted(set(sizes)) or not all(isfinite(time) and time >= 0 for _, time in points):
        raise ValueError(f"not a curve: {points}")
    return Curve(points)

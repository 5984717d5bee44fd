"""Devices and links by name, with the source and date of every figure.

Units are decimal, as on datasheets (1 GB is 10**9 bytes); peaks are dense. Datasheets were last read in November 2026.
What a device *reaches* of its peak is its ``efficiency`` by cost class, from public measurements on A100 and H100
(Vidur's per-operator tables: products of 512 tokens and more reach 0.65-0.76 and 0.64-0.78 of the peak).
"""

from __future__ import annotations

from partita.ir.cluster import DeviceSpec, Link

GB = 10**9
TERA = 1e12

# float32 products run on the vector units unless the user allows TF32, which PyTorch does not by default.
_GPU_EFFICIENCY: tuple[tuple[str, float], ...] = (
    ("matmul", 0.70),
    ("convolution", 0.55),
    ("attention", 0.50),
    ("scan", 0.40),
    ("pointwise", 0.80),
    ("reduction", 0.70),
    ("loss", 0.60),
    ("norm", 0.50),
    ("embedding", 0.20),
    ("random", 0.60),
    ("movement", 0.80),
    ("memory", 0.80),
)
"""Fraction of the peak (first four) or of the memory bandwidth (the rest; ``memory`` is what the first four reach)."""

_CPU_EFFICIENCY: tuple[tuple[str, float], ...] = (
    ("matmul", 0.95),
    ("convolution", 0.50),
    ("attention", 0.50),
    ("scan", 0.60),
    ("pointwise", 0.80),
    ("reduction", 0.70),
    ("loss", 0.40),
    ("norm", 0.50),
    ("embedding", 0.40),
    ("random", 0.20),
    ("movement", 0.80),
    ("memory", 0.90),
)
"""The same for a CPU, whose peak is a *reached* product rate: convolutions vary from 10 to 234 GFLOP/s by shape, random
numbers and transcendental functions reach 2-28 GB/s where additions reach 37-72."""

_V100 = "NVIDIA V100 datasheet, January 2020 (SXM2)"
_A100 = "NVIDIA A100 datasheet, June 2021 (SXM)"
_H100 = "NVIDIA H100 datasheet, 2023 (SXM, dense)"
_H200 = "NVIDIA H200 datasheet, 2024 (SXM, dense)"
_EFFICIENCY_SOURCE = "; efficiencies: Vidur's public operator tables"


def _gpu(name: str, memory_gb: int, bandwidth: float, peaks: dict[str, float], source: str) -> DeviceSpec:
    """Describe a CUDA device; peaks in TFLOP/s by dtype."""
    return DeviceSpec(
        name=name,
        platform="cuda",
        memory_bytes=memory_gb * GB,
        peak_flops=tuple((dtype, peak * TERA) for dtype, peak in sorted(peaks.items())),
        memory_bandwidth=bandwidth,
        launch_s=5e-6,
        efficiency=_GPU_EFFICIENCY,
        source=source + _EFFICIENCY_SOURCE,
    )


_V100_PEAKS = {"float16": 125.0, "float32": 15.7, "float64": 7.8}
_A100_PEAKS = {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5, "float64": 9.7, "int8": 624.0}
_H100_PEAKS = {
    "bfloat16": 989.0,
    "float16": 989.0,
    "float32": 67.0,
    "float64": 34.0,
    "float8_e4m3fn": 1979.0,
    "float8_e5m2": 1979.0,
    "int8": 1979.0,
}

CPU = DeviceSpec(
    name="cpu",
    platform="cpu",
    memory_bytes=16 * GB,
    peak_flops=(("bfloat16", 30e9), ("float16", 15e9), ("float32", 60e9), ("float64", 30e9)),
    memory_bandwidth=8e9,
    launch_s=8e-6,
    efficiency=_CPU_EFFICIENCY,
    source="built in: one thread of a 2-core server VM, rounded down (60 GFLOP/s, 8 GB/s; 5 us per graph node and 3 us "
    "per kernel); `partita doctor` measures this machine",
)
"""A CPU process when nothing was measured."""

DEVICES: dict[str, DeviceSpec] = {
    device.name: device
    for device in (
        _gpu("V100-16GB", 16, 900e9, _V100_PEAKS, _V100),
        _gpu("V100-32GB", 32, 900e9, _V100_PEAKS, _V100),
        _gpu("A100-40GB", 40, 1555e9, _A100_PEAKS, _A100),
        _gpu("A100-80GB", 80, 2039e9, _A100_PEAKS, _A100),
        _gpu("H100-80GB", 80, 3350e9, _H100_PEAKS, _H100),
        _gpu("H200-141GB", 141, 4800e9, _H100_PEAKS, _H200),
        CPU,
    )
}
"""Devices by name."""

LINKS: dict[str, Link] = {
    "NVLink2": Link(
        latency_s=10e-6,
        bandwidth=78e9,
        source="bus bandwidth of 4 V100 (Aceso's tables: 40, 78, 131 GB/s with 2, 4, 8); datasheet 150 GB/s one way",
    ),
    "NVLink3": Link(
        latency_s=5e-6,
        bandwidth=172e9,
        source="bus bandwidth of A100 above 8 MB (Vidur's tables); datasheet 300 GB/s one way",
    ),
    "NVLink4": Link(
        latency_s=5e-6,
        bandwidth=347e9,
        source="bus bandwidth of H100 above 8 MB (Vidur's tables); datasheet 450 GB/s one way",
    ),
    "PCIe4": Link(latency_s=10e-6, bandwidth=24e9, source="PCI Express 4.0 x16: 31.5 GB/s one way, 0.75 of it"),
    "PCIe5": Link(latency_s=10e-6, bandwidth=47e9, source="PCI Express 5.0 x16: 63 GB/s one way, 0.75 of it"),
    "InfiniBand-HDR": Link(latency_s=15e-6, bandwidth=20e9, source="200 Gb/s per port, 0.8 of it"),
    "InfiniBand-NDR": Link(latency_s=15e-6, bandwidth=37e9, source="400 Gb/s per port, 0.75 of it"),
    "Ethernet-25G": Link(latency_s=50e-6, bandwidth=2.5e9, source="25 Gb/s, 0.8 of it, TCP"),
    "Ethernet-100G": Link(latency_s=40e-6, bandwidth=9e9, source="100 Gb/s, 0.72 of it, TCP"),
    "loopback": Link(
        latency_s=60e-6,
        bandwidth=1.4e9,
        source="built in: Gloo all-reduce of two processes on a 2-core server VM (messages reach 2.7-4.0 GB/s after "
        "45 us); `partita doctor` measures this machine",
    ),
}
"""Links by name: what one device sees of the link, reached rather than nominal."""

HOST_LINKS: dict[str, str] = {
    "V100-16GB": "NVLink2",
    "V100-32GB": "NVLink2",
    "A100-40GB": "NVLink3",
    "A100-80GB": "NVLink3",
    "H100-80GB": "NVLink4",
    "H200-141GB": "NVLink4",
    "cpu": "loopback",
}
"""Link between two devices of one host, by device."""

NETWORK_LINKS: dict[str, str] = {
    "V100-16GB": "Ethernet-100G",
    "V100-32GB": "Ethernet-100G",
    "A100-40GB": "InfiniBand-HDR",
    "A100-80GB": "InfiniBand-HDR",
    "H100-80GB": "InfiniBand-NDR",
    "H200-141GB": "InfiniBand-NDR",
    "cpu": "Ethernet-25G",
}
"""Usual link between two hosts, by device; a cluster file says it better."""

"""Devices and links by name, with the source and date of every figure.

Units are decimal, as on datasheets (1 GB is 10**9 bytes); peaks are dense. The datasheets of V100 to H200
were last read in November 2026; the figures of the others are those their makers publish, entered in December 2026 and
checked, for B200 and MI250X, against public pages.
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
    ("tile", 0.92),
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
"""Fraction of the peak (first five; ``tile`` is what a large tile of a product approaches, see
`partita.cost.tiles`) or of the
memory bandwidth (the rest; ``memory`` is what the first five reach)."""

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

_EFFICIENCY_SOURCE = "; efficiencies: Vidur's public operator tables of A100 and H100"


def _gpu(name: str, memory_gb: int, bandwidth: float, peaks: dict[str, float], units: int, source: str) -> DeviceSpec:
    """Describe a device that torch drives as ``cuda`` (ROCm's too); bandwidth in GB/s, peaks in TFLOP/s by dtype."""
    return DeviceSpec(
        name=name,
        platform="cuda",
        memory_bytes=memory_gb * GB,
        peak_flops=tuple((dtype, peak * TERA) for dtype, peak in sorted(peaks.items())),
        memory_bandwidth=bandwidth * GB,
        launch_s=5e-6,
        efficiency=_GPU_EFFICIENCY,
        source=source + _EFFICIENCY_SOURCE,
        units=units,
    )


def _peaks(vector: float, double: float, half: float, byte: float = 0.0, eight: float = 0.0) -> dict[str, float]:
    """Return peaks by dtype, in TFLOP/s: ``half`` for both 16-bit formats, ``byte`` for int8, ``eight`` for float8."""
    peaks = {"float32": vector, "float64": double, "float16": half, "bfloat16": half}
    if byte:
        peaks["int8"] = byte
    if eight:
        peaks |= {"float8_e4m3fn": eight, "float8_e5m2": eight}
    return peaks


_V100_PEAKS = {"float16": 125.0, "float32": 15.7, "float64": 7.8}
_V100 = "NVIDIA V100 datasheet, January 2020 (SXM2)"
_A100_PEAKS = _peaks(19.5, 9.7, 312.0, 624.0)
_A100 = "NVIDIA A100 datasheet, June 2021 (SXM)"
_H100_PEAKS = _peaks(67.0, 34.0, 989.0, 1979.0, 1979.0)
_H100 = "NVIDIA H100 datasheet, 2023 (SXM, dense)"
_H100_PCIE_PEAKS = _peaks(51.0, 26.0, 756.0, 1513.0, 1513.0)
_H100_PCIE = "NVIDIA H100 datasheet, 2022 (PCIe, dense; half of the figures with sparsity)"
_H200 = "NVIDIA H200 datasheet, 2024 (SXM, dense)"
_GH200 = "NVIDIA GH200 Grace Hopper datasheet, 2024 (dense; the GPU alone)"
_B200_PEAKS = _peaks(75.0, 37.0, 2250.0, 4500.0, 4500.0)
_B200 = "NVIDIA HGX B200 and DGX B200 datasheets, 2024-2025 (one of eight GPUs, dense)"
_L40S_PEAKS = _peaks(91.6, 1.43, 362.0, 733.0, 733.0)
_L40S = "NVIDIA L40S datasheet, 2023 (dense; float64 is 1/64 of float32)"
_RTX_4090_PEAKS = _peaks(82.6, 1.29, 165.2, 660.6, 330.3)
_RTX_4090 = "NVIDIA Ada GPU architecture whitepaper v2, 2023 (dense, sums in float32)"
_RTX_3090_PEAKS = _peaks(35.6, 0.56, 71.0, 284.0)
_RTX_3090 = "NVIDIA Ampere GA102 GPU architecture whitepaper v2, 2021 (dense, sums in float32)"
_MI250X_PEAKS = _peaks(23.9, 23.9, 191.5, 191.5)
_MI250X = "AMD Instinct MI250X data sheet, 2021: half of the module, as torch sees each of its two dies as a device"
_MI300X_PEAKS = _peaks(163.4, 81.7, 1307.4, 2614.9, 2614.9)
_MI300X = "AMD Instinct MI300X data sheet, 2023 (dense; torch's float8 types run as AMD's fnuz types do)"

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
        _gpu("V100-16GB", 16, 900, _V100_PEAKS, 80, _V100),
        _gpu("V100-32GB", 32, 900, _V100_PEAKS, 80, _V100),
        _gpu("A100-40GB", 40, 1555, _A100_PEAKS, 108, _A100),
        _gpu("A100-80GB", 80, 2039, _A100_PEAKS, 108, _A100),
        _gpu("H100-80GB", 80, 3350, _H100_PEAKS, 132, _H100),
        _gpu("H100-PCIe-80GB", 80, 2000, _H100_PCIE_PEAKS, 114, _H100_PCIE),
        _gpu("H200-141GB", 141, 4800, _H100_PEAKS, 132, _H200),
        _gpu("GH200-96GB", 96, 4000, _H100_PEAKS, 132, _GH200),
        _gpu("GH200-144GB", 144, 4900, _H100_PEAKS, 132, _GH200),
        _gpu("B200-180GB", 180, 8000, _B200_PEAKS, 148, _B200),
        _gpu("L40S-48GB", 48, 864, _L40S_PEAKS, 142, _L40S),
        _gpu("RTX4090-24GB", 24, 1008, _RTX_4090_PEAKS, 128, _RTX_4090),
        _gpu("RTX3090-24GB", 24, 936, _RTX_3090_PEAKS, 82, _RTX_3090),
        _gpu("MI250X-64GB", 64, 1638, _MI250X_PEAKS, 110, _MI250X),
        _gpu("MI300X-192GB", 192, 5300, _MI300X_PEAKS, 304, _MI300X),
        CPU,
    )
}
"""Devices by name. Only those of A100 and H100 have efficiencies that were checked; the others borrow them."""


def chip_of(name: str) -> str:
    """Return the chip of a device's name, without its memory.

    Example:
        >>> chip_of("H100-PCIe-80GB"), chip_of("cpu")
        ('H100-PCIe', 'cpu')
    """
    head, _, tail = name.rpartition("-")
    return head if tail.endswith("GB") else name


_CHIPS = [chip_of(name) for name in DEVICES]
ALIASES: dict[str, str] = {
    **{
        chip: name
        for chip, name in zip(_CHIPS, DEVICES, strict=True)
        if chip != name and sum(other == chip or other.startswith(f"{chip}-") for other in _CHIPS) == 1
    },
    "H100-SXM-80GB": "H100-80GB",
    "H100-SXM": "H100-80GB",
}
"""Other spellings: a chip that comes in one size and form needs neither."""

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
    "NVLink5": Link(
        latency_s=5e-6,
        bandwidth=690e9,
        source="datasheet (B200, 2024) 900 GB/s one way; 0.77 of it, as NVLink4 reaches; not measured",
    ),
    "InfinityFabric3": Link(
        latency_s=10e-6,
        bandwidth=75e9,
        source="AMD MI250X data sheet, 2021: links of 50 GB/s one way, 2 between most dies; 0.75 of it; not measured",
    ),
    "InfinityFabric4": Link(
        latency_s=10e-6,
        bandwidth=310e9,
        source="AMD MI300X data sheet, 2023: 7 links of 64 GB/s one way, 0.7 of them; not measured",
    ),
    "PCIe3": Link(latency_s=10e-6, bandwidth=12e9, source="PCI Express 3.0 x16: 15.8 GB/s one way, 0.75 of it"),
    "PCIe4": Link(latency_s=10e-6, bandwidth=24e9, source="PCI Express 4.0 x16: 31.5 GB/s one way, 0.75 of it"),
    "PCIe5": Link(latency_s=10e-6, bandwidth=47e9, source="PCI Express 5.0 x16: 63 GB/s one way, 0.75 of it"),
    "InfiniBand-EDR": Link(latency_s=15e-6, bandwidth=10e9, source="100 Gb/s per port, 0.8 of it"),
    "InfiniBand-HDR": Link(latency_s=15e-6, bandwidth=20e9, source="200 Gb/s per port, 0.8 of it"),
    "InfiniBand-NDR": Link(latency_s=15e-6, bandwidth=37e9, source="400 Gb/s per port, 0.75 of it"),
    "InfiniBand-XDR": Link(latency_s=15e-6, bandwidth=75e9, source="800 Gb/s per port, 0.75 of it"),
    "Ethernet-10G": Link(latency_s=50e-6, bandwidth=1e9, source="10 Gb/s, 0.8 of it, TCP"),
    "Ethernet-25G": Link(latency_s=50e-6, bandwidth=2.5e9, source="25 Gb/s, 0.8 of it, TCP"),
    "Ethernet-100G": Link(latency_s=40e-6, bandwidth=9e9, source="100 Gb/s, 0.72 of it, TCP"),
    "Ethernet-400G-RoCE": Link(latency_s=20e-6, bandwidth=35e9, source="400 Gb/s per port, 0.7 of it, RDMA"),
    "WAN-10G": Link(latency_s=30e-3, bandwidth=1e9, source="10 Gb/s between sites some 3,000 km apart, 0.8 of it"),
    "loopback": Link(
        latency_s=60e-6,
        bandwidth=1.4e9,
        source="built in: Gloo all-reduce of two processes on a 2-core server VM (messages reach 2.7-4.0 GB/s after "
        "45 us); `partita doctor` measures this machine",
    ),
}
"""Links by name: what one device sees of the link, reached rather than nominal."""

_LINKS_OF_CHIPS: dict[str, tuple[str, str]] = {
    "V100": ("NVLink2", "Ethernet-100G"),
    "A100": ("NVLink3", "InfiniBand-HDR"),
    "H100": ("NVLink4", "InfiniBand-NDR"),
    "H100-PCIe": ("PCIe5", "InfiniBand-NDR"),
    "H200": ("NVLink4", "InfiniBand-NDR"),
    "GH200": ("NVLink4", "InfiniBand-NDR"),
    "B200": ("NVLink5", "InfiniBand-NDR"),
    "L40S": ("PCIe4", "InfiniBand-HDR"),
    "RTX4090": ("PCIe4", "Ethernet-25G"),
    "RTX3090": ("PCIe4", "Ethernet-25G"),
    "MI250X": ("InfinityFabric3", "InfiniBand-HDR"),
    "MI300X": ("InfinityFabric4", "InfiniBand-NDR"),
    "cpu": ("loopback", "Ethernet-25G"),
}
HOST_LINKS: dict[str, str] = {name: _LINKS_OF_CHIPS[chip_of(name)][0] for name in DEVICES}
"""Link between two devices of one host, by device."""

NETWORK_LINKS: dict[str, str] = {name: _LINKS_OF_CHIPS[chip_of(name)][1] for name in DEVICES}
"""Usual link between two hosts, by device; a cluster file says it better."""

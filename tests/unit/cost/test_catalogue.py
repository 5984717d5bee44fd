"""The catalogue's figures are of the right order, sourced, and consistent."""

from pathlib import Path

import pytest

from partita.cost.catalogue import ALIASES, DEVICES, HOST_LINKS, LINKS, NETWORK_LINKS
from partita.ir.graph import ITEM_SIZE


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_is_plausible(name):
    device = DEVICES[name]
    assert device.name == name
    assert device.source
    peaks = dict(device.peak_flops)
    assert set(peaks) <= set(ITEM_SIZE)
    assert 1e10 <= peaks["float32"] <= 2e14
    assert 5e9 <= device.memory_bandwidth <= 1e13
    assert 1e-6 <= device.launch_s <= 1e-4
    assert all(0 < value <= 1 for _, value in device.efficiency)
    assert "memory" in dict(device.efficiency)


def test_memory_is_decimal_and_in_the_name():
    for name, device in DEVICES.items():
        if device.platform == "cuda":
            assert device.memory_bytes == int(name.split("-")[-1].removesuffix("GB")) * 10**9


def test_the_newer_device_is_the_faster():
    order = [DEVICES[name] for name in ("V100-32GB", "A100-80GB", "H100-80GB", "H200-141GB", "B200-180GB")]
    assert [device.memory_bandwidth for device in order] == sorted(device.memory_bandwidth for device in order)
    assert [dict(device.peak_flops)["float16"] for device in order] == [125e12, 312e12, 989e12, 989e12, 2250e12]


@pytest.mark.parametrize("name", LINKS)
def test_a_link_is_plausible_and_sourced(name):
    link = LINKS[name]
    assert link.source
    assert 1e-6 <= link.latency_s <= 1e-1
    assert 1e9 <= link.bandwidth <= 1e12


def test_every_device_has_links_and_its_host_is_faster_than_its_network_or_as_fast():
    assert set(HOST_LINKS) == set(NETWORK_LINKS) == set(DEVICES)
    for name, device in DEVICES.items():
        if device.platform == "cuda":
            assert LINKS[HOST_LINKS[name]].bandwidth > LINKS[NETWORK_LINKS[name]].bandwidth


def test_a_figure_says_who_published_it_and_when():
    for device in DEVICES.values():
        if device.platform == "cuda":
            assert any(maker in device.source for maker in ("NVIDIA", "AMD"))
            assert any(str(year) in device.source for year in range(2020, 2027))
            assert device.units > 0


def test_a_wider_format_is_never_the_faster():
    for device in DEVICES.values():
        peaks = dict(device.peak_flops)
        assert peaks["float64"] <= peaks["float32"]
        if device.platform == "cuda":
            assert peaks["float32"] <= peaks["float16"] <= peaks.get("int8", peaks["float16"])


def test_a_chip_of_one_size_and_form_needs_neither():
    assert ALIASES["RTX4090"] == "RTX4090-24GB"
    assert set(ALIASES.values()) <= set(DEVICES)
    assert not {"A100", "V100", "H100", "GH200", "cpu"} & set(ALIASES)


def test_the_documented_tables_are_the_catalogues():
    text = (Path(__file__).parents[3] / "docs" / "costs.md").read_text(encoding="utf-8")
    for name, device in DEVICES.items():
        peaks = dict(device.peak_flops)
        halves = [f"{peaks[dtype] / 1e12:g}" if dtype in peaks else "—" for dtype in ("float16", "bfloat16", "float32")]
        row = [f"`{name}`", f"{device.memory_bytes / 1e9:g}", f"{device.memory_bandwidth / 1e9:g}", *halves]
        row += [str(device.units or "—"), f"{HOST_LINKS[name]}, {NETWORK_LINKS[name]}"]
        assert f"| {' | '.join(row)} |" in text
    for name, link in LINKS.items():
        assert f"| `{name}` | {link.latency_s * 1e6:g} | {link.bandwidth / 1e9:g} | {link.source} |" in text

"""Descriptions of clusters are read or refused with the known names and the nearest one."""

import json
import sys

import pytest

from partita.cost.catalogue import CPU, DEVICES, LINKS
from partita.cost.clusters import cpu_device, default_cluster, match_device, parse_cluster
from partita.cost.measure_file import Measurement, load_measurement, measurement_path, save_measurement
from partita.errors import CostError
from partita.ir.verify import verify

MEASURED = Measurement(
    cpu_name="Toy CPU",
    date="2026-11-30",
    threads=1,
    gemm_flops=(("bfloat16", 150e9), ("float32", 90e9)),
    memory_bandwidth=12e9,
    launch_s=6e-6,
    loopback_latency_s=45e-6,
    loopback_bandwidth=2.5e9,
)


@pytest.fixture(autouse=True)
def _no_measurement(monkeypatch, tmp_path):
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "cache"))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "name", "devices", "groups"),
    [
        ("cpu", "1xcpu", 1, []),
        ("4xcpu", "4xcpu", 4, [4]),
        ("8xH100-80GB", "8xH100-80GB", 8, [8]),
        (" 2x8xh100-80gb ", "2x8xH100-80GB", 16, [8, 16]),
        ("8x1xA100-40GB", "8x1xA100-40GB", 8, [8]),
        ("8xA100-40GB + 8xV100-16GB", "8xA100-40GB+8xV100-16GB", 16, [8, 16]),
        ("8xA100-40GB+4xV100-16GB", "8xA100-40GB+4xV100-16GB", 12, [8, 12]),
        ("4xV100-16GB+8xA100-40GB", "4xV100-16GB+8xA100-40GB", 12, [4, 12]),
    ],
)
def test_a_description_is_read(text, name, devices, groups):
    cluster = parse_cluster(text)
    assert (cluster.name, cluster.num_devices) == (name, devices)
    assert [level.group_size for level in cluster.levels] == groups
    assert parse_cluster(cluster.name) == cluster


def test_kinds_follow_the_order_of_the_text():
    cluster = parse_cluster("2xA100-40GB+3xV100-16GB+1xA100-40GB")
    assert [cluster.device(rank).name for rank in range(6)] == ["A100-40GB"] * 2 + ["V100-16GB"] * 3 + ["A100-40GB"]
    assert len(cluster.kinds) == 2


def test_hosts_are_connected_by_the_network_and_unlike_pools_by_the_slower_one():
    cluster = parse_cluster("2x8xH100-80GB")
    assert cluster.link(0, 7) == LINKS["NVLink4"]
    assert cluster.link(7, 8) == LINKS["InfiniBand-NDR"]
    mixed = parse_cluster("8xA100-40GB+8xV100-16GB")
    assert mixed.link(0, 8) == LINKS["Ethernet-100G"]


def test_hosts_of_unlike_devices_keep_their_own_links():
    mixed = parse_cluster("8xA100-40GB+8xV100-16GB")
    assert mixed.link(0, 7) == LINKS["NVLink3"]
    assert mixed.link(8, 15) == mixed.levels[0].link == LINKS["NVLink2"]
    assert parse_cluster("2x8xH100-80GB").levels[0].group_links == ()
    uneven = parse_cluster("4xV100-16GB+8xA100-40GB")  # the longer host is cut alike, in groups of its own kind
    assert [link == LINKS["NVLink3"] for link in uneven.levels[0].group_links] == [False, True, True]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("8xH100", "unknown device 'H100'", "H100-80GB"),
        ("4xcup", "unknown device 'cup'", "cpu"),
        ("4xA100-80G", "unknown device 'A100-80G'", "A100-80GB"),
        ("", "empty part", "4xcpu"),
        ("4xcpu+", "empty part", "4xcpu"),
        ("0xcpu", "not between 1 and", "4xcpu"),
        ("-1xcpu", "unknown device '-1xcpu'", "cpu"),
        ("2x2x2xcpu", "3 counts", "hosts x devices"),
        ("99999999xcpu", "not between 1 and", "4xcpu"),
        ("4x", "unknown device ''", "4xcpu"),
        ("²xcpu", "unknown device", "cpu"),
    ],
)
def test_a_wrong_description_says_what_and_what_is_known(text, message, hint):
    with pytest.raises(CostError) as caught:
        parse_cluster(text)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "kind"), [("8xRTX 4090", "RTX4090-24GB"), ("mi300x", "MI300X-192GB"), ("2xH100-SXM", "H100-80GB")]
)
def test_other_spellings_are_understood(text, kind):
    assert parse_cluster(text).device(0).name == kind


def test_too_many_devices_are_refused_before_they_are_built():
    with pytest.raises(CostError, match="is more than"):
        parse_cluster("1000x100000xcpu")


# ---------------------------------------------------------------- files

FILE = """
name = "lab"
[[devices]]
kind = "L4-24GB"
count = 4
[[devices]]
kind = "A100-40GB"
count = 4
[[kinds]]
name = "L4-24GB"
platform = "cuda"
memory = "24GB"
memory_bandwidth = "300GB/s"
launch = "6us"
peak_tflops = { float32 = 30.3, bfloat16 = 121 }
efficiency = { matmul = 0.5 }
[[levels]]
name = "host"
group_size = 4
link = "PCIe4"
[[levels]]
name = "site"
group_size = 8
latency = "20us"
bandwidth = "12.5GB/s"
"""


def test_a_file_describes_kinds_devices_and_levels(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(FILE)
    cluster = parse_cluster(path)
    assert cluster == parse_cluster(str(path))
    assert (cluster.name, cluster.num_devices) == ("lab", 8)
    device = cluster.device(0)
    assert (device.memory_bytes, device.memory_bandwidth, device.launch_s) == (24 * 10**9, 300e9, 6e-6)
    assert dict(device.peak_flops) == {"float32": 30.3e12, "bfloat16": 121e12}
    assert dict(device.efficiency)["matmul"] == 0.5
    assert cluster.device(4) == DEVICES["A100-40GB"]
    assert cluster.link(0, 3) == LINKS["PCIe4"]
    assert (cluster.link(3, 4).latency_s, cluster.link(3, 4).bandwidth) == (20e-6, 12.5e9)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count = 4", "count = 0", "'count' as a whole number"),
        ("count = 4", "cout = 4", "unknown entry 'cout'"),
        ('kind = "L4-24GB"', 'kind = "L5-24GB"', "unknown device 'L5-24GB'"),
        ('memory = "24GB"', 'memory = "24XB"', "unknown unit"),
        ('memory = "24GB"', "memory = 24", "needs 'memory' as text"),
        ('platform = "cuda"', 'platform = "tpu"', "known: cpu, cuda"),
        ("float32 = 30.3", "float32 = -1", "not a positive number"),
        ("group_size = 8", "group_size = 6", "not a multiple"),
        ("count = 4", "count = 8", "no level that connects all"),
        ('link = "PCIe4"', 'link = "PCIe9"', "unknown link 'PCIe9'"),
        ('bandwidth = "12.5GB/s"', 'bandwidth = "0GB/s"', "must be above 0"),
        ("group_size = 8", "group_size = 8\nin_network = 1", "'in_network' as true or false"),
        ('link = "PCIe4"', 'link = "PCIe4"\nlatency = "1us"', "has a link and 'latency'"),
        ('link = "PCIe4"', 'links = ["PCIe4"]', "1 links for 2 groups of 4"),
        ('link = "PCIe4"', 'links = "PCIe4"', "'links' as a list of text"),
        ('link = "PCIe4"', 'links = ["PCIe4", "PCIe9"]', "unknown link 'PCIe9'"),
        ("[[levels]]", "[[levels", "is not TOML"),
        ('name = "lab"', "name = 3", "needs 'name' as text"),
    ],
)
def test_a_wrong_file_says_where(tmp_path, old, new, message):
    path = tmp_path / "lab.toml"
    assert old in FILE
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(CostError) as caught:
        parse_cluster(path)
    assert message in str(caught.value)


RACKS = """
devices:
  - {kind: H100-80GB, count: 16}
levels:
  - {name: host, group_size: 4, links: [NVLink4, NVLink4, NVLink4, PCIe5]}
  - {name: rack, group_size: 8, link: InfiniBand-NDR, in_network: true}
  - {name: site, latency: 1ms, bandwidth: 1GB/s}
"""


def test_hosts_racks_and_sites_in_yaml(tmp_path):
    pytest.importorskip("yaml")
    path = tmp_path / "sites.yaml"
    path.write_text(RACKS)
    cluster = parse_cluster(str(path))
    assert [(level.name, level.group_size, level.in_network) for level in cluster.levels] == [
        ("host", 4, False),
        ("rack", 8, True),
        ("site", 16, False),
    ]
    assert cluster.link(0, 3) == LINKS["NVLink4"]
    assert cluster.link(12, 15) == LINKS["PCIe5"]
    assert cluster.link(0, 8).bandwidth == 1e9
    assert verify(cluster) == ()
    path.write_text("levels: [")
    with pytest.raises(CostError, match="is not YAML"):
        parse_cluster(path)


def test_yaml_without_its_package_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "sites.yml"
    path.write_text(RACKS)
    with pytest.raises(CostError, match="needs PyYAML") as caught:
        parse_cluster(path)
    assert "TOML" in caught.value.hint


def test_a_level_that_adds_nothing_is_refused(tmp_path):
    path = tmp_path / "twice.toml"
    path.write_text(FILE.replace("group_size = 8", "group_size = 4"))
    with pytest.raises(CostError, match="not above the level's before"):
        parse_cluster(path)


def test_a_missing_or_empty_file_is_refused(tmp_path):
    with pytest.raises(CostError, match="cannot be read"):
        parse_cluster(tmp_path / "none.toml")
    path = tmp_path / "empty.toml"
    path.write_text("")
    with pytest.raises(CostError, match="describes no device"):
        parse_cluster(path)


# ---------------------------------------------------------------- this machine


def test_a_measurement_is_read_back_and_used(monkeypatch, tmp_path):
    assert load_measurement() is None
    assert cpu_device().peak_flops == CPU.peak_flops
    path = save_measurement(MEASURED)
    assert path == measurement_path()
    assert load_measurement() == MEASURED
    device = cpu_device()
    assert dict(device.peak_flops)["float32"] == 90e9
    assert dict(device.peak_flops)["bfloat16"] == 150e9
    assert (device.memory_bandwidth, device.launch_s) == pytest.approx((12e9, 11e-6))
    assert "2026-11-30" in device.source
    assert parse_cluster("4xcpu").link(0, 1).bandwidth == 2.5e9
    other = save_measurement(MEASURED, tmp_path / "deep" / "other.json")
    assert cpu_device(other) == device


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("PARTITA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measurement_path() == tmp_path / "partita" / "cpu.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert measurement_path() == tmp_path / ".cache" / "partita" / "cpu.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "not a measurement of version"),
        ({"launch_s": -1.0}, "launch_s"),
        ({"memory_bandwidth": "fast"}, "memory_bandwidth"),
        ({"gemm_flops": {}}, "float32"),
        ({"gemm_flops": {"float32": 0}}, "gemm_flops"),
        ({"threads": True}, "threads"),
    ],
)
def test_a_wrong_measurement_is_refused(change, message):
    path = save_measurement(MEASURED)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CostError, match=message):
        load_measurement()


def test_a_broken_measurement_is_refused():
    path = save_measurement(MEASURED)
    path.write_text("{")
    with pytest.raises(CostError, match="is not JSON"):
        cpu_device()
    path.write_text('{"version": 1}')
    with pytest.raises(CostError, match="lacks cpu_name"):
        cpu_device()


def test_without_a_job_the_cluster_is_this_machine():
    cluster = default_cluster()
    assert (cluster.name, cluster.levels) == ("1xcpu", ())


def test_a_job_gives_the_number_of_devices(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    cluster = default_cluster(platform="cuda", device_name="NVIDIA H100 80GB HBM3", memory_bytes=79 * 2**30)
    assert cluster == parse_cluster("2x8xH100-80GB")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert default_cluster().name == "16xcpu"
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(CostError, match="WORLD_SIZE is 'many'"):
        default_cluster()


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80GB"),
        ("Tesla V100-SXM2-32GB", 31.7, "V100-32GB"),
        ("NVIDIA H200", 139.7, "H200-141GB"),
        ("NVIDIA GH200 480GB", 95.0, "GH200-96GB"),
        ("NVIDIA H100 PCIe", 79.2, "H100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", 79.2, "H100-80GB"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX4090-24GB"),
        ("AMD Instinct MI250X", 64.0, "MI250X-64GB"),
    ],
)
def test_a_cuda_device_is_found_by_chip_and_memory(name, gib, expected):
    assert match_device(name, int(gib * 2**30)) == expected


def test_an_unknown_cuda_device_is_named():
    with pytest.raises(CostError, match="Quadro"):
        match_device("Quadro 9")

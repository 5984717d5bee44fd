"""What the doctor finds, with a measurement made up."""

import json

import pytest

from partita import cli
from partita.cli import doctor
from partita.cost.measure_file import Measurement, load_measurement
from partita.errors import TransportError

MEASURED = Measurement(
    cpu_name="Testium 9",
    date="2026-01-02",
    threads=1,
    gemm_flops=(("bfloat16", 2e10), ("float32", 5e10)),
    memory_bandwidth=1e10,
    launch_s=4e-6,
    loopback_latency_s=3e-5,
    loopback_bandwidth=2e9,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path))


@pytest.fixture
def measuring(monkeypatch):
    monkeypatch.setattr("partita.profiler.cpu.measure_cpu", lambda: MEASURED)


def test_measured_figures_are_shown_and_kept(measuring, capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "CPU, measured on 2026-01-02: Testium 9, 1 thread(s) per process" in text
    assert "product, float32: 50.0 GFLOP/s" in text
    assert "smallest operator: 4.00 us" in text
    assert "between two processes: 30.0 us and 2.00 GB/s" in text
    assert load_measurement() == MEASURED
    assert cli.main(["doctor", "--no-measure"]) == 0
    assert "Testium 9" in capsys.readouterr().out


def test_without_any_measurement(capsys):
    assert cli.main(["doctor", "--no-measure", "--cluster", "2x8xH100-80GB"]) == 0
    text = capsys.readouterr().out
    assert "CPU: not measured" in text
    assert "cluster 2x8xH100-80GB: 16 devices" in text
    assert "host: groups of 8" in text
    assert "bfloat16 989 TFLOP/s" in text
    assert "source: NVIDIA H100 datasheet" in text


def test_an_unlike_cluster_shows_every_link_and_the_switches_that_add_up(capsys, tmp_path):
    path = tmp_path / "two.toml"
    level = '[[levels]]\nname = "host"\ngroup_size = 2\nlinks = ["NVLink4", "PCIe4"]\n'
    path.write_text(level + '[[levels]]\nname = "site"\nlink = "WAN-10G"\nin_network = true\n[[devices]]\n')
    with path.open("a") as file:
        file.write('kind = "L40S"\ncount = 4\n')
    assert cli.main(["doctor", "--no-measure", "--cluster", str(path)]) == 0
    text = capsys.readouterr().out
    assert "4 x L40S-48GB" in text
    assert "347 GB/s, 24.0 GB/s" in text
    assert "added up by its switches" in text


def test_as_json(capsys):
    assert cli.main(["doctor", "--no-measure", "--json", "--cluster", "4xcpu"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "partita.doctor"
    assert document["packages"]["torch"]
    assert document["machine"]["cores"] >= 1
    assert document["measured"] is None
    assert document["cluster"]["devices"] == 4
    assert all(part["source"] for part in document["cluster"]["kinds"] + document["cluster"]["levels"])


def test_what_is_missing_is_named(monkeypatch, capsys):
    def fail():
        raise TransportError("two processes cannot talk", hint="")

    def without(name):
        if name in {"rich", "transformers"}:
            raise doctor.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("partita.profiler.cpu.measure_cpu", fail)
    monkeypatch.setattr(doctor, "version", without)
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "rich is not installed: pip install rich" in text
    assert "transformers is not installed (optional;" in text
    assert "two processes cannot talk" in text


def test_an_unknown_cluster_is_a_clear_error(capsys):
    assert cli.main(["doctor", "--no-measure", "--cluster", "8xZ9"]) == 1
    assert "Z9" in capsys.readouterr().err

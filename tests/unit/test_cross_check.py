"""The comparison with public tables: honest halves, verdicts, and what needs no table."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GPT3 = {"hidden": 12288, "feedforward": 49152, "seq_size": 2048, "attn_heads": 96, "num_blocks": 96}
RUN = {"tensor_par": 8, "pipeline_par": 8, "pipeline_interleaving": 3, "microbatch_size": 1}


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delenv("PARTITA_BENCHDATA", raising=False)
    return importlib.import_module("cross_check")


@pytest.mark.parametrize("arguments", [[], ["--data", "no/such/place"]])
def test_without_data_it_says_how_to_give_it(bench, monkeypatch, capsys, arguments):
    monkeypatch.setattr("sys.argv", ["cross_check.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        bench.main()
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert ("is no directory" if arguments else "PARTITA_BENCHDATA") in message


def test_a_directory_without_the_tables_is_named(bench, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["cross_check.py", "--data", str(tmp_path)])
    with pytest.raises(SystemExit):
        bench.main()
    assert "lacks" in capsys.readouterr().err


@pytest.mark.parametrize("length", [8, 400])
def test_samples_come_from_one_half_and_errors_from_the_other(bench, length):
    rows = tuple((2048 + number * 150_001, 1e-5 + number * 1e-6) for number in range(length))
    table = bench.CollectiveTable("made up", "A100-80GB", 8, 8, rows)
    samples, test = bench.samples_of(table)
    assert set(samples.sizes) <= {size for size, _ in rows[::2]}
    assert test == rows[1::2]
    assert len(samples.sizes) <= 16


def test_a_target_is_missed_by_its_middle_or_its_tail(bench):
    errors = [0.01] * 8 + [-0.5] * 2
    found = bench.finding("part", "name", errors, (5.0, 12.0))
    assert (found.middle, found.high, found.reached) == (pytest.approx(1), pytest.approx(50), False)
    assert bench.finding("part", "name", errors[:8], (5.0, 12.0)).reached is True
    assert bench.finding("part", "name", errors).reached is None
    assert bench.finding("part", "name", []) is None
    worst = bench.finding("part", "name", errors, mean=True)
    assert (worst.middle, worst.high) == (pytest.approx(10.8), pytest.approx(50))
    assert "**missed**" in bench.table_of([found])


@pytest.mark.parametrize("mode", ["none", "seqsel"])
def test_the_published_activations_are_counted_exactly(bench, mode):
    """Korthikanti et al., figure 1, GPT-3: the closed form, and the operators but for the norms' statistics."""
    published = bench.megatron.ACTIVATIONS_GIB["gpt3-175B", mode] * 2**30
    assert bench.megatron.closed_bytes(GPT3, RUN, mode) == pytest.approx(published, rel=1e-6)
    counted = bench.megatron.counted_bytes(GPT3, RUN, mode)
    assert counted == pytest.approx(published, rel=1e-3)
    assert counted >= published

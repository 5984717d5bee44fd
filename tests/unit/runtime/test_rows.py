"""Rows are cut over replicas and microbatches without loss, in order, and evenly."""

from hypothesis import given
from hypothesis import strategies as st

from partita.runtime.rows import cut_rows, split_evenly

counts = st.integers(1, 9)


@given(st.integers(0, 200), counts, counts)
def test_every_row_is_in_one_chunk_in_order_and_none_is_empty(rows, replicas, microbatches):
    cut = cut_rows(rows, replicas, microbatches)
    assert len(cut) == replicas
    chunks = [chunk for part in cut for chunk in part]
    assert [row for start, stop in chunks for row in range(start, stop)] == list(range(rows))
    assert all(start < stop for start, stop in chunks)


@given(st.integers(1, 200), counts, counts)
def test_chunks_and_their_numbers_differ_by_one_at_most(rows, replicas, microbatches):
    cut = cut_rows(rows, replicas, microbatches)
    sizes = [stop - start for part in cut for start, stop in part]
    numbers = [len(part) for part in cut]
    assert max(sizes) - min(sizes) <= 1
    assert max(numbers) - min(numbers) <= 1
    assert sum(numbers) == min(rows, replicas * microbatches)
    assert max(numbers) <= microbatches


@given(st.integers(0, 100), counts)
def test_counts_add_up_and_larger_ones_come_first(total, parts):
    counts = split_evenly(total, parts)
    assert sum(counts) == total
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1

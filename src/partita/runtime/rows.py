"""Cut the rows of a batch over replicas and microbatches."""

from __future__ import annotations

Chunk = tuple[int, int]
"""Half-open range of rows."""


def rows_of(chunk: Chunk | None) -> int | None:
    """Return the number of rows of a chunk; None for a call that is not cut."""
    return None if chunk is None else chunk[1] - chunk[0]


def split_evenly(total: int, parts: int) -> list[int]:
    """Return ``parts`` counts that add up to ``total`` and differ by at most one, larger ones first."""
    base, extra = divmod(total, parts)
    return [base + (i < extra) for i in range(parts)]


def cut_rows(rows: int, replicas: int, microbatches: int) -> list[list[Chunk]]:
    """Cut ``rows`` into chunks for every replica and microbatch.

    No chunk is empty: with fewer rows than chunks there are fewer chunks, and a replica may have none.

    Args:
        rows: Rows of the whole batch.
        replicas: Data-parallel degree.
        microbatches: Microbatches per replica that the plan asks for.

    Returns:
        For each replica its chunks, in the order of the rows.
    """
    counts = split_evenly(min(rows, replicas * microbatches), replicas)
    sizes = split_evenly(rows, sum(counts)) if rows else []
    chunks: list[list[Chunk]] = []
    at, used = 0, 0
    for count in counts:
        mine = []
        for size in sizes[used : used + count]:
            mine.append((at, at + size))
            at += size
        used += count
        chunks.append(mine)
    return chunks

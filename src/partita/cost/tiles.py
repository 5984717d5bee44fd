"""How the shape of a product decides what it reaches: tiles, and waves of tiles.

Theory of operation. A GPU computes a product in tiles of the result, one per multiprocessor at a time. ``t`` tiles on
``u`` multiprocessors take ``ceil(t / u)`` waves, each as long as one tile, so a result of few tiles leaves
multiprocessors idle, and tiles at the edge compute what nobody asked for. Small tiles waste less but read more operands
per result, so they run slower. A library picks the tile that is best::

    T(m, n, k) = fill + min over tiles (a, b) of  ceil(batch * ceil(m / a) * ceil(n / b) / u) * 2 a b k / rate(a, b)
    rate(a, b) = peak * e_tile / u / (1 + EDGE (1 / a + 1 / b))                                           (1)

It is monotone in m, n, k and batch. ``e_tile`` (in the catalogue), ``EDGE`` and ``fill`` were set on the products of
one model, Llama-2-7B, of Vidur's A100 and H100 tables together; ``benchmarks/cross_check.py`` tests them on the seven
others. The whole is never faster than what the largest products reach, which power limits. Cutting the contracted dim
(split-k) was tried and changed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from partita.ir.graph import Op, TensorSpec

TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
"""Rows and columns of the tiles that product libraries choose from."""
EDGE = 12.0
"""Elements of a tile's edge that cost as much time as its operands' reading: a tile of 128 x 128 loses a sixth."""
FILL_S = 6e-6
"""Seconds in which a product's kernel starts, fills its buffers and drains; nothing hides them within it."""


@dataclass(frozen=True, slots=True)
class Product:
    """``batch`` products of (rows x inner) and (inner x columns)."""

    rows: int
    columns: int
    inner: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """Operations, a multiply-add as two."""
        return 2 * self.batch * self.rows * self.columns * self.inner


def product_of(op: Op, tensors: dict[str, TensorSpec]) -> Product | None:
    """Return the shape of an operator's product; None if it is none or has no result.

    An operand of two dims is shared by the whole batch, which then adds to the rows.
    """
    if op.kind != "matmul" or not op.writes or not op.flops:
        return None
    result = tensors[op.writes[0]]
    if not result.shape or not result.numel:
        return None
    columns = result.shape[-1]
    inner = max(1, op.flops // (2 * result.numel))
    dims = [len(tensors[name].shape) for name in op.reads if len(tensors[name].shape) > 1]
    if len(result.shape) > 2 and min(dims, default=2) > 2:
        return Product(result.shape[-2], columns, inner, prod(result.shape[:-2]))
    return Product(result.numel // columns, columns, inner)


def tiled_s(product: Product, peak: float, units: int) -> float:
    """Return the seconds of a product's waves, equation (1) without the fill.

    Args:
        product: The shape.
        peak: FLOP/s of all multiprocessors with ``e_tile`` applied.
        units: Multiprocessors.

    Example:
        >>> one, more = (tiled_s(Product(rows, 128, 64), 1e12, 1) for rows in (256, 257))
        >>> more > one > 2 * 256 * 128 * 64 / 1e12
        True
    """
    best = float("inf")
    for height, width in TILES:
        tiles = product.batch * -(-product.rows // height) * -(-product.columns // width)
        slower = 1.0 + EDGE * (1.0 / height + 1.0 / width)
        best = min(best, -(-tiles // units) * height * width * slower)
    return 2.0 * best * product.inner * units / peak

"""Views, copies, factories, look-ups: the operators that arrange data and compute nothing."""

from __future__ import annotations

from partita.cost.ops.call import Formula, OpCall, OpPrice, ids, is_floating, named, streaming, total_bytes


def view(call: OpCall) -> OpPrice:
    """``view, transpose`` …: free both ways; a copy where the result owns its memory (``reshape``, ``to``)."""
    return OpPrice(kind="view") if call.is_view else movement(call)


def part(call: OpCall) -> OpPrice:
    """``slice, select`` …: a free view, whose backward fills a whole gradient with zeros and copies the part.

    One that takes everything is free both ways: torch leaves it out wherever it does not trace.
    """
    if not call.is_view:
        return movement(call)
    if call.name == "slice" and call.writes and call.reads[0].shape == call.writes[0].shape:
        return OpPrice(kind="view")
    return OpPrice(kind="view", backward_bytes=call.grads_bytes())


def expansion(call: OpCall) -> OpPrice:
    """``expand``: a free view, whose backward sums over the copies."""
    if not call.needs_grad:
        return OpPrice(kind="view")
    added = sum(tensor.numel for tensor in call.writes if is_floating(tensor))
    return OpPrice(kind="view", backward_flops=added, backward_bytes=call.grads_bytes())


def movement(call: OpCall) -> OpPrice:
    """``cat, clone, pad, repeat`` …: every operand read, every result written, the same backwards; nothing is kept."""
    return streaming(call, "movement")


def lookup(call: OpCall) -> OpPrice:
    """``embedding, index, gather`` …: only what is picked is read; the backward fills a whole gradient first.

    The indices are kept.
    """
    indices = [tensor for tensor in call.reads if not is_floating(tensor)]
    picked = call.write_bytes
    return OpPrice(
        kind="embedding",
        bytes=total_bytes(indices) + 2 * picked,
        backward_bytes=call.grads_bytes() + total_bytes(indices) + picked if call.needs_grad else 0,
        saved=ids(indices) if call.needs_grad else (),
    )


def lookup_bags(call: OpCall) -> OpPrice:
    """``embedding_bag``: every row that a bag names is read and added; the indices and what tells the bags are kept."""
    table = call.reads[0] if call.reads else None
    kept = [tensor for tensor in (*call.reads[1:], *call.writes[1:]) if not is_floating(tensor)]
    if table is None or not table.numel:
        return streaming(call, "embedding", saved=kept)
    width = table.shape[-1] if table.shape else 1
    added = width * (call.reads[1].numel if len(call.reads) > 1 else 1)
    picked = added * (table.bytes // table.numel)
    grad = call.needs_grad
    return OpPrice(
        kind="embedding",
        flops=added,
        backward_flops=added if grad else 0,
        bytes=picked + total_bytes(kept) + call.write_bytes,
        backward_bytes=call.grads_bytes() + total_bytes(kept) + picked if grad else 0,
        saved=ids(kept) if grad else (),
    )


def placement(call: OpCall) -> OpPrice:
    """``scatter, index_put, index_add`` …: operands and results; the indices are kept."""
    indices = [tensor for tensor in call.reads[1:] if not is_floating(tensor)]
    return streaming(call, "embedding", saved=indices)


def factory(call: OpCall) -> OpPrice:
    """``arange, zeros`` …: the result is written."""
    return OpPrice(kind="factory", bytes=call.write_bytes)


def random(call: OpCall) -> OpPrice:
    """``rand, bernoulli`` …: about ten operations for each number, and the result is written."""
    return OpPrice(kind="random", flops=10 * call.elements, bytes=call.write_bytes)


def nothing(_call: OpCall) -> OpPrice:
    """Bookkeeping without data: assertions, sizes, ``getitem`` of a tuple of results."""
    return OpPrice(kind="view")


_VIEWS = """
view reshape _unsafe_view view_as reshape_as permute transpose t mT numpy_T swapaxes swapdims movedim moveaxis unsqueeze
squeeze flatten unflatten ravel alias detach contiguous to _to_copy type_as
view_as_real lift_fresh lift requires_grad conj_physical resolve_conj resolve_neg _conj cpu cuda
atleast_1d atleast_2d atleast_3d adjoint mH matrix_H linalg_diagonal _reshape_alias _neg_view chalf pin_memory data
"""
_PARTS = """
slice select narrow split split_with_sizes chunk tensor_split unbind unfold as_strided diagonal hsplit vsplit dsplit
unsafe_split unsafe_chunk unsafe_split_with_sizes
"""
_MOVES = """
cat concat concatenate stack hstack vstack dstack column_stack repeat repeat_interleave tile pad constant_pad_nd
reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d _pad_circular
roll flip fliplr flipud rot90 clone copy copy_ tril triu diag diag_embed meshgrid pixel_shuffle pixel_unshuffle
channel_shuffle im2col col2im block_diag cartesian_prod tril_indices triu_indices one_hot slice_scatter select_scatter
diagonal_scatter as_strided_scatter as_strided_copy slice_copy expand_copy view_copy permute_copy transpose_copy
detach_copy _reshape_copy unfold_copy vander combinations resize resize_as row_stack diagflat fill_diagonal
native_channel_shuffle _stack _chunk_cat pad_sequence _pack_padded_sequence _pad_packed_sequence complex fft_fftshift
fft_ifftshift nonzero_static
"""
_FACTORIES = """
arange zeros ones full empty eye linspace logspace zeros_like ones_like full_like empty_like new_zeros new_ones new_full
new_empty empty_strided new_empty_strided scalar_tensor tensor lift_fresh_copy hann_window hamming_window
_efficientzerotensor blackman_window bartlett_window kaiser_window empty_permuted fft_fftfreq fft_rfftfreq linalg_vander
"""
_RANDOM = """
rand randn randint randperm rand_like randn_like randint_like normal uniform bernoulli multinomial exponential random
poisson log_normal geometric cauchy normal_functional binomial _standard_gamma _sample_dirichlet
"""
_NOTHING = """
item _local_scalar_dense expect _assert_tensor_metadata _assert_async _assert_scalar sym_size sym_numel sym_stride
sym_storage_offset sym_constrain_range sym_constrain_range_for_size size stride numel dim is_floating_point getitem
_shape_as_tensor is_same_size record_stream _functional_assert_async _functional_assert_scalar _print storage_offset
is_complex is_contiguous element_size is_pinned get_device
"""

LAYOUT: dict[str, Formula] = {
    **named(view, _VIEWS),
    **named(part, _PARTS),
    **named(expansion, "expand expand_as broadcast_to broadcast_tensors"),
    **named(movement, _MOVES),
    **named(
        lookup,
        "embedding index index_select gather take take_along_dim _unsafe_index _unsafe_masked_index",
    ),
    **named(lookup_bags, "embedding_bag _embedding_bag _embedding_bag_forward_only"),
    **named(
        placement,
        "scatter scatter_add scatter_reduce index_put _index_put_impl _unsafe_index_put index_add index_copy "
        "index_fill masked_scatter index_reduce put max_unpool2d max_unpool3d embedding_renorm "
        "_unsafe_masked_index_put_accumulate",
    ),
    **named(factory, _FACTORIES),
    **named(random, _RANDOM),
    **named(nothing, _NOTHING),
}
"""Formula by operator name."""

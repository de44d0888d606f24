"""Writing the keys and values of new tokens into their pages, in XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Shaped

from kvjax.kernels.formats import Stored, encode, finite


def write_pages(
    pool: Shaped[Array, "pages heads page_size width"],
    new: Shaped[Array, "groups tokens heads width"],
    pages: Int32[Array, "groups touched"],
    first_tokens: Int32[Array, "groups touched"],
    begins: Int32[Array, "groups touched"],
    ends: Int32[Array, "groups touched"],
    blanks: Int32[Array, "groups touched"],
) -> Shaped[Array, "pages heads page_size width"]:
    """Store tokens page by page and zero what is behind the last one.

    Page `pages[g, i]` (0 for none) gets token `first_tokens[g, i]` in slot `begins[g, i]`, the next token in the next
    slot and so on before slot `ends[g, i]`. Slots from `blanks[g, i]` on, which is no less, become 0, so that readers
    meet no garbage behind a sequence's last token; those before it stay as they are.
    """
    # The barrier: fused with the scatter this would read the array that it writes, and XLA would copy all of it.
    old = lax.optimization_barrier(pool.at[pages].get(mode="promise_in_bounds"))
    put = _put(old, new.astype(pool.dtype), first_tokens, begins, ends, blanks)
    return pool.at[pages].set(put, mode="promise_in_bounds")


def _put(
    old: Shaped[Array, "groups touched heads page_size width"],
    new: Shaped[Array, "groups tokens heads width"],
    first_tokens: Int32[Array, "groups touched"],
    begins: Int32[Array, "groups touched"],
    ends: Int32[Array, "groups touched"],
    blanks: Int32[Array, "groups touched"],
) -> Shaped[Array, "groups touched heads page_size width"]:
    """Put tokens into pages, and zeros behind the last one."""
    slot = jnp.arange(old.shape[3], dtype=jnp.int32)[None, None]
    token = jnp.clip(first_tokens[..., None] + slot - begins[..., None], 0, new.shape[1] - 1)
    group = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None, None]
    rows = new.at[group, token].get(mode="promise_in_bounds").swapaxes(2, 3)
    slot = slot[:, :, None, :, None]
    begins, ends, blanks = (of[:, :, None, None, None] for of in (begins, ends, blanks))
    return jnp.where((slot >= begins) & (slot < ends), rows, jnp.where(slot < blanks, old, 0))


def write_scales(
    pools: tuple[Float[Array, "pages heads page_size"], ...],
    new: tuple[Float[Array, "groups tokens heads"], ...],
    *where: Int32[Array, "groups touched"],
) -> tuple[Float[Array, "pages heads page_size"], ...]:
    """Store the scales of tokens; `where` is that of `write_pages`."""
    put = lambda pool, of: write_pages(pool[..., None], of[..., None], *where)[..., 0]  # noqa: E731
    return tuple(map(put, pools, new))


def write_full_pages(
    pages: Stored,
    open_pages: Float[Array, "layers groups seqs heads page_size head_dim"],
    new: Float[Array, "groups tokens heads head_dim"],
    layer: Int32[Array, ""],
    sequence: Int32[Array, "groups touched"],
    ids: Int32[Array, "groups touched"],
    *where: Int32[Array, "groups touched"],
) -> tuple[Stored, Float[Array, "layers groups seqs heads page_size head_dim"]]:
    """Store the pages that become full in a format that is per channel, and keep what is left as it is.

    Args:
        pages: of the format.
        open_pages: the tokens of every row behind its last full page, as they are.
        new: what is added, in the layer `layer`.
        sequence: whose page each touched one is.
        ids: the touched pages, 0 for none; `where` is as for `write_pages`.

    Returns: the pages and the open ones.
    """
    size, seqs = pages.codes.shape[2], open_pages.shape[2]
    group = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None]
    place = (layer, group, sequence)
    old = lax.optimization_barrier(open_pages.at[place].get(mode="promise_in_bounds"))
    tiles = _put(old, finite(new).astype(old.dtype), *where)
    is_full = (where[2] == size) & (ids > 0)
    codes, scales = _encode_any(tiles, is_full, pages)
    full = jnp.where(is_full, ids, 0)
    put = lambda pool, of_pages: pool.at[full].set(of_pages, mode="promise_in_bounds")  # noqa: E731
    pages = Stored(put(pages.codes, codes), tuple(map(put, pages.scales, scales)), pages.form)
    place = (layer, group, jnp.where(is_full | (ids == 0), seqs, sequence))
    return pages, open_pages.at[place].set(tiles, mode="drop")


def _encode_any(
    tiles: Float[Array, "groups touched heads page_size head_dim"],
    is_full: Bool[Array, "groups touched"],
    pages: Stored,
):
    """Codes and scales of pages: zeros, at no cost, where none is full, as in most steps of one token."""
    encoded = lambda tiles: encode(tiles, pages.form)  # noqa: E731
    nothing = jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), jax.eval_shape(encoded, tiles))
    return lax.cond(is_full.any(), encoded, lambda _: nothing, tiles)

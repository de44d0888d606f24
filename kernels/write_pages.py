"""Writing the keys and values of new tokens into their pages, in XLA."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from kvjax.kernels.formats import Stored, encode


def write_pages(
    pool: Shaped[Array, "pages heads page_size width"],
    new: Shaped[Array, "groups tokens heads width"],
    pages: Int32[Array, "groups touched"],
    first_tokens: Int32[Array, "groups touched"],
    begins: Int32[Array, "groups touched"],
    ends: Int32[Array, "groups touched"],
) -> Shaped[Array, "pages heads page_size width"]:
    """Store tokens page by page and zero what is behind them.

    Page `pages[g, i]` (0 for none) gets token `first_tokens[g, i]` in slot `begins[g, i]`, the next token in the next
    slot and so on before slot `ends[g, i]`. Slots from there on become 0, so that readers meet no garbage behind a
    sequence's last token.
    """
    size = pool.shape[2]
    slot = jnp.arange(size, dtype=jnp.int32)[None, None]
    token = jnp.clip(first_tokens[..., None] + slot - begins[..., None], 0, new.shape[1] - 1)
    group = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None, None]
    rows = new.astype(pool.dtype).at[group, token].get(mode="promise_in_bounds").swapaxes(2, 3)
    slot = slot[:, :, None, :, None]
    old = jnp.where(slot < begins[:, :, None, None, None], pool.at[pages].get(mode="promise_in_bounds"), 0)
    fresh = (slot >= begins[:, :, None, None, None]) & (slot < ends[:, :, None, None, None])
    return pool.at[pages].set(jnp.where(fresh, rows, old), mode="promise_in_bounds")


def write_stored(
    pages: Stored, new: Float[Array, "groups tokens heads head_dim"], *where: Int32[Array, "groups touched"]
) -> Stored:
    """Store tokens in the pages' format; `where` is that of `write_pages`."""
    codes, scales = encode(new, pages.form)
    write_scale = lambda pool, of: write_pages(pool[..., None], of[..., None], *where)[..., 0]  # noqa: E731
    return Stored(write_pages(pages.codes, codes, *where), tuple(map(write_scale, pages.scales, scales)), pages.form)

"""What a kernel can serve, and what it says of a call that it cannot."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a kernel was written for.

    Attributes:
        head_dims, page_sizes: those it serves.
        dtypes: of queries, and of pages that are not quantised, which must be of the queries' dtype.
        most_heads: query heads of a KV head.
        quantized_keys, quantized_values: formats of pages that it reads too.
    """

    head_dims: tuple[int, ...]
    page_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    most_heads: int
    quantized_keys: tuple[str, ...] = ()
    quantized_values: tuple[str, ...] = ()

    def refuses(
        self, *, head_dim: int, page_size: int, dtype: str, key_format: str, value_format: str, heads_per_kv_head: int
    ) -> str | None:
        """Say why the kernel cannot serve a call, or None if it can."""
        if head_dim not in self.head_dims:
            return f"head_dim {head_dim} is not one of {', '.join(map(str, self.head_dims))}"
        if page_size not in self.page_sizes:
            return f"page_size {page_size} is not one of {', '.join(map(str, self.page_sizes))}"
        if dtype not in self.dtypes:
            return f"queries of {dtype} are not {' or '.join(self.dtypes)}"
        of_pools = ((key_format, self.quantized_keys), (value_format, self.quantized_values))
        for stored, quantized in of_pools:
            if stored != dtype and stored not in quantized:
                read = " or ".join((*self.dtypes, *quantized))
                return f"pages of {stored} are not of the queries' {dtype}; it reads pages of {read}"
        if not 1 <= heads_per_kv_head <= self.most_heads:
            return f"{heads_per_kv_head} query heads of a KV head are not 1 to {self.most_heads}"
        return None

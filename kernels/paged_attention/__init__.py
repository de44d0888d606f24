"""Attention of packed queries over pages.

Every backend has the signature of `reference.paged_attention`: `reference` (numpy float64, the definition), `xla`
(portable) and `hopper`. `Rows` and `Queries` say which pages and which tokens belong to a sequence, `Attention` is what
comes back.
"""

from kvjax.kernels.paged_attention.arguments import Attention as Attention
from kvjax.kernels.paged_attention.arguments import Queries as Queries
from kvjax.kernels.paged_attention.arguments import Rows as Rows
from kvjax.kernels.paged_attention.arguments import page_lse as page_lse

"""Attention of packed queries over pages.

Every backend has the signature of `reference.paged_attention`: `reference` (numpy float64, the definition) and `xla`
(portable). `Rows` and `Queries` say which pages and which tokens belong to a sequence.
"""

from kvjax.kernels.paged_attention.arguments import Queries as Queries
from kvjax.kernels.paged_attention.arguments import Rows as Rows

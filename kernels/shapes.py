"""Production shapes of paged attention, shared by compile checks, tests and benchmarks."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """One layer's attention in one step.

    Attributes:
        name: of the model.
        heads, kv_heads, head_dim: of the layer.
        batch: sequences.
        context: tokens of each sequence.
        queries: new tokens of each sequence; 1 is decode.
        page_size: slots of a page.
        window: positions a query sees, None for all.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    context: int
    queries: int = 1
    page_size: int = 16
    window: int | None = None

    @property
    def kernel(self) -> str:
        """decode or prefill."""
        return "decode" if self.queries == 1 else "prefill"

    @property
    def label(self) -> str:
        """The shape in words."""
        window = f", window {self.window}" if self.window else ""
        return (
            f"{self.name}: {self.heads}/{self.kv_heads} heads of {self.head_dim}, pages of {self.page_size}, "
            f"batch {self.batch}, context {self.context}, {self.queries} new{window}"
        )

    @property
    def bytes_moved(self) -> int:
        """Bytes that must be moved with 2-byte elements: the visible keys and values once, queries and outputs."""
        return self.bytes_with(2 * self.head_dim * 2)

    def bytes_with(self, slot_bytes: float) -> int:
        """The same where the key and the value of a slot and KV head take `slot_bytes`."""
        seen = self.context if self.window is None else min(self.context, self.window + self.queries - 1)
        pages = round(self.batch * seen * self.kv_heads * slot_bytes)
        return pages + 2 * self.batch * self.queries * self.heads * self.head_dim * 2

    @property
    def pages_per_seq(self) -> int:
        """Pages of one sequence."""
        return -(-self.context // self.page_size)


# name: (query heads, KV heads, head_dim, window)
_MODELS = {
    "Llama-3.1-8B": (32, 8, 128, None),
    "Llama-3.1-70B/TP8": (8, 1, 128, None),
    "Qwen3-32B": (64, 8, 128, None),
    "Gemma-3-27B local": (32, 16, 128, 1024),
    "gpt-oss-120b local": (64, 8, 64, 128),
    "Gemma-2-9B": (16, 8, 256, None),
    "Phi-3-mini": (32, 32, 96, None),
}
_DECODES = {
    "Llama-3.1-8B": ((1, 1024), (32, 1024), (256, 1024), (1, 131072), (32, 8192), (256, 4096)),
    "Llama-3.1-70B/TP8": ((32, 8192), (256, 1024), (1, 131072)),
    "Qwen3-32B": ((1, 32768), (256, 1024)),
    "Gemma-3-27B local": ((1, 131072), (32, 8192)),
    "gpt-oss-120b local": ((1, 131072), (256, 1024)),
    "Gemma-2-9B": ((32, 8192),),
    "Phi-3-mini": ((32, 4096),),
}


def _shapes() -> tuple[AttentionShape, ...]:
    shapes = []
    for name, (heads, kv_heads, head_dim, window) in _MODELS.items():
        model: dict[str, Any] = dict(name=name, heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window)
        shapes += [AttentionShape(**model, batch=batch, context=context) for batch, context in _DECODES[name]]
        shapes.append(AttentionShape(**model, batch=1, context=8192, queries=2048))
    llama = AttentionShape("Llama-3.1-8B", 32, 8, 128, 32, 4096)
    shapes += [dataclasses.replace(llama, page_size=size) for size in (8, 32, 64, 128)]
    shapes.append(dataclasses.replace(llama, name="head_dim 256", head_dim=256, page_size=128))
    return (*shapes, dataclasses.replace(llama, context=2048, queries=64))


ATTENTION_SHAPES = _shapes()

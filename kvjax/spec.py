"""The static description of a cache: shapes, page format and windows. Nothing here touches a device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from kvjax.errors import InputError, shown, whole_number
from kvjax.formats import canonical_format, forms_of
from kvjax.kernels.formats import Format
from kvjax.policy import Policy, checked_policy

_LEAST = dict(
    num_layers=1, num_kv_heads=1, head_dim=1, num_pages=1, max_seqs=1, pages_per_seq=1, max_query_length=1, page_size=8,
    rollback=0, groups=1,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Everything static about a cache; hashable, so it can key a compiled program.

    Attributes:
        num_layers: attention layers of the model.
        num_kv_heads: key/value heads of a layer.
        head_dim: values per head, even.
        num_pages: pages in the pool, the trash page 0 included; of both pools where `skip_layers` makes two.
        max_seqs: sequences the cache can hold at once.
        pages_per_seq: table entries of a sequence in one layer; `pages_per_seq * page_size` tokens fit a layer
            without a window, a windowed layer reuses its entries for ever.
        max_query_length: most tokens of one sequence in one step.
        page_size: tokens of a page, a multiple of 8.
        format: how keys and values are stored: "bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "int8",
            "int4" (keys with scales per channel of a page, which wants a page_size of 64, and rotated values),
            "int4_hadamard" (both rotated, with scales per token), "int4_per_token", or an alias (vLLM's names).
        key_format, value_format: other formats of keys or values than `format`; "int4_per_channel" is for keys only.
        skip_layers: layers whose keys and values are stored in `skip_format`, in a pool of their own; negative numbers
            count from the last layer. Models then name layers by numbers, not by traced values.
        skip_format: the format of those layers.
        skip_pages: how many of the pages are theirs, their page 0 included; None shares by what the longest sequence
            needs of each pool.
        windows: per layer the sliding window in tokens (a query sees itself and the `window - 1` tokens before
            it) or None; None for all layers means no windows.
        policy: what is kept of a sequence, from `kvjax.policies` or of your own; everything by default.
        rollback: tokens that `truncate` can take back in a windowed layer.
        groups: head groups with pages of their own: 1 (all heads of a layer share pages) or num_kv_heads.
        scrub_on_free: zero the keys and values of a page when it returns to the pool.
        debug: let every step test page ids before, and the allocator's invariants behind, on the device (cost grows
            with the pool and the tables).

    Raises: InputError naming the value and what is allowed.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    max_seqs: int
    pages_per_seq: int
    max_query_length: int
    page_size: int = 16
    format: str = "bfloat16"
    key_format: str | None = None
    value_format: str | None = None
    skip_layers: Sequence[int] = ()
    skip_format: str = "bfloat16"
    skip_pages: int | None = None
    windows: Sequence[int | None] | None = None
    policy: Policy = Policy()
    rollback: int = 0
    groups: int = 1
    scrub_on_free: bool = False
    debug: bool = False

    def __post_init__(self):
        object.__setattr__(self, "format", canonical_format(self.format))
        for name in ("key_format", "value_format"):
            own = getattr(self, name)
            object.__setattr__(self, name, None if own is None else canonical_format(own, name))
        object.__setattr__(self, "skip_format", canonical_format(self.skip_format, "skip_format"))
        for name, least in _LEAST.items():
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        for name in ("scrub_on_free", "debug"):
            if not isinstance(getattr(self, name), bool | np.bool):
                raise InputError(f"{name} is {shown(getattr(self, name))}: it must be True or False")
        object.__setattr__(self, "windows", self._named_windows())
        object.__setattr__(self, "skip_layers", self._named_layers())
        self._check_shapes()
        self._check_skip_pages()
        self._check_policy()
        self._check_windows()

    def _check_shapes(self):
        check_page_size(self.page_size)
        if self.head_dim % 2:
            raise InputError(f"head_dim {self.head_dim} is odd: rotary pairs and packed formats need an even size")
        if self.groups not in (1, self.num_kv_heads):
            raise InputError(f"groups {self.groups} is neither 1 nor num_kv_heads ({self.num_kv_heads})")
        row_pages, pools = self.num_layers * self.groups, 2 if self.skip_layers else 1
        if self.num_pages < row_pages + pools:
            raise InputError(
                f"num_pages {self.num_pages} cannot hold one sequence: {self.num_layers} layers x {self.groups} groups "
                f"need a page each and page 0 of {pools} pools is reserved; use at least {row_pages + pools}"
            )

    def _named_windows(self) -> tuple[int | None, ...]:
        if self.windows is None:
            return (None,) * self.num_layers
        listed = isinstance(self.windows, Sequence | np.ndarray) and not isinstance(self.windows, str | bytes)
        if not listed or getattr(self.windows, "ndim", 1) != 1:
            raise InputError(
                f"windows is {shown(self.windows)}: give a window or None for each of the {self.num_layers} layers"
            )
        return tuple(
            None if window is None else whole_number(f"windows[{layer}]", window, 1)
            for layer, window in enumerate(self.windows)
        )

    def _named_layers(self) -> tuple[int, ...]:
        listed = isinstance(self.skip_layers, Sequence | np.ndarray) and not isinstance(self.skip_layers, str | bytes)
        if not listed or getattr(self.skip_layers, "ndim", 1) != 1:
            raise InputError(f"skip_layers is {shown(self.skip_layers)}: give a list of layers")
        layers = self.num_layers
        named = {whole_number("a layer of skip_layers", of, -layers, layers - 1) % layers for of in self.skip_layers}
        if len(named) == layers:
            raise InputError(f"skip_layers names all {layers} layers: give format={self.skip_format!r} in its place")
        return tuple(sorted(named))

    def _check_skip_pages(self):
        if self.skip_pages is None:
            return
        if not self.skip_layers:
            raise InputError(f"skip_pages is {shown(self.skip_pages)} and there are no skip_layers: name them")
        least = len(self.skip_layers) * self.groups + 1
        most = self.num_pages - 1 - (self.num_layers - len(self.skip_layers)) * self.groups
        object.__setattr__(self, "skip_pages", whole_number("skip_pages", self.skip_pages, least, most))

    def _check_policy(self):
        checked_policy(self.policy)
        if self.policy.num_sinks and any(self._named_windows()):
            raise InputError(
                f"policy {self.policy.name} keeps the first tokens in every layer, and the model has windows of its "
                "own, whose layers were not trained with them: use another policy"
            )
        if self.policy.edits and self.key_form.is_per_channel:
            raise InputError(
                f"policy {self.policy.name} moves tokens, and keys with scales per channel belong to their page: use "
                "format int4_hadamard, which has scales per token"
            )
        self.policy.check(self)

    def _check_windows(self):
        if len(self.layer_windows) != self.num_layers:
            raise InputError(f"windows names {len(self.layer_windows)} layers, the model has {self.num_layers}")
        for layer, window in enumerate(self.layer_windows):
            if window is None:
                continue
            if self.pages_per_seq < (needed := self.pinned + self._ring_of_window(window)):
                raise InputError(
                    f"pages_per_seq {self.pages_per_seq} is too small for layer {layer}: window {window}, "
                    f"max_query_length {self.max_query_length} and rollback {self.rollback} need {needed}"
                )

    def _ring_of_window(self, window: int) -> int:
        return pages_for(window + self.max_query_length + self.rollback, self.page_size) + 1

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of every layer, the policy's where it has none of its own, or None."""
        assert self.windows is not None, "__post_init__ has named one for each layer"
        return tuple(self.policy.window_size if window is None else window for window in self.windows)

    @property
    def pinned(self) -> int:
        """Pages at the front of every row that hold the policy's sinks and stay."""
        return pages_for(self.policy.num_sinks, self.page_size)

    @property
    def rings(self) -> tuple[int, ...]:
        """Per layer the table entries that a row uses as a ring, behind the pinned ones."""
        rest = self.pages_per_seq - self.pinned
        return tuple(rest if w is None else self._ring_of_window(w) for w in self.layer_windows)

    @property
    def decode_slots(self) -> int | None:
        """Most slots that rows without a window have after a decode step, or None if the policy does not bound them."""
        if (bound := self.policy.bound) is None:
            return None
        whole_pages = pages_for(bound + self.page_size, self.page_size) * self.page_size
        return whole_pages if self.policy.by_page else bound + 1

    @property
    def decode_entries(self) -> int:
        """Table entries that rows use in decode steps: fewer than there are, if a policy bounds what they keep."""
        if (slots := self.decode_slots) is None or any(self.layer_windows):
            return self.pages_per_seq
        return min(self.pages_per_seq, pages_for(slots, self.page_size))

    @property
    def window_rings(self) -> tuple[int, ...]:
        """Entries of the layers that have a window, pinned ones included: the least `pages_per_seq` may be."""
        return tuple(self.pinned + self._ring_of_window(w) for w in self.layer_windows if w is not None)

    @functools.cached_property
    def pools(self) -> tuple[PoolSpec, ...]:
        """The layers that share a pool of pages, and what describes each pool: one for all, or two."""
        if not self.skip_layers:
            return (PoolSpec(tuple(range(self.num_layers)), self),)
        kept = tuple(layer for layer in range(self.num_layers) if layer not in self.skip_layers)
        parts, skip_pages = (kept, tuple(self.skip_layers)), self.skip_pages or self._share_of(self.skip_layers, kept)
        pages, windows = (self.num_pages - skip_pages, skip_pages), self._named_windows()
        formats = (dict(), dict(format=self.skip_format, key_format=None, value_format=None))
        return tuple(
            PoolSpec(
                layers,
                dataclasses.replace(
                    self, num_layers=len(layers), num_pages=count, skip_layers=(), skip_pages=None,
                    windows=[windows[layer] for layer in layers], policy=self._policy_of(layers), **changes,
                ),
            )
            for layers, count, changes in zip(parts, pages, formats, strict=True)
        )  # fmt: skip

    def _policy_of(self, layers: Sequence[int]) -> Policy:
        """The policy of a pool: none where it drops tokens and all layers have windows, of which it drops nothing."""
        windowed = all(self.windows is not None and self.windows[layer] is not None for layer in layers)
        return Policy() if self.policy.edits and windowed else self.policy

    def place_of(self, layer: int) -> tuple[int, int]:
        """Return the number of the pool that a layer is in, and the layer's place there."""
        number = next(number for number, pool in enumerate(self.pools) if layer in pool.layers)
        return number, self.pools[number].layers.index(layer)

    def _share_of(self, layers: Sequence[int], others: Sequence[int]) -> int:
        """Pages for some layers, by what the longest sequence holds of each; every layer has one for a sequence."""
        need, of_all = sum(self.rings[layer] for layer in layers), sum(self.rings)
        share = round((self.num_pages - 2) * need / of_all) + 1
        most = self.num_pages - 1 - len(others) * self.groups
        return min(max(share, 1 + len(layers) * self.groups), most)

    @property
    def heads_per_group(self) -> int:
        """KV heads whose keys and values share a page."""
        return self.num_kv_heads // self.groups

    @property
    def key_form(self) -> Format:
        """How keys are stored."""
        return forms_of(self.key_format or self.format)[0]

    @property
    def value_form(self) -> Format:
        """How values are stored."""
        return forms_of(self.value_format or self.format)[1]

    @property
    def is_quantized(self) -> bool:
        """Whether keys or values have scales."""
        return self.key_form.is_quantized or self.value_form.is_quantized

    @property
    def query_dtype(self) -> str:
        """The dtype that queries are taken to have where nobody says: bfloat16 for quantised formats."""
        return "bfloat16" if self.is_quantized else self.key_form.name

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of one sequence, or None if every layer has a window and a sequence may run for ever."""
        return None if all(self.layer_windows) else self.pages_per_seq * self.page_size


@dataclasses.dataclass(frozen=True)
class PoolSpec:
    """Layers of a model, in order, whose pages come from one pool, and the description of a cache of these alone."""

    layers: tuple[int, ...]
    spec: CacheSpec


def check_page_size(size: int) -> None:
    """Raise InputError for a page size that no cache has."""
    if size < 8 or size % 8:
        raise InputError(f"page_size {size} is not a multiple of 8: use 8, 16, 32, 64 or 128")


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


def bucket(count: int) -> int:
    """Round up to at most two significant bits after the first, so that similar sizes share a compiled program."""
    step = 1 << max(count.bit_length() - 3, 0)
    return -(-count // step) * step

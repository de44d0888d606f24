"""What a cache keeps: the protocol of policies. Those that kvjax brings are in `kvjax.policies`.

A policy is a frozen dataclass of numbers, part of `CacheSpec`, and its methods are pure functions on arrays of static
shape that a compiled step calls. This class keeps everything; a policy of your own overrides what it wants to do
otherwise: for most, `write` or `observe` give every token a score, and `rank` says what goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int8, Int32

from kvjax.errors import InputError, shown
from kvjax.kernels.pytree import pytree

if TYPE_CHECKING:
    from kvjax.spec import CacheSpec

ALL = 2**31 - 1
# What `token_kinds` says of a token; 0 of all others.
SPECIAL, PUNCTUATION = 1, 2
PREFILLS = ("exact", "chunked")
HEADS = ("each", "mean")

State = Mapping[str, Array]


@pytree
class Held:
    """Tokens by slot: of rows, one for each layer, group and sequence, or of the rows of one layer.

    Attributes:
        positions: int32 [*rows, slots], -1 where a slot is empty; slots are in no order.
        slots: what the policy keeps of each slot, [*rows, slots] by name; of no meaning where a slot is empty.
        rows: what it keeps of each row, [*rows] by name.
        number: int32 [*rows], a number of its own for each row of the cache.
        next_position, start_position: int32 [*rows] or broadcast to it: of the sequence's next token and its first.
        page_size: slots of a page (static).
    """

    positions: Int32[Array, "*rows slots"]
    slots: dict[str, Array]
    rows: dict[str, Array]
    number: Int32[Array, "*rows"]
    next_position: Int32[Array, "*of_rows"]
    start_position: Int32[Array, "*of_rows"]
    page_size: int = dataclasses.field(metadata=dict(static=True))

    @property
    def used(self) -> Bool[Array, "*rows slots"]:
        """Which slots hold a token."""
        return self.positions >= 0

    @property
    def count(self) -> Int32[Array, "*rows"]:
        """Tokens that a row holds."""
        return self.used.sum(-1, dtype=jnp.int32)

    @property
    def age(self) -> Int32[Array, "*rows slots"]:
        """How many tokens ago a slot's token came: 1 for the newest."""
        return self.next_position[..., None] - self.positions

    @property
    def place(self) -> Int32[Array, "*rows slots"]:
        """Which token of its sequence a slot holds: 0 for the first."""
        return self.positions - self.start_position[..., None]


@dataclasses.dataclass(frozen=True)
class Seen:
    """The attention of a step's last queries in one layer.

    Attributes:
        mass: float32 [groups, seqs, slots], the attention that a slot's token received, summed over the queries and
            averaged over the query heads that read the group's pages.
        entropy: float32 [groups, seqs], entropy of the queries' attention in nats, summed over the queries and averaged
            over those heads; None in decode.
        queries: int32 [seqs], how many queries that were.
        lengths: int32 [seqs], tokens that the step brought.
        is_new: bool [groups, seqs, slots], which of the tokens the step brought.
        ends: bool [seqs], whether the step ended a prompt.
        banded: gives `mass` of only the pairs with `query position - position <= band`, int32 [seqs]; None in decode.
    """

    mass: Float32[Array, "groups seqs slots"]
    entropy: Float32[Array, "groups seqs"] | None
    queries: Int32[Array, " seqs"]
    lengths: Int32[Array, " seqs"]
    is_new: Bool[Array, "groups seqs slots"]
    ends: Bool[Array, " seqs"]
    banded: Callable[[Int32[Array, " seqs"]], Float32[Array, "groups seqs slots"]] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Keeps everything: the base of all policies.

    Attributes:
        name: what `--policy` calls it.
        edits: whether it drops tokens or pages by rules of its own. Its sequences then own their pages: `fork` and
            `share` copy them, and `truncate` refuses those that have lost any.
        in_decode: whether decode steps drop something too, not only the end of a prompt.
        by_page: whether they drop whole pages, when one becomes full, in place of tokens.
        every_chunk: whether `observe` wants to see all parts of a prompt, not only the last.
        decode_queries: 1 if `observe` wants to see the attention of decode steps, else 0.
        wants_kinds: whether `write` has a use for the kinds of tokens.
    """

    name: ClassVar[str] = "full"
    edits: ClassVar[bool] = False
    in_decode: ClassVar[bool] = False
    every_chunk: ClassVar[bool] = False
    by_page: ClassVar[bool] = False
    decode_queries: ClassVar[int] = 0
    wants_kinds: ClassVar[bool] = False

    @property
    def window_size(self) -> int | None:
        """Most positions that a query sees, itself included, in layers without a window of their own; None for all."""
        return None

    @property
    def num_sinks(self) -> int:
        """First tokens that every query sees, whatever the window."""
        return 0

    @property
    def prompt_queries(self) -> int:
        """Of how many of the last queries `observe` wants the attention when a prompt, or a chunk of it, is read.

        0 for none, `ALL` for all.
        """
        return 0

    @property
    def last_chunk(self) -> int:
        """How many of the last tokens of a prompt its last chunk must hold: `ALL` for the whole prompt."""
        queries = 0 if self.every_chunk or self.in_chunks else self.prompt_queries
        # A token that comes alone is taken for one of decode.
        return queries if self.in_decode or not self.edits else max(queries, 2)

    @property
    def by_head(self) -> bool:
        """Whether every KV head needs pages of its own."""
        return False

    @property
    def in_chunks(self) -> bool:
        """Whether every step drops what is too much, and not only the step that ends a prompt."""
        return False

    @property
    def bound(self) -> int | None:
        """Most tokens that a row keeps in decode, or None if nothing bounds them."""
        return None

    def most_slots(self, prompt: int, new: int, chunk: int, page_size: int) -> int:
        """Most slots that a row needs at once, for a prompt, read in chunks, and new tokens, but for windows."""
        return prompt + new

    def check(self, spec: CacheSpec) -> None:
        """Raise InputError if caches of that kind cannot have the policy."""

    def slot_state(self) -> dict[str, str]:
        """What to keep of each slot: dtypes by name."""
        return {}

    def row_state(self) -> dict[str, str]:
        """What to keep of each layer, group and sequence: dtypes by name; 0 at first and after `release`."""
        return {}

    def page_state(self, spec: CacheSpec) -> dict[str, tuple[tuple[int, ...], str]]:
        """What to keep of each page: shapes and dtypes by name. For policies that drop nothing."""
        return {}

    def summarize(
        self, keys: Float32[Array, "*pages heads page_size head_dim"], used: Bool[Array, "*pages page_size"]
    ) -> dict[str, Array]:
        """Return what to keep of pages that a step has written to, [*pages, ...] by name.

        Args:
            keys: as attention reads them, rotated; of any value where a slot is not used.
            used: which slots hold a token.
        """
        return {}

    @property
    def pages_read(self) -> int | None:
        """Pages that a decode step reads for each KV head, in layers without a window; None for all there are."""
        return None

    @property
    def reads_all_before(self) -> int:
        """The first layer that `pages_read` is said of."""
        return 0

    def score_pages(
        self, q: Float32[Array, "seqs kv_heads of_head head_dim"], kept: dict[str, Array]
    ) -> Float32[Array, "kv_heads seqs pages"]:
        """Say which pages to read: those of the largest score; the one that the newest token is in is always read.

        Args:
            q: queries of each sequence, as attention takes them, by the KV head that they read.
            kept: what the policy keeps of the pages of each row, [groups, seqs, pages, ...] by name.
        """
        raise NotImplementedError

    def write(
        self,
        k: Float[Array, "tokens groups heads head_dim"],
        v: Float[Array, "tokens groups heads head_dim"],
        kinds: Int8[Array, " tokens"] | None,
    ) -> dict[str, Array]:
        """Return what to keep of new tokens, [tokens, groups] by name; keys come rotated."""
        return {}

    def observe(self, held: Held, seen: Seen) -> Held:
        """Return what is held of a layer, with new `slots` and `rows`, after the attention of a step."""
        return held

    def settle(self, rows: dict[str, Array], ends: Bool[Array, " seqs"], layers: Sequence[int]) -> State:
        """Return the state of all rows, [layers, groups, seqs] by name, after the layers of a step have run.

        Args:
            rows: as `observe` left it.
            ends: whether the step ended a prompt.
            layers: those without a window, of which tokens are dropped.
        """
        return rows

    def rank(self, held: Held) -> tuple[Float32[Array, "*rows slots"], Int32[Array, "*rows"] | int]:
        """Say what a row drops: of its tokens with a finite rank the lowest, while it has more of these than allowed.

        Returns: float32 ranks, infinite for tokens that stay (of equal ones the older goes first), and how many of the
            others are allowed.
        """
        return jnp.full(held.positions.shape, jnp.inf), 0


def state_shapes(spec: CacheSpec, policy: Policy) -> dict[str, dict[str, Any]]:
    """Shapes and dtypes of what a policy keeps, by what it is of."""
    rows = (spec.num_layers, spec.groups, spec.max_seqs)
    of = lambda shape, kept: {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, dtype in kept.items()}  # noqa: E731
    slots, pages = (spec.num_pages, spec.page_size), policy.page_state(spec)
    if pages and policy.edits:
        raise InputError(f"policy {policy.name} keeps something of pages and drops tokens: let it do one of the two")
    of_pages = {
        name: jax.ShapeDtypeStruct((spec.num_pages, *shape), jnp.dtype(dtype)) for name, (shape, dtype) in pages.items()
    }
    return dict(slots=of(slots, policy.slot_state()), pages=of_pages, rows=of(rows, policy.row_state()))


def checked_policy(policy: object) -> None:
    """Raise InputError for what is no policy, such as its text or its class."""
    if not isinstance(policy, Policy):
        raise InputError(
            f"policy is {shown(policy)}: give a kvjax.policy.Policy, or kvjax.policies.parse_policy of a text"
        )


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise InputError if a value is none of those allowed."""
    if value not in allowed:
        raise InputError(f"{name} is {shown(value)}: choose one of {', '.join(allowed)}")

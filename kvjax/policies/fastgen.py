"""FastGen (arXiv 2310.01801): every head keeps as little as its attention over the prompt allows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from kvjax.errors import InputError, shown, whole_number
from kvjax.policies.budget import AtPromptEnd
from kvjax.policy import ALL, PUNCTUATION, SPECIAL, Held, Seen

if TYPE_CHECKING:
    from kvjax.spec import CacheSpec

# Up to which kind of tokens a head keeps them. A row keeps everything until its prompt ends.
EVERYTHING, TO_LOCAL, TO_FREQUENT, TO_PUNCTUATION, TO_SPECIAL = range(5)
# What a fraction of a length may be off by, in float32, before it counts as a token more or less.
_SLACK = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastGen(AtPromptEnd):
    """At the prompt's end every KV head takes the first of these policies that recovers enough of its attention.

    Special tokens; those and punctuation; those and frequent tokens; those and local tokens; all. A set of tokens
    recovers the attention that the prompt's queries give to it, the mean over the queries. Frequent tokens are those of
    the largest mean attention from the queries that saw them, in prompt and decode, so many as are `frequent` of the
    prompt; local ones the newest, `local` of the prompt (a query's own window while the prompt is judged). Both numbers
    stay what they are in decode; special tokens and punctuation add up. The newest token always stays, and is not
    counted: the next query sees it and itself.

    Frequent tokens are chosen among those that the rest of the policy does not keep at the prompt's end, as in
    cold-compress, to which the authors refer. Query heads that share a KV head are judged by the mean of their
    attention. The kinds of tokens come with the step (`begin_step`; the loops know them of a `LanguageModel`); where
    nobody tells them, only the first tokens are special.

    Attributes:
        recovery: of the attention, at least, above 0 and at most 1.
        local, frequent: fractions of the prompt, from 0 to 1.
        sinks: first tokens that count as special, whatever their kind.
    """

    name: ClassVar[str] = "fastgen"
    in_decode: ClassVar[bool] = True
    decode_queries: ClassVar[int] = 1
    wants_kinds: ClassVar[bool] = True
    recovery: float = 0.95
    local: float = 0.3
    frequent: float = 0.3
    sinks: int = 4

    def __post_init__(self):
        super().__post_init__()
        for name in ("recovery", "local", "frequent"):
            value = getattr(self, name)
            if not isinstance(value, float | int) or not 0 <= value <= 1 or (name == "recovery" and value == 0):
                raise InputError(f"{name} is {shown(value)}: give a number from 0 to 1")
        object.__setattr__(self, "sinks", whole_number("sinks", self.sinks, 0))

    @property
    def by_head(self) -> bool:
        return True

    @property
    def prompt_queries(self) -> int:
        return ALL

    def check(self, spec: CacheSpec) -> None:
        super().check(spec)
        if spec.heads_per_group > 1:
            raise InputError(
                f"policy {self.name} chooses a policy for each KV head, and {spec.heads_per_group} share a page: give "
                f"groups={spec.num_kv_heads}"
            )

    def slot_state(self) -> dict[str, str]:
        return dict(score="float32", kind="int8")

    def row_state(self) -> dict[str, str]:
        return dict(keeps="int32", window="int32", frequent="int32")

    def write(self, k, v, kinds):
        shape = k.shape[:2]
        kinds = jnp.zeros(shape, jnp.int8) if kinds is None else jnp.broadcast_to(kinds[:, None], shape)
        return dict(score=jnp.zeros(shape, jnp.float32), kind=kinds)

    def observe(self, held: Held, seen: Seen) -> Held:
        held = dataclasses.replace(held, slots=held.slots | dict(score=held.slots["score"] + seen.mass))
        if seen.banded is None:
            return held
        chosen, judged = self._chosen(held, seen), (seen.ends & (seen.lengths > 1))[None]
        rows = {name: jnp.where(judged, of, held.rows[name]) for name, of in chosen.items()}
        return dataclasses.replace(held, rows=rows)

    def _chosen(self, held: Held, seen: Seen) -> dict[str, Int32[Array, "groups seqs"]]:
        """What a prompt's attention says of its rows."""
        assert seen.banded is not None, "decode steps choose nothing"
        length = (held.next_position - held.start_position).astype(jnp.float32)
        window = jnp.maximum(jnp.floor(self.local * length + _SLACK), 1).astype(jnp.int32)
        count = jnp.ceil(self.frequent * length - _SLACK).astype(jnp.int32)
        special, punctuation = self._special(held), held.slots["kind"] == PUNCTUATION
        marked, in_window = special | punctuation, held.age <= window[..., None]
        frequent = marked | self._most_seen(held, ~marked & (held.age > 1), count)
        outside = marked | self._most_seen(held, ~marked & ~in_window, count)
        queries = jnp.maximum(seen.queries, 1).astype(jnp.float32)[None]
        banded = seen.banded((window - 1)[0])
        of_columns = lambda kept, others: jnp.where(held.used & kept, seen.mass, others).sum(-1) / queries  # noqa: E731
        recovered = (of_columns(outside, banded), *(of_columns(kept, 0) for kept in (frequent, marked, special)))
        keeps = jnp.full(held.count.shape, EVERYTHING, jnp.int32)
        for level, part in enumerate(recovered, TO_LOCAL):
            keeps = jnp.where(part >= self.recovery, level, keeps)
        of_rows = lambda of: jnp.broadcast_to(of, keeps.shape)  # noqa: E731
        return dict(keeps=keeps, window=of_rows(window), frequent=of_rows(count))

    def _special(self, held: Held) -> Bool[Array, "*rows slots"]:
        return (held.slots["kind"] == SPECIAL) | (held.place < self.sinks)

    def _most_seen(self, held: Held, among: Bool[Array, "*rows slots"], count: Int32[Array, "*of_rows"]):
        """Mark the `count` tokens of the largest mean attention among some, of equal ones the newer."""
        number = jnp.broadcast_to(jnp.arange(among.shape[-1], dtype=jnp.int32), among.shape)
        score = jnp.where(among & held.used, -_mean_attention(held), jnp.inf)
        *_, order = lax.sort((score, -held.positions, number), num_keys=2)
        is_chosen = jnp.broadcast_to(number < count[..., None], among.shape)
        chosen = jnp.put_along_axis(jnp.zeros(among.shape, bool), order, is_chosen, axis=-1, inplace=False)
        return chosen & jnp.isfinite(score)

    def rank(self, held: Held):
        keeps, kind = held.rows["keeps"][..., None], held.slots["kind"]
        stays = (keeps == EVERYTHING) | self._special(held) | (held.age <= 1)
        stays |= (kind == PUNCTUATION) & (keeps <= TO_PUNCTUATION)
        stays |= (held.age <= held.rows["window"][..., None]) & (keeps == TO_LOCAL)
        allowed = jnp.where(held.rows["keeps"] <= TO_FREQUENT, held.rows["frequent"], 0)
        return jnp.where(stays, jnp.inf, _mean_attention(held)), allowed


def _mean_attention(held: Held) -> Float32[Array, "*rows slots"]:
    """Attention that tokens have received, over the queries that saw them."""
    return held.slots["score"] / jnp.maximum(held.age, 1).astype(jnp.float32)

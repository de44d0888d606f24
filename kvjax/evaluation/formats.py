"""What page formats cost in quality: perplexity, divergence, passkeys and attention, beside their bytes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvjax import sizes
from kvjax.batch import cache_spec
from kvjax.errors import InputError, whole_number
from kvjax.evaluation import passkey
from kvjax.evaluation.quality import Comparison, Fake, Scores, Variant, perplexity
from kvjax.evaluation.texts import Document, Text, excerpts
from kvjax.formats import canonical_format
from kvjax.kernels.formats import FORMATS
from kvjax.models import registry
from kvjax.models.decoder import Decoder
from kvjax.models.loading import LanguageModel
from kvjax.options import Options
from kvjax.paths import enable_compilation_cache
from kvjax.spec import CacheSpec

DEFAULT_FORMATS = ("bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "int4_hadamard", "int4_per_token")
# Formats of the evaluation alone, and the format whose bytes they would take.
_ROTATED_FP8 = dataclasses.replace(FORMATS["fp8_e4m3"], name="fp8_e4m3_hadamard", is_rotated=True)
FAKES = {
    "int4_before_rotary": (
        Fake(FORMATS["int4_per_channel"], FORMATS["int4_hadamard"], before_rotary=True),
        "int4",
    ),
    "fp8_e4m3_hadamard": (Fake(_ROTATED_FP8, _ROTATED_FP8), "fp8_e4m3"),
}
CHUNK = 512
_LONG = 1024  # the context of bytes_ratio_at_1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        formats: what `CacheSpec` takes as format, `KEYS/VALUES` for two of them, or a key of `FAKES`.
        context: tokens of a window; each begins with an empty cache.
        windows: of each text.
        passkey_lengths: tokens of the prompts with a passkey, the answer included; none leaves passkeys out.
        trials: passkeys of each length.
        page_size: of all caches.
        seed: of the passkeys, and of where they stand.
    """

    formats: Sequence[str] = DEFAULT_FORMATS
    context: int = 2048
    windows: int = 4
    passkey_lengths: Sequence[int] = (512, 1024, 2048)
    trials: int = 10
    page_size: int = 64
    seed: int = 0

    def __post_init__(self):
        names = dict.fromkeys("/".join(_formats_of(name)) if name not in FAKES else name for name in self.formats)
        object.__setattr__(self, "formats", tuple(names))
        if not names:
            raise InputError("no format to measure: name one")
        for name in ("windows", "trials"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1))
        object.__setattr__(self, "context", whole_number("context", self.context, 2))
        lengths = [whole_number("a passkey length", length, 1) for length in dict.fromkeys(self.passkey_lengths)]
        object.__setattr__(self, "passkey_lengths", tuple(lengths))
        object.__setattr__(self, "seed", whole_number("seed", self.seed, 0))
        self._check_page_size()

    def _check_page_size(self) -> None:
        small = CacheSpec(
            num_layers=1, num_kv_heads=1, head_dim=2, num_pages=2, max_seqs=1, pages_per_seq=1, max_query_length=1,
            page_size=self.page_size,
        )  # fmt: skip
        object.__setattr__(self, "page_size", small.page_size)
        fakes = [name for name in self.formats if name in FAKES]
        if fakes and CHUNK % self.page_size:
            raise InputError(
                f"page_size {self.page_size} does not divide chunks of {CHUNK} tokens, which {fakes[0]} wants: use "
                "8, 16, 32, 64 or 128, or leave it out"
            )


def _formats_of(name: str) -> tuple[str, ...]:
    """Return one format, or those of keys and values. Raises InputError for a name that is none."""
    if not isinstance(name, str) or name.count("/") != 1:
        return (canonical_format(name),)
    keys, values = name.split("/")
    return canonical_format(keys, "key_format"), canonical_format(values, "value_format")


def run(
    model: LanguageModel, settings: Settings, texts: Sequence[Text], notify: Callable[[str], None]
) -> dict[str, Any]:
    """Measure formats on a model.

    Full precision is float32 pages, whatever the weights; every cache is fed the same tokens, in chunks of 512.

    Args:
        model: a decoder with its tokenizer.
        settings: what to measure.
        texts: prose and code; where there is prose, it alone makes the figures of a row, and stands for passkeys.
        notify: is called with lines of progress.

    Returns: the report, for JSON (docs/formats.md says what its keys mean).

    Raises: InputError for texts and lengths that do not fit each other or the model.
    """
    began = time.perf_counter()
    prose = [text for text in texts if text.kind == "prose"] or list(texts)
    documents = _documents(model, settings, texts, prose[0])
    longest = max(len(document.tokens) for document in documents)
    full, variants = caches(model.decoder, longest, settings)
    comparison = Comparison(model.decoder, full, variants)
    first = next(document for document in documents if document.name == prose[0].name and document.answer is None)
    _estimate(comparison, documents, first, notify)
    scores = _scores(comparison, documents, began, notify)
    errors = {}
    for variant in variants:
        errors[variant.name] = comparison.attention_error(variant, first)
    notify(f"attention outputs measured after {time.perf_counter() - began:.0f} s")
    pooled = [text.name for text in prose]
    results = {name: quality(documents, scores, name, pooled) for name in ("full", *errors)}
    rows = [
        dict(format=variant.name, stored=variant.fake is None)
        | bytes_of(variant, full)
        | results[variant.name]
        | dict(attention_rel_error=errors[variant.name])
        for variant in variants
    ]
    return dict(
        model=model.name, context=settings.context, chunk=full.max_query_length, page_size=full.page_size,
        seed=settings.seed, pooled=pooled,
        texts=[dict(name=text.name, kind=text.kind, source=text.source) for text in texts],
        full=dict(format="float32") | results["full"], rows=rows, seconds=time.perf_counter() - began,
    )  # fmt: skip


def load(name: str, notify: Callable[[str], None]) -> LanguageModel:
    """Load a model in float32, its layers stacked: each of the many programs compiles in a tenth of the time.

    Raises: InputError as `kvjax.load` does.
    """
    enable_compilation_cache()
    source = registry.find(name)
    config, tokenizer = registry.read_config(source), registry.read_tokenizer(source)
    decoder = Decoder(config, registry.load_weights(source, notify=notify), scan=True)
    return LanguageModel(name=source.name, decoder=decoder, config=config, tokenizer=tokenizer)


def _documents(model: LanguageModel, settings: Settings, texts: Sequence[Text], prose: Text) -> list[Document]:
    longest = max(settings.context, *settings.passkey_lengths, 0)
    if longest > model.config.max_position:
        raise InputError(
            f"{longest} tokens are more than the {model.config.max_position} that {model.name} was trained on: "
            "lower the context and the passkey lengths"
        )
    documents = []
    for text in texts:
        documents += excerpts(text, model.tokenizer, settings.windows, settings.context)
    for length in settings.passkey_lengths:
        documents += passkey.documents(prose, model.tokenizer, length, settings.trials, settings.seed)
    return documents


def caches(decoder: Any, longest: int, settings: Settings) -> tuple[CacheSpec, list[Variant]]:
    """Return the spec of full precision, and the variants: all of one sequence of the longest document."""
    options = Options(format="float32", page_size=settings.page_size, chunk_size=CHUNK)
    full = cache_spec(decoder, [longest], [1], options)
    variants = []
    for name in settings.formats:
        if name in FAKES:
            variants.append(Variant(name, full, FAKES[name][0]))
            continue
        first, *other = name.split("/")
        second = other[0] if other else None
        spec = dataclasses.replace(
            full, format=second or first, key_format=first if other else None, value_format=second
        )
        variants.append(Variant(name, spec))
    return full, variants


def bytes_of(variant: Variant, full: CacheSpec) -> dict[str, float]:
    """Return bytes of full pages with their metadata, and ratios to bfloat16.

    `bytes_ratio_at_1024` is of all that a sequence of 1024 tokens holds, open pages included; of `FAKES` those of the
    format that they stand for.
    """
    plain = dataclasses.replace(full, format="bfloat16", key_format=None, value_format=None)
    spec = variant.spec
    if variant.fake is not None:
        spec = dataclasses.replace(full, format=FAKES[variant.name][1], key_format=None, value_format=None)
    return dict(
        bytes_per_token=sizes.token_bytes(spec),
        bytes_ratio=sizes.token_bytes(spec) / sizes.token_bytes(plain),
        bytes_ratio_at_1024=sizes.sequence_bytes(spec, _LONG) / sizes.sequence_bytes(plain, _LONG),
    )


def _estimate(comparison: Comparison, documents: list[Document], first: Document, notify) -> None:
    """Feed one document to the full-precision cache alone, and say what that means for the rest."""
    times = [time.perf_counter()]
    for _ in range(2):
        comparison.scores(first, variants=())
        times.append(time.perf_counter())
    document_s, compile_s = times[2] - times[1], max(2 * times[1] - times[0] - times[2], 0.0)
    caches, chunks = len(comparison.variants), sum(map(comparison.chunks, documents))
    of_chunk = document_s / comparison.chunks(first)
    seconds = of_chunk * chunks * (1 + caches) + caches * (2 * document_s + 2 * compile_s)
    notify(
        f"about {seconds / 60:.1f} minutes: {chunks} chunks of tokens for {1 + caches} caches at {of_chunk:.2f} s "
        f"(measured), {2 * caches} programs to compile at {compile_s:.1f} s"
    )


def _scores(comparison: Comparison, documents: list[Document], began: float, notify) -> list[dict[str, Scores]]:
    scores, done, total = [], 0, sum(map(comparison.chunks, documents))
    for document in documents:
        scores.append(comparison.scores(document))
        done += comparison.chunks(document)
        notify(f"{done} of {total} chunks after {time.perf_counter() - began:.0f} s ({document.kind}, {document.name})")
    return scores


def quality(documents, scores, name: str, pooled: list[str]) -> dict[str, Any]:
    """The figures of one cache: of the pooled texts, of each text, and of the passkeys."""
    pairs = [(document, of[name], of["full"]) for document, of in zip(documents, scores, strict=True)]
    plain = [pair for pair in pairs if pair[0].answer is None]
    kinds = {document.name: document.kind for document, *_ in plain}
    by_text = {
        text: dict(kind=kind) | _figures([pair[1:] for pair in plain if pair[0].name == text])
        for text, kind in kinds.items()
    }
    found = {}
    for document, own, _ in pairs:
        if document.answer is not None:
            found.setdefault(len(document.tokens), []).append(bool(own.right[document.answer].all()))
    all_found = [of for length in found.values() for of in length]
    return (
        _figures([pair[1:] for pair in plain if pair[0].name in pooled])
        | dict(
            passkey=float(np.mean(all_found)) if all_found else None,
            passkey_trials=len(all_found),
            passkey_by_length={str(length): float(np.mean(of)) for length, of in found.items()},
        )
        | dict(texts=by_text)
    )


def _figures(windows: Sequence[tuple[Scores, Scores]]) -> dict[str, Any]:
    """Figures of windows, each a pair of a cache's scores and those of full precision."""
    own = [a for a, _ in windows]
    return perplexity([(a.nll, b.nll) for a, b in windows]) | dict(
        kl=float(np.concatenate([of.kl for of in own]).astype(np.float64).mean()),
        agreement=float(np.concatenate([of.agrees for of in own]).mean()),
    )

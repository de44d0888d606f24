"""The decoder against transformers: a tiny random-weight model of each family, dense, paged, scanned and unrolled."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from kvjax.cache import init_cache
from kvjax.invariants import check
from kvjax.models.decoder import Decoder
from kvjax.models.registry import find, load_weights, read_config
from kvjax.spec import CacheSpec
from kvjax.step import begin_step, end_step

REFERENCE = Path(__file__).parent.parent / "reference"
FAMILIES = json.loads((REFERENCE / "families.json").read_text())
LOGITS = np.load(REFERENCE / "families.npz")
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def random_weights():
    import importlib.util

    module = importlib.util.spec_from_file_location("random_weights", REFERENCE / "random_weights.py")
    assert module and module.loader
    loaded = importlib.util.module_from_spec(module)
    module.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory, random_weights):
    """Name of a family, its source (a Hugging Face folder with drawn weights) and its canonical weights."""
    facts = FAMILIES[request.param]
    drawn = random_weights.draw_weights(facts["parameters"], seed=facts["seed"], norm_center=facts["norm_center"])
    assert random_weights.checksum(drawn) == facts["weights_crc32"], "numpy's random stream is not the fixture's"
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(facts["config"]))
    save_file(drawn, folder / "model.safetensors")
    source = find(str(folder))
    return request.param, read_config(source), load_weights(source)


class Paged:
    """A decoder over a paged cache; compiles two steps, one for chunks of up to 32 tokens and one for decoding."""

    def __init__(self, decoder: Decoder):
        config = decoder.config
        self.spec = CacheSpec(
            num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, num_pages=200,
            max_seqs=2, pages_per_seq=12, max_query_length=32, page_size=8, format="float32",
            windows=config.windows, debug=True,
        )  # fmt: skip
        graph, state = nnx.split(decoder)

        def step_of(cache, tokens, length):
            longest = tokens.shape[0]
            cache, step = begin_step(
                cache, jnp.array([0, 1], jnp.int32) * length, num_tokens=longest, max_query_length=longest
            )
            logits, cache = nnx.merge(graph, state)(cache, step, tokens, all_tokens=True)
            cache, _ = end_step(cache, step)
            return logits, cache

        self.step = jax.jit(step_of, donate_argnums=0)

    def logits(self, tokens, chunks) -> np.ndarray:
        """Logits of all tokens, fed in chunks of the given lengths."""
        cache, out, begin = init_cache(self.spec), [], 0
        for length in chunks:
            padded = np.zeros(1 if length == 1 else 32, np.int32)
            padded[:length] = tokens[begin : begin + length]
            logits, cache = self.step(cache, jnp.asarray(padded), jnp.int32(length))
            out.append(np.asarray(logits)[:length])
            begin += length
        check(cache, held={})
        return np.concatenate(out)


@pytest.fixture(scope="module")
def unrolled(family) -> Paged:
    _, config, weights = family
    return Paged(Decoder(config, weights, scan=False, features_major=True))


def test_dense_logits_are_those_of_transformers(family):
    name, config, weights = family
    logits = jax.jit(Decoder(config, weights).dense)(jnp.asarray(LOGITS[f"{name}.tokens"]))
    np.testing.assert_allclose(logits, LOGITS[f"{name}.logits"], atol=TOLERANCE)


@pytest.mark.parametrize("chunks", [(32, 8), (7, 5, 11) + (1,) * 17], ids=["prefill", "chunks-and-decode"])
def test_paged_logits_are_those_of_transformers(family, unrolled, chunks):
    name = family[0]
    logits = unrolled.logits(LOGITS[f"{name}.tokens"], chunks)
    np.testing.assert_allclose(logits, LOGITS[f"{name}.logits"], atol=TOLERANCE)


def test_scanned_layers_give_the_logits_of_unrolled_ones(family, unrolled):
    name, config, weights = family
    tokens, chunks = LOGITS[f"{name}.tokens"], (13, 1, 1, 25)
    scanned = Paged(Decoder(config, weights, scan=True, features_major=False))
    np.testing.assert_allclose(scanned.logits(tokens, chunks), unrolled.logits(tokens, chunks), atol=1e-4)

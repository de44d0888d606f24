"""Codes as XLA's attention widens them, bit for bit what the format says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.formats import FORMATS, numbers
from kvjax.kernels.paged_attention.xla_numbers import widen

BITS = {"float32": np.uint32, "bfloat16": np.uint16}


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.is_quantized])
def test_every_code_widens_to_its_number(name, dtype):
    form = FORMATS[name]
    codes = jnp.asarray(np.arange(256, dtype=np.uint8).view(form.dtype).reshape(16, 16))
    wanted = np.asarray(numbers(codes, form, dtype))
    got = np.concatenate([np.asarray(part) for part in jax.jit(lambda of: widen(of, form, dtype))(codes)], axis=-1)
    is_number = ~np.isnan(wanted.astype(np.float32))
    assert is_number.sum() >= 250
    np.testing.assert_array_equal(got.view(BITS[dtype])[is_number], wanted.view(BITS[dtype])[is_number])

"""Policies as text: NAME[:key=value,...]."""

from __future__ import annotations

import dataclasses

from kvjax.errors import InputError, shown
from kvjax.policies.entropy import Entropy
from kvjax.policies.fastgen import FastGen
from kvjax.policies.h2o import H2O
from kvjax.policies.knorm import KNorm
from kvjax.policies.paged_eviction import PagedEviction
from kvjax.policies.quest import Quest
from kvjax.policies.random import Random
from kvjax.policies.sliding_window import SlidingWindow
from kvjax.policies.snapkv import SnapKV
from kvjax.policies.streaming import Streaming
from kvjax.policies.tova import TOVA
from kvjax.policy import Policy

_ALL = (
    Policy, SlidingWindow, Streaming, H2O, TOVA, SnapKV, KNorm, PagedEviction, Entropy, FastGen, Quest, Random,
)  # fmt: skip
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _ALL}


def parse_policy(text: str, **given: int) -> Policy:
    """Return the policy that `NAME[:key=value,...]` stands for, such as "h2o:budget=256,recent=32".

    Args:
        text: a name of `POLICIES`, and values for its attributes.
        given: attributes that the text does not say.

    Raises: InputError for an unknown name or key, a value of the wrong kind, or one that is missing.
    """
    name, _, rest = text.partition(":")
    if name not in POLICIES:
        raise InputError(f"policy {shown(name)} is unknown: choose one of {', '.join(POLICIES)}")
    fields = {field.name: field for field in dataclasses.fields(POLICIES[name])}
    values: dict[str, object] = {key: value for key, value in given.items() if key in fields}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in fields:
            allowed = ", ".join(fields) or "none"
            raise InputError(f"{shown(part)} is no key=value of policy {name}: its keys are {allowed}")
        values[key] = _value(key, value, str(fields[key].type))
    missing = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in values]
    if missing:
        raise InputError(f"policy {name} needs {' and '.join(missing)}: give {name}:{missing[0]}=…")
    return POLICIES[name](**values)


def _value(key: str, text: str, kind: str) -> object:
    """The value of an attribute, by what its annotation says."""
    convert, what = (str, "") if kind == "str" else (float, "a number") if kind == "float" else (int, "a whole number")
    try:
        return convert(text)
    except ValueError:
        raise InputError(f"{key}={text} is not {what}: give {what}, and a comma before the next key") from None

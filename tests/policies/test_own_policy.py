"""A policy of one's own, the one that README shows, against its definition."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
from helpers.driver import DECODE
from helpers.policies import POLICY_SPEC, PolicyTwin, assert_bounded, h2o

README = (Path(__file__).parents[2] / "README.md").read_text()


def own_policy() -> Any:
    """The class in README."""
    code = re.findall(r"```python\n(.*?)```", README.split("## A policy of your own", 1)[1], re.DOTALL)[0]
    assert len(code.splitlines()) <= 50
    names: dict[str, Any] = dict(__name__=__name__)
    exec(compile(code, "README.md", "exec"), names)
    return names["ValueAware"]


def test_a_policy_of_ones_own():
    spec = dataclasses.replace(POLICY_SPEC, windows=None, policy=own_policy()(budget=12))
    by_size = lambda token, end: token.score * np.abs(token.value).sum()  # noqa: E731
    rule = dataclasses.replace(h2o(12, recent=4), rank=by_size)
    twin = PolicyTwin(spec, rule=rule, compare_scores=False)
    for i in range(36):
        twin.step([1, int(i > 5), 0, int(i % 2)], **DECODE)
        assert_bounded(twin)
    assert twin.dropped > 60 and min(twin.kept(0)) < 12

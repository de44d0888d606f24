"""Policies: what a cache keeps of a sequence (see `kvjax.policy`), and their names on the command line."""

from kvjax.policies.entropy import Entropy as Entropy
from kvjax.policies.fastgen import FastGen as FastGen
from kvjax.policies.h2o import H2O as H2O
from kvjax.policies.knorm import KNorm as KNorm
from kvjax.policies.paged_eviction import PagedEviction as PagedEviction
from kvjax.policies.parsing import POLICIES as POLICIES
from kvjax.policies.parsing import parse_policy as parse_policy
from kvjax.policies.quest import Quest as Quest
from kvjax.policies.random import Random as Random
from kvjax.policies.sliding_window import SlidingWindow as SlidingWindow
from kvjax.policies.snapkv import SnapKV as SnapKV
from kvjax.policies.streaming import Streaming as Streaming
from kvjax.policies.tova import TOVA as TOVA

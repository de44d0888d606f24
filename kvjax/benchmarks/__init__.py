"""Measurements of speed and memory, interleaved so that their ratios hold on a busy machine."""

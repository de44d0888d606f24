"""Attention over pages: Pallas kernels and their references; arrays in, arrays out. Imported as `kvjax.kernels`."""

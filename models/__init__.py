"""Language models written on the cache, and the readers of their weights. Imported as `kvjax.models`."""

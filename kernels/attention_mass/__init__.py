"""How much attention slots receive and how it is spread, in a second pass over the keys.

Every backend has the signature of `reference.attention_mass`; rows and queries are those of `paged_attention`.
"""

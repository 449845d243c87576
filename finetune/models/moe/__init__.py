"""Mixtures of experts: their routers and grouped products, and experts sharded over ranks."""

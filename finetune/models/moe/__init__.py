"""Mixtures of experts: their routers and grouped products, adapters on experts, and experts sharded over ranks."""

"""Attention that keeps packed documents apart: the documents of a batch, and the kernels that compute them."""

"""What survives the process: checkpoints that are published whole or not at all, and runs that go on from them exactly.

`folder` is the format on disk and how a folder is published, verified and pruned; `state` is the tensors, piece by piece;
`saving` and `resuming` join the two. docs/checkpoints.md describes the format.
"""

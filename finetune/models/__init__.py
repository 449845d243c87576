"""Models: built on the meta device, adapted, sharded over the ranks, filled with each rank's
slices.
"""

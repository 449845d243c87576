"""Models: built on the meta device, adapted, sharded over the ranks, and filled with each rank's slices of the
weights."""

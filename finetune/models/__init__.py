"""From a name or an architecture to a model on the ranks: built on meta, adapted, spread, filled slice by slice."""

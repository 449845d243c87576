"""How a run is spread: the Accelerate YAML, read strictly, and the world of ranks it makes.

Only this room knows Accelerate's state, environment and plugins.
"""

"""What the user wrote, read strictly; and the rulebook: what works together, by facts on layout,
model and machine
"""

"""What works together: the rulebook, and the facts about layout, model and machine that it reads"""

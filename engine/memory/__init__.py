"""Who owns which bytes: planners from figures to plans. Nothing here allocates, or reads a tensor, or knows a card."""

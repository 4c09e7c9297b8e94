"""Models: load weights, find the state-space layers of a model and put a state driver under them."""

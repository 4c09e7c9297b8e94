"""Teacher forcing: a model's tokens under every state policy at once, and the divergence of its outputs."""

"""Measure how far a low-precision recurrent state moves a hybrid SSM model's output distribution."""

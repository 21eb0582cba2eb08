"""Bias, variance and cost of gradient estimators against exact gradients, and training with each of them."""

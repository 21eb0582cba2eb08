"""What the library was tried on: the paper's table, the question of depth, gradient estimators, strong conditioners."""

"""Twenty binary tables (DEBD), the standard benchmark of exact densities, with the default of `auto_fit`."""

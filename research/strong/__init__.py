"""What recipes with strong conditioners reach: rows, score, table, picture."""

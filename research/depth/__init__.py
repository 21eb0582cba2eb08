"""Whether depth pays: rows, score, table, picture."""

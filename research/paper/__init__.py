"""The table of Hesselink and Aziz (2020), trained again: rows, score, table, pictures."""

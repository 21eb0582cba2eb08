"""All doors: add yours here, and the small set, the long one and its table have it."""

from __future__ import annotations

from attack import data_files, folders, options, python_edge, run_folders, table_files, tables
from attack.rule import Door

DOORS: dict[str, Door] = {
    "csv": data_files.csv_damaged,
    "csv, whole": data_files.csv_whole,
    "npy": data_files.npy_damaged,
    "npy, whole": data_files.npy_whole,
    "npz": data_files.npz_damaged,
    "npz, whole": data_files.npz_whole,
    "paths of data": data_files.paths,
    "tables": tables.damaged,
    "tables, whole": tables.whole,
    "tables by commands": table_files.commands,
    "tables of words": table_files.words,
    "schemas": tables.schema_json,
    "schema files": tables.schema_file,
    "folders of scores": folders.score,
    "folders of samples": folders.sample,
    "streams": folders.stream,
    "TOML": options.toml,
    "config.json": options.config_json,
    "options of train": options.train,
    "options of readers": options.readers,
    "first words": options.first_words,
    "finished runs": run_folders.finished,
    "unfinished runs": run_folders.unfinished,
    "forged weights": run_folders.forged,
    "forged schemas": run_folders.forged_schema,
    "bit flips": run_folders.bit_flips,
    "log_prob": python_edge.log_prob,
    "numbers in Python": python_edge.numbers,
    "data sets in Python": python_edge.datasets,
    "fit": python_edge.fit,
    "save": python_edge.save,
    "load": python_edge.load,
} | ({"scikit-learn": python_edge.estimators} if python_edge.SCIKIT_THERE else {})

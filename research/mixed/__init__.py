"""Three tables of mixed columns, named in `tables.toml` before any model was fitted: `auto_fit` by default beside others."""

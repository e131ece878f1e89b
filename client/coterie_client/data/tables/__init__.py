"""Reads CSV, Parquet, NPZ and statistics files: cells, dialects and column types become features and targets."""

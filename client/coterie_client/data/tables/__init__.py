"""Tables as files: cells, dialects and types of CSV, Parquet, NPZ and statistics files, made into features and targets."""

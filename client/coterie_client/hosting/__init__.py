"""A client host: built from an experiment under its owner's policy, it hands tasks to the halves and keeps their states."""

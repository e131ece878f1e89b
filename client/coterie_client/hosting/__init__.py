"""A client host: built from an experiment under its owner's policy, it dispatches tasks to the halves and keeps their states."""

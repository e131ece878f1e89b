"""Records of a run: the ledger of messages, snapshots, and files that are written atomically."""

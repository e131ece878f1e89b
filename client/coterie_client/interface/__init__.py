"""What a client half is, and what the local update of a method is."""

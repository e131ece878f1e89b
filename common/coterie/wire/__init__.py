"""The wire format: declared messages, their codec, and frames."""

"""Random numbers: named streams, and the common coins."""

"""Random numbers: named streams, the common coins, and the streams of generated data."""

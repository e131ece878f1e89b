"""What several server halves share: local training, known clusters, sums of derivatives, and preparation."""

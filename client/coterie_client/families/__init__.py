"""What several client halves share, and the steps of every run: preparation, evaluation, local training, derivatives, gaps."""

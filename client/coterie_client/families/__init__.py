"""Parts shared by several client halves, and the steps of every run: preparation, evaluation, local training, derivatives, gaps."""

"""Networks of users, built, trained and evaluated with torch. No other package of the client imports torch.

Method halves see a network's tensors as numpy arrays by name.
"""

from coterie_client.nets.network import TorchNetwork

__all__ = ["TorchNetwork"]

"""Networks of users, built, trained and judged by torch. The only package of a client that imports it.

Method halves see a network's tensors as numpy arrays by name, and none of torch.
"""

from coterie_client.nets.network import TorchNetwork

__all__ = ["TorchNetwork"]

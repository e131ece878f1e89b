"""Networks of users, built, trained and judged by torch. The only package of a client that imports it.

Method halves see a network's tensors as numpy arrays by name, and none of torch.
"""

from coterie_client.nets.gradients import ALPHA, Adapted, Envelope, Mixed
from coterie_client.nets.network import Fitted, TorchNetwork
from coterie_client.nets.rows import Rows
from coterie_client.nets.training import Draw, Phase

__all__ = ["ALPHA", "Adapted", "Draw", "Envelope", "Fitted", "Mixed", "Phase", "Rows", "TorchNetwork"]

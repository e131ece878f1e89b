"""Local updates of one user's model, whatever it is: phases of minibatch steps, and where a step takes its gradient.

Models are tensors by name, as numpy arrays. What knows a model's loss is a `Learner`: a network (`coterie_client.nets`), or the convex loss
of a user (`coterie_client.problems`). The loop of steps and the rules of the methods are here, once for both, and need no torch.
"""

from coterie_client.learning.batches import Epoch, count_steps, epochs, steps_of
from coterie_client.learning.gradients import gradient
from coterie_client.learning.learner import Draw, Fitted, Learner, Network, Rows, Tensors
from coterie_client.learning.phases import ALPHA, Adapted, Envelope, Mixed, Phase, Rule
from coterie_client.learning.steps import Optimizer, Slope, Trained, train

__all__ = [
    "ALPHA",
    "Adapted",
    "Draw",
    "Envelope",
    "Epoch",
    "Fitted",
    "Learner",
    "Mixed",
    "Network",
    "Optimizer",
    "Phase",
    "Rows",
    "Rule",
    "Slope",
    "Tensors",
    "Trained",
    "count_steps",
    "epochs",
    "gradient",
    "steps_of",
    "train",
]

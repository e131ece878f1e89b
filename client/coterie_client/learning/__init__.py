"""Local updates of one user's model, whatever it is: phases of minibatch steps, and where a step takes its gradient.

Models are tensors by name, as numpy arrays. What knows a model's loss is a `Learner`: a network (`coterie_client.nets`), or the convex loss
of a user (`coterie_client.problems`). The loop of steps is here, once for both; rules of methods work on it, and need no torch.
"""

from coterie_client.learning.batches import Epoch, count_steps, epochs, steps_of
from coterie_client.learning.gradients import evaluated, gradient
from coterie_client.learning.learner import Draw, Fitted, Learner, Network, Rows, Tensors
from coterie_client.learning.phases import Phase, Rule
from coterie_client.learning.steps import Gradient, Gradients, Numbers, Optimizer, Slope, Trained, train

__all__ = [
    "Draw",
    "Epoch",
    "Fitted",
    "Gradient",
    "Gradients",
    "Learner",
    "Network",
    "Numbers",
    "Optimizer",
    "Phase",
    "Rows",
    "Rule",
    "Slope",
    "Tensors",
    "Trained",
    "count_steps",
    "epochs",
    "evaluated",
    "gradient",
    "steps_of",
    "train",
]

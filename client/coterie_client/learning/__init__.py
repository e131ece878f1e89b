"""Local updates of one user's model: phases of minibatch steps, and rules for where a step takes its gradient.

Models are tensors by name, as numpy arrays. A `Learner` knows a model's loss: a network (`coterie_client.nets`), or a user's convex loss
(`coterie_client.problems`). Both share this loop of steps and these rules, which need no torch.
"""

from coterie_client.learning.phases import Draw, Epoch, Fitted, Learner, Network, Phase, Rows, Rule, Tensors, count_steps, epochs, steps_of
from coterie_client.learning.steps import Gradient, Gradients, Numbers, Optimizer, Slope, Trained, evaluated, gradient, train

__all__ = [
    "Draw", "Epoch", "Fitted", "Gradient", "Gradients", "Learner", "Network", "Numbers", "Optimizer", "Phase", "Rows", "Rule", "Slope",
    "Tensors", "Trained", "count_steps", "epochs", "evaluated", "gradient", "steps_of", "train",
]  # fmt: skip

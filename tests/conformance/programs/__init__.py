"""Programs in the style of published Keras examples, on generated data: each trains for a few steps.

A program is a function that receives ``wrap``, applied to each optimizer, and returns a compiled model, its inputs and
its targets. None has a random layer: those draw other numbers on each rank than in one process.

The first line of a program's docstring stands in docs/conformance.md.
"""

from programs import (
    adapted_weights,
    compiled_models,
    generative_models,
    metric_learning,
    own_train_steps,
    reinforcement_learning,
    sequence_models,
    several_optimizers,
    used_gradients,
    vision_models,
    whole_batch,
)

PROGRAMS = [
    *compiled_models.PROGRAMS,
    *own_train_steps.PROGRAMS,
    *used_gradients.PROGRAMS,
    *whole_batch.PROGRAMS,
    *vision_models.PROGRAMS,
    *sequence_models.PROGRAMS,
    *generative_models.PROGRAMS,
    *metric_learning.PROGRAMS,
    *reinforcement_learning.PROGRAMS,
    *several_optimizers.PROGRAMS,
    *adapted_weights.PROGRAMS,
]

LOSS_WEIGHTS = {
    "several_outputs_with_loss_weights": compiled_models.LOSS_WEIGHTS,
    "detection_with_several_losses": vision_models.DETECTION_WEIGHTS,
}
"""The weights of the losses of programs that pass them to ``compile``: a task has a field for them."""

ADAPTIVE_WITH_EMBEDDINGS = {
    "language_model_with_masks",
    "text_classification_with_a_transformer",
    "bidirectional_lstm_with_masks",
    "sequence_to_sequence",
    "several_outputs_with_loss_weights",
    "bags_of_words",
}
"""Programs whose embeddings plain Keras trains otherwise, because it does not add up the entries of a row."""

REFUSED = {
    "summed_loss": "a loss with reduction='sum' needs DistributedOptimizer(…, op='sum')",
    "dice_loss": "the loss of a batch must be the mean of the losses of its samples",
}
"""Programs that cannot be equal to one process, and what the refusal says."""

COMPILES_ITSELF = {
    "generative_adversarial_network",
    "wasserstein_gan_with_gradient_penalty",
    "cycle_consistent_gan",
    "proximal_policy_optimization",
}
"""Programs whose model has a ``compile`` of its own, with several optimizers."""

"""Programs in the style of published Keras examples, on generated data: each trains for a few steps.

A program is a function that receives ``wrap``, applied to each optimizer, and returns a compiled model, its inputs and
its targets. None has a random layer: those draw other numbers on each rank than in one process.

The first line of a program's docstring stands in docs/conformance.md.
"""

from programs import compiled_models, own_train_steps, used_gradients, whole_batch

PROGRAMS = [
    *compiled_models.PROGRAMS,
    *own_train_steps.PROGRAMS,
    *used_gradients.PROGRAMS,
    *whole_batch.PROGRAMS,
]

ADAPTIVE_WITH_EMBEDDINGS = {
    "language_model_with_masks",
    "text_classification_with_a_transformer",
    "bidirectional_lstm_with_masks",
    "sequence_to_sequence",
    "several_outputs_with_loss_weights",
}
"""Programs whose embeddings plain Keras trains otherwise, because it does not add up the entries of a row."""

REFUSED = {
    "summed_loss": "a loss with reduction='sum' needs DistributedOptimizer(…, op='sum')",
    "dice_loss": "the loss of a batch must be the mean of the losses of its samples",
}
"""Programs that cannot be equal to one process, and what the refusal says."""

REFUSED_AS_TASK = {
    **REFUSED,
    "moving_average_and_schedule": "a task's optimizer must have a number for its learning rate",
    "generative_adversarial_network": "a task's model must have Keras' compile",
}
"""Those that ``--task`` refuses. A Task has one optimizer, and its schedules are options."""

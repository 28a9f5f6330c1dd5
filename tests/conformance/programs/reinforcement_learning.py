"""Programs that learn from logged states, actions and returns."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops, optimizers

from programs.own_loss import OwnLoss
from programs.samples import CLASSES, FEATURES, LABELS, TARGETS
from programs.several_optimizers import network, update

RETURNS = TARGETS[:, 0]
REWARDS, OLD_LOGARITHMS = TARGETS[:, 1], (-1.6 + 0.1 * TARGETS[:, 1]).astype(np.float32)


def log_probabilities(logits, actions):
    return -losses.sparse_categorical_crossentropy(actions, logits, from_logits=True)


class PolicyGradient(OwnLoss, keras.Model):
    def loss_of(self, x, y):
        actions, returns = y
        logits = self(x, training=True)
        entropy = -ops.sum(ops.softmax(logits) * ops.log_softmax(logits), axis=1)
        return -ops.mean(log_probabilities(logits, actions) * returns + 0.01 * entropy)


def policy_gradient(wrap):
    """REINFORCE: logarithms of the probabilities of logged actions times their returns."""
    inputs = layers.Input((6,))
    model = PolicyGradient(inputs, layers.Dense(CLASSES)(layers.Dense(8, activation="relu")(inputs)))
    model.compile(optimizer=wrap(optimizers.Adam(1e-2)))
    return model, FEATURES, (LABELS, RETURNS)


class DeepQ(OwnLoss, keras.Model):
    """Mnih et al., arXiv:1312.5602; the target network follows slowly."""

    def __init__(self):
        super().__init__()
        self.network, self.target = network(6, CLASSES), network(6, CLASSES)
        self.target.set_weights(self.network.get_weights())
        self.target.trainable = False
        self.loss_fn = losses.Huber()

    def loss_of(self, x, y):
        (states, next_states), (actions, rewards) = x, y
        future = ops.max(self.target(next_states), axis=1)
        values = ops.sum(self.network(states) * ops.one_hot(actions, CLASSES), axis=1)
        return self.loss_fn(rewards + 0.9 * future, values)

    def train_step(self, data):
        results = super().train_step(data)
        for old, new in zip(self.target.weights, self.network.weights, strict=True):
            old.assign(old * 0.8 + new * 0.2)
        return results


def deep_q_learning(wrap):
    """DQN and DDPG: a target network that a train_step moves slowly, global clipping."""
    model = DeepQ()
    model.compile(optimizer=wrap(optimizers.Adam(1e-2, global_clipnorm=0.5)))
    return model, (FEATURES, FEATURES[::-1].copy()), (LABELS, REWARDS)


class ProximalPolicy(keras.Model):
    """Schulman et al., arXiv:1707.06347."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = network(6, CLASSES), network(6, 1)

    def compile(self, policy_optimizer, value_optimizer):
        super().compile()
        self.policy_optimizer, self.value_optimizer = policy_optimizer, value_optimizer

    def train_step(self, data):
        (states, old_logarithms), (actions, returns) = data
        advantages = returns - ops.stop_gradient(self.critic(states)[:, 0])
        with tf.GradientTape() as tape:
            ratio = ops.exp(log_probabilities(self.actor(states), actions) - old_logarithms)
            least = ops.where(advantages > 0, 1.2 * advantages, 0.8 * advantages)
            policy_loss = -ops.mean(ops.minimum(ratio * advantages, least))
        update(self.policy_optimizer, tape, policy_loss, [self.actor])
        with tf.GradientTape() as tape:
            value_loss = ops.mean(ops.square(returns - self.critic(states)[:, 0]))
        update(self.value_optimizer, tape, value_loss, [self.critic])
        return {"policy_loss": policy_loss, "value_loss": value_loss}


def proximal_policy_optimization(wrap):
    """PPO: clipped ratios of probabilities; optimizers for actor and critic."""
    model = ProximalPolicy()
    model.compile(wrap(optimizers.SGD(0.05)), wrap(optimizers.Adam(1e-2)))
    return model, (FEATURES, OLD_LOGARITHMS), (LABELS, RETURNS)


PROGRAMS = [
    policy_gradient,
    deep_q_learning,
    proximal_policy_optimization,
]

"""REINFORCE learns to balance a pole: eager calls, episodes of different lengths.

    tfdistrun -np 2 python recipes/examples/reinforce.py

Each rank plays its own episodes with the common policy. The number of steps in the
episodes differs between ranks, but the number of collective calls does not: the
optimizer takes one step per round of episodes. The loop ends when the mean length of
the episodes on all ranks is large enough. This number is equal on every rank, so all
ranks leave the loop together.

References:
    Williams, Simple statistical gradient-following algorithms for connectionist
    reinforcement learning, Machine Learning 8, 1992, section 4.
    Barto, Sutton and Anderson, Neuronlike adaptive elements that can solve difficult
    learning control problems, IEEE Trans. Systems, Man, and Cybernetics 13, 1983: the
    cart and its pole.
"""

import argparse
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mnist_data

EPISODES, MAX_STEPS, DISCOUNT, SEED = 16, 200, 0.98, 1


class Poles:
    """Poles on carts, all moved together; an episode ends when its pole falls.

    Args:
        count: number of carts.
        rng: random generator for the initial states.
    """

    TIME_S, GRAVITY, FORCE = 0.02, 9.8, 10.0
    CART_KG, POLE_KG, HALF_POLE_M = 1.0, 0.1, 0.5

    def __init__(self, count: int, rng: np.random.Generator) -> None:
        # Position, velocity, angle and angular velocity; in m, m/s, rad and rad/s.
        self.states = rng.uniform(-0.05, 0.05, (count, 4)).astype(np.float32)

    def push(self, to_the_right: np.ndarray) -> np.ndarray:
        """Moves all carts by one step; returns which poles stand, shape [count]."""
        x, speed, angle, turn = self.states.T
        force = np.where(to_the_right, self.FORCE, -self.FORCE)
        mass = self.CART_KG + self.POLE_KG
        moment = self.POLE_KG * self.HALF_POLE_M
        sin, cos = np.sin(angle), np.cos(angle)
        pushed = (force + moment * turn**2 * sin) / mass
        turning = (self.GRAVITY * sin - cos * pushed) / (
            self.HALF_POLE_M * (4 / 3 - self.POLE_KG * cos**2 / mass)
        )
        moving = pushed - moment * turning * cos / mass
        change = np.stack([speed, moving, turn, turning], axis=1)
        self.states = (self.states + self.TIME_S * change).astype(np.float32)
        return (np.abs(self.states[:, 0]) < 2.4) & (np.abs(self.states[:, 2]) < 0.21)


def play(policy: keras.Model, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Plays episodes until every pole has fallen, for at most MAX_STEPS.

    Returns:
        States [steps, 4], actions [steps] and discounted returns [steps] of all steps
        in which a pole stood; and the length of each episode [EPISODES].
    """
    poles = Poles(EPISODES, rng)
    standing = np.ones(EPISODES, bool)
    states, actions, alive = [], [], []
    while standing.any() and len(states) < MAX_STEPS:
        right = keras.ops.sigmoid(policy(poles.states))[:, 0]
        states.append(poles.states)
        alive.append(standing)
        actions.append(rng.uniform(size=EPISODES) < right.numpy())
        standing = standing & poles.push(actions[-1])
    returns = np.zeros((len(states), EPISODES), np.float32)
    following = np.zeros(EPISODES, np.float32)
    for step in reversed(range(len(states))):  # reward 1 for each step a pole stands
        following = alive[step] * (1 + DISCOUNT * following)
        returns[step] = following
    kept = np.stack(alive)
    return np.stack(states)[kept], np.stack(actions)[kept], returns[kept], kept.sum(0)


def main() -> None:
    """Trains the policy and reports the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--enough", type=float, default=150.0, metavar="STEPS")
    flags = parser.parse_args()
    tfdist.init()
    keras.utils.set_random_seed(SEED)
    rng = np.random.default_rng(tfdist.data.seed(SEED))  # different on each rank
    policy = keras.Sequential(
        [keras.Input((4,)), layers.Dense(32, activation="tanh"), layers.Dense(1)]
    )
    adam = keras.optimizers.Adam(0.02)
    adam.build(policy.trainable_variables)
    tfdist.broadcast_variables(policy.weights + adam.variables)

    for number in range(1, flags.rounds + 1):
        states, actions, returns, lengths = play(policy, rng)
        # Sums over all ranks, so that mean and spread are over the steps of all ranks.
        sums = [len(returns), returns.sum(), (returns**2).sum(), lengths.mean()]
        sums = tfdist.allreduce(tf.constant(sums, tf.float64), op=tfdist.ReduceOp.SUM)
        steps, total, squares, length = sums.numpy()
        mean = total / steps
        spread = np.sqrt(squares / steps - mean**2)
        advantages = ((returns - mean) / (spread + 1e-6)).astype(np.float32)

        with tfdist.DistributedGradientTape() as tape:
            surprise = tf.nn.sigmoid_cross_entropy_with_logits(
                actions.astype(np.float32), policy(states)[:, 0]
            )
            loss = tf.reduce_mean(surprise * advantages)
        variables = policy.trainable_variables
        # The ranks have different numbers of steps: the mean is over all steps.
        adam.apply(tape.gradient(loss, variables, weight=len(returns)), variables)

        length /= tfdist.size()
        own = tfdist.allgather_object(len(returns))
        if tfdist.rank() == 0:
            print(f"round {number:2}: {length:5.1f} steps upright; of ranks {own}")
        if length >= flags.enough:  # the same number on all ranks, so all ranks stop
            break

    hashes = tfdist.allgather_object(mnist_data.weights_hash(policy))
    if len(set(hashes)) != 1:
        raise SystemExit(f"The ranks' weights differ. Hashes by rank: {hashes}")
    if tfdist.rank() == 0:
        print(f"after {number} rounds a pole stands for {length:.1f} steps")
        print(f"same weights on all ranks: {hashes[0]}", flush=True)


if __name__ == "__main__":
    main()

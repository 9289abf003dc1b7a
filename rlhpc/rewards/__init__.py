"""Rewards: rules by name, and a pool of killable processes that evaluates them."""

from rlhpc.rewards.pool import RewardPool, RewardResult
from rlhpc.rewards.rules import REWARDS, Reward, register, reward_of_source

__all__ = ["REWARDS", "Reward", "RewardPool", "RewardResult", "register", "reward_of_source"]

"""rlhpc: reinforcement learning for mixture-of-experts language models on Slurm clusters."""

__version__ = "0.1.0"

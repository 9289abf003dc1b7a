"""The Hydra launcher of `launch=slurm`. Hydra takes plugins from packages under hydra_plugins only, and finds this one
because Python puts the directory of launch/run.py first on its path."""

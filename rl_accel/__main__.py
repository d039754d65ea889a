"""``python -m rl_accel`` is the ``rl-accel`` command."""

from rl_accel.cli import main

if __name__ == "__main__":
    main()

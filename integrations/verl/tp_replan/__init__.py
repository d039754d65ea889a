"""A tensor-parallel size that follows preemptions, on verl: ``+rl_accel.tp_replan.enable=True``.

``wiring`` checks the configuration in the driver. In the trainer process ``mode`` has ``callback`` shown each step that is logged;
it reads ``counters`` of the rollout servers and asks the planner. ``live`` replaces the servers, ``restart`` saves and stops. What
the driver then exits with, and who starts it again, is in ``rl_accel.integrations.ray.restart_note`` and ``rl_accel.relaunch``.
"""

STATE_FILE = "rl_accel_tp_replan.json"
"""In ``trainer.default_local_dir``: what the planner knows, after each step."""

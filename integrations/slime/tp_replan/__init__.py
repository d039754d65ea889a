"""A tensor-parallel size that follows preemptions, as advice, on slime: functions named in the YAML of ``rl-accel slime-config``.

``arguments`` says what slime's arguments allow, ``layout`` how its engines stand and would stand at another size, ``servers`` reads
their counters, ``replan`` asks the planner after each rollout, ``advice`` says what it found and writes it down.
"""

STATE_FILE = "rl_accel_tp_replan.json"
"""In ``--save``: what the planner knows, after each rollout."""
CONFIG_FILE = "rl_accel_sglang_config.yaml"
"""In ``--save``, unless ``rl_accel.tp_replan.config_file`` names another: what the next launch is to use."""

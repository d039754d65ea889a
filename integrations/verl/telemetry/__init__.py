"""The stage clock on verl: ``+rl_accel.telemetry.enable=True``. It observes and changes nothing.

``wiring`` chooses our agent loops in the configuration. In an agent-loop worker ``recording`` notes when each response began, was
generated and got its reward. In the trainer process ``observer`` fetches these notes once a step, has
:mod:`rl_accel.telemetry.stage_clock` make numbers of them, and leaves a line a step in a file, which ``rl-accel profile`` reads.
``preemptions`` asks the rollout servers for their counters. ``mode`` puts the observer where the trainer's logger is.
"""

SECTION = "trainer.rl_accel_telemetry"
"""What every process finds in verl's configuration: the path of the file."""

FILE = "rl_accel_telemetry.jsonl"
"""Its name, in ``trainer.default_local_dir``."""

WORKER_PART = "rl_accel.integrations.verl.telemetry.recording.Recording"
"""What this feature adds to agent-loop workers."""

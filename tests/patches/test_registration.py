"""The state of a registration can be asked for at any time, also while another thread imports what it is about."""

import pytest


@pytest.mark.slow
def test_status_from_another_thread_does_not_wait_for_an_import(python):
    done = python("""
        import importlib, threading
        import rl_accel
        features = {
            "telemetry": "verl.utils.tracking",
            "reward_timeout": "verl.experimental.reward_loop",
            "tail_batching": "verl.trainer.ppo.v1",
        }
        rl_accel.enable(**dict.fromkeys(features, True))
        over = threading.Event()

        def ask():
            while not over.wait(0.002):  # without a pause the import would hardly ever get the interpreter
                rl_accel.status()

        threading.Thread(target=ask, daemon=True).start()
        for feature, module in features.items():
            importlib.import_module(module)
            assert rl_accel.status()[feature].applied, feature
        over.set()
    """)
    assert done.returncode == 0, done.stderr

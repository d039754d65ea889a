"""The state of a registration can be asked for at any time, also while another thread imports what it is about."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("feature", "module"),
    [
        ("reward_timeout", "verl.experimental.reward_loop"),
        ("tail_batching", "verl.trainer.ppo.v1"),
        ("telemetry", "verl.utils.tracking"),
    ],
)
def test_status_from_another_thread_does_not_wait_for_an_import(python, feature, module):
    done = python(f"""
        import importlib, threading
        import rl_accel
        rl_accel.enable({feature}=True)
        over = threading.Event()

        def ask():
            while not over.wait(0.002):  # without a pause the import would hardly ever get the interpreter
                rl_accel.status()

        threading.Thread(target=ask, daemon=True).start()
        importlib.import_module({module!r})
        over.set()
        assert rl_accel.status()[{feature!r}].applied
    """)
    assert done.returncode == 0, done.stderr

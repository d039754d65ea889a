"""Tests that warnings of rl-accel are visible whatever is done to the root logger, and never appear twice."""

import pytest
from ray.exceptions import RayTaskError

from rl_accel.errors import first_line, typed_line
from rl_accel.log import warn_once
from rl_accel.switch import forget_when_off


def test_a_warning_is_logged_once_until_all_is_off(caplog):
    for step in range(3):
        warn_once("key", "at step %d", step)
    for forget in forget_when_off:
        forget()
    warn_once("key", "at step %d", 3)
    assert [record.getMessage() for record in caplog.records] == ["at step 0", "at step 3"]


@pytest.mark.parametrize(("message", "line"), [("\n one\ntwo", "one"), ("", "ValueError"), ("\n", "ValueError")])
def test_the_first_line_of_an_error_is_never_empty(message, line):
    assert first_line(ValueError(message)) == line


def reported_by_ray(cause, times=1):
    """``cause`` as Ray reports an exception of a remote call, and of a call within a call if ``times`` is 2."""
    for _ in range(times):
        words = f"ray::Scorer.compute_score() (pid=7)\n  File 'grader.py', line 1, in grade\n{type(cause).__name__}: {cause}"
        report = RayTaskError("compute_score", words, cause, proctitle="ray::Scorer", pid=7, ip="127.0.0.1")
        cause = report.as_instanceof_cause()
    return cause


class Unsendable(Exception):
    def __reduce__(self):
        raise TypeError("it holds a lock")


@pytest.mark.parametrize("times", [1, 2])
def test_an_error_of_another_process_says_what_was_raised_there_and_not_the_name_of_the_call(times):
    assert first_line(reported_by_ray(NotImplementedError("no reward for this\ntask"), times)) == "no reward for this"
    assert typed_line(reported_by_ray(NotImplementedError("no reward"), times)) == "NotImplementedError: no reward"
    assert typed_line(reported_by_ray(NotImplementedError(), times)) == "NotImplementedError"


def test_an_error_that_cannot_be_sent_to_this_process_says_what_was_raised_there():
    assert first_line(reported_by_ray(Unsendable("the sandbox is gone"))) == "Unsendable: the sandbox is gone"
    assert typed_line(ValueError("one\ntwo")) == "ValueError: one"


def test_a_root_logger_that_another_package_mutes_does_not_mute_ours(python):
    done = python(
        """
        import logging
        logging.basicConfig(level=logging.WARNING, format="root %(message)s")
        import rl_accel.runtime

        logger = logging.getLogger("rl_accel")
        logger.warning("first")
        root = logging.getLogger()
        root.setLevel(logging.ERROR)
        for handler in root.handlers:
            handler.setLevel(logging.ERROR)
        logger.warning("second")
        logger.error("third")
        logging.getLogger("other").warning("fourth")
        """
    )
    lines = [line.rpartition(" ")[0] or line for line in done.stderr.splitlines()]
    said = [line.rpartition(":")[2].removeprefix("root ") for line in done.stderr.splitlines()]
    assert said == ["first", "second", "third"], done.stderr
    assert lines[0] == lines[2] == "root", "the root's handler goes first"


def test_what_a_user_has_set_up_stays(python):
    done = python(
        """
        import logging
        logging.getLogger("rl_accel").setLevel(logging.ERROR)
        import rl_accel.runtime
        logging.getLogger("rl_accel").warning("not wanted")
        """
    )
    assert (done.returncode, done.stderr) == (0, "")

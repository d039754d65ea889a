"""Warnings of the pack are seen whatever others do to the root logger, and never twice."""


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

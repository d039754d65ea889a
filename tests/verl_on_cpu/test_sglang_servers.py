"""Tests start and end of SGLang servers and routers with small programs. The tests of slime use real servers."""

import subprocess
import sys

import pytest

from rl_accel.errors import RlAccelError
from verl_on_cpu import sglang_servers

SERVES = """
import sys
from pathlib import Path
from verl_on_cpu import sglang_servers
(port,) = sglang_servers._free_ports(1)
command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
with sglang_servers._running(command, f"http://127.0.0.1:{port}", lambda client: client.get("/").is_success) as server:
    Path(sys.argv[1]).write_text(str(server.pid))
    print("serves", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_server_ends_with_its_block_and_with_a_process_that_is_killed(killed, tmp_path, wait_for, gone):
    words = [sys.executable, "-c", SERVES, str(tmp_path / "pid")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"serves\n"
        assert not gone(tmp_path / "pid")
        if killed:
            process.kill()
        else:
            process.stdin.close()
        wait_for(lambda: gone(tmp_path / "pid"), "the end of the server")


def test_a_server_that_does_not_start_or_is_absent_is_named(tmp_path, monkeypatch):
    command = [sys.executable, "-m", "no_such_server"]
    never = sglang_servers._running(command, "http://x", lambda client: False)
    with pytest.raises(RlAccelError, match=r"no_such_server does not serve at http://x: .*No module named"), never:
        pass
    monkeypatch.setattr(sglang_servers, "PYTHON", tmp_path / "python")
    absent = sglang_servers.sglang_server(tmp_path)
    with (
        pytest.raises(RlAccelError, match=r"SGLang is absent: there is no .*/python, which `make sglang` builds"),
        absent,
    ):
        pass

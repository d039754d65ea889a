"""Fixtures shared by all tests. Code in a process of its own gets a clean environment and a time limit."""

import functools
import http.server
import itertools
import json
import math
import os
import shlex
import shutil
import socket
import string
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import venv
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from hypothesis import settings

from rl_accel import log
from rl_accel.lab.ab.runner import MODULES, RAY_DID_NOT_START
from verl_on_cpu import sglang_servers

settings.register_profile("shared machine", deadline=None)  # how long an example takes says nothing here
settings.load_profile("shared machine")

REPO = Path(__file__).resolve().parent.parent
STARTED = time.monotonic()

END = "\nimport os, sys\nsys.stdout.flush(), sys.stderr.flush(), os._exit(0)"
"""Last lines of a script that runs in a fork."""
STARTS = 3
"""Number of attempts to start Ray, whose own fixed time limit may be too short on a busy machine."""
FORKS = Path(__file__).with_name("forks")
"""Folder with the server that forks processes, and its client."""
DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds per test file, as last measured with ``pytest --store-durations``."""

# Flags of whoever runs the tests must not reach the processes that the tests start.
_OURS = ("RL_ACCEL", "VERL_", "RAY_RUNTIME_ENV_HOOK", "RAY_ADDRESS")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store-durations", action="store_true", help=f"write seconds of files to {DURATIONS.name}")
    parser.addoption("--full-within", type=float, metavar="MINUTES", help="begin no full test later than that")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test marked ``full`` that would begin too late, before its fixtures are set up."""
    minutes = item.config.getoption("--full-within")
    if minutes is not None and item.get_closest_marker("full") and time.monotonic() - STARTED > 60 * minutes:
        pytest.skip(f"marked full, and the {minutes:g} minutes in which those may begin are over")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts test files by duration, longest first, so that no worker runs a long file alone at the end. Files with only ``full``
    tests come last."""
    stored: dict[str, float] = json.loads(DURATIONS.read_text())
    promised = {item.path for item in items if not item.get_closest_marker("full")}
    items.sort(key=lambda item: (item.path not in promised, -stored.get(item.nodeid.partition("::")[0], math.inf)))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Updates the stored durations of the files that ran, with the option ``--store-durations``."""
    if config.getoption("--store-durations"):
        seconds: Counter[str] = Counter()
        for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
            if type(report) is pytest.TestReport:  # not a subtest's, whose seconds are in its test's
                seconds[report.nodeid.partition("::")[0]] += report.duration
        stored = json.loads(DURATIONS.read_text()) | {file: round(spent, 1) for file, spent in seconds.items()}
        kept = {file: stored[file] for file in sorted(stored) if (REPO / file).exists()}
        DURATIONS.write_text(json.dumps(kept, indent=1) + "\n")


def _flags_of_this_process() -> tuple[Any, dict[str, str]]:
    runtime = sys.modules.get("rl_accel.runtime")  # many tests need none
    variables = {name: value for name, value in os.environ.items() if name.startswith(_OURS)}
    return runtime.RUNTIME.sources() if runtime else {}, variables


@pytest.fixture(autouse=True)
def flags_are_put_back() -> Iterator[None]:
    """Turns all features off after each test, because flags would also apply to later tests and to the runs that they start."""
    before = _flags_of_this_process()
    yield
    if _flags_of_this_process() != before:
        sys.modules["rl_accel.runtime"].RUNTIME.restore(before[0])
    assert _flags_of_this_process() == before


@pytest.fixture(autouse=True)
def warnings_are_new() -> None:
    """Makes warnings that are logged once per process appear once per test."""
    log._warned.clear()


@pytest.fixture
def invoke() -> Callable[..., str]:
    """``invoke(command, *words, code=0)`` calls a command in this process; returns its output and the error that ends it.

    ``code`` is the exit code that it must have, None for any but 0.
    """

    def call(command: Any, *words: object, code: int | None = 0) -> str:
        done = CliRunner().invoke(command, [str(word) for word in words])
        error = "" if isinstance(done.exception, SystemExit | None) else str(done.exception)
        assert done.exit_code == code or (code is None and done.exit_code), done.output + error
        return done.output + error

    return call


WRITES = {"open", "write", "flush", "fsync", "replace", "mkdir"}
WRITES |= {"PyTorchFileWriter", "write_record", "write_end_of_file"}


@pytest.fixture
def killed_at() -> Callable[[int, Callable[[], object]], bool]:
    """``killed_at(n, save)`` calls ``save`` in a child process that is killed before its n-th write. Returns whether it was."""

    def call(number: int, save: Callable[[], object]) -> bool:
        if child := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        writes = itertools.count()

        def watch(_frame: Any, event: str, function: Any) -> None:
            if event == "c_call" and function.__name__ in WRITES and next(writes) == number:
                os._exit(9)

        try:
            sys.setprofile(watch)
            save()
        finally:
            os._exit(0)

    return call


@pytest.fixture
def wait_for() -> Callable[..., Any]:
    """``wait_for(condition, "what")`` waits until the condition holds, and returns it; fails after 120 seconds."""

    def wait(condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + 120
        while not (found := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"waited 120 s for {what}")
            time.sleep(0.02)
        return found

    return wait


@pytest.fixture(scope="session")
def gone() -> Callable[[Path | int], bool]:
    """``gone(process)`` returns whether it has ended, given its id or a file with its id.

    What has no memory counts as ended: a zombie, and the first process of a PID namespace while it waits for the zombies in it.
    Both stay for ever in a container whose first process reaps nothing.
    """

    def ended(process: Path | int) -> bool:
        try:
            pid = process if isinstance(process, int) else int(process.read_text())
            return psutil.Process(pid).memory_info().rss == 0
        except psutil.NoSuchProcess:
            return True

    return ended


@pytest.fixture
def anyio_backend() -> str:
    """Event loop library for tests and fixtures that are coroutine functions."""
    return "asyncio"


@pytest.fixture(scope="session")
def repo() -> Path:
    """Root folder of the checkout."""
    return REPO


@pytest.fixture(scope="session")
def clean_environment() -> dict[str, str]:
    """Environment variables for child processes: those of this process without flags of rl-accel, hub access and usage reports."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
    return {**kept, "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="session")
def forks() -> Callable[..., Any]:
    """``with forks(python, environment) as command`` runs a server of forks that has imported torch and transformers.

    ``command`` starts a process as ``python`` does, but sooner. Each fork imports verl and this project itself.
    """

    @contextmanager
    def run(python: str, environment: dict[str, str]) -> Iterator[list[str]]:
        one_thread = {
            "OMP_NUM_THREADS": "1",
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
        }  # no fork beside threads
        with tempfile.TemporaryDirectory(prefix="rla", dir="/tmp") as folder:
            path = f"{folder}/forks"
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(path)
                listener.listen(64)  # clients wait while the server imports libraries
                server = subprocess.Popen(
                    [python, str(FORKS / "server.py"), str(listener.fileno())],
                    stdin=subprocess.PIPE,
                    pass_fds=[listener.fileno()],
                    env={**environment, **one_thread},
                )
            try:
                yield [python, "-S", "-E", str(FORKS / "client.py"), path]
            finally:
                server.stdin.close()
                server.wait()

    return run


@pytest.fixture(scope="session")
def forking(forks, clean_environment) -> Iterator[list[str]]:
    """A command like that of Python, whose processes are forks of one server."""
    with forks(sys.executable, clean_environment) as command:
        yield command


@pytest.fixture(scope="session")
def forked_workers() -> Callable[..., dict[str, str]]:
    """``forked_workers(command, environment)`` returns variables with which verl's Ray workers are forks by ``command``."""

    def variables(command: list[str], environment: dict[str, str]) -> dict[str, str]:
        paths = [environment.get("PYTHONPATH", ""), str(FORKS)]
        modules = [environment.get(MODULES, ""), "forked_ray_workers"]
        found = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), MODULES: ",".join(filter(None, modules))}
        return {**environment, **found, "FORKING": shlex.join(command)}

    return variables


@pytest.fixture
def python(clean_environment, tmp_path, request) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a Python script in a fresh process outside the checkout: ``python(source, "word", RL_ACCEL_CONFIG=...)``.

    ``code`` is the exit code that it must have, None for any.
    With ``fork=True`` it is one of ``forking``, which serves where it does not matter that torch has been imported; it ends with
    the last line of the script, without the two seconds that Python takes to take so many modules apart.
    It runs again, twice at most, where Ray does not start in the time that it allows itself.
    """

    def run(source: str, *words: str, fork: bool = False, code: Any = 0, timeout: float = 540, **env: str) -> Any:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source) + fork * END)
        interpreter = request.getfixturevalue("forking") if fork else [sys.executable]
        command, env = [*interpreter, str(script), *words], {**clean_environment, **env}
        for _ in range(STARTS):
            done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=timeout)
            if RAY_DID_NOT_START not in done.stderr:
                break
        assert code in (None, done.returncode), done.stdout[-4000:] + done.stderr[-4000:]
        return done

    return run


@pytest.fixture(scope="session")
def wheel(repo, tmp_path_factory) -> Path:
    """Path of a wheel, built from a copy of the tracked files with the build tools of this environment."""
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    source.mkdir()
    names = ("rl_accel", "patches", "integrations", "pyproject.toml", "README.md", "LICENSE")
    subprocess.run(["cp", "-r", *names, str(source)], cwd=repo, check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    subprocess.run([*command, str(source)], check=True, timeout=300)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def wheel_python(wheel, tmp_path_factory) -> Path:
    """A new virtual environment that holds only the wheel. Third-party packages come from the environment of the tests."""
    root = tmp_path_factory.mktemp("installed")
    venv.create(root / "env", with_pip=True)
    python = root / "env" / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True, timeout=300)
    site = next((root / "env" / "lib").glob("python*/site-packages"))
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "third_party.pth").write_text(ours + "\n")  # added last, and its own .pth files (editable!) are not read
    return python


@pytest.fixture(scope="session")
def wheel_environment(clean_environment, wheel_python) -> dict[str, str]:
    """Environment variables of a shell in which the wheel's environment is active and this checkout is not on the path."""
    kept = {key: value for key, value in clean_environment.items() if key != "PYTHONPATH"}
    return {**kept, "PATH": f"{wheel_python.parent}:{kept['PATH']}"}


@pytest.fixture(scope="session")
def slime_root() -> Path:
    """Checkout of slime from the variable SLIME_ROOT, made importable. Without it, tests that use this fixture are skipped."""
    root = os.environ.get("SLIME_ROOT", "")
    if not root:
        pytest.skip("slime itself is absent: SLIME_ROOT names no checkout of it")
    for folder in (root, str(REPO / "tests/integrations/slime/plugins")):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return Path(root)


@pytest.fixture
def web_server() -> Iterator[Callable[[Callable[[str, Any], str | None]], str]]:
    """``web_server(answer)``: the address of a server that gives what ``answer(path, JSON of the request)`` does, 404 for None.

    It stands for a service of somebody else's.
    """
    with ExitStack() as servers:

        def start(answer: Callable[[str, Any], str | None]) -> str:
            class Handler(http.server.BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    given = self.rfile.read(int(self.headers["Content-Length"] or 0))
                    body = answer(self.path, json.loads(given or "null"))
                    self.send_response(404 if body is None else 200)
                    self.send_header("Content-Type", "application/json")
                    self.end_headers()
                    self.wfile.write((body or "").encode())

                do_POST = do_GET

                def log_message(self, *_: Any) -> None:
                    pass

            server = servers.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            servers.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            return f"http://127.0.0.1:{server.server_port}"

        yield start


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A temporary folder with a short path: Ray's socket names must fit in 107 characters."""
    path = Path(tempfile.mkdtemp(prefix="rla", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def ray_heads(environment: dict[str, str], folder: Path) -> Iterator[Callable[..., str]]:
    """Yields ``start(num_cpus=2, num_gpus=0, **env)``, which starts a cluster and returns its address; ends them afterwards."""
    with ExitStack() as stack:

        def start(num_cpus: int = 2, num_gpus: int = 0, **env: str) -> str:
            options = f"--num-cpus={num_cpus} --num-gpus={num_gpus} --include-dashboard=false --temp-dir={folder / 'r'}"
            words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"]
            for _ in range(STARTS):
                head = subprocess.Popen(
                    [*words, *options.split()],
                    env={**environment, "RAY_AUTH_MODE": "disabled", **env},
                    cwd=folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
                stack.callback(head.stdout.close)
                stack.callback(head.wait, timeout=60)
                stack.callback(head.terminate)  # with --block it ends the processes that it started
                output = ""
                for line in head.stdout:
                    output += line
                    if "--address=" in line:
                        return line.split("--address='")[1].split("'")[0]
                if RAY_DID_NOT_START not in output:
                    break
            raise RuntimeError(f"no Ray cluster: {output}")

        yield start


@pytest.fixture
def start_ray(short_tmp, clean_environment) -> Iterator[Callable[..., str]]:
    """``start_ray(num_cpus=2, num_gpus=0, **env)`` starts a cluster for the test and returns its address."""
    with ray_heads(clean_environment, short_tmp) as start:
        yield start


@pytest.fixture(scope="module")
def ray_address(clean_environment) -> Iterator[str]:
    """Address of a Ray cluster that the tests of a module share. Each test is a separate job."""
    with (
        tempfile.TemporaryDirectory(prefix="rla", dir="/tmp", ignore_cleanup_errors=True) as folder,
        ray_heads(clean_environment, Path(folder)) as start,
    ):
        yield start()


@pytest.fixture(scope="session")
def same_bits() -> Callable[[Any, Any], bool]:
    """Returns whether two tensors are equal bit by bit, including the sign of zero."""
    torch = pytest.importorskip("torch")

    def compare(a: Any, b: Any) -> bool:
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))

    return compare


@pytest.fixture(scope="session")
def make_case() -> Callable[..., SimpleNamespace]:
    """``make_case(seed, most_rows=40, most_tokens=60)``: arguments of ``gae`` for at least two tokens.

    Responses of uneven length, observation spans, padding on both sides.
    """
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")

    def make(seed: int, *, most_rows: int = 40, most_tokens: int = 60) -> SimpleNamespace:
        random = np.random.RandomState(seed)
        rows, tokens = random.randint(1, most_rows), random.randint(2, most_tokens)
        if seed % 80 == 0:  # more than the kernels hold at a time
            tokens += 2048
        scale = 10.0 ** random.choice([-20, -3, 0, 0, 0, 3, 20])
        rewards, values = (torch.from_numpy(random.randn(rows, tokens) * scale).float() for _ in range(2))
        if seed % 3 == 0:
            rewards[:, :-1] = 0
        mask = torch.arange(tokens) < torch.from_numpy(random.randint(0, tokens + 1, (rows, 1)))
        if seed % 2:
            mask &= torch.from_numpy(random.rand(rows, tokens)) < 0.7
        if seed % 5 == 0:
            mask = mask.flip(1)
        mask[0, :2] = True
        gamma, lam = random.choice([0.0, 0.5, 0.9, 0.99, 1.0]), random.choice([0.0, 0.5, 0.95, 1.0])
        mask = mask.to(torch.float32 if seed % 4 == 3 else torch.int64)
        if seed % 7 == 0:  # as verl cuts the response out of a mask over prompt and response
            mask = torch.nn.functional.pad(mask, (5, 0), value=1)[:, 5:]
        if seed % 11 == 0:
            rewards = rewards.t().contiguous().t()
        return SimpleNamespace(rewards=rewards, values=values, mask=mask, gamma=float(gamma), lam=float(lam))

    return make


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """``make_model(seed=0, **config)`` builds a Qwen2 of two layers with 64 tokens, of which 4 ends a response."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def make(seed: int = 0, **changes: Any) -> Any:
        sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
        tokens = {"eos_token_id": 4, "pad_token_id": 0, "bos_token_id": 1, "max_position_embeddings": 1024}
        config = transformers.Qwen2Config(**{**sizes, **attention, **tokens, "initializer_range": 0.2, **changes})
        torch.manual_seed(seed)
        return transformers.Qwen2ForCausalLM(config).eval()

    return make


@pytest.fixture
def engine_for() -> Iterator[Callable[..., Any]]:
    """``engine_for(model, **options)`` starts a CPU engine that is closed after the test."""
    from verl_on_cpu.engine import CPUEngine

    with ExitStack() as engines:

        def start(model: Any, **options: Any) -> Any:
            options = {"eos_token_ids": [4], "max_num_seqs": 8, "max_model_len": 512, **options}
            return engines.enter_context(closing(CPUEngine(model, **options)))

        yield start


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, make_model) -> Path:
    """Folder with a random Qwen2 model whose responses end after about 30 tokens, and a tokenizer with one token per character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("slime") / "model"
    symbols = ["<pad>", "<unk>", "<eos>", "Ġ", *string.digits, *string.ascii_lowercase]
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 16384}
    model = make_model(eos_token_id=2, pad_token_id=0, bos_token_id=None, **sizes)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def start_server(model_folder) -> Iterator[Callable[..., tuple[str, "subprocess.Popen[bytes]"]]]:
    """``start_server(max_total_tokens=600)`` starts a real SGLang server and returns its address and its process.

    Tests are skipped without SGLang. A start takes 45 seconds of processor time, and a server 1.5 GB.
    """
    if reason := sglang_servers.sglang_problem():
        pytest.skip(reason)
    with ExitStack() as servers:
        yield lambda **options: servers.enter_context(sglang_servers.sglang_server(model_folder, **options))


@pytest.fixture(scope="session")
def serve(start_server) -> Callable[..., str]:
    """``serve(max_total_tokens=600)`` returns the address of a real SGLang server. Calls with equal options share a server."""
    return functools.cache(lambda **options: start_server(**options)[0])

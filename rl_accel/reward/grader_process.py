"""Process of a trusted grader (a function of the user that computes the reward of a response). It serves call after call.

The process that grades starts a host, which runs :func:`main`. The host imports the grader. If a fork of it is
safe then, the host serves no calls: it forks a process for each worker, so that the import costs time and memory once. If the
import leaves threads, connections or processes behind, the host serves calls itself, and each worker has a host of its own.

Both ends of the socket trust each other, so that messages are pickled.
"""

import _thread
import contextlib
import copyreg
import fcntl
import functools
import gc
import importlib
import importlib.util
import logging
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from typing import Any, NoReturn

import psutil

from rl_accel.reward.program_process import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    Channel,
    PeerClosed,
    be_killed_first,
    describe,
    frame,
    prctl,
)


@dataclass(frozen=True)
class Start:
    """First message to a host. Its answer is ``("ready", pid, forks)``, or ``("problem", text)`` if it cannot import the grader.

    A call is the message ``(args, kwargs, names of constants to add)``. While a call runs, the process may send ``("ask", name,
    version)``, see :func:`ask`. It ends the call by ``(verdict, reason, pickled value or exception)``.

    Attributes:
        target: "module:function" or "/path/file.py:function".
        folder: working folder during the import; "" for the folder of the caller.
        in_thread: True to call the grader in a thread other than the main thread.
        environment: environment variables, in addition to those of the caller.
        logging: arguments of ``logging.basicConfig``; {} leaves Python's logging as it is.
        imported: files of the top-level modules that the caller has imported, by name. The process imports the same files, also if
            its path now finds others first.
        modules: names of modules to import before the grader.
        defaults: default keyword arguments of functions ("module.name"), which their modules get when they are imported.
        packed: pickled pair: the keyword arguments of the function that returns the grader (None if ``target`` is the grader
            itself), and the keyword arguments of the grader that are the same in all calls.
        reseed: True to seed random numbers anew, so that they differ from those of earlier processes of the same grader.
    """

    target: str
    folder: str
    in_thread: bool
    environment: dict[str, str]
    logging: dict[str, Any]
    imported: dict[str, str]
    modules: tuple[str, ...]
    defaults: dict[str, dict[str, Any]]
    packed: bytes = field(repr=False)
    reseed: bool = False


def encode(message: Any) -> bytes:
    """Returns a message pickled. Both ends trust each other."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def dumps(value: Any) -> bytes:
    """Returns ``value`` pickled: by cloudpickle if pickle fails or if ``value`` refers to this process's ``__main__``."""
    with contextlib.suppress(Exception):  # cloudpickle says why, if it fails as well
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        if b"__main__" not in data:
            return data
    import cloudpickle

    plain: bytes = cloudpickle.dumps(value)
    return plain


def kill_tree(root: psutil.Process) -> None:
    """Kills a process and all its descendants; of the calling process, only the descendants."""
    stopped: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.Error):
        if root.pid != os.getpid():
            root.suspend()
            stopped[root.pid] = root
        # stopped before their children are listed again, because a process may start new ones when others are killed
        while new := [child for child in root.children(recursive=True) if child.pid not in stopped]:
            for child in new:
                stopped[child.pid] = child
                with contextlib.suppress(psutil.Error):
                    child.suspend()
    for process in stopped.values():
        with contextlib.suppress(psutil.Error):
            process.kill()


def main(descriptor: int) -> NoReturn:
    """Runs a host until the other end of the socket with this file descriptor is closed."""
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    caller = os.pidfd_open(os.getppid())  # a fork of the caller may hold the socket open
    connections = _connections()
    try:
        start = Start(**pickle.loads(channel.receive()))
        _become_grader_process()
        try:
            grader, constants = _find_grader(start)
        except BaseException as error:
            channel.send(encode(("problem", _place_of(error))))
            os._exit(0)
        if _fork_is_safe(connections):
            channel.send(encode(("ready", os.getpid(), True)))
            _Template(channel.control, caller, start, grader, constants).serve()
        _thread.start_new_thread(_end_with_caller, (channel.control, caller))  # the user's module does not see it
        _serve(channel, start, grader, constants)
    except PeerClosed:
        pass
    finally:
        kill_tree(psutil.Process())
        os._exit(0)


def _become_grader_process() -> None:
    """Makes orphans below this process its children, so that :func:`kill_tree` finds them, and lets the kernel kill it first."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    be_killed_first()


def _end_with_caller(control: socket.socket, caller: int) -> None:
    """Body of a thread that ends this process and all that it started as soon as the caller has ended."""
    poll = select.poll()
    poll.register(control, 0)  # reports that the socket was closed, but no messages
    poll.register(caller, select.POLLIN)
    poll.poll()
    kill_tree(psutil.Process())
    os._exit(0)


class _Template:
    """Host that only forks: a process that serves calls for each socket that it receives.

    When such a process has ended, tells the caller how, on the same socket, and kills what the process has left.
    """

    def __init__(
        self, control: socket.socket, caller: int, start: Start, grader: Callable[..., Any], constants: dict[str, Any]
    ) -> None:
        self._control = control
        self._caller = caller
        self._start = start
        self._grader = grader
        self._constants = constants
        self._random_state = random.getstate()
        self._is_first = True
        self._children: dict[int, tuple[int, socket.socket]] = {}  # by pidfd

    def serve(self) -> None:
        """Serves until the caller has ended."""
        gc.collect()
        gc.freeze()  # garbage collection in a fork would copy every page
        while True:
            poll = select.poll()
            for descriptor in (self._control.fileno(), self._caller, *self._children):
                poll.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._caller in ready:
                return
            for ended in ready & self._children.keys():
                self._bury(ended)
            if self._control.fileno() in ready:
                data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
                if not data:
                    return
                self._fork(socket.socket(fileno=descriptors[0]))

    def _fork(self, channel: socket.socket) -> None:
        child = os.fork()
        if child:
            self._children[os.pidfd_open(child)] = child, channel
            self._is_first = False
            return
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            _become_grader_process()
            self._control.close()
            for _, other in self._children.values():
                other.close()
            if self._is_first:
                random.setstate(self._random_state)
            else:
                _reseed()
            _serve(Channel(channel), self._start, self._grader, self._constants)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _bury(self, ended: int) -> None:
        child, channel = self._children.pop(ended)
        os.close(ended)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        serving = {pid for pid, _ in self._children.values()}
        for orphan in psutil.Process().children():
            if orphan.pid not in serving:
                kill_tree(orphan)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan.pid, 0)
        with channel, contextlib.suppress(OSError):
            channel.setblocking(False)
            channel.send(frame(encode(("ended", f"its process ended with {status}", b""))))


_serving: Channel | None = None
"""Channel of the call that runs in this process, for :func:`ask`."""
_asking = threading.Lock()


def ask(name: str, version: int) -> tuple[int, bytes | None]:
    """Asks the caller for a value, during a call. Returns the version of the value, and the value pickled.

    The value is None if the ``version`` that this process has already is the newest. The version is negative if the caller has no
    such value.

    Raises:
        RuntimeError: no call runs in this process, for example because this is a fork that the grader has made.
    """
    if _serving is None or os.getpid() != _pid:
        raise RuntimeError(f"{name} can only be read in the process of the grader, during a call")
    with _asking:
        _serving.send(encode(("ask", name, version)))
        answer: tuple[int, bytes | None] = pickle.loads(_serving.receive())
        return answer


_pid = os.getpid()


def _serve(channel: Channel, start: Start, grader: Callable[..., Any], constants: dict[str, Any]) -> NoReturn:
    """Serves calls until the caller closes the socket, then ends this process."""
    global _serving, _pid
    _serving = channel
    _pid = os.getpid()
    if start.reseed:
        _reseed()
    channel.send(encode(("ready", _pid, False)))

    def serve() -> None:
        with contextlib.suppress(PeerClosed):
            while True:
                answer = _call(grader, constants, *pickle.loads(channel.receive()))
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(Exception):
                        stream.flush()
                if os.getpid() != _pid:  # this process is a fork that the grader has made
                    os._exit(0)
                channel.send(encode(answer))

    if start.in_thread:
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
    else:
        serve()
    kill_tree(psutil.Process())
    os._exit(0)


def _call(
    grader: Callable[..., Any], constants: dict[str, Any], packed: bytes, names: list[str]
) -> tuple[str, str, bytes]:
    try:
        args, kwargs = pickle.loads(packed)
        value = grader(*args, **kwargs, **{name: constants[name] for name in names})
        return "done", "", dumps(value)
    except BaseException as error:
        return "error", describe(error), _pickled(error)


def _find_grader(start: Start) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Imports and returns the grader, and the keyword arguments that are the same in all calls.

    Raises any error of the import, and TypeError if the result is not callable.
    """
    sys.meta_path.insert(0, _AsInCaller(start.imported))
    os.environ.update(start.environment)
    if start.logging:
        logging.basicConfig(**start.logging)
    for path, defaults in start.defaults.items():
        from rl_accel.post_import import when_imported

        module, _, name = path.rpartition(".")
        when_imported(module, functools.partial(_set_defaults, name, defaults))
    module, _, name = start.target.rpartition(":")
    with contextlib.chdir(start.folder) if start.folder else contextlib.nullcontext():
        for needed in start.modules:
            importlib.import_module(needed)
        function: Any = _load(module) if os.path.isabs(module) else importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    arguments, constants = pickle.loads(start.packed)
    if arguments is not None:
        function = function(**arguments)
    if not callable(function):
        raise TypeError(f"{start.target} must be a function, found {function!r}")
    return function, constants


class _AsInCaller(MetaPathFinder):
    """Finds the files of the top-level modules that the caller has imported, before the path finds others of the same name."""

    def __init__(self, imported: dict[str, str]) -> None:
        self._imported = imported

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        file = self._imported.get(fullname, "")
        return importlib.util.spec_from_file_location(fullname, file) if os.path.exists(file) else None


def _set_defaults(name: str, defaults: dict[str, Any], module: Any) -> None:
    function = getattr(module, name)

    @functools.wraps(function)
    def with_defaults(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**defaults, **kwargs})

    setattr(module, name, with_defaults)


def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"grader_{abs(hash(path))}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    # not added to sys.modules, because the file may have the name of a package that it imports
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fork_is_safe(connections_before: set[str]) -> bool:
    """True if the import of the grader has left one thread, no child process, no new connection and no SIGCHLD handler."""
    if signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL:  # a template would not learn how its processes end
        return False
    # The trial fork makes OpenBLAS, which numpy loads, end its threads, so that they are not counted. They restart later.
    if trial := os.fork():
        os.waitpid(trial, 0)
    else:
        os._exit(0)
    has_children = bool(psutil.Process().children())
    return len(os.listdir("/proc/self/task")) == 1 and not has_children and _connections() <= connections_before


def _connections() -> set[str]:
    """Returns the open file descriptors that a fork must not share (all but files open for reading), as text "number target"."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            reads_only = fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            target = os.readlink(f"/proc/self/fd/{name}")
            if not (reads_only and target.startswith("/")):
                found.add(f"{name} {target}")
    return found


def _reseed() -> None:
    """Seeds random numbers anew, so that processes forked after the same import draw different ones."""
    random.seed()
    if numbers := sys.modules.get("numpy.random"):
        numbers.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()


def _pickled(error: BaseException) -> bytes:
    """Returns ``error`` pickled, with its traceback as a note. Replaces an error that is no Exception by a RuntimeError."""
    try:
        trace = "".join(traceback.format_exception(error))
        # SystemExit would end the thread of the trainer process that raises it again
        if not isinstance(error, Exception):
            error = RuntimeError(describe(error))
        error.add_note(f"In the process of the grader:\n{trace}")
        if not _survives(error):  # the constructor takes other arguments than ``args``, or an attribute is a lock
            copyreg.pickle(type(error), _with_text)
        if _survives(error):
            return dumps(error)
    except BaseException:
        pass  # even the text of the error may raise
    return dumps(RuntimeError(describe(error)))


def _with_text(error: Exception) -> Any:
    """Tells pickle how to restore an exception that it cannot restore by itself. For :mod:`copyreg`.

    The restored exception has the same text. Its type is a subclass of the original one. Attributes that cannot be pickled are
    dropped.
    """
    kind = type(error)
    text = str(error)
    state = {name: value for name, value in vars(error).items() if _survives(value)}
    copy = type(kind.__name__, (kind,), {"__str__": lambda _: text, "__module__": kind.__module__})
    return kind.__new__, (copy, *filter(_survives, error.args)), state


def _survives(value: Any) -> bool:
    """Returns whether ``value`` can be pickled and unpickled; for an exception, also whether its text stays the same."""
    try:
        copy = pickle.loads(dumps(value))
    except Exception:
        return False
    return not isinstance(value, Exception) or describe(copy) == describe(value)


def _place_of(error: BaseException) -> str:
    """Returns type and text of ``error``, with the file and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{describe(error)}{place}"

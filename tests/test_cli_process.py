"""The program as a shell sees it: pipes that close, full disks, signals, terminals, a silent stdin."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from terminal import Terminal

SCRIPTED = [sys.executable, str(Path(__file__).parent / "support" / "scripted_model.py")]
ANSI = re.compile(rb"\x1b")
LONG = {"text": "0123456789", "repeat": 50_000, "ctx": 1 << 20}
HANGING = {"text": "0123456789", "repeat": 3, "hang_after": 25}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INFER_")}
    kept.pop("NO_COLOR", None)
    return {**kept, "INFER_HOME": str(tmp_path / "home"), "TERM": "xterm-256color"}


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """start(script, *arguments, **popen_options): `infer run --raw` in a process that the test may kill."""
    running = []

    def call(script: dict[str, Any], *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **options,
        }
        command = [*SCRIPTED, json.dumps(script), "run", "--raw", *arguments]
        process = subprocess.Popen(command, env=environment, **options)
        running.append(process)
        return process

    yield call
    for process in running:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def finish(process: subprocess.Popen[bytes], seconds: float = 10) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def wait_for(path: Path, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_some(descriptor: int, enough: Callable[[bytes], bool], seconds: float = 10) -> bytes:
    data = b""
    deadline = time.monotonic() + seconds
    while not enough(data) and time.monotonic() < deadline:
        if select.select([descriptor], [], [], 0.1)[0]:
            try:
                piece = os.read(descriptor, 1 << 16)
            except OSError:  # Linux: the other side of the terminal is closed
                break
            if not piece:
                break
            data += piece
    return data


def test_head_gets_its_bytes_and_ends_the_run(environment: dict[str, str]) -> None:
    script = json.dumps({**LONG, "delay": 0.001})
    command = '"$@" | head -c 5; echo " ${PIPESTATUS[0]}"'
    started = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", command, "bash", *SCRIPTED, script, "run", "--raw", "hi"],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (b"01234 141\n", b"")
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("arguments", [["run", "--raw", "hi"], ["--help"], ["run", "--raw", "--json", "hi"]])
def test_a_full_disk(environment: dict[str, str], arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*SCRIPTED, "{}", *arguments], env=environment, stdin=subprocess.DEVNULL, stdout=full,
            stderr=subprocess.PIPE, timeout=20, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert b"No space left on device" in done.stderr


def test_help_for_a_reader_that_left(environment: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*SCRIPTED, "{}", "--help"],
        env=environment,
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=20,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGINT, 130, b"interrupted"),
        (signal.SIGTERM, 143, b"terminated"),
        (signal.SIGHUP, 143, b"terminated"),
    ],
)
@pytest.mark.parametrize("flag", [None, "--json", "--no-stream", "--jsonl"])
def test_signals_keep_the_partial_text(
    start: Start, tmp_path: Path, number: signal.Signals, code: int, word: bytes, flag: str | None
) -> None:
    script = {**HANGING, "marker": str(tmp_path / "marker")}
    process = start(script, *([flag] if flag else []), "hi")
    wait_for(tmp_path / "marker")
    process.send_signal(number)
    returned, out, err = finish(process)
    assert (returned, err) == (code, b"infer: " + word + b"\n")
    if flag in (None, "--no-stream"):
        assert out == b"0123456789012345678901234"
        return
    report = json.loads(out.splitlines()[-1])
    assert (report["text"], report["finish_reason"]) == ("0123456789012345678901234", "cancelled")


def test_an_interrupt_while_the_model_loads(start: Start, tmp_path: Path) -> None:
    process = start({"load_delay": 30, "marker": str(tmp_path / "marker")}, "hi")
    wait_for(tmp_path / "marker")
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, b"", b"infer: interrupted\n")


def test_a_second_interrupt_ends_at_once(start: Start) -> None:
    # Nobody reads the pipe: the first signal waits for a reader for a while, the second does not.
    process = start(LONG, "hi")
    assert process.stdout is not None
    read_some(process.stdout.fileno(), lambda data: len(data) >= 5)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    assert time.monotonic() - started < 0.9


def test_an_interrupt_with_a_reader_that_does_not_read(start: Start) -> None:
    process = start(LONG, "hi")
    assert process.stdout is not None
    read_some(process.stdout.fileno(), lambda data: len(data) >= 5)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 143


def test_partial_text_in_an_output_file(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "answer"
    process = start(HANGING, "-o", str(path), "hi")
    deadline = time.monotonic() + 10
    while not (path.exists() and path.stat().st_size == 25) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert path.read_bytes() == b"0123456789012345678901234"


def test_the_answer_streams(start: Start, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    process = start({**HANGING, "text": "é", "hang_after": 3, "marker": str(marker)}, "hi")
    assert process.stdout is not None
    # Two bytes make the character, the third begins one and is held back.
    assert read_some(process.stdout.fileno(), lambda data: len(data) >= 2) == "é".encode()
    wait_for(marker)
    process.send_signal(signal.SIGINT)
    assert finish(process)[1] == "\ufffd".encode()


def test_a_silent_stdin_is_announced(start: Start) -> None:
    process = start({}, "ask", stdin=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stdin is not None
    started = time.monotonic()
    note = read_some(process.stderr.fileno(), lambda data: b"\n" in data)
    assert 1.5 < time.monotonic() - started < 6
    assert note.startswith(b"infer: note: reading stdin, which is open but silent")
    assert b"--no-stdin" in note
    process.stdin.write(b"late\n")
    code, out, err = finish(process)
    assert (code, out, err) == (0, b"Hello there.", b"")


def test_devnull_and_closed_stdin(start: Start) -> None:
    assert finish(start({}, "ask"))[:2] == (0, b"Hello there.")
    closed = start({}, "ask", stdin=None, preexec_fn=lambda: os.close(0))
    assert finish(closed)[:2] == (0, b"Hello there.")


def test_every_reader_of_stdin_tells_that_it_is_closed(environment: dict[str, str]) -> None:
    readers = (
        ["chat"],
        ["run"],
        ["run", "-"],
        ["tokenize"],
        ["template", "set", "t"],
        ["perplexity", "-f", "-"],
    )
    for arguments in readers:
        done = subprocess.run(
            [*SCRIPTED, json.dumps({"template": "{{ messages[0].content }}"}), *arguments], env=environment,
            capture_output=True, preexec_fn=lambda: os.close(0), timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1), arguments
        assert b"stdin is closed" in done.stderr or b" is empty: give a text" in done.stderr


def test_closed_stdout(start: Start) -> None:
    code, _, err = finish(start({}, "ask", stdout=None, preexec_fn=lambda: os.close(1)))
    assert (code, err) == (1, b"infer: error: stdout is closed: send it to a file or a pipe\n")


def test_utf8_whatever_the_locale(start: Start, environment: dict[str, str]) -> None:
    environment.update(LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    code, out, err = finish(start({"text": "日本 é", "warnings": ["größe"]}, "hi"))
    assert (code, out) == (0, "日本 é".encode())
    assert err == "infer: warning: größe\n".encode()


def on_terminal(
    command: list[str], environment: dict[str, str], act: Callable[[int, int], bytes] | None = None
) -> tuple[int, bytes]:
    """Run with a terminal as stdin, stdout and stderr; act gets the process id and the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, environment)
    seen = act(pid, terminal) if act else b""
    seen += read_some(terminal, lambda _: False)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), seen.replace(b"\r\n", b"\n")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("text", ["Hello [/INST] [bold]x[/bold]\nend", "\x1b[31mred\x1b]0;t\x07\x9b2J ü\n"])
def test_terminal_and_pipe_show_the_same_text(start: Start, environment: dict[str, str], text: str) -> None:
    script = json.dumps({"text": text})
    code, shown = on_terminal([*SCRIPTED, script, "run", "--raw", "hi"], environment)
    piped = finish(start({"text": text}, "hi"))[1].decode()
    assert code == 0
    assert piped == text
    visible = text.translate({0x1B: "␛", 0x07: "␇", 0x9B: "\ufffd"})
    assert shown.decode() == visible.removesuffix("\n") + "\n"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_warning_comes_after_the_answer_on_a_terminal(start: Start, environment: dict[str, str]) -> None:
    script = {"text": "one line, and one more", "warn_after": 5}
    warning = b"infer: warning: the prompt cache is off: disk full"
    arguments = [*SCRIPTED, json.dumps(script), "run", "--raw", "hi"]
    terminal = Terminal(arguments, environment, stdin=subprocess.DEVNULL)
    terminal.end()
    assert terminal.raw == b"one line, and one more\r\n" + warning + b"\r\n"
    terminal.close()
    assert finish(start(script, "hi")) == (0, b"one line, and one more", warning + b"\n")


def test_ctrl_c_on_a_terminal(environment: dict[str, str]) -> None:
    def press(pid: int, terminal: int) -> bytes:
        seen = read_some(terminal, lambda data: data.count(b"4") >= 2)
        os.write(terminal, b"\x03")
        return seen

    script = json.dumps({**HANGING, "hang_after": 15})
    code, shown = on_terminal([*SCRIPTED, script, "run", "--raw", "hi"], environment, press)
    assert code == 130
    assert shown == b"012345678901234^C\ninfer: interrupted\n"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("change", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_no_ansi_and_no_returns_where_unwanted(environment: dict[str, str], change: dict[str, str]) -> None:
    environment.update(change)
    for arguments in (
        ["--help"],
        ["run", "--help"],
        ["run", "--raw", "--stats", "hi"],
        ["ls"],
        ["run", "--x"],
    ):
        _, shown = on_terminal([*SCRIPTED, "{}", *arguments], environment)
        assert shown
        assert not ANSI.search(shown)
        assert b"\r" not in shown


def test_no_ansi_off_a_terminal(environment: dict[str, str]) -> None:
    environment["FORCE_COLOR"] = "1"
    for arguments in (["--help"], ["run", "--raw", "--stats", "hi"], ["ls"], ["run", "--x"]):
        done = subprocess.run(
            [*SCRIPTED, "{}", *arguments], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=20, check=False,
        )  # fmt: skip
        assert not ANSI.search(done.stdout + done.stderr)
        assert b"\r" not in done.stdout + done.stderr


def in_python(code: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, **options
    )


SWALLOWING = """
import os, pathlib, sys, weakref
folder = pathlib.Path(sys.argv[1])
(folder / "swallows.py").write_text('''
import pathlib, time
try:
    pathlib.Path(__file__).with_name("marker").touch()
    time.sleep(20)
except BaseException:
    pass
''')
sys.path.insert(0, str(folder))
from infer.cli.signals import install
install()
import swallows
print("went on")
"""


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, b"interrupted"), (signal.SIGTERM, 143, b"terminated")]
)
def test_a_signal_during_an_import_ends_the_process(
    tmp_path: Path, number: signal.Signals, code: int, word: bytes
) -> None:
    with in_python(SWALLOWING, str(tmp_path), stdout=subprocess.PIPE) as process:
        wait_for(tmp_path / "marker")
        process.send_signal(number)
        assert finish(process) == (code, b"", b"infer: " + word + b"\n")


STARTING = """
import sys, time
class Slow:
    def find_spec(self, name, path, target=None):
        if name == "infer.cli.main":
            print("importing", flush=True)
            time.sleep(20)
sys.meta_path.insert(0, Slow())
from infer.cli.start import main
main()
"""


def test_an_interrupt_while_the_program_starts_is_no_traceback() -> None:
    with in_python(STARTING, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert finish(process) == (-signal.SIGINT, b"", b"")


BUSY = """
import contextlib, hashlib, sys
from infer.cli import signals
signals._GRACE_S = 0.2
signals.install()
rounds = 1 << 10
with signals.patient() if sys.argv[1] == "patient" else contextlib.nullcontext():
    try:
        print("busy", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[2]))  # no signal handler runs meanwhile
    except KeyboardInterrupt:
        print("kept", flush=True)
        signals.leave(130)
"""


@pytest.mark.parametrize(
    ("how", "rounds", "out"), [("patient", 3_000_000, b"kept\n"), ("hasty", 1 << 30, b"")]
)
def test_a_signal_during_a_long_call(how: str, rounds: int, out: bytes) -> None:
    with in_python(BUSY, how, str(rounds), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        code, seen, err = finish(process, 30)
        assert (code, seen) == (130, out)
        assert err == (b"" if out else b"infer: interrupted\n")


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_no_file_gets_the_number_of_a_closed_standard_stream(tmp_path: Path, closed: tuple[int, ...]) -> None:
    path = tmp_path / "opened"
    code = (
        "import os, sys; from infer.cli.start import occupy_standard_descriptors as occupy; occupy()\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT); os.write(fd, str(fd).encode())"
    )
    command = [sys.executable, "-c", code, str(path)]
    subprocess.run(
        command, preexec_fn=lambda: [os.close(number) for number in closed], timeout=20, check=True
    )
    assert int(path.read_text()) > 2


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["man"], ["ls"], ["cache", "info"], ["session", "ls"]]
)
def test_results_for_a_closed_stdout(environment: dict[str, str], arguments: list[str]) -> None:
    done = subprocess.run(
        [*SCRIPTED, "{}", *arguments], env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        preexec_fn=lambda: os.close(1), timeout=20, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        1, b"infer: error: stdout is closed: send it to a file or a pipe\n",
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [["ls"], ["--help"], ["run", "--help"], ["--version"], ["man"]])
def test_a_result_for_a_full_disk_says_where(environment: dict[str, str], arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*SCRIPTED, "{}", *arguments],
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=20,
            check=False,
        )
    assert (done.returncode, done.stderr) == (
        1, b"infer: error: stdout: cannot write: No space left on device\n",
    )  # fmt: skip

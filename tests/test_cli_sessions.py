"""`infer run --session`, `--continue` and `infer session`: conversations across runs, with a scripted model."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from scripted_model import Script, ScriptedModel, install

from infer.cli.main import invoke

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SCRIPTED = [sys.executable, str(Path(__file__).parent / "support" / "scripted_model.py")]
DEFAULT = "smollm2-135m-instruct"


class Home:
    """Runs commands in this process, each with a new scripted model, and looks into the session files."""

    def __init__(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.path = path
        self.model: ScriptedModel | None = None
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        code = invoke(arguments)
        return code, *self._capsys.readouterr()

    def run(self, *arguments: str, **script: Any) -> tuple[int, str, str]:
        self.model = ScriptedModel(Script(**{"template": CHATML, **script}))
        install(self.model, self._monkeypatch.setattr)
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        return self("run", *arguments)

    def say(self, *arguments: str, **script: Any) -> str:
        """A run that must succeed; what it said on stderr."""
        code, _, err = self.run(*arguments, **script)
        assert code == 0, err
        return err

    @property
    def prompt(self) -> str:
        assert self.model is not None
        return self.model.prompts[0]

    def file(self, name: str) -> Path:
        return self.path / "state" / "sessions" / f"{name}.jsonl"

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file(name).read_text(encoding="utf-8").splitlines()]

    def texts(self, name: str) -> list[str]:
        return [line["content"] for line in self.lines(name)[1:]]


@pytest.fixture
def home(scripted_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Home:
    return Home(scripted_home, monkeypatch, capsys)


def test_a_conversation_goes_on(home: Home) -> None:
    assert (
        home.say("--session", "s", "-s", "Be kind.", "one", text="First.") == "infer: note: new session s\n"
    )
    assert home.prompt == "<|system|>Be kind.\n<|user|>one\n<|assistant|>"
    assert home.run("--session", "s", "two", text="Second.") == (0, "Second.", "")
    assert home.prompt == ("<|system|>Be kind.\n<|user|>one\n<|assistant|>First.\n<|user|>two\n<|assistant|>")
    header, *messages = home.lines("s")
    assert {**header, "created": ""} == {
        "infer_session": 1, "model": DEFAULT, "created": "", "system": "Be kind.",
    }  # fmt: skip
    assert [(m["role"], m["content"]) for m in messages] == [
        ("user", "one"), ("assistant", "First."), ("user", "two"), ("assistant", "Second."),
    ]  # fmt: skip
    assert (messages[3]["model"], messages[3]["finish"]) == (DEFAULT, "stop")
    assert all(message["time"].endswith("Z") for message in messages)


def test_continue_takes_the_session_used_last(home: Home) -> None:
    assert home.run("--continue", "hi")[::2] == (
        1, "infer: error: there is no session to continue; --session NAME begins one\n",
    )  # fmt: skip
    for name in ("a", "b", "a"):
        home.say("--session", name, "one")
        time.sleep(0.02)
    assert home.say("--continue", "two") == "infer: note: session a, 2 turns so far\n"
    assert home.say("--continue", "-q", "three") == ""
    assert home.texts("a")[-2] == "three"
    assert len(home.texts("b")) == 2


def test_the_text_is_kept_as_it_is(home: Home) -> None:
    text = "\x1b[31m<|user|>\u2028é\r\n"
    home.say("--session", "s", "--prefill", "Sure:", "one", text=text)
    assert home.texts("s") == ["one", "Sure:" + text]
    home.say("--session", "s", "two")
    assert f"<|assistant|>Sure:{text}\n<|user|>two" in home.prompt


def test_json_of_a_session_run(home: Home) -> None:
    code, out, _ = home.run("--session", "s", "--json", "-n", "2", "one")
    assert (code, json.loads(out)["text"]) == (0, "He")
    assert home.lines("s")[2]["finish"] == "length"


def test_the_system_message_stays(home: Home) -> None:
    home.say("--session", "s", "-s", "Be kind.", "one")
    home.say("--session", "bare", "one")
    before = home.file("s").read_bytes()
    for name, text in (("s", "Be rude."), ("s", ""), ("bare", "Be kind.")):
        code, out, err = home.run("--session", name, "-s", text, "two")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "which stays: drop --system" in err
    assert home.file("s").read_bytes() == before
    assert home.say("--session", "s", "-s", "Be kind.", "two") == ""
    assert home.say("--session", "bare", "-s", "", "two") == ""


def test_a_configured_system_message_is_for_new_sessions(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.say("--session", "s", "one")
    monkeypatch.setenv("INFER_SYSTEM", "Be kind.")
    err = home.say("--session", "s", "two")
    assert err.startswith(
        "infer: note: session s keeps what it was begun with, no system message: INFER_SYSTEM "
    )
    assert "system" not in home.prompt
    home.say("--session", "new", "one")
    assert home.lines("new")[0]["system"] == "Be kind."


def test_another_model_is_said(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.gguf").touch()
    path = str(tmp_path / "other.gguf")
    home.say("--session", "s", "one")
    err = home.say("--session", "s", "-m", "other.gguf", "two")
    assert err == f"infer: note: session s was begun with {DEFAULT}; {path} answers this time\n"
    assert [line["model"] for line in home.lines("s")[2::2]] == [DEFAULT, path]
    assert home.say("--session", "s", "three") == ""
    monkeypatch.setenv("INFER_MODEL", "other.gguf")
    err = home.say("--session", "s", "four")
    assert err == f"infer: note: session s goes on with {DEFAULT}, not with INFER_MODEL\n"
    assert home.lines("s")[-1]["model"] == DEFAULT
    home.say("--session", "new", "one")
    monkeypatch.chdir("/")
    monkeypatch.delenv("INFER_MODEL")
    assert home.say("--session", "new", "two") == ""
    assert home.lines("new")[-1]["model"] == home.lines("new")[0]["model"] == path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--session", "s", "--raw"], "--session keeps a chat, and --raw is none"),
        (["--continue", "--raw"], "--continue keeps a chat, and --raw is none"),
        (["--session", "s", "--continue"], "--session and --continue contradict each other"),
        (["--session", "../s"], "'../s' is no name for a session"),
        (["--session", "a/b"], "'a/b' is no name for a session"),
    ],
)
def test_flags_that_make_no_sense(home: Home, arguments: list[str], message: str) -> None:
    code, out, err = home.run(*arguments, "hi")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not (home.path / "state").exists()


def test_flags_beat_the_environment(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.say("--session", "s", "one")
    monkeypatch.setenv("INFER_SESSION", "env")
    home.say("one")
    assert home.texts("env")[0] == "one"
    os.utime(home.file("s"), (4e9, 4e9))
    home.say("--continue", "two")
    assert home.texts("s")[-2] == "two"
    home.say("--session", "", "three")
    assert "three" not in home.texts("s") + home.texts("env")
    monkeypatch.setenv("INFER_CONTINUE", "1")
    home.say("--session", "third", "one")
    code, _, err = home.run("four")
    assert code == 2
    assert "INFER_SESSION and INFER_CONTINUE contradict each other" in err


def test_a_base_model_has_no_conversations(home: Home) -> None:
    code, _, err = home.run("--session", "s", "-q", "hi", template=None)
    assert (code, err.count("\n")) == (2, 1)
    assert "--session needs a chat template" in err
    assert not home.file("s").exists()


def test_a_failure_before_any_output_changes_nothing(home: Home) -> None:
    for _ in range(2):
        code, _, _ = home.run("--session", "s", "hi", fail_after=0)
        assert code == 1
        assert not home.file("s").exists()
        code, _, _ = home.run("--session", "s", "x" * 600)
        assert code == 4
    home.say("--session", "s", "one")
    before = home.file("s").read_bytes()
    assert home.run("--session", "s", "hi", fail_after=0)[0] == 1
    assert home.run("--session", "s", "-n", "0", "hi")[0] == 0
    assert home.file("s").read_bytes() == before


def test_a_failure_later_keeps_what_was_said(home: Home) -> None:
    code, out, _ = home.run("--session", "s", "hi", fail_after=5)
    assert (code, out) == (1, "Hello")
    assert (home.texts("s"), home.lines("s")[2]["finish"]) == (["hi", "Hello"], "cancelled")


def test_a_session_that_cannot_be_written(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.say("--session", "s", "one")
    before = home.file("s").read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    code, out, err = home.run("--session", "s", "two", text="The answer.")
    assert (code, out, err.count("\n")) == (1, "The answer.", 1)
    assert "s.jsonl: this turn cannot be kept: No space left on device" in err
    code, out, err = home.run("--session", "s", "two", text="The answer.", fail_after=3)
    assert (code, out) == (1, "The")
    assert [line.split(":")[1] for line in err.splitlines()] == [" warning", " error"]
    assert home.file("s").read_bytes() == before


def test_a_damaged_session_is_named_and_never_rewritten(home: Home) -> None:
    home.say("--session", "s", "one")
    damaged = home.file("s").read_bytes()[:-20]
    home.file("s").write_bytes(damaged)
    for arguments in (["run", "--session", "s", "two"], ["session", "show", "s"], ["session", "export", "s"]):
        code, out, err = home.run(*arguments[1:]) if arguments[0] == "run" else home(*arguments)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert f"{home.file('s')}: line 3: not a JSON object" in err
    assert home.file("s").read_bytes() == damaged
    code, out, _ = home("session", "ls")
    assert code == 0
    assert "damaged: " in out.splitlines()[1]
    assert out.splitlines()[1].split()[1] == "-"


def test_a_conversation_longer_than_the_context(home: Home) -> None:
    for letter in "abcd":
        home.say("--session", "s", "-s", "SYS", letter * 60, text=letter.upper() * 40)
    tokens = len(home.prompt) + 1 + len("D" * 40 + "\n<|user|>e\n<|assistant|>")
    before = home.file("s").read_bytes()
    code, out, err = home.run("--session", "s", "e", ctx=400)
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert f"conversation has {tokens} tokens with its 4 earlier turns, context holds 400" in err
    assert "--truncate head" in err
    assert home.file("s").read_bytes() == before

    err = home.say("--session", "s", "--truncate", "head", "-n", "20", "e", ctx=400)
    assert f"conversation of {tokens} tokens without its oldest 2 of 4 turns: " in err
    assert home.prompt.startswith("<|system|>SYS\n<|user|>ccc")
    assert home.prompt.endswith("<|user|>e\n<|assistant|>")
    assert len(home.texts("s")) == 10
    assert home.file("s").read_bytes().startswith(before)


@pytest.mark.parametrize(("side", "kept"), [("head", "y"), ("tail", "x")])
def test_a_message_longer_than_the_context(home: Home, side: str, kept: str) -> None:
    home.say("--session", "s", "one")
    err = home.say("--session", "s", "--truncate", side, "-n", "4", "x" * 500 + "y" * 500)
    assert "without its oldest 1 of 1 turns" in err
    assert f"to 508 tokens at its {side}" in err
    assert home.prompt.startswith(f"<|user|>{kept}")
    assert home.texts("s")[2] == "x" * 500 + "y" * 500


# -- processes


def start(home: Home, script: dict[str, Any], *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*SCRIPTED, json.dumps({"template": CHATML, **script}), *arguments],
        env={**os.environ, "INFER_HOME": str(home.path)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_an_interrupted_answer_is_kept_in_part(
    home: Home, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    home.say("--session", "s", "one")
    for hang_after, texts in ((0, []), (4, ["two", "Hell"])):
        marker = tmp_path / f"marker{hang_after}"
        script = {"hang_after": hang_after, "marker": str(marker)}
        with start(home, script, "run", "--session", "s", "two") as process:
            wait_for(marker)
            process.send_signal(number)
            out, err = process.communicate(timeout=20)
        assert (process.returncode, out.decode()) == (code, texts[1] if texts else "")
        assert err.count(b"\n") == 1
        assert home.texts("s")[2:] == texts
    assert home.lines("s")[-1]["finish"] == "cancelled"
    home.say("--session", "s", "three")
    assert "<|assistant|>Hell\n<|user|>three" in home.prompt


def test_a_reader_that_leaves_keeps_the_part_it_may_have_seen(home: Home) -> None:
    script = json.dumps({"template": CHATML, "delay": 0.001, "repeat": 1000, "ctx": 1 << 20})
    subprocess.run(
        ["bash", "-c", '"$@" | head -c 5', "bash", *SCRIPTED, script, "run", "-q", "--session", "s", "hi"],
        env={**os.environ, "INFER_HOME": str(home.path)}, stdin=subprocess.DEVNULL, timeout=30, check=True,
        capture_output=True,
    )  # fmt: skip
    assert home.texts("s")[1].startswith("Hello")
    assert home.lines("s")[2]["finish"] == "cancelled"


def test_two_runs_at_once(home: Home, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with start(home, {"hang_after": 3, "marker": str(marker)}, "run", "--session", "s", "one") as process:
        wait_for(marker)
        code, out, err = home.run("--session", "s", "two")
        assert (code, out, err) == (
            1, "", "infer: error: session s is in use by another process: wait for it, or use another name\n",
        )  # fmt: skip
        home.say("--session", "other", "two")
        process.kill()
        process.communicate(timeout=20)
    home.say("--session", "s", "two")


def test_a_pipeline_in_one_session(home: Home) -> None:
    """The second run waits for its prompt before it takes the session, so that the first can finish with it."""
    one = json.dumps({"template": CHATML, "text": "First."})
    two = json.dumps({"template": CHATML, "text": "Second."})
    program = " ".join(SCRIPTED)
    done = subprocess.run(
        ["bash", "-c", f"{program} '{one}' run --session s a | {program} '{two}' run --session s b"],
        env={**os.environ, "INFER_HOME": str(home.path)}, stdin=subprocess.DEVNULL, timeout=30, check=True,
        capture_output=True,
    )  # fmt: skip
    assert done.stdout == b"Second."
    assert home.texts("s") == ["a", "First.", "First.\n\nb", "Second."]


# -- infer session


def test_ls(home: Home) -> None:
    assert home("session", "ls") == (0, "NAME  TURNS  LAST USED  MODEL\n", "")
    home.say("--session", "a", "one")
    time.sleep(0.02)
    home.say("--session", "longer-name", "one")
    code, out, _ = home("session", "ls")
    header, first, second = out.splitlines()
    assert (code, header.split()[0], first.split()[:2], second.split()[0]) == (
        0,
        "NAME",
        ["longer-name", "1"],
        "a",
    )
    listing = json.loads(home("session", "ls", "--json")[1])
    assert listing["folder"] == str(home.file("a").parent)
    row = listing["sessions"][1]
    assert (row["name"], row["turns"], row["model"], row["error"]) == ("a", 1, DEFAULT, None)
    assert (row["path"], row["size"]) == (str(home.file("a")), home.file("a").stat().st_size)


def test_show_and_export(home: Home) -> None:
    home.say("--session", "s", "-s", "Be kind.", "one", text="First.")
    home.say("--session", "s", "-n", "3", "two", text="Second.")
    assert home("session", "show", "s") == (
        0, "[system]\nBe kind.\n\n[user]\none\n\n[assistant]\nFirst.\n\n[user]\ntwo\n\n[assistant: length]\nSec\n", "",
    )  # fmt: skip
    shown = json.loads(home("session", "show", "--json", "s")[1])
    assert shown["messages"][0] == {"role": "system", "content": "Be kind."}
    assert [message["content"] for message in shown["messages"]] == [
        "Be kind.",
        "one",
        "First.",
        "two",
        "Sec",
    ]
    assert (shown["name"], shown["model"], shown["messages"][4]["finish"]) == ("s", DEFAULT, "length")
    assert json.loads(home("session", "export", "s", "--format", "json")[1]) == shown
    code, markdown, _ = home("session", "export", "s")
    assert code == 0
    assert markdown.startswith(f"# s\n\n{DEFAULT}, 2")
    assert "\n## System\n\nBe kind.\n\n## User\n\none\n\n## Assistant\n\nFirst.\n" in markdown
    assert markdown.endswith("## Assistant (length)\n\nSec\n")
    assert home("session", "export", "s", "--format", "xml")[0] == 2


def test_export_of_any_text(home: Home) -> None:
    text = "\x1b[31m\u2028é\r\n\t\0 "
    home.say("--session", "s", "-s", "Be\nkind.", "one", text=text)
    code, out, _ = home("session", "export", "s", "--format", "jsonl")
    lines = [json.loads(line) for line in out.split("\n")[:-1]]
    assert code == 0
    assert [(line["role"], line["content"]) for line in lines] == [
        ("system", "Be\nkind."), ("user", "one"), ("assistant", text),
    ]  # fmt: skip


def test_rename(home: Home) -> None:
    home.say("--session", "s", "one")
    assert home("session", "rename", "s", "t") == (0, "", "session s is now t\n")
    assert home("session", "rename", "s", "u")[0] == 1
    assert home("session", "rename", "t", "a/b")[0] == 2
    home.say("--session", "s", "two")
    assert home("session", "rename", "s", "t")[0] == 1
    assert (home.texts("s")[0], home.texts("t")[0]) == ("two", "one")


def test_search(home: Home) -> None:
    home.say(
        "--session",
        "s",
        "-s",
        "Be kind.",
        "Where is the STRASSE?",
        text="x" * 50 + " Straße\x1b[2J " + "y" * 50,
    )
    home.say("--session", "t", "nothing")
    home.file("bad").write_bytes(b"{")
    code, out, err = home("session", "search", "strasse")
    assert (code, err.count("\n"), "bad.jsonl: line 1" in err) == (0, 1, True)
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [
        ["s", "1", "user"],
        ["s", "1", "assistant"],
    ]
    assert "…" in out
    assert "\x1b" not in out
    found = json.loads(home("session", "search", "--json", "KIND")[1])["matches"]
    assert found == [{"session": "s", "message": 0, "role": "system", "content": "Be kind."}]
    assert home("session", "search", "nowhere")[:2] == (0, "")
    assert home("session", "search", "")[0] == 2


def test_rm(home: Home) -> None:
    home.say("--session", "s", "one")
    code, _, err = home("session", "rm", "s")
    assert code == 2
    assert "give -y" in err
    assert home.file("s").exists()
    assert home("session", "rm", "s", "-y") == (0, "", "deleted session s\n")
    assert list(home.file("s").parent.iterdir()) == []
    for command in ("rm", "show", "export"):
        code, _, err = home("session", command, "s")
        assert (code, err.count("\n")) == (1, 1)
        assert "there is no session 's'" in err


def test_a_terminal_gets_no_control_characters(home: Home, tmp_path: Path) -> None:
    import pty

    home.say("--session", "s", "\x1b[2Jone", text="\x1b]0;title\x07\n")
    for arguments in (["show", "s"], ["export", "s"], ["export", "--format", "json", "s"], ["ls"]):
        outer, inner = pty.openpty()
        process = start_on(home, inner, ["session", *arguments])
        os.close(inner)
        data = b""
        while True:
            try:
                piece = os.read(outer, 65536)
            except OSError:
                break
            if not piece:
                break
            data += piece
        os.close(outer)
        assert process.wait(timeout=20) == 0
        assert b"\x1b" not in data
        assert b"\x07" not in data
        assert data
    assert "\x1b[2Jone" in home("session", "show", "s")[1]


def start_on(home: Home, terminal: int, arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "from infer.cli.main import main; main()", *arguments],
        env={**os.environ, "INFER_HOME": str(home.path)}, stdin=terminal, stdout=terminal, stderr=terminal,
    )  # fmt: skip


def test_session_commands_do_not_import_torch(home: Home) -> None:
    home.say("--session", "s", "one")
    code = (
        "import sys; from infer.cli.main import invoke\n"
        "for words in (['ls'], ['show', 's'], ['export', 's'], ['rm', '-y', 's']):\n"
        "    assert invoke(['session', *words]) == 0\n"
        "print(*({'torch', 'numpy', 'jinja2', 'rich', 'tokenizers'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "INFER_HOME": str(home.path)},
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stderr == "deleted session s\n\n"


def test_names_complete(home: Home) -> None:
    from infer.cli.options import complete_session

    assert complete_session("") == []
    home.say("--session", "alpha", "one")
    home.say("--session", "beta", "one")
    assert complete_session("al") == ["alpha"]
    assert set(complete_session("")) == {"alpha", "beta"}


def test_help(home: Home) -> None:
    code, without, _ = home("session")
    assert code == 0
    assert home("session", "--help")[1] == without
    assert home("session", "nope")[0] == 2

"""The command line: what it prints, what it writes, and one clear line with exit code 2 for whatever is wrong."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import tilewise as tw
from tests.support import assert_same_bits, inputs
from tilewise.cli.app import run
from tilewise.runtime.roof import Roof
from tilewise.simd.target import TARGETS

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setattr("tilewise.cli.run.measure_roof", lambda target: Roof(1e11, 1e10))

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run([str(x) for x in arguments])
        return code, *capsys.readouterr()

    return call


def in_a_process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "from tilewise.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def assert_one_line(result: tuple[int, str, str], *words: str) -> None:
    """Exit code 2, nothing on stdout, and on stderr one line that holds the words."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert all(word in err for word in words), err


@pytest.fixture
def tensors() -> dict[str, Any]:
    q, k, v = inputs(2, 4, 2, 9, 9, 16, 8)
    return {"q": q, "k": k, "v": v, "sinks": np.array([1, -2, 0.5, 3], np.float32)}


@pytest.fixture
def npz(tmp_path: Path, tensors: dict[str, Any]) -> Path:
    path = tmp_path / "qkv.npz"
    np.savez(path, **tensors)
    return path


# ---- run
def test_run_takes_the_captured_layer_by_default(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "result.npz"
    code, text, err = command("run", "--repeat", 1, "--check", "--out", out)
    assert (code, err) == (0, "")
    for words in (
        "SmolLM2-135M",
        "q [1, 9, 512, 64]  k [1, 3, 512, 64]",
        "causal",
        "GFLOP/s",
        "scratch",
        "ratio",
        "o [1, 9",
    ):
        assert words in text
    layer = np.load(Path(tw.__file__).parent / "data" / "smollm2_layer.npz")
    expected = tw.attention(layer["q"], layer["k"], layer["v"], causal=True, return_lse=True)
    with np.load(out) as written:
        assert_same_bits((written["o"], written["lse"]), expected)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ([], {}),
        (["--causal"], {"causal": True}),
        (["--causal", "--window", 3, "--q-offset", 2], {"causal": True, "window": 3, "q_offset": 2}),
        (["--causal", "--q-offset", "4,0"], {"causal": True, "q_offset": [4, 0]}),
        (["--scale", "-0.75", "--bc", 7, "--span", 14], {"scale": -0.75, "bc": 7, "span": 14}),
        (["--sinks", "sinks", "--br", 2, "--threads", 2], {"sinks": np.array([1, -2, 0.5, 3], np.float32)}),
        (["--sinks", "1,-2,0.5,3"], {"sinks": np.array([1, -2, 0.5, 3], np.float32)}),
    ],
)
def test_run_passes_on_what_it_is_told(
    command: Command, tmp_path: Path, tensors: dict[str, Any], kind: str, flags: list[Any], arguments: dict[str, Any]
) -> None:
    file, out = tmp_path / f"x.{kind}", tmp_path / "out.npz"
    if kind == "npz":
        np.savez(file, **tensors)
    else:
        save_file(tensors, file)
    code, text, err = command("run", file, "--out", out, "--repeat", 1, "--check", *flags)
    assert (code, err) == (0, ""), err
    assert str(file) in text
    with np.load(out) as written:
        expected = tw.attention(tensors["q"], tensors["k"], tensors["v"], return_lse=True, **arguments)
        assert_same_bits((written["o"], written["lse"]), expected)


def test_run_reads_fortran_order(command: Command, tmp_path: Path, tensors: dict[str, Any]) -> None:
    file, out = tmp_path / "x.npz", tmp_path / "out.npz"
    np.savez(file, **{name: np.asfortranarray(x) for name, x in tensors.items()})
    assert command("run", file, "--out", out)[0] == 0
    with np.load(out) as written:
        assert_same_bits(written["o"], tw.attention(tensors["q"], tensors["k"], tensors["v"]))


def test_run_check_fails_where_the_error_is_too_large(
    command: Command, npz: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tw.attention

    def wrong(*arrays: Any, **arguments: Any) -> Any:
        o, lse = real(*arrays, **arguments)
        return o + np.float32(1e-5), lse

    monkeypatch.setattr("tilewise.cli.run.tw.attention", wrong)
    code, _, err = command("run", npz, "--check", "--repeat", 1)
    assert code == 1
    assert "more than 2 times" in err
    assert command("run", npz, "--repeat", 1)[0] == 0


def test_run_in_the_interpreter(command: Command, npz: Path) -> None:
    with tw.config(interpret=True):
        code, text, _ = command("run", npz, "--repeat", 1)
    assert code == 0
    assert "not measured" in text


def broken_files(folder: Path, tensors: dict[str, Any]) -> dict[str, tuple[Path, str]]:
    """Files that cannot be used, and a word that the complaint must hold."""
    q, k, v = (tensors[name] for name in "qkv")

    def npz(name: str, **arrays: Any) -> Path:
        path = folder / f"{name}.npz"
        np.savez(path, **{"q": q, "k": k, "v": v, **arrays})
        return path

    def raw(name: str, data: bytes) -> Path:
        path = folder / name
        path.write_bytes(data)
        return path

    whole = npz("whole").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    (folder / "folder.npz").mkdir()
    np.savez(folder / "no_k.npz", q=q, v=v)
    np.save(folder / "single.npy", q)
    save_file({"q": q.astype(np.float16), "k": k, "v": v}, folder / "half.safetensors")
    bf16 = b'{"q":{"dtype":"BF16","shape":[1,1,1,1],"data_offsets":[0,2]}}'
    return {
        "no such file": (folder / "missing.npz", "no such file"),
        "no such safetensors": (folder / "missing.safetensors", "no such file"),
        "directory": (folder / "folder.npz", "is a directory"),
        "wrong suffix": (raw("x.txt", b""), "expected a .npz or .safetensors"),
        "single array": (folder / "single.npy", "expected a .npz"),
        "single array named npz": (raw("single.npz", (folder / "single.npy").read_bytes()), "single array"),
        "empty": (raw("empty.npz", b""), "cannot read"),
        "garbage": (raw("garbage.npz", b"garbage" * 100), "cannot read"),
        "truncated": (raw("truncated.npz", whole[: len(whole) // 2]), "cannot read"),
        "corrupt": (raw("corrupt.npz", bytes(flipped)), "cannot read"),
        "pickle": (raw("pickle.npz", pickle.dumps({"q": 1})), "not a .npz"),
        "object array": (npz("objects", q=np.array([{}, None], object)), "pickle"),
        "missing array": (folder / "no_k.npz", "'k'"),
        "float16": (npz("half", q=q.astype(np.float16)), "float16; only float32"),
        "float64": (npz("double", k=k.astype(np.float64)), "float64; only float32"),
        "integers": (npz("integers", v=v.astype(np.int32)), "int32; only float32"),
        "text": (npz("text", v="text"), "only float32"),
        "rank": (npz("rank", q=q[0]), "4 axes"),
        "scalar": (npz("scalar", q=np.float32(1)), "4 axes"),
        "heads": (npz("heads", q=q[:, :3]), "multiple"),
        "batch": (npz("batch", k=k[:1]), "batch"),
        "float16 safetensors": (folder / "half.safetensors", "float16; only float32"),
        "bfloat16": (
            raw("b.safetensors", len(bf16).to_bytes(8, "little") + bf16 + b"\0\0"), "bfloat16; only float32"
        ),
        "corrupt safetensors": (raw("c.safetensors", b"\xff" * 40), "cannot read"),
    }  # fmt: skip


BROKEN = (
    "no such file", "no such safetensors", "directory", "wrong suffix", "single array", "single array named npz",
    "empty", "garbage", "truncated", "corrupt", "pickle", "object array", "missing array", "float16", "float64",
    "integers", "text", "rank", "scalar", "heads", "batch", "float16 safetensors", "bfloat16", "corrupt safetensors",
)  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_bad_file_gets_one_line(command: Command, tmp_path: Path, tensors: dict[str, Any], name: str) -> None:
    files = broken_files(tmp_path, tensors)
    assert set(files) == set(BROKEN)
    file, word = files[name]
    assert_one_line(command("run", file), word)


def test_an_unreadable_file_gets_one_line(command: Command, npz: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:  # chmod would not stop root
        raise PermissionError(13, "Permission denied", str(npz))

    monkeypatch.setattr("pathlib.Path.open", refuse)
    assert_one_line(command("run", npz), "permission denied")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--scale", "nan"], "scale"),
        (["--scale", "inf"], "scale"),
        (["--scale", "half"], "--scale"),
        (["--q-offset", "-1"], "q_offset"),
        (["--q-offset", "x"], "--q-offset"),
        (["--q-offset", "1,2,3"], "q_offset"),
        (["--q-offset", "99999999999999999999"], "q_offset"),
        (["--window", "2.5"], "--window"),
        (["--br", "-1"], "br"),
        (["--bc", "-1"], "bc"),
        (["--bc", "513"], "bc"),
        (["--bc", "7", "--span", "15"], "span"),
        (["--threads", "0"], "--threads"),
        (["--repeat", "0"], "--repeat"),
        (["--sinks", "1,2"], "sinks"),
        (["--sinks", "nobody"], "--sinks"),
        (["--sinks", "q"], "sinks"),
        (["--flag"], "--flag"),
        (["another"], "another"),
        (["--out", "x.txt"], "--out"),
        (["--out", "nowhere/x.npz"], "there is no folder"),
        (["--out", "."], "--out"),
    ],
)
def test_a_bad_flag_gets_one_line(command: Command, npz: Path, flags: list[str], word: str) -> None:
    assert_one_line(command("run", npz, *flags), word)


def test_the_output_is_not_the_input(command: Command, npz: Path) -> None:
    before = npz.read_bytes()
    assert_one_line(command("run", npz, "--out", npz), "is the input file")
    assert npz.read_bytes() == before


def test_unequal_lengths_need_an_offset(command: Command, tmp_path: Path, tensors: dict[str, Any]) -> None:
    np.savez(tmp_path / "x.npz", **{**tensors, "q": tensors["q"][:, :, :4]})
    assert_one_line(command("run", tmp_path / "x.npz", "--causal"), "q_offset must be given", "Tk - Tq")


@pytest.mark.parametrize(
    ("environment", "word"),
    [({"TILEWISE_TARGET": "z80"}, "unknown target"), ({"TILEWISE_DEBUG": "9"}, "TILEWISE_DEBUG")],
)
def test_a_bad_environment_gets_one_line(environment: dict[str, str], word: str) -> None:
    done = in_a_process("run", **environment)
    assert_one_line((done.returncode, done.stdout, done.stderr), word)


def test_no_memory_gets_one_line(command: Command, npz: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any, **__: Any) -> Any:
        raise tw.ArenaExhausted("arena: requested 1 bytes")

    monkeypatch.setattr("tilewise.cli.run.tw.attention", exhausted)
    code, _, err = command("run", npz)
    assert (code, err) == (2, "tilewise: arena: requested 1 bytes\n")


# ---- info, show, and the whole
def test_info_tells_what_is_here(command: Command, tmp_path: Path) -> None:
    with tw.config(cache=tmp_path / "nobody", threads=3):
        code, text, err = command("info")
    assert (code, err) == (0, "")
    for words in (tw.__version__, np.__version__, "LLVM", "TILEWISE_DEBUG", *TARGETS, "not made yet", "3 of"):
        assert words in text


@pytest.mark.parametrize(
    ("prepare", "state"),
    [
        (lambda folder: None, "0 kernels"),
        (lambda folder: (folder / "x.o").write_bytes(bytes(10**5)), "1 kernels, 0.1 MB"),
        (lambda folder: folder.chmod(0o777), "not used"),
    ],
)
def test_info_tells_the_state_of_the_cache(
    command: Command, tmp_path: Path, prepare: Callable[[Path], Any], state: str
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    prepare(folder)
    with tw.config(cache=folder):
        assert state in command("info")[1]
    with tw.config(cache="off"):
        assert "cache     off" in command("info")[1]


def test_info_works_where_no_target_does(command: Command) -> None:
    with tw.config(target="z80"):
        code, text, _ = command("info")
    assert code == 0
    assert "none: unknown target 'z80'" in text


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("plan", ["register tile", "work items", "scratch"]),
        ("code", ["def forward_f32_d24x17_bc7", "fma(", "for i"]),
        ("ir", ["define i64", "llvm.fma.v16f32"]),
        ("asm", [".text", "forward_f32_d24x17_bc7"]),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_show_for_every_target(command: Command, what: str, words: list[str], target: str) -> None:
    code, text, err = command(
        "show", "--B", 2, "--H", 6, "--Hkv", 2, "--Tq", 5, "--Tk", 70, "--D", 24, "--Dv", 17, "--bc", 7, "--causal",
        "--window", 9, "--br", 2, "--span", 14, "--threads", 1, "--what", what, "--target", target,
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert all(word in text for word in words)


def test_show_makes_a_plan_for_a_problem_larger_than_memory(command: Command) -> None:
    code, text, _ = command("show", "--H", 64, "--Hkv", 8, "--Tq", 1, "--Tk", 1 << 40, "--D", 128)
    assert code == 0
    assert "scratch" in text


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--D", "0"], "--D"), (["--D", "1025"], "--D"), (["--H", "6", "--Hkv", "4"], "multiple"),
        (["--bc", "1000"], "bc"), (["--Tq", "-1"], "--Tq"), (["--what", "cheese"], "--what"),
        (["--target", "z80"], "--target"), (["--q-offset", "-3"], "q_offset"),
        (["--B", "1048576", "--H", "1048576", "--Tk", "1099511627776"], "too large"),
    ],
)  # fmt: skip
def test_show_refuses_in_one_line(command: Command, flags: list[str], word: str) -> None:
    assert_one_line(command("show", *flags), word)


def test_help_of_the_whole_and_of_each_command(command: Command) -> None:
    code, text, _ = command()
    assert code == 0
    for name in ("run", "verify", "parity", "info", "show"):
        assert name in text
        code, help_text, _ = command(name, "--help")
        assert code == 0
        assert help_text.startswith(f"Usage: tilewise {name}")
    assert command("--version")[1] == f"tilewise, version {tw.__version__}\n"
    assert_one_line(command("cheese"), "cheese")


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from tilewise.cli import main; main(['info'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert_one_line((done.returncode, done.stdout, done.stderr), missing, "pip install 'tilewise[cli]'")


def test_the_library_needs_neither_click_nor_rich() -> None:
    code = "import sys, tilewise, tilewise.verify; assert not {'click', 'rich', 'safetensors'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_closed_pipe_is_no_error() -> None:
    code = "from tilewise.cli import main; main()"
    shell = f'"{sys.executable}" -c "{code}" show --what code | head -n 1'
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {shell}"], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("def forward")
    assert done.stderr == ""
    assert done.returncode in (0, 141)

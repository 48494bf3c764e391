"""A model in three small wheels that real pip accepts, and a quick stand-in for pip that fails when told."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

from infer.runtime.store.catalog import CatalogEntry, PyPISource, WheelPart

NAME = "tiny-test-model"
PIECES = [random.Random(seed).randbytes(size) for seed, size in enumerate((3_000_000, 2_000_000, 70_001))]
CONTENT = b"".join(PIECES)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_wheel(folder: Path, number: int, piece: bytes, extra: dict[str, bytes] | None = None) -> WheelPart:
    """A wheel that real pip accepts, with one data member (and others)."""
    package, version = f"tiny_test_part{number}", "1.0"
    info = f"{package}-{version}.dist-info"
    member = f"{package}/data/piece{number:02d}"
    files = {
        f"{package}/__init__.py": b"raise SystemExit('imported')",
        member: piece,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **(extra or {}),
    }
    record = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for name, data in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]).encode()
    path = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return WheelPart(
        distribution=package.replace("_", "-"),
        version=version,
        wheel=path.name,
        wheel_sha256=sha256(path.read_bytes()),
        member=member,
        size=len(piece),
    )


def make_entry(parts: tuple[WheelPart, ...], content: bytes = CONTENT) -> CatalogEntry:
    return CatalogEntry(
        name=NAME,
        file_name="tiny-test.gguf",
        sha256=sha256(content),
        size=len(content),
        license="CC0",
        description="test",
        architecture="llama",
        quantization="Q8_0",
        sources=(PyPISource(parts),),
    )


def replace_part(entry: CatalogEntry, number: int, **changes: object) -> CatalogEntry:
    (source,) = entry.sources
    assert isinstance(source, PyPISource)
    parts = list(source.parts)
    parts[number] = dataclasses.replace(parts[number], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(entry, sources=(PyPISource(tuple(parts)),))


FAKE_PIP = """
import os, pathlib, shutil, sys, time
folder = pathlib.Path(os.environ["FAKE_WHEELS"])
options = sys.argv[1:]
target = pathlib.Path(options[options.index("-d") + 1])
name = pathlib.Path(options[options.index("-r") + 1]).read_text().split("==")[0].replace("-", "_")
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(name + "\\n")
if name == os.environ.get("FAKE_HANG"):
    pathlib.Path(os.environ["TMPDIR"], "growing").write_bytes(bytes(1000))
    time.sleep(60)
if name == os.environ.get("FAKE_FAIL"):
    sys.exit(os.environ["FAKE_MESSAGE"])
for wheel in folder.glob(name + "-*.whl"):
    shutil.copy(wheel, target)
"""


class FakePip:
    """A stand-in on PYTHONPATH, quick and obedient: FAKE_HANG and FAKE_FAIL name packages it fails on."""

    def __init__(self, folder: Path, wheels: Path, setenv: Callable[[str, str], None]) -> None:
        package = folder / "fake" / "pip"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(FAKE_PIP)
        self.log = folder / "fake" / "log"
        self.setenv = setenv
        setenv("PYTHONPATH", str(package.parent))
        setenv("FAKE_WHEELS", str(wheels))
        setenv("FAKE_LOG", str(self.log))

    def fail(self, name: str, message: str) -> None:
        self.setenv("FAKE_FAIL", name)
        self.setenv("FAKE_MESSAGE", message)

    def runs(self) -> list[str]:
        return self.log.read_text().split()


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

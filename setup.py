"""Maps the top-level folders into the `infer` namespace and compiles the native kernels; the rest is pyproject.toml.

Subpackages are discovered, never listed: a list silently drops a new folder from the wheel. The kernels are a plain
shared library that no Python version is compiled into: one wheel per platform serves them all. Without a compiler the
package installs all the same and computes with torch.
"""

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

TOP = ("cli", "runtime", "quant", "samplers")
KERNELS = Path("quant", "kernels")


def load_builder() -> ModuleType:
    """quant/kernels/build.py, which imports nothing of the package."""
    spec = importlib.util.spec_from_file_location(
        "kernel_build", Path(__file__).parent / KERNELS / "build.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    library: Path | None = None

    def run(self) -> None:
        super().run()
        builder = load_builder()
        folder = (
            Path(__file__).parent / KERNELS if self.editable_mode else Path(self.build_lib, "infer", KERNELS)
        )
        target = folder / builder.LIBRARY
        target.unlink(missing_ok=True)
        try:
            self.library = builder.build(target)
        except builder.BuildError as e:
            self.warn(f"infer will compute with torch only, without its native kernels: {e}")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        built = [] if self.library is None or self.editable_mode else [str(self.library)]
        return [*super().get_outputs(include_bytecode), *built]


class WheelOfAnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        if self.get_finalized_command("build_py").library is None:
            return super().get_tag()
        return "py3", "none", sysconfig.get_platform().replace("-", "_").replace(".", "_")


setup(
    packages=[f"infer.{top}" for top in TOP]
    + [f"infer.{top}.{sub}" for top in TOP for sub in find_packages(top)],
    package_dir={f"infer.{top}": top for top in TOP},
    include_package_data=True,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfAnyPython},
)

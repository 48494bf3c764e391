"""Maps the four top-level folders into the `infer` namespace; everything else is in pyproject.toml.

Subpackages are discovered, never listed: a list silently drops a new folder from the wheel.
"""

from setuptools import find_packages, setup

TOP = ("cli", "runtime", "quant", "samplers")

setup(
    packages=[f"infer.{top}" for top in TOP]
    + [f"infer.{top}.{sub}" for top in TOP for sub in find_packages(top)],
    package_dir={f"infer.{top}": top for top in TOP},
    include_package_data=True,
)

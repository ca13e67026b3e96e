"""Print packaging/constraints.txt: the installed version of everything the project needs.

Follows the requirements of the installed distribution through all its extras;
tools that happen to be in the environment besides are left out.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HEADER = """\
# The exact versions everything was tested with (Python 3.11, Linux x86-64); used by the Makefile.
#     pip install -c packaging/constraints.txt .
# Written by `make constraints`; not by hand.
"""


def closure(root: str) -> dict[str, str]:
    """Name and version of every installed distribution that `root` needs, with all its extras."""
    extras = distribution(root).metadata.get_all("Provides-Extra") or []
    found: dict[str, str] = {}
    todo = [Requirement(f"{root}[{','.join(extras)}]")]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        wanted = todo.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            installed = distribution(wanted.name)
        except PackageNotFoundError:  # an extra that is not installed here was not tested
            continue
        found[key[0]] = installed.version.partition("+")[0]  # a local build suffix is no release
        for line in installed.requires or []:
            needed = Requirement(line)
            contexts = [{"extra": extra} for extra in wanted.extras] or [{"extra": ""}]
            if needed.marker is None or any(needed.marker.evaluate(c) for c in contexts):
                todo.append(needed)
    del found[canonicalize_name(root)]
    return found


if __name__ == "__main__":
    pins = sorted(closure("volunteer").items())
    print(HEADER + "\n".join(f"{name}=={version}" for name, version in pins))

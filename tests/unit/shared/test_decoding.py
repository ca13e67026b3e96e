"""Decoding by several threads at once."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from shared.decoding import convert, decode, decoder
from tests.support.sources import ROOT

TYPES = 100
# Types that nobody has decoded yet, each met by four threads at once. The interpreter changes
# threads as often as it can.
STORM = """
import sys, threading, types
from shared.decoding import convert, decode

TEXT = '''
from __future__ import annotations
import msgspec
class Inner(msgspec.Struct):
    names: dict[str, list[int | None]] = {}
    more: tuple[float, ...] = ()
class Outer(msgspec.Struct):
''' + "".join(f"    f{n}: Inner | None = None\\n" for n in range(12))

def work(kind, turn, ready):
    ready.wait()
    if turn % 2:
        assert decode(b'{"f1": {"names": {"a": [1]}}}', kind).f1.names == {"a": [1]}
    else:
        assert convert({"f1": {"more": [1.5]}}, kind).f1.more == (1.5,)

sys.setswitchinterval(1e-6)
for number in range(int(sys.argv[1])):
    module = sys.modules[f"made{number}"] = types.ModuleType(f"made{number}")
    exec(TEXT, module.__dict__)
    ready = threading.Barrier(4)
    threads = [threading.Thread(target=work, args=(module.Outer, turn, ready)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_a_type_may_be_decoded_by_many_threads_at_once_for_the_first_time() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", STORM, str(TYPES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


class Pair(msgspec.Struct, frozen=True):
    left: int
    right: str = ""


def test_values_and_mistakes_are_those_of_msgspec() -> None:
    assert decode(b'{"left": 1}', Pair) == Pair(1)
    assert decode('[{"left": 1}]', tuple[Pair, ...]) == (Pair(1),)
    assert decode(b'{"any": [1]}') == {"any": [1]}
    assert convert({"left": "2"}, Pair, strict=False) == Pair(2)
    assert decoder(Pair) is decoder(Pair)
    with pytest.raises(msgspec.ValidationError, match=r"\$\.left"):
        decode(b'{"left": "1"}', Pair)
    with pytest.raises(msgspec.ValidationError, match=r"\$\.left"):
        convert({"left": "2"}, Pair)

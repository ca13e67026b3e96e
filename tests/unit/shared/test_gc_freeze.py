"""Imports that the garbage collector lets be."""

from __future__ import annotations

import gc

import pytest

from shared.programs import gc_freeze


def test_nothing_is_collected_while_what_stays_is_built_and_after_it_as_before() -> None:
    before = gc.get_freeze_count()
    with gc_freeze.long_lived():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


def test_an_import_that_fails_leaves_the_collector_as_it_was() -> None:
    with pytest.raises(ImportError), gc_freeze.long_lived():
        raise ImportError("a library is missing")
    assert gc.isenabled()


def test_a_process_without_a_collector_stays_so() -> None:
    gc.disable()
    try:
        with gc_freeze.long_lived():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

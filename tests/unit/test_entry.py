"""The process of the console command."""

from __future__ import annotations

import gc

from tests.unit.rlhf import Rlhf


def test_the_garbage_collector_looks_at_no_module(rlhf: Rlhf) -> None:
    gc.unfreeze()  # the session has frozen its modules
    try:
        assert rlhf.run("reshard", "--help")[0] == 0
        frozen = gc.get_freeze_count()
        assert frozen > len(gc.get_objects()), "modules are not looked at again"
        assert gc.isenabled()
        kept = [object()]
        assert rlhf.run("reshard", "--help")[0] == 0
        assert any(found is kept for found in gc.get_objects()), "later objects are looked at"
    finally:
        gc.freeze()

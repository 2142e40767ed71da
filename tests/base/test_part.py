"""Parts of the loop: which methods it calls."""

from __future__ import annotations

from gapless.base.part import Hooks, Part


class Planned(Part):
    def before_plan(self):
        pass


class Busy(Planned):
    @property
    def busy(self):
        return True

    def end(self, request):
        pass


def test_hooks_hold_the_parts_that_override_a_method_in_order():
    parts = busy, plain, planned = Busy(), Part(), Planned()
    hooks = Hooks.of(parts)
    assert hooks.before_plan == (busy, planned)
    assert hooks.busy == hooks.end == (busy,)
    assert all(plain not in found for found in hooks) and not hooks.wait


def test_hooks_have_every_method_of_a_part_except_its_close():
    methods = {name for name in vars(Part) if not name.startswith("_")} - {"brings_pages"}
    assert methods - {*Hooks._fields} == {"close"}

"""The lanes, one file each."""

from gapless.step.lane import Lane
from gapless.step.lanes.adjust import AdjustLane
from gapless.step.lanes.cut import CutLane
from gapless.step.lanes.mask import MaskLane
from gapless.step.lanes.score import ScoreLane

LANES: tuple[Lane, ...] = (MaskLane(), AdjustLane(), ScoreLane(), CutLane())
"""All lanes, in the order of their programs and of their lists before the packet: a list travels with all after it."""
